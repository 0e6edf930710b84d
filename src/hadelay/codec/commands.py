"""What may enter the Raft log, and its bytes. docs/spec/commands.md has every layout with an example.

    entry   := {version u1, level u1, count u2, now_ms i8}  count × command                       little-endian
    command := {type u1, size u4}  body

One entry is one step of cluster time: its commands are applied in order, all at `now_ms`, stamped once by the leader.
Commands are encoded by whoever has the request and put together, untouched, by the leader's queue. `level` is the
feature level the entry needs: a node that does not have it stops, because skipping it would make it another replica.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from hadelay.codec.leasetokens import LEASE
from hadelay.codec.publishcommand import decode_publish, hash_client_key
from hadelay.codec.publishcommand import encode_publish as _publish_body
from hadelay.codec.wire import MAX_NAME, Malformed, Reader, pack_name
from hadelay.members import Member, Members
from hadelay.members import is_whole as whole_members
from hadelay.model import MAX_RATE, MAX_REASON, Draft
from hadelay.version import MEMBERS_LEVEL, SETTLE_LEVEL

ENTRY_VERSION = 1
MAX_REQUEST_ID = 64
#: A position in a grant is a u16 in its lease tokens.
MAX_GRANT = 65_535
#: The last number of a grant, a u32 in its lease tokens too.
MAX_SEQ = (1 << 32) - 1
#: A grant may be committed at most this long before its messages are due (they are handed out when they are).
MAX_AHEAD_MS = 100


class Audited(NamedTuple):
    """A command, and who wanted it: the answer is the command's own."""

    node: str
    token_id: str
    token: str
    action: str
    target: str
    kind: int
    body: memoryview


class Command(IntEnum):
    """Numbers are in the log: never renumber. 32–63 are kept for keys, reschedule, retries, webhooks and flow, 64–79
    for access, 80–95 for the cluster, 96–127 for schedules, groups, bulk jobs and settlements."""

    NOOP = 0
    PUBLISH = 1
    GRANT = 2
    ACK = 3
    NACK = 4
    EXTEND = 5
    EXPIRE = 6
    CANCEL = 7
    CURSOR = 8
    TOPIC_PUT = 9
    TOPIC_DELETE = 10
    SWEEP = 11
    CARRY = 12
    RETIRE = 13
    FEATURE = 14
    INCARNATION = 15
    SETTINGS = 16
    RESCHEDULE = 32
    REDRIVE = 33
    TTL_EXPIRE = 34
    PURGE = 35
    DROP_DEAD = 36
    REDRIVE_SOME = 40
    ALERTED = 41
    TOKEN_CREATE = 64
    TOKEN_REVOKE = 65
    AUDITED = 66
    MEMBERS = 80
    SETTLE = 113


#: The feature level that brought a command, where it is above the first. Before the cluster has switched to it, apply
#: refuses the command on every node alike: those that know it, and those to which its number means nothing.
LEVEL_OF: dict[int, int] = {Command.MEMBERS: MEMBERS_LEVEL, Command.SETTLE: SETTLE_LEVEL}

_ENTRY = struct.Struct("<BBHq")
_COMMAND = struct.Struct("<BI")
_GRANT = struct.Struct("<IIqIBBBBH")
_LEASES = struct.Struct("<BIq")
_COUNT = struct.Struct("<I")
_TARGETS = struct.Struct("<II")
_WHEN = struct.Struct("<q?")
_CURSOR = struct.Struct("<III")
_SLICE = struct.Struct("<II")
_INCARNATION = struct.Struct("<Q")
_COUNTER = struct.Struct("<Q")
#: The section of a SETTLE that exists so far.
_DELAYS = 1
#: Flags of a member.
_VOTER, _JOINED = 1, 2
_REDRIVE = struct.Struct("<BdI")
_U64 = np.dtype("<u8")
_U32 = np.dtype("<u4")


class Grant(NamedTuple):
    """Lease these messages to `consumer`: a proposal, decided by apply message by message."""

    term: int
    #: Chosen by the leader: 1 to MAX_SEQ, and not one of a grant of its term that is held.
    seq: int
    lease_ms: int
    consumer: str
    #: Empty: the request is not idempotent.
    request_id: bytes
    node: str
    hours: NDArray[np.uint32]
    indexes: NDArray[np.uint32]
    #: They were handed out already (interval mode): to be recorded, whatever the topic's limits say by now.
    handed: bool = False
    #: Messages that fall due within so many ms may be granted too (at most MAX_AHEAD_MS): they are handed out then.
    ahead_ms: int = 0


class SettleLeases(NamedTuple):
    """ACK, NACK (`value_ms`: delay, −1 for the topic's own) and EXTEND (`value_ms`: the new lease)."""

    node: str
    value_ms: int
    rows: NDArray[np.void]
    #: Of a NACK: why, for people; at most MAX_REASON bytes, "" for none.
    reason: str = ""
    #: Per lease: ms from its grant until its message was handed to the consumer, NONE32 where that is not known.
    delays: NDArray[np.uint32] | None = None


class Settle(NamedTuple):
    """An ACK or NACK with what else is known of these leases."""

    kind: int
    leases: SettleLeases


class Redrive(NamedTuple):
    """Of these dead letters, or of `all` there are: those at `rate` per second (None: as fast as it goes)."""

    node: str
    topic: str
    all: bool
    rate: float | None
    ids: NDArray[np.uint64]


class Targets(NamedTuple):
    """Messages, by id and then by (topic, hash of the client key)."""

    ids: NDArray[np.uint64]
    keys: list[tuple[str, bytes]]


class Cancel(NamedTuple):
    node: str
    targets: Targets


class Reschedule(NamedTuple):
    """`when_ms`: Unix ms, or a delay when `relative`; past, zero and negative are now."""

    node: str
    when_ms: int
    relative: bool
    targets: Targets


class Cursor(NamedTuple):
    """Hour tick, second tick, localIndex: where scanning starts, never a permission."""

    hour: int
    second: int
    local: int


class Slice(NamedTuple):
    """CARRY, RETIRE and DROP_DEAD: work on `hour`, on at most `limit` entries now. SWEEP, TTL_EXPIRE: no hour (0)."""

    hour: int
    limit: int


def encode_entry(now_ms: int, commands: Sequence[bytes], level: int = 1) -> bytes:
    """`commands` are what the other encoders returned. At most 65,535 of them."""
    return b"".join((_ENTRY.pack(ENTRY_VERSION, level, len(commands), now_ms), *commands))


def decode_entry(entry: bytes | memoryview) -> tuple[int, int, list[tuple[int, memoryview]]]:
    """(level, now_ms, [(type, body)]). Raises Malformed; a body is looked at by `decode`, one by one."""
    reader = Reader(memoryview(entry))
    version, level, count, now_ms = reader.unpack(_ENTRY)
    if version != ENTRY_VERSION:
        raise Malformed(f"entry version {version}, this code reads {ENTRY_VERSION}")
    commands = []
    for _ in range(count):
        kind, size = reader.unpack(_COMMAND)
        commands.append((kind, reader.take(size)))
    reader.end()
    return level, now_ms, commands


def is_whole(command: object) -> bool:
    """Bytes that say their own length: one encoded command, whatever is in it."""
    if type(command) is not bytes or len(command) < _COMMAND.size:
        return False
    return bool(_COMMAND.unpack_from(command)[1] == len(command) - _COMMAND.size)


def kind_of(command: bytes) -> int:
    """Of one encoded command: its number, or that of the command in an AUDITED."""
    if command[0] != Command.AUDITED:
        return command[0]
    try:
        return int(decode(command[0], memoryview(command)[_COMMAND.size :]).kind)
    except Malformed:
        return command[0]


def _frame(kind: Command, *parts: bytes) -> bytes:
    return b"".join((_COMMAND.pack(kind, sum(map(len, parts))), *parts))


def encode_publish(node: str, drafts: Sequence[Draft], request_key: bytes | None = None) -> bytes:
    """`node`: the name of the accepting node. See codec/publishcommand.py."""
    return _frame(Command.PUBLISH, _publish_body(node, drafts, request_key))


def encode_grant(grant: Grant) -> bytes:
    consumer, node = grant.consumer.encode(), grant.node.encode()
    hours, indexes = np.asarray(grant.hours, _U32), np.asarray(grant.indexes, _U32)
    assert len(hours) == len(indexes) <= MAX_GRANT
    assert len(grant.request_id) <= MAX_REQUEST_ID
    head = _GRANT.pack(
        grant.term, grant.seq, grant.lease_ms, len(hours), len(consumer), len(grant.request_id), len(node),
        grant.handed, grant.ahead_ms,
    )  # fmt: skip
    return _frame(Command.GRANT, head, consumer, grant.request_id, node, hours.tobytes(), indexes.tobytes())


def _leases(kind: Command, node: str, rows: NDArray[np.void], value_ms: int, reason: bytes = b"") -> bytes:
    assert rows.dtype == LEASE
    name = node.encode()
    return _frame(kind, _LEASES.pack(len(name), len(rows), value_ms), name, rows.tobytes(), reason)


def encode_ack(node: str, rows: NDArray[np.void]) -> bytes:
    return _leases(Command.ACK, node, rows, 0)


def uncounted(delay_ms: int) -> int:
    """The delay_ms that `encode_nack` takes for messages that come back after this delay without counting the attempt,
    and the other way round. Below the feature level of that it means the topic's backoff."""
    return -2 - delay_ms


def encode_nack(node: str, rows: NDArray[np.void], delay_ms: int = -1, reason: str = "") -> bytes:
    """delay_ms: −1 for the topic's backoff, below that as `uncounted` has it. reason: cut to MAX_REASON bytes."""
    cut = reason.encode()[:MAX_REASON].decode(errors="ignore")
    return _leases(Command.NACK, node, rows, delay_ms, pack_name(cut) if cut else b"")


def encode_extend(node: str, rows: NDArray[np.void], lease_ms: int) -> bytes:
    return _leases(Command.EXTEND, node, rows, lease_ms)


def encode_settle(command: bytes, delays: NDArray[np.uint32]) -> bytes:
    """`command`, an encoded ACK or NACK, with the hand-out delay in ms of each of its leases, NONE32 for unknown."""
    section = np.asarray(delays, _U32).tobytes()
    return _frame(Command.SETTLE, command, _COMMAND.pack(_DELAYS, len(section)), section)


def leases_in(command: bytes) -> NDArray[np.void] | None:
    """The leases that an encoded ACK or NACK settles, None for every other command."""
    start = _COMMAND.size + _LEASES.size
    if command[0] not in (Command.ACK, Command.NACK) or len(command) < start:
        return None
    name, count, _ = _LEASES.unpack_from(command, _COMMAND.size)
    start += name
    if len(command) < start + count * LEASE.itemsize:
        return None
    return np.frombuffer(command, LEASE, count, start)


def encode_expire(grants: Iterable[tuple[int, int]]) -> bytes:
    """Grants of which a position has run out: (term, seq) each. Apply judges every position against state.now."""
    pairs = np.array(list(grants), _U32).reshape(-1, 2)
    return _frame(Command.EXPIRE, _COUNT.pack(len(pairs)), pairs.tobytes())


def encode_cancel(
    node: str, ids: Sequence[int] | NDArray[np.uint64] = (), keys: Sequence[tuple[str, bytes]] = ()
) -> bytes:
    """`keys`: (topic, client key)."""
    return _frame(Command.CANCEL, pack_name(node), *_pack_targets(ids, keys))


def encode_reschedule(
    node: str,
    when_ms: int,
    relative: bool,
    ids: Sequence[int] | NDArray[np.uint64] = (),
    keys: Sequence[tuple[str, bytes]] = (),
) -> bytes:
    return _frame(Command.RESCHEDULE, pack_name(node), _WHEN.pack(when_ms, relative), *_pack_targets(ids, keys))


def _pack_targets(ids: Sequence[int] | NDArray[np.uint64], keys: Sequence[tuple[str, bytes]]) -> list[bytes]:
    named = [pack_name(topic) + hash_client_key(key) for topic, key in keys]
    return [_TARGETS.pack(len(ids), len(keys)), np.asarray(ids, _U64).tobytes(), *named]


def encode_cursor(hour: int, second: int, local: int) -> bytes:
    return _frame(Command.CURSOR, _CURSOR.pack(hour, second, local))


def encode_topic_put(name: str, config: dict[str, Any]) -> bytes:
    """Sets what `config` names, validated by apply; None puts a key back to its default."""
    return _frame(Command.TOPIC_PUT, pack_name(name), msgpack.packb(config))


def encode_topic_delete(name: str, force: bool = False) -> bytes:
    return _frame(Command.TOPIC_DELETE, pack_name(name), bytes([force]))


def encode_sweep(limit: int = 16_384) -> bytes:
    """Settle as cancelled what deleted topics left behind, looking at `limit` entries."""
    return _frame(Command.SWEEP, _SLICE.pack(0, limit))


def encode_carry(hour: int, limit: int = 1_000) -> bytes:
    """Move up to `limit` messages that `hour` still owes to the running hour."""
    return _frame(Command.CARRY, _SLICE.pack(hour, limit))


def encode_retire(hour: int, limit: int = 16_384) -> bytes:
    """Forget a drained hour, after looking at its entries in slices of `limit`."""
    return _frame(Command.RETIRE, _SLICE.pack(hour, limit))


def encode_redrive(node: str, topic: str, ids: Sequence[int], *, all: bool = False, rate: float | None = None) -> bytes:
    """Bring dead letters back: `ids`, at once; or all there are now, slice by slice (REDRIVE_SOME), at `rate`."""
    head = _REDRIVE.pack(all, rate or 0.0, len(ids))
    return _frame(Command.REDRIVE, pack_name(node), pack_name(topic), head, np.asarray(ids, _U64).tobytes())


def encode_redrive_some(topic: str, limit: int = 500) -> bytes:
    """Go on with the redrive of a topic: up to `limit` of its dead letters, if its rate allows as many."""
    return _frame(Command.REDRIVE_SOME, pack_name(topic), _COUNT.pack(limit))


def encode_ttl_expire(limit: int = 500) -> bytes:
    """End what waits and is past its TTL, looking at `limit` messages."""
    return _frame(Command.TTL_EXPIRE, _SLICE.pack(0, limit))


def encode_purge(topic: str, states: int) -> bytes:
    """Cancel what the topic holds in these states: bits of ledger/topics.py."""
    return _frame(Command.PURGE, pack_name(topic), bytes([states]))


def encode_drop_dead(hour: int, limit: int = 1_000) -> bytes:
    """Forget a dead hour that is over, `limit` of its letters at a time."""
    return _frame(Command.DROP_DEAD, _SLICE.pack(hour, limit))


def encode_alerted(topic: str, count: int) -> bytes:
    """Somebody was told of the topic's first `count` deaths."""
    return _frame(Command.ALERTED, pack_name(topic), _COUNTER.pack(count))


def encode_token_create(name: str, digest: bytes, scopes: Sequence[str], lifetime_ms: int | None) -> bytes:
    """digest: SHA-256 of the token. Checked by apply (ledger/access.py)."""
    return _frame(Command.TOKEN_CREATE, msgpack.packb([name, digest, list(scopes), lifetime_ms]))


def encode_token_revoke(token_id: str) -> bytes:
    return _frame(Command.TOKEN_REVOKE, pack_name(token_id))


def encode_audited(node: str, token_id: str, token: str, action: str, target: str, command: bytes) -> bytes:
    """`command`, encoded, and an entry of the audit trail with it. Texts are cut to MAX_NAME bytes."""
    texts = (node, token_id, token, action, target)
    cut = (pack_name(text.encode()[:MAX_NAME].decode(errors="ignore")) for text in texts)
    return _frame(Command.AUDITED, *cut, command)


def encode_feature(level: int) -> bytes:
    return _frame(Command.FEATURE, _COUNT.pack(level))


def encode_incarnation(node: str, incarnation: int) -> bytes:
    return _frame(Command.INCARNATION, pack_name(node), _INCARNATION.pack(incarnation))


def encode_members(members: Members) -> bytes:
    """The members from now on. It has to be the only command of its entry: in the log it is in force (ADR 150)."""
    assert whole_members(members), members
    packed = [
        pack_name(m.name) + pack_name(m.address) + bytes([_VOTER * m.voter | _JOINED * m.joined]) for m in members
    ]
    return _frame(Command.MEMBERS, bytes([len(members)]), *packed)


def members_in(entry: bytes | memoryview) -> Members | None:
    """The members that an entry, once it is in the log, puts in force; None for every other entry."""
    if len(entry) <= _ENTRY.size or entry[_ENTRY.size] != Command.MEMBERS:
        return None
    try:
        _, _, commands = decode_entry(entry)
        if not is_change_of_members(commands):
            return None
        members: Members = decode(*commands[0])
    except Malformed:
        return None
    return members


def is_change_of_members(commands: Sequence[tuple[int, memoryview]]) -> bool:
    return len(commands) == 1 and commands[0][0] == Command.MEMBERS


def encode_settings(settings: dict[str, Any]) -> bytes:
    """The limits apply decides by. Replicated, because two nodes with different files must still agree."""
    return _frame(Command.SETTINGS, msgpack.packb(settings))


def encode_noop() -> bytes:
    return _frame(Command.NOOP)


def decode(kind: int, body: memoryview) -> Any:
    """The command's type: Publish, Grant, SettleLeases, … or a tuple. Raises Malformed, also for an unknown kind."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Malformed(f"no command has the number {kind}")
    if kind == Command.PUBLISH:
        return decode_publish(body)
    reader = Reader(body)
    command = decoder(reader)
    reader.end()
    return command


def _decode_grant(reader: Reader) -> Grant:
    term, seq, lease_ms, count, consumer, request_id, node, handed, ahead_ms = reader.unpack(_GRANT)
    if count > MAX_GRANT or request_id > MAX_REQUEST_ID:
        raise Malformed("a grant has at most 65,535 messages and a request id at most 64 bytes")
    return Grant(
        term,
        seq,
        lease_ms,
        reader.text(consumer),
        bytes(reader.take(request_id)),
        reader.text(node),
        reader.array(_U32, count),
        reader.array(_U32, count),
        bool(handed),
        ahead_ms,
    )


def _decode_leases(reader: Reader) -> SettleLeases:
    node, count, value_ms = reader.unpack(_LEASES)
    return SettleLeases(reader.text(node), value_ms, reader.array(LEASE, count))


def _decode_nack(reader: Reader) -> SettleLeases:
    leases = _decode_leases(reader)
    if reader.at == len(reader.view):
        return leases
    reason = reader.name()
    if len(reason.encode()) > MAX_REASON:
        raise Malformed(f"a reason has at most {MAX_REASON} bytes")
    return leases._replace(reason=reason)


def _decode_settle(reader: Reader) -> Settle:
    kind, size = reader.unpack(_COMMAND)
    if kind not in (Command.ACK, Command.NACK):
        raise Malformed("a settlement is an ACK or a NACK")
    leases: SettleLeases = decode(kind, reader.take(size))
    section, size = reader.unpack(_COMMAND)
    if section != _DELAYS or size != len(leases.rows) * _U32.itemsize:
        raise Malformed("a settlement has one section, of a delay per lease")
    return Settle(kind, leases._replace(delays=reader.array(_U32, len(leases.rows))))


def _decode_redrive(reader: Reader) -> Redrive:
    node, topic = reader.name(), _named(reader)
    everything, rate, count = reader.unpack(_REDRIVE)
    # So that neither infinity nor "not a number" gets into the state.
    if not 0 <= rate <= MAX_RATE:
        raise Malformed(f"a rate is above 0 and at most {MAX_RATE}")
    return Redrive(node, topic, bool(everything), rate or None, reader.array(_U64, count))


def _decode_expire(reader: Reader) -> list[tuple[int, int]]:
    (count,) = reader.unpack(_COUNT)
    pairs = reader.array(_U32, 2 * count).reshape(-1, 2)
    return [(term, seq) for term, seq in pairs.tolist()]


def _decode_targets(reader: Reader) -> Targets:
    ids, keys = reader.unpack(_TARGETS)
    return Targets(reader.array(_U64, ids), [(_named(reader), bytes(reader.take(16))) for _ in range(keys)])


def _decode_reschedule(reader: Reader) -> Reschedule:
    node = reader.name()
    when_ms, relative = reader.unpack(_WHEN)
    return Reschedule(node, when_ms, relative, _decode_targets(reader))


def _decode_topic_put(reader: Reader) -> tuple[str, Any]:
    return _named(reader), reader.msgpack()


def _decode_topic_delete(reader: Reader) -> tuple[str, bool]:
    return _named(reader), bool(reader.take(1)[0])


def _decode_audited(reader: Reader) -> Audited:
    node, token_id, token, action, target = (reader.name() for _ in range(5))
    kind, size = reader.unpack(_COMMAND)
    return Audited(node, token_id, token, action, target, kind, reader.take(size))


def _decode_members(reader: Reader) -> Members:
    found = []
    for _ in range(reader.take(1)[0]):
        name, address, flags = _named(reader), reader.name(), reader.take(1)[0]
        found.append(Member(name, address, bool(flags & _VOTER), bool(flags & _JOINED)))
    if not whole_members(tuple(found)):
        raise Malformed("members are in the order of their names, each once, and one of them votes")
    return tuple(found)


def _named(reader: Reader) -> str:
    name = reader.name()
    if not name or len(name) > MAX_NAME:
        raise Malformed("an empty name")
    return name


_DECODERS: dict[int, Any] = {
    Command.NOOP: lambda reader: None,
    Command.PUBLISH: decode_publish,
    Command.GRANT: _decode_grant,
    Command.ACK: _decode_leases,
    Command.NACK: _decode_nack,
    Command.EXTEND: _decode_leases,
    Command.EXPIRE: _decode_expire,
    Command.CANCEL: lambda reader: Cancel(reader.name(), _decode_targets(reader)),
    Command.RESCHEDULE: _decode_reschedule,
    Command.CURSOR: lambda reader: Cursor(*reader.unpack(_CURSOR)),
    Command.TOPIC_PUT: _decode_topic_put,
    Command.TOPIC_DELETE: _decode_topic_delete,
    Command.SWEEP: lambda reader: Slice(*reader.unpack(_SLICE)),
    Command.CARRY: lambda reader: Slice(*reader.unpack(_SLICE)),
    Command.RETIRE: lambda reader: Slice(*reader.unpack(_SLICE)),
    Command.FEATURE: lambda reader: reader.unpack(_COUNT)[0],
    Command.INCARNATION: lambda reader: (_named(reader), reader.unpack(_INCARNATION)[0]),
    Command.SETTINGS: lambda reader: reader.msgpack(),
    Command.REDRIVE: _decode_redrive,
    Command.TTL_EXPIRE: lambda reader: Slice(*reader.unpack(_SLICE)),
    Command.PURGE: lambda reader: (_named(reader), reader.take(1)[0]),
    Command.DROP_DEAD: lambda reader: Slice(*reader.unpack(_SLICE)),
    Command.REDRIVE_SOME: lambda reader: (_named(reader), reader.unpack(_COUNT)[0]),
    Command.ALERTED: lambda reader: (_named(reader), reader.unpack(_COUNTER)[0]),
    Command.TOKEN_CREATE: lambda reader: reader.msgpack(),
    Command.TOKEN_REVOKE: _named,
    Command.AUDITED: _decode_audited,
    Command.MEMBERS: _decode_members,
    Command.SETTLE: _decode_settle,
}
