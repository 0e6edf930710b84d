"""Encodes and decodes the whole ledger: for checkpoints, snapshots and comparisons of replicas.

A small core has all numbers, settings and members; everything that grows is a row of a table (ledger/changedrows.py).
Equal ledgers give equal bytes: maps are written in a fixed order, bitmaps in their one canonical form. Derived values
(leased bitmaps, generations) are not written.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from hadelay import version
from hadelay.codec.batches import State
from hadelay.errors import WAY_OUT, ConfigError, FatalError, HadelayError
from hadelay.ledger import access
from hadelay.ledger.batches import members
from hadelay.ledger.changedrows import (
    AUDIT,
    BATCHST,
    GRANTS,
    HOURS,
    JOBS,
    TABLES,
    TOKENS,
    TOPICS,
    ChangedRows,
    Key,
    Row,
)
from hadelay.ledger.hours.hourstate import HourState, bitmap, rows_by_value
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.leases.grantrows import OpenGrant
from hadelay.ledger.rowformats import PLAIN, Core, CoreHead, RowFormat, decoder, encode, encode_canonical
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicBook, TopicState
from hadelay.rights import Audit, AuditEntry, Token
from hadelay.settings.cluster import Settings
from hadelay.settings.shardmap import ALONE

VERSION = 1
_U32, _U64, _GRANT_KEY = struct.Struct(">I"), struct.Struct(">Q"), struct.Struct(">QQ")
#: Table → function that encodes a key of the table.
_KEYS: dict[bytes, Callable[[Any], bytes]] = {
    TOPICS: _U32.pack, JOBS: _U32.pack, HOURS: _U32.pack, AUDIT: _U64.pack, TOKENS: str.encode,
    GRANTS: lambda key: _GRANT_KEY.pack(*key), BATCHST: members.row_key,
}  # fmt: skip
_TOPIC, _JOB, _GRANT, _HOUR = RowFormat(TopicState), RowFormat(BulkJob), RowFormat(OpenGrant), RowFormat(HourState)
_decode_head, _decode_core, _decode_token = map(decoder, (CoreHead, Core, Token))
_decode_audit, _decode_state = map(decoder, (AuditEntry, State))
#: Decodes a grant's row: (whether the grant's request id is remembered, fields of the grant).
_decode_grant = decoder(tuple[bool, _GRANT.array])  # type: ignore[name-defined]

#: Table → (key in the table, value) of its rows, ascending.
Rows = Mapping[bytes, Iterable[tuple[bytes, bytes]]]


def begin(ledger: Ledger) -> tuple[bytes, Iterator[Sequence[Row]]]:
    """Begin a checkpoint of the ledger as it is now. Returns (core: the encoded state that is in no row; slices of the
    changed rows). The slices are encoded when they are asked for, and must be used up before the next checkpoint
    begins."""
    return dump_core(ledger), ledger.changes.begin(partial(_encoded, ledger))


def dump(ledger: Ledger) -> tuple[bytes, dict[bytes, list[tuple[bytes, bytes]]]]:
    """Encode the whole ledger: (core, all rows). Equal ledgers give equal bytes, for comparing replicas; slow."""
    rows: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for table, keys in zip(TABLES, _keys(ledger), strict=True):
        encoded = [_encoded(ledger, table, key, canonical=True) for key in keys]
        rows[table] = sorted((key, value) for _, key, value in encoded if value is not None)
    return dump_core(ledger), rows


def noted(ledger: Ledger) -> list[Row]:
    """Encode the rows that the next checkpoint would write; for checks."""
    return [_encoded(ledger, table, key) for table in TABLES for key in ledger.changes.keys(table)]


def _keys(ledger: Ledger) -> tuple[Iterable[Key], ...]:
    audit = [entry.number for entry in ledger.audit.entries]
    return (
        range(len(ledger.topics.all)),
        ledger.grants,
        ledger.jobs,
        ledger.tokens,
        audit,
        ledger.hours,
        ledger.batch_states,
    )


def _encoded(ledger: Ledger, table: bytes, key: Key, *, canonical: bool = False) -> Row:
    """Encode a row in its present state. canonical: equal states of hours give equal bytes."""
    value = _value(ledger, table, key)
    return table, _KEYS[table](key), None if value is None else (encode_canonical if canonical else encode)(value)


def _value(ledger: Ledger, table: bytes, key: Key) -> Any:
    """The object, or the values, that a row stores; None if the row no longer exists."""
    if table == TOPICS:
        return _TOPIC.values(ledger.topics[key])
    if table == GRANTS:
        if (grant := ledger.grants.get(key)) is None:
            return None
        remembered = ledger.requests.get(grant.consumer, {}).get(grant.request_id) == grant.key
        return remembered, _GRANT.values(grant)
    if table == TOKENS:
        return ledger.tokens.get(key)
    if table == AUDIT:
        kept = ledger.audit.entries
        return kept[key - kept[0].number] if kept and kept[0].number <= key <= kept[-1].number else None
    if table == BATCHST:
        return ledger.batch_states.get(key)
    if table == JOBS:
        return None if (job := ledger.jobs.get(key)) is None else _JOB.values(job)
    return None if (hour_state := ledger.hours.get(key)) is None else _HOUR.values(hour_state)


def dump_core(ledger: Ledger) -> bytes:
    """Encode the core: the numbers, settings and members of the ledger, whose size does not grow with use."""
    return encode_canonical(
        Core(
            **{name: getattr(ledger, name) for name in PLAIN},
            version=VERSION,
            settings=ledger.settings.to_map(),
            named=dict(sorted(ledger.named.items())),
            incarnations=dict(sorted(ledger.incarnations.items())),
            audited=ledger.audit.count,
            made={table: dict(sorted(by.items())) for table, by in sorted(ledger.made.items())},
        )
    )


def dump_hour(hour_state: HourState, *, canonical: bool = False) -> bytes:
    """Encode the state of an hour. canonical: equal states give equal bytes, which is slower for large hours."""
    return (encode_canonical if canonical else encode)(_HOUR.values(hour_state))


def load(ledger: Ledger, core: bytes, rows: Rows) -> None:
    """Fill a new ledger from a checkpoint. The ledger's store, tables and names must be at the checkpoint's applied
    index already. Errors: see `decode`."""
    decode(ledger, core, rows)
    ledger.store.set_clock(ledger.now_hour)


def decode(ledger: Ledger, core: bytes, rows: Rows) -> None:
    """Fill a new ledger from a checkpoint, without using its store, tables and names. Raises FatalError for bytes of
    another version, and OSError for disk errors; checksums were verified before."""
    try:
        _fill(ledger, _read_core(core, ledger.group), rows)
    except (HadelayError, OSError):
        raise
    except Exception as error:  # decoders of numbers, bitmaps and arrays raise errors of many types
        raise _unreadable(f"{type(error).__name__}: {error}") from error


def _unreadable(why: str) -> FatalError:
    return FatalError(f"the checkpoint's state can't be read ({why}); {WAY_OUT}")


def _read_core(core: bytes, group: int) -> Core:
    head = _decode_head(core)
    if head.version != VERSION or head.level > version.FEATURE_LEVEL or head.group != group:
        raise FatalError(
            f"the checkpoint has version {head.version}, level {head.level} and group {head.group}; this program reads "
            f"version {VERSION} and level {version.FEATURE_LEVEL} at most, and the node is of group {group}: use a "
            "newer hadelay, or the data directory of this node"
        )
    return _decode_core(core)  # type: ignore[no-any-return]


def _fill(ledger: Ledger, core: Core, rows: Rows) -> None:
    for name in PLAIN:
        setattr(ledger, name, getattr(core, name))
    ledger.named, ledger.incarnations = core.named, core.incarnations
    ledger.settings = Settings.from_map(core.settings)
    ledger.made = {table: Counter(by) for table, by in core.made.items()}
    ledger.ttl_from = ledger.unique_from = ledger.batchend_from = b""
    ledger.changes = changes = ChangedRows()
    ledger.topics = TopicBook(changes)
    for _, row in rows.get(TOPICS, ()):
        ledger.topics.add(_TOPIC.load(row))
    ledger.hours = {int.from_bytes(key, "big"): load_hour(row) for key, row in rows.get(HOURS, ())}
    grants = [_decode_grant(row) for _, row in rows.get(GRANTS, ())]
    for remembered, grant in sorted(((known, OpenGrant(*values)) for known, values in grants), key=_by_number):
        _load_grant(ledger, grant, remembered)
    ledger.jobs = {}
    for _, row in rows.get(JOBS, ()):
        job = _JOB.load(row)
        job.watch(partial(changes.note, JOBS, job.number))
        ledger.jobs[job.number] = job
    running = [job for job in ledger.jobs.values() if job.spec.action == "fill" and not job.ended_ms]
    ledger.fills = {number: job for job in running for number in job.topics}
    ledger.batch_states = {members.number_in(key): _decode_state(row) for key, row in rows.get(BATCHST, ())}
    tokens = [_decode_token(row) for _, row in rows.get(TOKENS, ())]
    access.set_tokens(ledger, {token.id: token for token in sorted(tokens, key=lambda token: token.created_at_ms)})
    ledger.audit = Audit(core.audited, [_decode_audit(row) for _, row in rows.get(AUDIT, ())])
    changes.clear()


def _by_number(known: tuple[bool, OpenGrant]) -> int:
    return known[1].number


def _load_grant(ledger: Ledger, grant: OpenGrant, remembered: bool) -> None:
    grant.watch(partial(ledger.changes.note, GRANTS, grant.key))
    ledger.grants[grant.key] = grant
    if remembered:
        ledger.requests.setdefault(grant.consumer, {})[grant.request_id] = grant.key
    leased = grant.rows[grant.rows["open"] == 1]
    for hour, where in rows_by_value(leased["hour"]):
        ledger.hours.setdefault(hour, HourState()).leased |= bitmap(leased["index"][where])


def for_new_cluster(core: bytes, group: int, *, shard: bool = False) -> bytes:
    """Adapt a core to a cluster restored from a backup: new group number, no added members, no incarnations. A cluster
    with a shard map is suspended (creates no topic) until its map changes: since the backup, other shards may have
    created topics with names that it owns. shard: the cluster is one of several shards, even if the backup is older
    than its first map. Raises ConfigError if the new number is, or was, the number of a shard in the map: ids and
    leases would seem to be that shard's."""
    try:
        known = _decode_core(core)
    except msgspec.MsgspecError as error:
        raise _unreadable(str(error)) from error
    index = None if known.shards.current is None or group == known.group else known.shards.current.issuer(group)
    if index is not None:
        raise ConfigError(
            f"cluster.group = {group} is a number that shard {index} has, or had before a restore: choose another"
        )
    shards = replace(known.shards, suspended=True) if shard or known.shards != ALONE else ALONE
    return encode_canonical(replace(known, group=group, incarnations={}, members=(), members_index=0, shards=shards))


def load_hour(row: bytes) -> HourState:
    """Decode what `dump_hour` encoded; the leases of the hour are in the grants."""
    return _HOUR.load(row)
