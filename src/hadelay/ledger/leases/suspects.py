"""Messages that earlier leaders may have handed out without a record in the log (dispatch.sync = "interval").

A leader hands out ahead of the grant only what the replicated state bounds: messages due from the second of its
dispatch cursor on, and at most AHEAD_MS after the last stamp. Its cursor passes no second with a hand-out whose grant
is not committed. So the state at the end of a term names what the term's leader may have handed out unrecorded: one
range of due times. The ranges are replicated, because several leaders may fail before the messages are handed out.
"""

from collections.abc import Iterable

import numpy as np

from hadelay.codec.formats import I64, SECONDS_PER_HOUR, U32, Mask
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, HOUR_MS

#: Range of due times, in Unix ms; both ends are included.
Range = tuple[int, int]

#: Limit of the time, in ms, from cluster time to the due time of a message that is handed out ahead of its grant.
AHEAD_MS = 50
#: Limit of the number of ranges; beyond the limit, the two oldest ranges are merged.
MAX_RANGES = 32


def goes_ahead(ledger: Ledger, second: int, due_ms: I64) -> bool:
    """Whether a leader may hand out messages with these due times ahead of their grant. second: the second that the
    leader's dispatch cursor has reached, in Unix time."""
    return bool(due_ms.min() >= second * 1000 and due_ms.max() <= ledger.now_ms + AHEAD_MS)


def within(ranges: Iterable[Range], due_ms: I64) -> Mask:
    """Mask of due times that are in one of the ranges."""
    found = np.zeros(len(due_ms), np.bool_)
    for first_ms, last_ms in ranges:
        found |= (due_ms >= first_ms) & (due_ms <= last_ms)
    return found


def of_term(ledger: Ledger) -> Range:
    """Due times of the messages that the leader of the present term may have handed out without a record in the log.
    The present term is that of the last applied entry."""
    hour, second, _ = ledger.cursor
    return hour * HOUR_MS + second * 1000, ledger.now_ms + AHEAD_MS


def after_term(ledger: Ledger) -> tuple[Range, ...]:
    """Ranges of due times that the next term's leader suspects: those of earlier terms, and that of the present term
    (`of_term`). A range without open messages is left out."""
    found: list[Range] = []
    counts = _open_seconds(ledger)
    for first_ms, last_ms in (*ledger.suspects, of_term(ledger)):
        if not _has_open(ledger, counts, first_ms, last_ms):
            continue
        if found and first_ms <= found[-1][1]:
            first_ms, last_ms = min(first_ms, found[-1][0]), max(last_ms, found[-1][1])
            found.pop()
        found.append((first_ms, last_ms))
    while len(found) > MAX_RANGES:
        found[:2] = [(min(found[0][0], found[1][0]), found[1][1])]
    return tuple(found)


def _open_seconds(ledger: Ledger) -> list[tuple[int, U32]]:
    """The hours that have begun and have open messages, as (hour, number of open messages in each of its seconds).
    Called only once per term, because there may be tens of thousands of hours."""
    hours = ledger.hours.items()
    return [(hour, state.open_seconds) for hour, state in hours if state.open_seconds is not None]


def _has_open(ledger: Ledger, counts: list[tuple[int, U32]], first_ms: int, last_ms: int) -> bool:
    first, last = first_ms // 1000, last_ms // 1000
    if first > last:
        return False
    running = ledger.now_hour
    if last_ms // HOUR_MS > running and ledger.store.count(last_ms // HOUR_MS):
        return True  # not counted by second until the hour begins: assume open messages
    for hour, seconds in counts:
        if first_ms // HOUR_MS <= hour <= min(last_ms // HOUR_MS, running, DEAD_HOURS - 1):
            start = hour * SECONDS_PER_HOUR
            if seconds[max(first - start, 0) : last - start + 1].any():
                return True
    return False
