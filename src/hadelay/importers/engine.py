"""Engine of all importers: publishes the entries that a source yields, in batches, and counts them.

An entry is published with its id as the message's key and under an Idempotency-Key made of all that it is, so that an
import may be stopped, and run again: an entry that waits in the cluster is kept once.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hadelay.client import Client
from hadelay.client.apart import put_apart
from hadelay.client.putoptions import Put
from hadelay.client.types import PutResult
from hadelay.errors import HadelayError

#: Limits of one publish request: number of entries, and bytes of all their bodies (a larger entry is sent alone).
BATCH, BATCH_BYTES = 500, 4 << 20
#: Limit of the refused entries that a report names.
_NAMED = 20
#: Time, in seconds, for which a publish is repeated after a temporary refusal, such as that of a full topic.
_PATIENCE_S = 60.0
#: Maximum length of a client key, in bytes; of a longer id, the key is the hash.
_LONGEST_KEY = 256


class Entry(NamedTuple):
    """A delayed job of another system. put: with topic, body and the due time `at` in Unix ms."""

    id: str
    put: Put


class Skipped(NamedTuple):
    """A job that is not copied, and the reason."""

    id: str
    reason: str


@dataclass
class Report:
    """Counts of one import."""

    found: int = 0
    imported: int = 0
    #: Number of entries that the cluster already had.
    repeated: int = 0
    #: Number of entries whose due time has passed: they are published without a delay.
    overdue: int = 0
    bytes: int = 0
    #: Reason → number of jobs that were skipped for it.
    skipped: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    #: Id and reason of the first refused entries.
    refusals: list[tuple[str, str]] = field(default_factory=list)
    topics: Counter[str] = field(default_factory=Counter)
    #: Earliest and latest due time of all entries, in Unix ms.
    first_ms: int | None = None
    last_ms: int | None = None

    def _see(self, put: Put, now_ms: int) -> None:
        due_ms = put.at if isinstance(put.at, int) else now_ms
        self.topics[put.topic] += 1
        self.bytes += len(put.body) if isinstance(put.body, bytes) else 0
        self.overdue += due_ms <= now_ms
        self.first_ms = min(due_ms, self.first_ms or due_ms)
        self.last_ms = max(due_ms, self.last_ms or due_ms)

    def _refuse(self, id: str, error: Exception) -> None:
        self.refused += 1
        if len(self.refusals) < _NAMED:
            self.refusals.append((id, str(error)))


def copy(
    source: Iterable[Entry | Skipped], client: Client | None, advance: Callable[[int], object] = lambda count: None
) -> Report:
    """Publish all entries of a source; without a client, only count them. advance: called after each batch with its
    number of entries.

    Raises the client's error if no node answers, or if a refusal that may pass lasts for a minute; run it again then.
    """
    report, now_ms = Report(), time.time_ns() // 1_000_000
    for some in _in_batches(source):
        entries = []
        for one in some:
            if isinstance(one, Skipped):
                report.skipped[one.reason] += 1
            else:
                report._see(one.put, now_ms)
                if isinstance(one.put.at, int) and one.put.at <= now_ms:
                    one.put.at = None
                entries.append(one)
        report.found += len(some)
        if client is not None:
            for entry, result in _publish(client, [_named(entry) for entry in entries]):
                if isinstance(result, Exception):
                    report._refuse(entry.id, result)
                elif result.duplicate:
                    report.repeated += 1
                else:
                    report.imported += 1
        advance(len(some))
    return report


def _in_batches(source: Iterable[Entry | Skipped]) -> Iterator[list[Entry | Skipped]]:
    """Divide a source into batches: entries of one batch are in memory together, and are published in one request."""
    some: list[Entry | Skipped] = []
    size = 0
    for one in source:
        own = len(one.put.body) if isinstance(one, Entry) and isinstance(one.put.body, bytes | str) else 0
        if some and (len(some) == BATCH or size + own > BATCH_BYTES):
            yield some
            some, size = [], 0
        some.append(one)
        size += own
    if some:
        yield some


def _named(entry: Entry) -> Entry:
    put = entry.put
    if put.key is None:
        short = 0 < len(entry.id.encode()) <= _LONGEST_KEY and entry.id.isprintable()
        put.key = entry.id if short else hashlib.sha256(entry.id.encode()).hexdigest()
    put.on_conflict = "keep"
    digest = hashlib.sha256(repr((put.topic, put.key, put.at, put.ttl, put.meta, put.body)).encode())
    put.idempotency_key = digest.hexdigest()
    return entry


def _publish(client: Client, entries: list[Entry]) -> Iterator[tuple[Entry, PutResult]]:
    """Publish entries, and repeat those with a temporary error; yields each entry with its final result. Raises an
    error that lasts longer than _PATIENCE_S."""
    until = time.monotonic() + _PATIENCE_S
    while entries:
        results = put_apart(client, [entry.put for entry in entries])
        later: list[tuple[Entry, HadelayError]] = []
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, HadelayError) and (result.retryable or not result.outcome_known):
                later.append((entry, result))
            else:
                yield entry, result
        entries = [entry for entry, _ in later]
        if later:
            if time.monotonic() > until:
                raise later[0][1]
            time.sleep(max(0.5, (later[0][1].retry_after_ms or 0) / 1000))
