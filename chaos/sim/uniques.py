"""Check of the promise about unique keys: one message per key and period (unique_for).

U1  Within the period of a key one message is stored; a publish is dropped only within the period, for the message that
    began it, or for a pending message with the key. A model, which shares no code with the ledger, follows the log.
"""

from collections.abc import Callable
from typing import Any

from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger.messages.unique import PERIOD, UNIQ
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import PENDING

TOPIC = "once"


class Uniques:
    """Model of the periods of unique keys, which checks U1 for each committed publish with a unique_for."""

    def __init__(self, decide: Callable[..., None]) -> None:
        """decide: counts a checked case of a promise and notes a violation, see `Machines.decide`."""
        self._decide = decide
        #: {number of the topic, number of its deletions, hash of the key} → last period of the key, as (id of the
        #: message that began the period, end in Unix ms). None until the first log entry.
        self._periods: dict[bytes, tuple[int, int]] | None = None

    def begin(self, ledger: Ledger) -> None:
        """Before the first entry: take over the periods that a restored cluster already has."""
        if self._periods is None:
            known = ((key, PERIOD.unpack_from(value)) for key, value in ledger.tables.range(UNIQ, limit=1 << 20))
            self._periods = {key: (first_id, until_ms) for key, (first_id, _, until_ms) in known}

    def committed(self, body: memoryview, result: Any, ledger: Ledger) -> None:
        """Check U1 for an applied PUBLISH. ledger: state after the PUBLISH's entry."""
        if not isinstance(result, PublishResult) or self._periods is None:
            return  # skip a refused command: a fuzz client may have sent bytes that are no PUBLISH
        command = decode(Command.PUBLISH, body)
        hashes = dict(zip(command.client_keys["row"].tolist(), command.client_keys["hash"], strict=True))
        covered: set[int] = set()
        for key in command.keys:
            covered.update(range(int(key["first"]), int(key["first"]) + int(key["count"])))
        for row, for_ms in zip(command.uniques["row"].tolist(), command.uniques["for_ms"].tolist(), strict=True):
            topic = ledger.known_topic(command.topics[int(command.rows["topic"][row])])
            if result.codes[row] != RowCode.OK or topic is None:
                continue
            key = topic.number.to_bytes(4, "big") + topic.lives.to_bytes(2, "big") + hashes[row].tobytes()
            first_id, until_ms = self._periods.get(key, (0, 0))
            within, found = until_ms > ledger.now_ms, int(result.ids[row])
            if not result.duplicate[row]:
                text = f"{found:x} is stored in the period of {first_id:x}, which lasts {until_ms - ledger.now_ms} ms"
                self._decide("U1 unique, stored", within, text, found, first_id)
                self._periods[key] = (found, ledger.now_ms + for_ms)
            elif row not in covered:
                wrong = found != first_id if within else not _was_pending(ledger, found)
                text = f"a publish is dropped for {found:x}; the period of {first_id:x} ended at {until_ms}"
                self._decide("U1 unique, dropped", wrong, text, found, first_id)


def _was_pending(ledger: Ledger, message_id: int) -> bool:
    """Whether the message was pending before the last entry: it still is pending, or ended at the time of that
    entry."""
    known = describe(ledger, message_id)
    return known is not None and (known.state in PENDING or known.history[-1].at_ms == ledger.now_ms)
