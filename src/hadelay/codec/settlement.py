"""The SETTLE command: an ack or a nack of leases (docs/spec/commands.md).

    body := head {nack u1, node u1, reason u1, leases u4, value i8, results u4, replies u4}      little-endian
            node name  leases × LEASE  leases × delay u4  reason  results  replies

The delays have a fixed place, so that the leader fills what it measured into the command of a follower without decoding
it.
"""

import struct

import numpy as np

from hadelay.codec.ackparts import decode_replies, decode_results
from hadelay.codec.commandtypes import Command, SettleLeases
from hadelay.codec.formats import U32, Rows
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.wire import COMMAND, Malformed, WireReader, frame
from hadelay.model import MAX_REASON, NONE32

_HEAD = struct.Struct("<BBBIqII")
_U32 = np.dtype("<u4")
_UNKNOWN = NONE32.to_bytes(4, "little")


def encode_settle(
    node: str,
    rows: Rows,
    *,
    nack: bool = False,
    value_ms: int = 0,
    reason: str = "",
    results: bytes = b"",
    replies: bytes = b"",
    delays: U32 | None = None,
) -> bytes:
    """Encode a SETTLE. value_ms: delay of a nack, see commands.encode_nack. reason: reason of a nack, cut to MAX_REASON
    bytes. results, replies: parts of an ack, encoded by `encode_results` and `encode_replies`. delays: hand-out delay
    in ms of each lease, NONE32 for unknown; None: all unknown."""
    assert rows.dtype == LEASE
    name, text = node.encode(), cut_reason(reason) if reason else b""
    column = _UNKNOWN * len(rows) if delays is None else np.asarray(delays, _U32).tobytes()
    head = _HEAD.pack(nack, len(name), len(text), len(rows), value_ms, len(results), len(replies))
    return frame(Command.SETTLE, head, name, rows.tobytes(), column, text, results, replies)


def cut_reason(text: str) -> bytes:
    return text.encode()[:MAX_REASON].decode(errors="ignore").encode()


def leases_in(command: bytes) -> Rows | None:
    """The leases that an encoded SETTLE settles; None for every other command, and for a SETTLE that is too short."""
    if command[0] != Command.SETTLE or len(command) < COMMAND.size + _HEAD.size:
        return None
    _, name, _, count, *_ = _HEAD.unpack_from(command, COMMAND.size)
    start = COMMAND.size + _HEAD.size + name
    if len(command) < start + count * (LEASE.itemsize + _U32.itemsize):
        return None
    return np.frombuffer(command, LEASE, count, start)


def with_delays(command: bytes, delays: U32) -> bytes:
    """The encoded SETTLE with the hand-out delay in ms of each of its leases; NONE32: unknown."""
    start = COMMAND.size + _HEAD.size + command[COMMAND.size + 1] + len(delays) * LEASE.itemsize
    column = np.asarray(delays, _U32).tobytes()
    return b"".join((command[:start], column, command[start + len(column) :]))


def decode_settle(reader: WireReader) -> SettleLeases:
    """Decode a SETTLE. Raises Malformed if an ack has a delay or a reason, or a nack has results or answers."""
    nack, name, reason, count, value_ms, results, replies = reader.unpack(_HEAD)
    if nack > 1 or reason > MAX_REASON or (results or replies if nack else reason or value_ms):
        raise Malformed("an ack has no delay and no reason, a nack no results and answers; reasons: at most 128 bytes")
    node, rows, delays = reader.text(name), reader.array(LEASE, count), reader.array(_U32, count)
    return SettleLeases(
        node,
        value_ms,
        rows,
        reader.text(reason),
        delays,
        decode_results(reader.take(results), count) if results else None,
        decode_replies(reader.take(replies), count) if replies else None,
        bool(nack),
    )
