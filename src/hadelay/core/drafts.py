"""PUBLISH: messages on their way into the log, as columns.

    body := head {node u1, topics u2, rows u4, keys u4, blob u4}  node name  topics × {size u1, name}
            rows × PUBLISH_ROW  keys × KEY_ROW  blob                                             little-endian
    blob := rows × {48 bytes left free, meta, body}

The free bytes are where apply puts the record header, so that the blob *is* the piece of the hour log: written once by
the accepting node, copied once per replica. `payload_crc` is computed by the accepting node and by nobody else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import add
from typing import NamedTuple

import numpy as np
from google_crc32c import value as crc32c
from numpy.typing import NDArray

from hadelay.core.wire import Malformed, Reader, pack_name

#: Room for the header of a record, in front of every payload.
GAP = bytes(48)

#: `when_ms` is a delay, to be resolved against cluster time by apply.
RELATIVE = 1

PUBLISH_ROW = np.dtype(
    [
        ("when_ms", "<i8"),
        ("tag_mask", "<u8"),
        ("ttl_ms", "<i8"),
        ("meta_size", "<u4"),
        ("body_size", "<u4"),
        ("payload_crc", "<u4"),
        ("topic", "<u2"),
        ("flags", "<u2"),
    ]
)
#: An Idempotency-Key and the rows it covers. `hash` includes the scope, see `hash_key`.
KEY_ROW = np.dtype([("hash", "V16"), ("fingerprint", "<u8"), ("first", "<u4"), ("count", "<u4")])

_HEAD = struct.Struct("<BHIII")
_OPTIONS = struct.Struct("<qQq?")


class Draft(NamedTuple):
    """One message as the front door understood it."""

    topic: str
    #: Unix ms, or a delay in ms when `relative`. Past, zero and negative mean now.
    when_ms: int
    relative: bool
    tag_mask: int
    #: 0: none
    ttl_ms: int
    #: msgpack map, or empty
    meta: bytes
    body: bytes
    #: Idempotency-Key of this message alone
    idem: bytes | None = None


@dataclass(slots=True)
class Publish:
    """A decoded PUBLISH."""

    node: str
    topics: list[str]
    rows: NDArray[np.void]
    keys: NDArray[np.void]
    #: Where each record starts in `blob`, and how long it is, header included.
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    blob: memoryview


def hash_key(scope: bytes, key: bytes) -> bytes:
    """16 bytes that stand for an Idempotency-Key. `scope` keeps the keys of requests and of rows apart."""
    return blake2b(key, digest_size=16, key=scope).digest()


def encode_publish(node: str, drafts: Sequence[Draft], request_key: bytes | None = None) -> bytes:
    """The body of a PUBLISH of `drafts`, in order; `request_key` is the Idempotency-Key that covers all of them."""
    names, when, relative, mask, ttl, metas, bodies, idems = zip(*drafts, strict=True)
    topics = list(dict.fromkeys(names))
    payloads = list(map(add, metas, bodies))
    rows = np.zeros(len(drafts), PUBLISH_ROW)
    rows["when_ms"], rows["tag_mask"], rows["ttl_ms"] = when, mask, ttl
    rows["meta_size"] = list(map(len, metas))
    rows["body_size"] = list(map(len, bodies))
    rows["payload_crc"] = list(map(crc32c, payloads))
    rows["flags"] = relative
    if len(topics) > 1:
        local = {name: n for n, name in enumerate(topics)}
        rows["topic"] = list(map(local.__getitem__, names))
    keys = _key_rows(drafts, rows, idems, request_key)
    blob = GAP + GAP.join(payloads)
    parts = [_HEAD.pack(len(node.encode()), len(topics), len(drafts), len(keys), len(blob)), node.encode()]
    parts += [pack_name(name) for name in topics]
    parts += [rows.tobytes(), keys.tobytes(), blob]
    return b"".join(parts)


def _key_rows(
    drafts: Sequence[Draft], rows: NDArray[np.void], idems: Sequence[bytes | None], request_key: bytes | None
) -> NDArray[np.void]:
    wanted = [(hash_key(b"row", key), n, 1) for n, key in enumerate(idems) if key is not None]
    if request_key is not None:
        wanted.append((hash_key(b"request", request_key), 0, len(drafts)))
    keys = np.zeros(len(wanted), KEY_ROW)
    for at, (digest, first, count) in enumerate(wanted):
        print_of = blake2b(digest_size=8)
        for n in range(first, first + count):
            d = drafts[n]
            print_of.update(_OPTIONS.pack(d.when_ms, d.tag_mask, d.ttl_ms, d.relative))
            print_of.update(rows[n]["payload_crc"].tobytes())
            print_of.update(d.topic.encode())
        keys[at] = (digest, int.from_bytes(print_of.digest(), "little"), first, count)
    return keys


def decode_publish(body: memoryview) -> Publish:
    """Raises Malformed unless every length, topic number and key range fits: apply relies on all of them."""
    reader = Reader(body)
    node_size, topic_count, row_count, key_count, blob_size = reader.unpack(_HEAD)
    node = reader.text(node_size)
    topics = [reader.name() for _ in range(topic_count)]
    rows = reader.array(PUBLISH_ROW, row_count)
    keys = reader.array(KEY_ROW, key_count)
    blob = reader.take(blob_size)
    reader.end()
    if not row_count or not topic_count or not all(topics):
        raise Malformed("a publish has rows and topics")
    if int(rows["topic"].max()) >= topic_count:
        raise Malformed("a row names a topic that is not in the list")
    sizes = rows["meta_size"].astype(np.int64) + rows["body_size"] + len(GAP)
    ends = np.cumsum(sizes)
    if ends[-1] != blob_size:
        raise Malformed("payloads and their sizes differ")
    if key_count and int((keys["first"].astype(np.int64) + keys["count"]).max()) > row_count:
        raise Malformed("a key covers rows that are not there")
    return Publish(node, topics, rows, keys, ends - sizes, sizes, blob)
