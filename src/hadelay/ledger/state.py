"""The replicated state machine: every message, and where it is in its life.

Law 1: only `apply` changes state, and only because a committed entry says so.
Law 2: `now_ms` arrives inside the entry, stamped once by the leader. Nothing here asks what time it is.
Law 3: `apply` never raises for bad input; a refusal is a value. What it does raise (a damaged file, a feature level
       this code does not have) must stop the node, since to go on would make it another replica.
Law 4: never iterate a set of strings: hashing differs between processes, so replicas would disagree.
Law 5: nothing is kept in memory per waiting message. Entries live in the hours' files; here are bitmaps of what is
       over, the grants that are held, and counters.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from google_crc32c import extend as crc32c_extend
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.commands import (
    ENTRY_VERSION,
    LEVEL_OF,
    Audited,
    Command,
    Settle,
    decode,
    decode_entry,
    is_change_of_members,
)
from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.codec.results import Done, Refused, Result
from hadelay.codec.wire import Malformed
from hadelay.errors import FatalError
from hadelay.ledger import access, changes, checkpoint, dead, leases, lookup, maintenance, publish, topics, ttl
from hadelay.ledger.describe import Description, describe
from hadelay.ledger.grants import HeldGrant
from hadelay.ledger.hourstate import HourState, indexes_of
from hadelay.ledger.ports import CONSUMER, NODE, REASON, HourStore, Listener, Names, Tables
from hadelay.ledger.topics import Topic, Topics, known_topic
from hadelay.members import JOINED, Members
from hadelay.model import DEAD_HOURS, HOUR_MS, NONE32, Event
from hadelay.rights import Audit, Token
from hadelay.settings.cluster import Settings
from hadelay.version import FEATURE_LEVEL, FIRST_LEVEL

_LINK = struct.Struct("<QQI")
_MAX_NOW_MS = (DEAD_HOURS - 1) * HOUR_MS
#: Entries of which `_closed_seconds` reads the seconds at a time.
_CHUNK = 65_536


class DelayState:
    """One group's state. `store`, `tables` and `names` are changed by apply alone; see ledger/ports.py."""

    #: Number of "no node" in a dispatch log entry: the cluster did it.
    no_node = 0xFF

    def __init__(
        self, group: int, store: HourStore, tables: Tables, names: Names, settings: Settings | None = None
    ) -> None:
        self.group, self.store, self.tables, self.names = group, store, tables, names
        self.settings = settings or Settings()
        self.listener = Listener()
        #: Told of the hour and the INDEX or HELD rows that were settled, on every node; must not keep the rows.
        self.on_settled: Callable[[int, NDArray[np.void]], None] | None = None
        #: Cluster time of the last entry.
        self.now_ms = 0
        self.applied = 0
        self.term = 0
        #: CRC32C over all entries applied, each with its index and term: equal on equal replicas.
        self.chain = 0
        #: The feature level that the cluster has switched to.
        self.level = FIRST_LEVEL
        #: Hour tick, second tick, localIndex. A new leader waits for the ticks; users see the localIndex (ADR 191).
        self.cursor = (0, 0, 0)
        self.topics = Topics()
        self.hours: dict[int, HourState] = {}
        self.grants: dict[tuple[int, int], HeldGrant] = {}
        #: consumer → request id → grant, while it is held.
        self.requests: dict[str, dict[bytes, tuple[int, int]]] = {}
        self.incarnations: dict[str, int] = {}
        #: As the entry at `members_index` said; () while they are those the cluster was founded with.
        self.members: Members = ()
        self.members_index = 0
        self._changes_members = False
        self.retired = BitMap()
        #: Where SWEEP goes on: (hour, globalIndex).
        self.sweep = (0, 0)
        #: TTL_EXPIRE has done what lies before this key of its table: derived, "" is right as well.
        self.ttl_from = b""
        self.key_epoch = 0
        self.key_epoch_ends_ms = 0
        self.key_count = 0
        self.key_count_before = 0
        self.keys_dropped_early = 0
        #: By id. Never changed in place: who holds one of these dicts sees that there is another (ledger/access.py).
        self.tokens: dict[str, Token] = {}
        self.audit = Audit()
        #: How many consumers, nodes and reasons were given a number.
        self.named = {CONSUMER: 0, NODE: 0, REASON: 0}
        self._touched: set[int] = set()

    # ---- apply

    def apply(self, index: int, term: int, entry: bytes | memoryview) -> list[Result]:
        """One committed entry: a result per command, in order. Raises FatalError and DamagedFile only (law 3)."""
        if len(entry) and entry[0] > ENTRY_VERSION:
            raise FatalError(f"entry {index} has version {entry[0]}, this code reads {ENTRY_VERSION}: upgrade it")
        self.applied, self.term = index, term
        self.chain = crc32c_extend(crc32c_extend(self.chain, _LINK.pack(index, term, len(entry))), bytes(entry))
        try:
            level, now_ms, commands = decode_entry(entry)
        except Malformed as error:
            return [Refused("malformed", str(error))]
        if level > FEATURE_LEVEL:
            raise FatalError(f"entry {index} needs feature level {level}, this code has {FEATURE_LEVEL}: upgrade it")
        if self.now_ms < now_ms < _MAX_NOW_MS:
            self._advance(now_ms)
        self._changes_members = is_change_of_members(commands)
        return [self.apply_one(kind, body) for kind, body in commands]

    def apply_one(self, kind: int, body: memoryview) -> Result:
        if LEVEL_OF.get(kind, FIRST_LEVEL) > self.level:
            return Refused("needs_upgrade", "not before every node is upgraded (feature_level of GET /v1/cluster)")
        try:
            command = decode(kind, body)
        except Malformed as error:
            return Refused("malformed", str(error))
        return _APPLY[kind](self, command)

    def _advance(self, now_ms: int) -> None:
        """Time goes forwards only: a new leader's clock may be behind the old one's."""
        before = self.now_hour
        self.now_ms = now_ms
        if self.now_hour != before:
            self.store.set_clock(self.now_hour)
            for hour in self.store.hours():
                if before < hour <= self.now_hour and self.open_entries(hour):
                    self._begin_hour(hour)

    def _begin_hour(self, hour: int) -> None:
        """From now on the hour's open entries are counted by second."""
        hour_state = self.hour_state(hour)
        seconds = self.store.heads(hour).count.astype(np.uint32)
        settled = indexes_of(hour_state.settled)
        for at in range(0, len(settled), _CHUNK):
            rows = self.store.entries(hour, settled[at : at + _CHUNK])
            seconds -= np.bincount(rows["second"], minlength=SECONDS_PER_HOUR).astype(np.uint32)
        hour_state.open_seconds = seconds

    def dump(self, *, everything: bool = False) -> tuple[bytes, dict[int, bytes]]:
        """(main blob, blob per hour changed since the last dump; b"" for one to forget). ledger/checkpoint.py

        everything: all hours, equal bytes for equal states, for comparing replicas.
        """
        touched = set(self.hours) if everything else self._touched
        hours = {
            h: checkpoint.dump_hour(self.hours[h], canonical=everything) if h in self.hours else b""
            for h in sorted(touched)
        }
        if not everything:
            self._touched = set()
        return checkpoint.dump_main(self), hours

    def load(self, main: bytes, hours: dict[int, bytes]) -> None:
        """Become the state of that dump: the store, tables and names must be those of the same applied index."""
        checkpoint.load(self, main, hours)
        self._touched = set()

    # ---- for the modules that apply one kind of command each

    @property
    def now_hour(self) -> int:
        return self.now_ms // HOUR_MS

    def hour_state(self, hour: int) -> HourState:
        """To change it: it is part of the next checkpoint."""
        self._touched.add(hour)
        found = self.hours.get(hour)
        if found is None:
            found = self.hours[hour] = HourState()
        return found

    def forget_hour(self, hour: int) -> None:
        self._touched.add(hour)
        self.hours.pop(hour, None)

    def number_of(self, kind: int, name: str) -> int:
        """Number of a consumer, node or reason, given now if it has none. Beyond the limits: NONE32 and `no_node`."""
        try:
            return self.names.number(kind, name)
        except KeyError:
            pass
        limits = {
            CONSUMER: (self.settings.max_consumers, NONE32),
            NODE: (self.no_node, self.no_node),
            REASON: (self.settings.max_reasons, NONE32),
        }
        limit, beyond = limits[kind]
        if self.named[kind] >= limit:
            return beyond
        self.named[kind] += 1
        return self.names.register(kind, name)

    # ---- reads

    def open_entries(self, hour: int) -> int:
        """Waiting or leased, in O(1)."""
        hour_state = self.hours.get(hour)
        return self.store.count(hour) - (len(hour_state.settled) if hour_state else 0)

    def fate(self, hour: int, index: int) -> tuple[Event | None, bool]:
        """(how the entry ended, whether it is leased); (None, False) while it waits, or never was."""
        hour_state = self.hours.get(hour)
        return (hour_state.ended(index), index in hour_state.leased) if hour_state else (None, False)

    def held_by(self, consumer: str, request_id: bytes) -> HeldGrant | None:
        """What this request got and still holds, if anything: to be handed out again (idempotent receive)."""
        key = self.requests.get(consumer, {}).get(request_id)
        return self.grants[key] if key is not None else None

    def topic(self, name: str) -> Topic | None:
        found = known_topic(self, name)
        return found if found is not None and found.exists else None

    def find(self, message_id: int) -> tuple[int, int] | None:
        return lookup.find(self, message_id)

    def describe(self, message_id: int, now_ms: int = 0, *, body: bool = False) -> Description | None:
        return describe(self, message_id, now_ms, body=body)


def _apply_noop(state: DelayState, command: None) -> Done:
    return Done(False)


def _apply_cursor(state: DelayState, command: tuple[int, int, int]) -> Done:
    changed = tuple(command) > state.cursor
    if changed:
        state.cursor = (command[0], command[1], command[2])
    return Done(changed)


def _apply_feature(state: DelayState, level: int) -> Done | Refused:
    if level > FEATURE_LEVEL:
        raise FatalError(f"the cluster switched to feature level {level}, this code has {FEATURE_LEVEL}: upgrade it")
    changed = level > state.level
    state.level = max(state.level, level)
    return Done(changed)


def _apply_incarnation(state: DelayState, command: tuple[str, int]) -> Done:
    node, incarnation = command
    changed = incarnation > state.incarnations.get(node, -1)
    if changed:
        state.incarnations[node] = incarnation
    return Done(changed)


def _apply_members(state: DelayState, command: Members) -> Done | Refused:
    if not state._changes_members:
        # In force it was only if the log shows it at a glance (commands.members_in).
        return Refused("malformed", "a change of the members is the only command of its entry")
    state.members, state.members_index = command, state.applied
    for member in command:
        if member.joined:
            state.incarnations.setdefault(member.name, JOINED)
    return Done(True)


def _apply_settings(state: DelayState, command: Any) -> Done | Refused:
    try:
        settings = Settings.from_map(command)
    except ValueError as error:
        return Refused("bad_config", str(error))
    changed = settings != state.settings
    state.settings = settings
    return Done(changed)


def _apply_audited(state: DelayState, command: Audited) -> Result:
    if command.kind == Command.AUDITED:
        return Refused("malformed", "what is audited is not audited again")
    return access.note(state, command, state.apply_one(command.kind, command.body))


def _apply_settle(state: DelayState, command: Settle) -> Result:
    return (leases.apply_ack if command.kind == Command.ACK else leases.apply_nack)(state, command.leases)


_APPLY: dict[int, Callable[[DelayState, Any], Result]] = {
    Command.NOOP: _apply_noop,
    Command.PUBLISH: publish.apply_publish,
    Command.GRANT: leases.apply_grant,
    Command.ACK: leases.apply_ack,
    Command.NACK: leases.apply_nack,
    Command.EXTEND: leases.apply_extend,
    Command.EXPIRE: leases.apply_expire,
    Command.CANCEL: changes.apply_cancel,
    Command.RESCHEDULE: changes.apply_reschedule,
    Command.CURSOR: _apply_cursor,
    Command.TOPIC_PUT: topics.apply_put,
    Command.TOPIC_DELETE: topics.apply_delete,
    Command.SWEEP: maintenance.apply_sweep,
    Command.CARRY: maintenance.apply_carry,
    Command.RETIRE: maintenance.apply_retire,
    Command.FEATURE: _apply_feature,
    Command.INCARNATION: _apply_incarnation,
    Command.SETTINGS: _apply_settings,
    Command.REDRIVE: dead.apply_redrive,
    Command.TTL_EXPIRE: ttl.apply_ttl_expire,
    Command.PURGE: topics.apply_purge,
    Command.DROP_DEAD: dead.apply_drop_dead,
    Command.REDRIVE_SOME: dead.apply_redrive_some,
    Command.ALERTED: dead.apply_alerted,
    Command.TOKEN_CREATE: access.apply_token_create,
    Command.TOKEN_REVOKE: access.apply_token_revoke,
    Command.AUDITED: _apply_audited,
    Command.MEMBERS: _apply_members,
    Command.SETTLE: _apply_settle,
}
