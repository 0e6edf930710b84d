"""Answers of webhook receivers that an ack carries for success callbacks, in section 3 of a SETTLE
(docs/spec/commands.md).

    section := {n u4}  n × REPLY_ROW  n × {content type, body}                                   little-endian
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hadelay.codec.formats import Rows
from hadelay.codec.wire import Malformed, WireReader
from hadelay.model import MAX_REPLY

#: Layout of one answer. lease: number of its lease in the command. flags: _TRUNCATED. kind, size: bytes of the content
#: type (ASCII) and of the body.
REPLY_ROW = np.dtype([("lease", "<u4"), ("status", "<u2"), ("flags", "u1"), ("kind", "u1"), ("size", "<u4")])
#: Bit of `flags`: the receiver sent more than the body has.
_TRUNCATED = 1
#: Limit of a content type, in bytes.
_MAX_KIND = 255

_COUNT = struct.Struct("<I")


class CallReply(NamedTuple):
    """Answer of a receiver: its HTTP status, and at most MAX_REPLY bytes of its body."""

    status: int
    content_type: str
    body: bytes
    truncated: bool


class CallReplies(NamedTuple):
    """Answers to calls about some leases of an ACK. blob: content types and bodies, in the order of `rows`."""

    rows: Rows
    blob: memoryview

    def by_lease(self) -> dict[int, CallReply]:
        found, at = {}, 0
        for lease, status, flags, kind, size in self.rows.tolist():
            text = bytes(self.blob[at : at + kind]).decode("ascii")
            body = bytes(self.blob[at + kind : at + kind + size])
            found[lease] = CallReply(status, text, body, bool(flags & _TRUNCATED))
            at += kind + size
        return found


def encode_replies(replies: Sequence[CallReply | None]) -> bytes:
    """Encode the section. replies: per lease; None: the lease has no answer. b"" if no lease has one."""
    rows, texts = [], []
    for lease, reply in enumerate(replies):
        if reply is not None:
            kind = reply.content_type.encode("ascii", "replace")[:_MAX_KIND]
            rows.append((lease, reply.status, _TRUNCATED * reply.truncated, len(kind), len(reply.body)))
            texts += [kind, reply.body]
    return b"".join([_COUNT.pack(len(rows)), np.array(rows, REPLY_ROW).tobytes(), *texts]) if rows else b""


def decode_replies(data: memoryview, leases: int) -> CallReplies:
    """Decode the section of an ACK of so many leases. Raises Malformed unless sizes, texts and lease numbers are
    consistent: apply relies on that."""
    reader = WireReader(data)
    (count,) = reader.unpack(_COUNT)
    rows = reader.array(REPLY_ROW, count)
    at = rows["lease"].astype(np.int64)
    if not count or at[-1] >= leases or not (at[1:] > at[:-1]).all() or int(rows["size"].max()) > MAX_REPLY:
        raise Malformed("answers are of leases in ascending order, and of limited size")
    sizes = rows["kind"].astype(np.int64) + rows["size"]
    blob = reader.take(int(sizes.sum()))
    reader.end()
    starts = sizes.cumsum() - sizes
    for start, kind in zip(starts.tolist(), rows["kind"].tolist(), strict=True):
        if not bytes(blob[start : start + kind]).isascii():
            raise Malformed("a content type is ASCII")
    return CallReplies(rows, blob)
