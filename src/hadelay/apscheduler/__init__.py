"""Job store for APScheduler 3 that keeps jobs as schedules of a cluster (docs/howto/apscheduler.md)."""

try:
    from hadelay.apscheduler.store import HadelayJobStore as HadelayJobStore
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "apscheduler":
        raise
    raise ImportError("hadelay.apscheduler needs apscheduler: install hadelay[apscheduler]") from error
