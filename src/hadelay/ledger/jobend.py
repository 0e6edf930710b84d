"""The end of a bulk job, by itself or stopped."""

from hadelay.ledger.bulkjob import BulkJob
from hadelay.ledger.state import Ledger


def end_job(ledger: Ledger, job: BulkJob, *, stopped: bool = False) -> None:
    """End a bulk job; a fill lets go of the acked messages that were kept for it."""
    job.ended_ms, job.stopped = ledger.now_ms, stopped
    for topic in [number for number, fill in ledger.fills.items() if fill is job]:
        ledger.fills = {number: fill for number, fill in ledger.fills.items() if number != topic}
        for hour in [hour for hour, hour_state in ledger.hours.items() if topic in hour_state.unfilled]:
            del ledger.hour_state(hour).unfilled[topic]
