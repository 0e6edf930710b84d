"""Broker and result backend for Dramatiq on a cluster (docs/howto/dramatiq.md)."""

try:
    from hadelay.dramatiq.broker import HadelayBroker as HadelayBroker
    from hadelay.dramatiq.results import HadelayBackend as HadelayBackend
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "dramatiq":
        raise
    raise ImportError("hadelay.dramatiq needs dramatiq: install hadelay[dramatiq]") from error
