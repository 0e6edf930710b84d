"""Commands of the Raft log: their numbers, values and bytes. docs/spec/commands.md has every layout with an example.

    command := {type u1, size u4}  body                                                         little-endian

Whoever has the request encodes the command; the leader's queue puts commands together, untouched (codec/entries.py).
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadelay.codec import batches, publishcommand, schedules
from hadelay.codec.commandtypes import (
    MAX_GRANT,
    MAX_REQUEST_ID,
    Alerted,
    Audited,
    Cancel,
    Command,
    Grant,
    Incarnation,
    Job,
    Maintain,
    NewMembers,
    Purge,
    RedriveCommand,
    RescheduleCommand,
    SettleLeases,
    SubscriptionPut,
    TokenCreate,
    TokenRevoke,
    TopicDelete,
    TopicExpiry,
    TopicPut,
    TopicUse,
)
from hadelay.codec.formats import U32, Rows
from hadelay.codec.jobcommands import FillBegin, JobBegin, JobCursor, JobStep, JobStop
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.packed import decoder
from hadelay.codec.publishcommand import decode_publish, hash_client_key
from hadelay.codec.settlement import cut_reason, decode_settle, encode_settle
from hadelay.codec.shardcommands import MAX_MAP_BYTES, PutShardMap, ShardStep
from hadelay.codec.wire import COMMAND, Malformed, WireReader, cut_name, pack_name
from hadelay.codec.wire import frame as _frame
from hadelay.members import Members
from hadelay.model import MAX_REASON, Draft

#: Maintenance job → default limit of the index entries or table rows that one slice examines.
_LIMITS = {
    Job.SWEEP: 16_384, Job.ROLL_FORWARD: 1_000, Job.RETIRE: 16_384, Job.TTL_EXPIRE: 500, Job.DROP_DEAD: 1_000,
    Job.REDRIVE: 500, Job.BATCHES: 20,
}  # fmt: skip

_GRANT = struct.Struct("<IIqIBBBBH")
#: First fields of an EXTEND: lengths of the node's name and of the progress, number of leases, lease in ms.
_EXTEND = struct.Struct("<BBIq")
_COUNT = struct.Struct("<I")
_PAIR = struct.Struct("<II")
_CURSOR = struct.Struct("<III")
#: Value of a nack's delay that makes its messages dead letters, whatever their attempts.
DEAD_NOW = -(1 << 63)
_U32 = np.dtype("<u4")
_decode_settings = decoder(dict[str, Any])


def encode_publish(node: str, drafts: Sequence[Draft], request_key: bytes | None = None, by: str = "") -> bytes:
    """Encode a PUBLISH (layout: codec/publishcommand.py). node: name of the node that accepted the request. by: name
    of the request's token, which may use only a share of some tables (ledger/limits/shares.py)."""
    return _frame(Command.PUBLISH, publishcommand.encode_publish(node, drafts, request_key, by))


def encode_grant(grant: Grant) -> bytes:
    consumer, node = grant.consumer.encode(), grant.node.encode()
    hours, indexes = np.asarray(grant.hours, _U32), np.asarray(grant.indexes, _U32)
    assert len(hours) == len(indexes) <= MAX_GRANT
    assert len(grant.request_id) <= MAX_REQUEST_ID
    head = _GRANT.pack(
        grant.term,
        grant.seq,
        grant.lease_ms,
        len(hours),
        len(consumer),
        len(grant.request_id),
        len(node),
        grant.handed,
        grant.ahead_ms,
    )
    return _frame(Command.GRANT, head, consumer, grant.request_id, node, hours.tobytes(), indexes.tobytes())


def encode_ack(
    node: str, rows: Rows, results: bytes = b"", replies: bytes = b"", *, delays: U32 | None = None
) -> bytes:
    """Encode a SETTLE that acks. Arguments: see `encode_settle`."""
    return encode_settle(node, rows, results=results, replies=replies, delays=delays)


def uncounted(delay_ms: int) -> int:
    """Convert a delay in ms to the encoding for a nack whose attempt does not count (−2 − delay), or the encoding to
    the delay."""
    return -2 - delay_ms


def encode_nack(node: str, rows: Rows, delay_ms: int = -1, reason: str = "", *, delays: U32 | None = None) -> bytes:
    """Encode a SETTLE that nacks. delay_ms: delay until the retry, or −1 for the topic's backoff, DEAD_NOW to make the
    messages dead letters, or a value of `uncounted`. reason, delays: see `encode_settle`."""
    return encode_settle(node, rows, nack=True, value_ms=delay_ms, reason=reason, delays=delays)


def encode_extend(node: str, rows: Rows, lease_ms: int, progress: str = "") -> bytes:
    """Encode an EXTEND. progress: text that the handler reported, cut to MAX_REASON bytes."""
    assert rows.dtype == LEASE
    name, text = node.encode(), cut_reason(progress)
    return _frame(Command.EXTEND, _EXTEND.pack(len(name), len(text), len(rows), lease_ms), name, rows.tobytes(), text)


def encode_expire(grants: Iterable[tuple[int, int]]) -> bytes:
    """Encode an EXPIRE, which ends the leases of these grants that have run out by cluster time. grants: (term, seq) of
    each."""
    pairs = np.array(list(grants), _U32).reshape(-1, 2)
    return _frame(Command.EXPIRE, _COUNT.pack(len(pairs)), pairs.tobytes())


def encode_cancel(
    node: str, ids: Sequence[int] | NDArray[np.uint64] = (), keys: Sequence[tuple[str, bytes]] = ()
) -> bytes:
    """Encode a CANCEL of messages, named by `ids`, or by `keys`: (topic, client key)."""
    return _frame(Command.CANCEL, Cancel(node, *_targets(ids, keys)).pack())


def encode_reschedule(
    node: str,
    when_ms: int,
    relative: bool,
    ids: Sequence[int] | NDArray[np.uint64] = (),
    keys: Sequence[tuple[str, bytes]] = (),
    *,
    expected_ms: int | None = None,
) -> bytes:
    """Encode a RESCHEDULE. expected_ms: due time that the messages must have; None: any."""
    expected = -1 if expected_ms is None else expected_ms
    command = RescheduleCommand(node, *_targets(ids, keys), when_ms, relative, expected)
    return _frame(Command.RESCHEDULE, command.pack())


def _targets(
    ids: Sequence[int] | NDArray[np.uint64], keys: Sequence[tuple[str, bytes]]
) -> tuple[list[int], list[tuple[str, bytes]]]:
    return list(map(int, ids)), [(topic, hash_client_key(key)) for topic, key in keys]


def encode_cursor(hour: int, second: int, local: int) -> bytes:
    """Encode a CURSOR: hour, second and number within the second, up to which the leader has made messages ready."""
    return _frame(Command.CURSOR, _CURSOR.pack(hour, second, local))


def encode_topic_put(name: str, config: dict[str, Any]) -> bytes:
    """Encode a TOPIC_PUT: change the settings in `config`; None resets a setting. Apply validates `config`."""
    return _frame(Command.TOPIC_PUT, TopicPut(name, config).pack())


def encode_subscription_put(topic: str, subscription: str, config: dict[str, Any]) -> bytes:
    """Encode a SUBSCRIPTION_PUT: create a subscription of the topic, or change its settings like a TOPIC_PUT."""
    return _frame(Command.SUBSCRIPTION_PUT, SubscriptionPut(topic, subscription, config).pack())


def encode_subscription_fill(begin: FillBegin) -> bytes:
    return _frame(Command.SUBSCRIPTION_FILL, begin.pack())


def encode_topic_delete(name: str, force: bool = False) -> bytes:
    return _frame(Command.TOPIC_DELETE, TopicDelete(name, force).pack())


def encode_redrive(node: str, topic: str, ids: Sequence[int], *, all: bool = False, rate: float | None = None) -> bytes:
    """Encode a REDRIVE of dead letters: `ids` at once, or all of the topic, in slices, at `rate` per second."""
    return _frame(Command.REDRIVE, RedriveCommand(node, topic, all, rate or None, list(map(int, ids))).pack())


def encode_maintain(job: Job, hour: int = 0, limit: int | None = None, topic: str = "") -> bytes:
    """Encode one slice of a maintenance job on `hour`, or on `topic` for a REDRIVE. limit: maximum number of entries to
    look at; None: the job's default."""
    count = _LIMITS[job] if limit is None else limit
    of = pack_name(topic) if job is Job.REDRIVE else _COUNT.pack(hour)
    return _frame(job, of, _COUNT.pack(count))


def encode_job_begin(begin: JobBegin) -> bytes:
    return _frame(Command.JOB_BEGIN, begin.pack())


def encode_job_step(job: int, expected: JobCursor, cursor: JobCursor, ids: Sequence[int] | NDArray[np.uint64]) -> bytes:
    return _frame(Command.JOB_STEP, JobStep(job, expected, cursor, list(map(int, ids))).pack())


def encode_topic_expiry(rows: Sequence[TopicUse]) -> bytes:
    return _frame(Command.TOPIC_EXPIRY, TopicExpiry(rows).pack())


def encode_job_stop(job: int) -> bytes:
    return _frame(Command.JOB_STOP, JobStop(job).pack())


def encode_purge(topic: str, states: int) -> bytes:
    """Encode a PURGE: cancel the topic's messages in these states (bits of ledger/topics/topicchanges.py)."""
    return _frame(Command.PURGE, Purge(topic, states).pack())


def encode_alerted(topic: str, count: int) -> bytes:
    """Encode an ALERTED: the alert URL was notified of the topic's first `count` messages that became dead letters."""
    return _frame(Command.ALERTED, Alerted(topic, count).pack())


def encode_token_create(
    name: str, digest: bytes, scopes: Sequence[str], lifetime_ms: int | None, aws_key: bytes | None = None
) -> bytes:
    """Encode a TOKEN_CREATE. digest: SHA-256 of the token. Apply checks all fields (ledger/access.py)."""
    return _frame(Command.TOKEN_CREATE, TokenCreate(name, digest, list(scopes), lifetime_ms, aws_key).pack())


def encode_token_revoke(token_id: str) -> bytes:
    return _frame(Command.TOKEN_REVOKE, TokenRevoke(token_id).pack())


def encode_audited(node: str, token_id: str, token: str, action: str, target: str, command: bytes) -> bytes:
    """Encode a command together with its entry of the audit trail. Texts of that entry are cut to MAX_NAME bytes."""
    node, token_id, token, action, target = map(cut_name, (node, token_id, token, action, target))
    body = memoryview(command)[COMMAND.size :]
    return _frame(Command.AUDITED, Audited(node, token_id, token, action, target, command[0], body).pack())


def encode_feature(level: int) -> bytes:
    return _frame(Command.FEATURE, _COUNT.pack(level))


def encode_incarnation(node: str, incarnation: int) -> bytes:
    return _frame(Command.INCARNATION, Incarnation(node, incarnation).pack())


def encode_members(members: Members) -> bytes:
    """Encode a MEMBERS: the new list of members, which is in force as soon as it is in the log (ADR 150). A MEMBERS
    must be the only command of its entry."""
    return _frame(Command.MEMBERS, NewMembers(members).pack())


def encode_settings(settings: dict[str, Any]) -> bytes:
    """Encode a SETTINGS: limits that apply enforces, replicated as nodes' configuration files may differ."""
    return _frame(Command.SETTINGS, msgspec.msgpack.encode(settings))


def encode_shard_map(step: ShardStep, packed: bytes) -> bytes:
    """Encode a SHARD_MAP. packed: the map (settings/shardmap.py). Apply checks the map."""
    return _frame(Command.SHARD_MAP, PutShardMap(step, msgspec.Raw(packed)).pack())


def encode_noop() -> bytes:
    return _frame(Command.NOOP)


def decode(kind: int, body: memoryview) -> Any:
    """Decode a command's body into Publish, Grant, … or a tuple. Raises Malformed, also for an unknown kind."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Malformed(f"no command has the number {kind}")
    reader = WireReader(body)
    command = decoder(reader)
    reader.end()
    return command


def _decode_grant(reader: WireReader) -> Grant:
    term, seq, lease_ms, count, consumer, request_id, node, handed, ahead_ms = reader.unpack(_GRANT)
    if count > MAX_GRANT or request_id > MAX_REQUEST_ID:
        raise Malformed("a grant must have at most 65,535 messages and a request id of at most 64 bytes")
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


def _decode_extend(reader: WireReader) -> SettleLeases:
    name, progress, count, lease_ms = reader.unpack(_EXTEND)
    if progress > MAX_REASON:
        raise Malformed(f"progress must have at most {MAX_REASON} bytes")
    return SettleLeases(reader.text(name), lease_ms, reader.array(LEASE, count), reader.text(progress))


def _decode_expire(reader: WireReader) -> list[tuple[int, int]]:
    (count,) = reader.unpack(_COUNT)
    pairs = reader.array(_U32, 2 * count).reshape(-1, 2)
    return [(term, seq) for term, seq in pairs.tolist()]


def _decode_job(job: Job) -> Callable[[WireReader], Maintain]:
    if job is Job.REDRIVE:
        return lambda reader: Maintain(job, 0, topic=reader.named(), limit=reader.unpack(_COUNT)[0])
    return lambda reader: Maintain(job, *reader.unpack(_PAIR))


def _decode_shard_map(reader: WireReader) -> PutShardMap:
    if len(reader.view) > MAX_MAP_BYTES:
        raise Malformed(f"a shard map must have at most {MAX_MAP_BYTES} bytes")
    return PutShardMap.read(reader)


_DECODERS: dict[int, Callable[[WireReader], Any]] = {
    **{job: _decode_job(job) for job in Job},
    Command.NOOP: lambda reader: None,
    Command.GRANT: _decode_grant,
    Command.PUBLISH: decode_publish,
    Command.SETTLE: decode_settle,
    Command.EXTEND: _decode_extend,
    Command.EXPIRE: _decode_expire,
    Command.CANCEL: Cancel.read,
    Command.RESCHEDULE: RescheduleCommand.read,
    Command.CURSOR: lambda reader: reader.unpack(_CURSOR),
    Command.TOPIC_PUT: TopicPut.read,
    Command.SUBSCRIPTION_PUT: SubscriptionPut.read,
    Command.TOPIC_DELETE: TopicDelete.read,
    Command.FEATURE: lambda reader: reader.unpack(_COUNT)[0],
    Command.INCARNATION: Incarnation.read,
    Command.SETTINGS: lambda reader: _decode_settings(reader.rest()),
    Command.SHARD_MAP: _decode_shard_map,
    Command.REDRIVE: RedriveCommand.read,
    Command.PURGE: Purge.read,
    Command.ALERTED: Alerted.read,
    Command.TOKEN_CREATE: TokenCreate.read,
    Command.TOKEN_REVOKE: TokenRevoke.read,
    Command.AUDITED: Audited.read,
    Command.MEMBERS: lambda reader: NewMembers.read(reader).members,
    Command.JOB_BEGIN: JobBegin.read,
    Command.JOB_STEP: JobStep.read,
    Command.JOB_STOP: JobStop.read,
    Command.TOPIC_EXPIRY: TopicExpiry.read,
    Command.SUBSCRIPTION_FILL: FillBegin.read,
    **schedules.DECODERS,
    **batches.DECODERS,
}
