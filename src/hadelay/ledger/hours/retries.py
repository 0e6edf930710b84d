"""Messages that wait for another attempt after a failed one: a bitmap per hour, and a count per topic.

The index entry says how often a message failed: hand-outs before the entry was filed (`attempt`), less hand-outs that
did not count (bits of `flags`). A message is *retrying* while an entry with failures waits. So the bitmap and the count
hold nothing that the files and the other bitmaps do not say; they only spare a search through every entry.
"""

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, Mask, Rows
from hadelay.ledger.hours.hourstate import bitmap, is_in, rows_by_value
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import by_topic

#: First of the bits of INDEX.flags that count hand-outs given back untried (uncounted NACK). Such hand-outs count
#: neither for `max_attempts` nor for the backoff; `attempt` still numbers every hand-out.
EXCUSED_AT = 6
MAX_EXCUSED = (1 << 10) - 1


def excused(rows: Rows) -> NDArray[np.uint16]:
    """Number of hand-outs of each message (INDEX rows) that do not count as attempts."""
    found: NDArray[np.uint16] = rows["flags"] >> np.uint16(EXCUSED_AT)
    return found


def failed(rows: Rows) -> Mask:
    """Which of these INDEX rows were filed after a failed attempt of their message."""
    return np.asarray(rows["attempt"] > excused(rows))


def begin(ledger: Ledger, hours: I64, rows: Rows) -> None:
    """Count entries (INDEX rows) that begin to wait as retrying, if an attempt of their message failed before."""
    some = failed(rows)
    if not some.any():
        return
    rows, hours = rows[some], hours[some]
    for hour, where in rows_by_value(hours):
        ledger.hour_state(hour).retrying |= bitmap(rows["index"][where])
    for number, count in by_topic(rows["topic"]):
        ledger.topics[number].retrying += count


def end(ledger: Ledger, hour: int, rows: Rows) -> None:
    """Stop counting entries of an hour as retrying: they no longer wait, because they ended (INDEX rows) or were leased
    (LEASED rows)."""
    hour_state = ledger.hour_state(hour)
    if not hour_state.retrying:
        return
    rows = rows[is_in(rows["index"], hour_state.retrying)]
    hour_state.retrying -= bitmap(rows["index"])
    if "generation" in (rows.dtype.names or ()):
        rows = rows[ledger.topics.alive(rows)]  # leave out deleted topics: their counts are 0 already
    for number, count in by_topic(rows["topic"]) if len(rows) else ():
        ledger.topics[number].retrying -= count
