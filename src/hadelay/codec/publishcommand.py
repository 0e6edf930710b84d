"""The PUBLISH command: new messages on their way into the Raft log, stored as columns.

    body := head {node u1, token u1, topics u2, rows u4, keys u4, client keys u4, groups u4, uniques u4, blob u4}
            node name  token name  topics × {size u1, name}  rows × PUBLISH_ROW  keys × KEY_ROW
            client keys × CLIENT_KEY_ROW  groups × GROUP_ROW  uniques × UNIQUE_ROW  blob          little-endian
    blob := rows × {48 bytes left free, meta, body}

The free bytes are where apply puts the record header, so that the blob *is* the piece of the hour log: written once by
the accepting node, copied once per replica. `payload_crc` is computed by the accepting node and by nobody else.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import add

import numpy as np
from google_crc32c import value as crc32c
from msgspec.structs import astuple

from hadelay.codec.formats import I64, Rows
from hadelay.codec.meta import retried
from hadelay.codec.wire import Malformed, WireReader, cut_name, pack_name
from hadelay.model import KEEP, MAX_UNIQUE_MS, PERIOD, Draft

#: Free bytes in front of every payload, where apply writes the header of the record.
GAP = bytes(48)

#: Bits of PUBLISH_ROW.flags. RELATIVE: `when_ms` is a delay, to which apply adds cluster time. CALLBACK: the message's
#: meta has a webhook URL. BATCHED: the message's meta names a batch that the message joins.
RELATIVE, CALLBACK, BATCHED = 1, 2, 4

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
#: Layout of an Idempotency-Key and the range of rows that the key covers. `hash`: see `hash_key`.
KEY_ROW = np.dtype([("hash", "V16"), ("fingerprint", "<u8"), ("first", "<u4"), ("count", "<u4")])

#: Layout of the client key of one message. `hash`: see `hash_client_key`.
CLIENT_KEY_ROW = np.dtype([("row", "<u4"), ("mode", "u1"), ("pad", "V3"), ("max_wait_ms", "<i8"), ("hash", "V16")])

#: Layout of the group of one message. `group`: see `hash_group`.
GROUP_ROW = np.dtype([("row", "<u4"), ("pad", "V4"), ("group", "<u8")])

#: Layout of the `unique_for` of one message, which has a client key.
UNIQUE_ROW = np.dtype([("row", "<u4"), ("for_ms", "<u4")])

_NO_GROUPS, _NO_UNIQUES = np.zeros(0, GROUP_ROW), np.zeros(0, UNIQUE_ROW)
_HEAD = struct.Struct("<BBHIIIIII")
#: Options and checksum of a message (Draft), from which the fingerprint of an Idempotency-Key is computed.
_OPTIONS = struct.Struct("<qQq?BqI")
#: A single KEY_ROW and a single CLIENT_KEY_ROW as structs: setting a row of a structured array takes ten times as long.
_KEY, _CLIENT_KEY = struct.Struct("<16s8sII"), struct.Struct("<IB3xq16s")
_GROUP, _UNIQUE = struct.Struct("<I4xQ"), struct.Struct("<II")


@dataclass(slots=True)
class Publish:
    node: str
    topics: list[str]
    rows: Rows
    keys: Rows
    client_keys: Rows
    #: Offset of each record in `blob`, and the record's length, header included.
    starts: I64
    sizes: I64
    blob: memoryview
    #: GROUP_ROWs of the messages with a group.
    groups: Rows = field(default_factory=lambda: _NO_GROUPS)
    #: UNIQUE_ROWs of the messages with a `unique_for`.
    uniques: Rows = field(default_factory=lambda: _NO_UNIQUES)
    #: Name of the token of the requests, if the publish may add rows to tables with a share per token; else "".
    by: str = ""

    @property
    def named(self) -> Rows:
        """CLIENT_KEY_ROWs of the keys that messages keep: without the keys that only serve `unique_for` (PERIOD)."""
        keys = self.client_keys
        return keys[keys["mode"] != PERIOD] if len(keys) else keys


def hash_key(scope: bytes, key: bytes) -> bytes:
    """16-byte hash of a key. scope: kind of key, such as b"client"; each kind has hashes of its own."""
    return blake2b(key, digest_size=16, key=scope).digest()


def hash_client_key(key: bytes) -> bytes:
    """16-byte hash of a client key, looked up together with the number of its topic (ledger/messages/keys.py)."""
    return hash_key(b"client", key)


def hash_group(group: str) -> int:
    """64-bit hash of a message group's name, which the log and the tables hold in place of the name."""
    return int.from_bytes(blake2b(group.encode(), digest_size=8, key=b"group").digest(), "little")


def encode_publish(node: str, drafts: Sequence[Draft], request_key: bytes | None = None, by: str = "") -> bytes:
    """Encode the body of a PUBLISH of `drafts`, in order. request_key: Idempotency-Key that covers all messages. by:
    name of the requests' token."""
    names, when, relative, mask, ttl, metas, bodies, idems, client, _, _, callback, groups, unique, batched = zip(
        *map(astuple, drafts), strict=True
    )
    topics = list(dict.fromkeys(names))
    count = len(drafts)
    rows = np.zeros(count, PUBLISH_ROW)
    rows["when_ms"] = np.fromiter(when, np.int64, count)
    rows["flags"] = np.fromiter(relative, np.bool_, count)
    payloads: Sequence[bytes] = bodies
    # Columns that no message uses stay zero, which saves time.
    if any(metas):
        payloads = list(map(add, metas, bodies))
        rows["meta_size"] = list(map(len, metas))
    rows["body_size"] = np.fromiter(map(len, bodies), np.uint32, count)
    crcs = list(map(crc32c, payloads))
    rows["payload_crc"] = crcs
    if any(mask):
        rows["tag_mask"] = mask
    if any(ttl):
        rows["ttl_ms"] = ttl
    if any(callback):
        rows["flags"] |= np.array(callback, np.uint16) * CALLBACK
    if any(batched):
        rows["flags"] |= np.array(batched, np.uint16) * BATCHED
    if len(topics) > 1:
        local = {name: n for n, name in enumerate(topics)}
        rows["topic"] = list(map(local.__getitem__, names))
    keys = _key_rows(drafts, crcs, idems, request_key)
    client_keys = b"" if client.count(None) == count else _client_key_rows(drafts)
    blob = GAP.join((b"", *payloads))
    key_count, client_count = len(keys) // KEY_ROW.itemsize, len(client_keys) // CLIENT_KEY_ROW.itemsize
    name, token = node.encode(), cut_name(by).encode()
    grouped = b"" if groups.count(None) == count else _group_rows(groups)
    uniques = b"".join([_UNIQUE.pack(n, ms) for n, ms in enumerate(unique) if ms]) if any(unique) else b""
    head = _HEAD.pack(
        len(name),
        len(token),
        len(topics),
        count,
        key_count,
        client_count,
        len(grouped) // GROUP_ROW.itemsize,
        len(uniques) // UNIQUE_ROW.itemsize,
        len(blob),
    )
    packed = map(pack_name, topics)
    return b"".join((head, name, token, *packed, rows.tobytes(), keys, client_keys, grouped, uniques, blob))


def _group_rows(groups: Sequence[int | None]) -> bytes:
    return b"".join([_GROUP.pack(n, group) for n, group in enumerate(groups) if group is not None])


def _check_groups(command: Publish) -> None:
    at = command.groups["row"].astype(np.int64)
    if at[-1] >= len(command.rows) or not (at[1:] > at[:-1]).all():
        raise Malformed("groups must belong to existing rows, in ascending order")


def _check_uniques(command: Publish) -> None:
    """Raise Malformed unless rows ascend, periods are valid, and each row has a client key (KEEP or PERIOD)."""
    at, keyed = command.uniques["row"], command.client_keys["row"][np.isin(command.client_keys["mode"], (KEEP, PERIOD))]
    for_ms = command.uniques["for_ms"]
    if not (at[1:] > at[:-1]).all() or not np.isin(at, keyed).all():
        raise Malformed("each unique_for must belong to a row with a client key to keep, in ascending order")
    if not for_ms.all() or int(for_ms.max()) > MAX_UNIQUE_MS:
        raise Malformed(f"a unique_for must be from 1 to {MAX_UNIQUE_MS} ms")


def _client_key_rows(drafts: Sequence[Draft]) -> bytes:
    pack = _CLIENT_KEY.pack
    return b"".join(
        [
            pack(n, d.on_conflict, d.max_wait_ms, hash_client_key(d.key))
            for n, d in enumerate(drafts)
            if d.key is not None
        ]
    )


def _key_rows(
    drafts: Sequence[Draft], crcs: Sequence[int], idems: Sequence[bytes | None], request_key: bytes | None
) -> bytes:
    wanted = []
    if idems.count(None) < len(idems):
        wanted = [(hash_key(b"row", key), n, 1) for n, key in enumerate(idems) if key is not None]
    if request_key is not None:
        wanted.append((hash_key(b"request", request_key), 0, len(drafts)))
    rows, pack = [], _OPTIONS.pack
    for digest, first, count in wanted:
        prints = []
        for n in range(first, first + count):
            d = drafts[n]
            crc = crcs[n] if (same := retried(d.meta)) is d.meta else crc32c(same + d.body)
            prints.append(pack(d.when_ms, d.tag_mask, d.ttl_ms, d.relative, d.on_conflict, d.max_wait_ms, crc))
            prints.append(d.topic.encode())
            if d.unique_ms:
                prints.append(b"\0unique%d" % d.unique_ms)
        rows.append(_KEY.pack(digest, blake2b(b"".join(prints), digest_size=8).digest(), first, count))
    return b"".join(rows)


def decode_publish(reader: WireReader) -> Publish:
    """Decode the body of a PUBLISH. Raises Malformed unless lengths, topic numbers and key ranges are consistent."""
    head = reader.unpack(_HEAD)
    node_size, by_size, topic_count, row_count, key_count, client_count, group_count, unique_count, blob_size = head
    node, by = reader.text(node_size), reader.text(by_size) if by_size else ""
    topics = [reader.name() for _ in range(topic_count)]
    rows = reader.array(PUBLISH_ROW, row_count)
    keys = reader.array(KEY_ROW, key_count)
    client_keys = reader.array(CLIENT_KEY_ROW, client_count)
    groups = reader.array(GROUP_ROW, group_count) if group_count else _NO_GROUPS
    uniques = reader.array(UNIQUE_ROW, unique_count) if unique_count else _NO_UNIQUES
    blob = reader.take(blob_size)
    if not row_count or not topic_count or not all(topics):
        raise Malformed("a PUBLISH must have rows and topics, and every topic a name")
    if int(rows["topic"].max()) >= topic_count:
        raise Malformed("a row names a topic that is not in the list")
    sizes = rows["meta_size"].astype(np.int64) + rows["body_size"] + len(GAP)
    ends = np.cumsum(sizes)
    if ends[-1] != blob_size:
        raise Malformed("the sizes of the payloads do not add up to the size of the blob")
    if key_count and int((keys["first"].astype(np.int64) + keys["count"]).max()) > row_count:
        raise Malformed("an Idempotency-Key covers rows beyond the last row")
    if client_count:
        at = client_keys["row"].astype(np.int64)
        if at[-1] >= row_count or not (at[1:] > at[:-1]).all() or int(client_keys["mode"].max()) > PERIOD:
            raise Malformed("client keys must belong to rows in ascending order, with a known mode")
    command = Publish(node, topics, rows, keys, client_keys, ends - sizes, sizes, blob, groups, uniques, by)
    if group_count:
        _check_groups(command)
    if unique_count:
        _check_uniques(command)
    return command


def decode_body(body: bytes) -> Publish:
    """Decode the bytes of `encode_publish`. Raises Malformed."""
    reader = WireReader(memoryview(body))
    command = decode_publish(reader)
    reader.end()
    return command
