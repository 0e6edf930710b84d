"""Celery on hadelay: a transport of kombu. Importing this module makes the URL schemes hadelay:// and hadelays:// known
to kombu."""

try:
    import celery as _celery  # noqa: F401
except ImportError as error:
    raise ImportError("hadelay.celery needs Celery: pip install 'hadelay[celery]'") from error

from kombu.transport import TRANSPORT_ALIASES

from hadelay.celery.transport import Transport as Transport

TRANSPORT_ALIASES["hadelay"] = TRANSPORT_ALIASES["hadelays"] = "hadelay.celery:Transport"
