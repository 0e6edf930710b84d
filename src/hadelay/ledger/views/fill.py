"""Fill levels of the tables that all tenants share (docs/howto/security.md)."""

from hadelay.codec.formats import CONSUMER, REASON
from hadelay.ledger.batches.batches import MAX_BATCHES
from hadelay.ledger.jobs.bulk import MAX_JOBS
from hadelay.ledger.schedules.schedules import MAX_BYTES, MAX_SCHEDULES
from hadelay.ledger.state import Ledger
from hadelay.rights import MAX_TOKENS


def fill_ratios(ledger: Ledger) -> dict[str, float]:
    """Number of rows of each table, divided by its limit. Reads only counters, because a scrape of metrics must stay
    cheap."""
    limits, schedules = ledger.settings, ledger.schedules
    return {
        "topics": len(ledger.topics.all) / limits.max_topics,
        "consumers": ledger.named[CONSUMER] / limits.max_consumers,
        "reasons": ledger.named[REASON] / limits.max_reasons,
        "jobs": sum(not job.ended_ms for job in ledger.jobs.values()) / MAX_JOBS,
        "schedules": max(schedules.count / MAX_SCHEDULES, schedules.bytes / MAX_BYTES),
        "batches": ledger.batches.count / MAX_BATCHES,
        "tokens": len(ledger.tokens) / MAX_TOKENS,
        "unique_keys": ledger.unique_count / (limits.idempotency_max_keys // 2 or 1),
    }
