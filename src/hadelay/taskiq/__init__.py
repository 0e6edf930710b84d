"""Broker, result backend and schedules for taskiq on a cluster (docs/howto/taskiq.md)."""

try:
    from hadelay.taskiq.broker import HadelayBroker as HadelayBroker
    from hadelay.taskiq.results import HadelayResultBackend as HadelayResultBackend
    from hadelay.taskiq.schedules import HadelayScheduleSource as HadelayScheduleSource
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "taskiq":
        raise
    raise ImportError("hadelay.taskiq needs taskiq: install hadelay[taskiq]") from error
