"""Results of handlers, which an ack stores for clients that wait for the message's end (ADR 242).

A result is a record with an index entry in an hour of the family of dead letters: the one in which the retention of its
message's topic ends, so the files of results are written, checked, repaired, copied and deleted as those of dead
letters are. The entry has the number of attempts RESULT, which no message has, and is settled at once.

    ackres  {message id u64} big-endian → {hour u32, index u32} of the result's entry
"""

from __future__ import annotations

import numpy as np

from hadelay.codec.commandtypes import SettleLeases
from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE, RESULT_ATTEMPT, Mask, Rows
from hadelay.codec.publishcommand import GAP
from hadelay.codec.records import decode_record
from hadelay.ledger.hours.hourstate import HourState, bitmap, rows_by_value
from hadelay.ledger.hours.transitions import ID_KEY, PLACE_VALUE
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import by_topic_bytes
from hadelay.model import DEAD_HOURS, HOUR_MS, Event

RESULTS = b"ackres"
#: Time for which results of a topic without a retention of its own are kept, in ms: the default of the nodes' setting
#: retention.settled.
_KEPT_MS = 24 * HOUR_MS


def keep_results(ledger: Ledger, command: SettleLeases, done: Mask) -> None:
    """Store the results that an ACK carries, for the leases that it acked. done: per lease, whether the ACK acked
    it."""
    results = command.results
    assert results is not None
    numbers = [lease for lease in results if done[lease]]
    if not numbers:
        return
    leases, taken = command.rows[numbers], [results[lease] for lease in numbers]
    sizes = np.array([len(one.json) for one in taken])
    rows, headers = np.zeros(len(taken), INDEX), np.zeros(len(taken), RECORD)
    for hour, where in rows_by_value(leases["hour"]):
        rows[where] = ledger.store.entries(hour, leases["index"][where])
    hours = np.zeros(len(taken), np.int64)
    for number, where in rows_by_value(rows["topic"]):
        until_ms = ledger.now_ms + ledger.topics[number].config.get("retention_ms", _KEPT_MS)
        hours[where], rows["second"][where] = DEAD_HOURS + until_ms // HOUR_MS, until_ms % HOUR_MS // 1000
    rows["deliver_at_ms"], rows["attempt"] = ledger.now_ms, RESULT_ATTEMPT
    rows["tag_mask"], rows["flags"], rows["size"] = 0, 0, sizes + RECORD_SIZE
    headers["body_size"], headers["payload_crc"] = sizes, [one.crc for one in taken]
    headers["topic"], headers["published_at_ms"] = rows["topic"], ledger.now_ms
    headers["deliver_at_ms"] = ledger.now_ms
    records = bytearray(GAP.join((b"", *(one.json for one in taken))))
    ledger.store.append(hours, rows, records, headers)
    for first_id, hour, index in zip(rows["first_id"].tolist(), hours.tolist(), rows["index"].tolist(), strict=True):
        ledger.tables.put(RESULTS, ID_KEY.pack(first_id), PLACE_VALUE.pack(hour, index))
    for hour, where in rows_by_value(hours):
        hour_state = ledger.hour_state(hour)
        hour_state.settle(bitmap(rows["index"][where]), Event.REDRIVEN)
        hour_state.results += len(rows[where])
    for number, _, size in by_topic_bytes(rows):
        ledger.topics[number].bytes += size


def result_of(ledger: Ledger, message_id: int) -> bytes | None:
    """The JSON that a message's ack carried; None without a result, or once it was deleted. Raises DamagedFile."""
    found = ledger.tables.get(RESULTS, ID_KEY.pack(message_id))
    if found is None:
        return None
    hour, index = PLACE_VALUE.unpack(found)
    row = ledger.store.entries(hour, slice(index, index + 1))[0]
    return decode_record(ledger.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)).body


def forget_results(ledger: Ledger, hour_state: HourState, rows: Rows) -> None:
    """Delete the stored results of acks whose entries are among these rows of an hour that is being deleted."""
    rows = rows[rows["attempt"] == RESULT_ATTEMPT]
    for first_id in rows["first_id"].tolist():
        ledger.tables.delete(RESULTS, ID_KEY.pack(first_id))
    for number, _, size in by_topic_bytes(rows):
        ledger.topics[number].bytes -= size
    hour_state.results -= len(rows)
