"""unique_for: a publish whose client key was published within a period is dropped, whether that message is pending or
settled.

    table `uniq`     key of the table `key`                         →  id u64, deliver_at i64, until i64, name of the
                                                                       token that published, if any
    table `uniqend`  until u64 (big-endian) · its key in `uniq`     →  nothing, in the order in which periods end

A period begins with the publish that stores a message, and ends at `until`: a publish in the same millisecond is the
first of the next period. Only time and the deletion of the topic end a period; a new life of a topic has other keys.
Publishes without `unique_for` neither ask for a period nor begin one.
"""

import struct

import numpy as np

from hadelay.codec.formats import Mask
from hadelay.codec.results import RowCode
from hadelay.ledger.limits import shares
from hadelay.ledger.messages.keys import SCOPE, Batch, key_of, table_keys
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState

UNIQ, UNIQEND = b"uniq", b"uniqend"
#: Layout of a value in `uniq`: id and due time of the message that began the period, and the end of the period.
PERIOD = struct.Struct("<Qqq")
_END = struct.Struct(">Q")
#: Number of ended periods that a PUBLISH drops at most, besides two for each row with a `unique_for`.
_MORE = 16


class Periods:
    """Decides about the rows of a batch that have a `unique_for`. Make an object before client keys are judged, call
    `admit` after that, and `finish` once the rows are filed."""

    def __init__(self, ledger: Ledger, batch: Batch) -> None:
        """Answers rows within a period with the message that began it, and removes the rows from `batch.take`."""
        self.ledger, self.batch = ledger, batch
        rows = batch.command.uniques
        drop_ended(ledger, 2 * len(rows) + _MORE)
        keyed = batch.command.client_keys
        keys = table_keys(ledger, batch, keyed[keyed["row"].searchsorted(rows["row"])])
        stored = ledger.tables.get_many(UNIQ, keys)
        #: (row, its key in `uniq`, length of the period in ms, end of an earlier period of the key or None).
        self._rows: list[tuple[int, bytes, int, int | None]] = []
        for row, key, for_ms, known in zip(rows["row"].tolist(), keys, rows["for_ms"].tolist(), stored, strict=True):
            if not batch.take[row]:
                continue
            first_id, deliver_at_ms, until_ms = PERIOD.unpack_from(known) if known is not None else (0, 0, None)
            if until_ms is not None and until_ms > ledger.now_ms:
                batch.take[row] = False
                batch.result.ids[row], batch.result.deliver_at_ms[row] = first_id, deliver_at_ms
                batch.result.duplicate[row] = True
            else:
                self._rows.append((row, key, for_ms, until_ms))

    def admit(self) -> None:
        """Refuse rows that would begin more periods than the cluster remembers."""
        limit, used = self.ledger.settings.idempotency_max_keys // 2, self.ledger.unique_count
        new = np.array(
            [row for row, *_, before_ms in self._rows if self.batch.take[row] and before_ms is None], np.intp
        )
        for room, code in (
            (limit - used, RowCode.TOO_MANY_KEYS),
            (shares.room(self.ledger, shares.UNIQUE, used, limit), RowCode.SHARE_OF_KEYS),
        ):
            beyond = self.batch.take & False
            beyond[new[max(room, 0) :]] = True
            self.batch.refuse(beyond, code)

    def finish(self, taken: Mask) -> None:
        """Begin the periods of the rows that were filed, those in `taken`. Later rows of the command with the same keys
        get the messages of these rows as their answer."""
        ledger, result = self.ledger, self.batch.result
        began: dict[bytes, int] = {}
        for row, key, for_ms, before_ms in self._rows:
            if not taken[row]:
                if (first := began.get(key)) is not None:
                    result.ids[row], result.deliver_at_ms[row] = result.ids[first], result.deliver_at_ms[first]
                    result.codes[row], result.duplicate[row] = RowCode.OK, True
                continue
            began[key] = row
            if before_ms is None:
                ledger.unique_count += 1
            else:
                _forget_maker(ledger, key)
                ledger.tables.delete(UNIQEND, _END.pack(before_ms) + key)
            until_ms = ledger.now_ms + for_ms
            period = PERIOD.pack(int(result.ids[row]), int(result.deliver_at_ms[row]), until_ms) + ledger.by.encode()
            shares.took(ledger, shares.UNIQUE)
            ledger.tables.put(UNIQ, key, period)
            ledger.tables.put(UNIQEND, _END.pack(until_ms) + key, b"")


def _forget_maker(ledger: Ledger, key: bytes) -> None:
    """Give back the row of `uniq` to the share of the token that made the row (ledger/limits/shares.py)."""
    row = ledger.tables.get(UNIQ, key) if shares.UNIQUE.name in ledger.made else None
    if row is not None and len(row) > PERIOD.size:
        shares.gave_back(ledger, shares.UNIQUE, row[PERIOD.size :].decode())


def is_unique(ledger: Ledger, topic: str, digest: bytes) -> bool:
    """Whether a publish with `unique_for` and the client key of this hash is dropped at present."""
    key = key_of(ledger, topic, digest)
    stored = None if key is None else ledger.tables.get(UNIQ, key)
    return stored is not None and bool(PERIOD.unpack_from(stored)[2] > ledger.now_ms)


def has_period(ledger: Ledger, topic: TopicState) -> bool:
    """Whether a key of the topic has a period. An ended period counts until `drop_ended` drops it."""
    first, last = (SCOPE.pack(topic.number, topic.lives) + end for end in (b"", b"\xff" * 17))
    return bool(ledger.unique_count) and bool(ledger.tables.range(UNIQ, first, last, 1))


def first_end_ms(ledger: Ledger) -> int | None:
    """End of the period that ends first, in Unix ms; None if there is no period."""
    found = ledger.tables.range(UNIQEND, ledger.unique_from, None, 1) if ledger.unique_count else []
    return _END.unpack_from(found[0][0])[0] if found else None


def drop_ended(ledger: Ledger, limit: int) -> bool:
    """Drop up to `limit` periods that have ended. Returns whether no ended period is left."""
    if not ledger.unique_count:
        return True
    ended = ledger.tables.range(UNIQEND, ledger.unique_from, _END.pack(ledger.now_ms + 1), limit)
    for end, _ in ended:
        _forget_maker(ledger, end[_END.size :])
        ledger.tables.delete(UNIQEND, end)
        ledger.tables.delete(UNIQ, end[_END.size :])
    ledger.unique_count -= len(ended)
    if ended:
        # Begin the next search behind these rows: periods that begin later end later, too, so no row is added before.
        ledger.unique_from = ended[-1][0] + b"\0"
    return len(ended) < limit
