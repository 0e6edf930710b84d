"""Applies a committed log entry, command by command: the only way to change the ledger (laws in ledger/state.py)."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from google_crc32c import extend as crc32c_extend

from hadelay import version
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import LEVEL_OF, Audited, Command, Incarnation, SettleLeases
from hadelay.codec.entries import ENTRY_VERSION, decode_entry, is_change_of_members
from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.codec.publishcommand import Publish
from hadelay.codec.results import Done, Refused, Result
from hadelay.codec.wire import Malformed
from hadelay.errors import FatalError
from hadelay.ledger import access
from hadelay.ledger.batches import batches, ending
from hadelay.ledger.hours import maintenance
from hadelay.ledger.hours.hourstate import indexes_of
from hadelay.ledger.jobs import bulk
from hadelay.ledger.leases import dead, granting, settling, suspects
from hadelay.ledger.messages import changes, publish
from hadelay.ledger.schedules import firing, schedules
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import shards, topicchanges, topicexpiry
from hadelay.members import JOINED, Members
from hadelay.model import DEAD_HOURS, HOUR_MS
from hadelay.settings.cluster import Settings
from hadelay.version import FIRST_LEVEL

_LINK = struct.Struct("<QQI")
_MAX_NOW_MS = (DEAD_HOURS - 1) * HOUR_MS
#: Number of entries that `_begin_hour` reads at a time.
_CHUNK = 65_536


def apply_entry(ledger: Ledger, index: int, term: int, entry: bytes | memoryview) -> list[Result]:
    """Apply one committed entry; returns a result per command. Raises only FatalError and DamagedFile."""
    if len(entry) and entry[0] > ENTRY_VERSION:
        raise FatalError(
            f"log entry {index} has format version {entry[0]}, this program reads {ENTRY_VERSION}: upgrade this node"
        )
    if term != ledger.term:
        ledger.suspects = suspects.after_term(ledger)
    ledger.applied, ledger.term = index, term
    ledger.chain = crc32c_extend(crc32c_extend(ledger.chain, _LINK.pack(index, term, len(entry))), bytes(entry))
    try:
        level, now_ms, commands = decode_entry(entry)
    except Malformed as error:
        return [Refused("malformed", str(error))]
    if level > version.FEATURE_LEVEL:
        raise FatalError(
            f"log entry {index} needs feature level {level}, this program has {version.FEATURE_LEVEL}: "
            "upgrade this node"
        )
    if ledger.now_ms < now_ms < _MAX_NOW_MS:
        _advance(ledger, now_ms)
    ledger.changes_members = is_change_of_members(commands)
    results = []
    for kind, body in commands:
        ledger.by = ""
        results.append(_apply_command(ledger, kind, body))
    return results


def _apply_command(ledger: Ledger, kind: int, body: memoryview) -> Result:
    if LEVEL_OF.get(kind, FIRST_LEVEL) > ledger.level:
        return Refused(
            "needs_upgrade",
            "not supported until every node is upgraded (feature_level of GET /v1/cluster)",
        )
    try:
        command = decode(kind, body)
    except Malformed as error:
        return Refused("malformed", str(error))
    result = _APPLY[kind](ledger, command)
    if ledger.complete:
        ending.end_complete(ledger)
    return result


def _advance(ledger: Ledger, now_ms: int) -> None:
    """Set cluster time to a later time; callers ignore earlier times, which a new leader's clock may give."""
    before = ledger.now_hour
    ledger.now_ms = now_ms
    if ledger.now_hour != before:
        ledger.store.set_clock(ledger.now_hour)
        for hour in ledger.store.hours():
            if before < hour <= ledger.now_hour and ledger.open_entries(hour):
                _begin_hour(ledger, hour)


def _begin_hour(ledger: Ledger, hour: int) -> None:
    """Begin to count the unsettled entries in each second of an hour that has just begun."""
    hour_state, count = ledger.hour_state(hour), ledger.store.count(hour)
    uncounted = hour_state.settled | hour_state.blocked
    # Read the smaller set, the unsettled or the settled entries: reading a million entries takes 0.1 s or more.
    subtract = 2 * len(uncounted) <= count
    indexes = indexes_of(uncounted if subtract else uncounted.flip(0, count))
    seconds = np.zeros(SECONDS_PER_HOUR, np.uint32)
    for at in range(0, len(indexes), _CHUNK):
        rows = ledger.store.entries(hour, indexes[at : at + _CHUNK])
        seconds += np.bincount(rows["second"], minlength=SECONDS_PER_HOUR).astype(np.uint32)
    hour_state.open_seconds = ledger.store.heads(hour).count.astype(np.uint32) - seconds if subtract else seconds


def _apply_noop(ledger: Ledger, command: None) -> Done:
    return Done(False)


def _apply_cursor(ledger: Ledger, command: tuple[int, int, int]) -> Done:
    changed = tuple(command) > ledger.cursor
    if changed:
        ledger.cursor = (command[0], command[1], command[2])
    return Done(changed)


def _apply_feature(ledger: Ledger, level: int) -> Done | Refused:
    if level > version.FEATURE_LEVEL:
        raise FatalError(
            f"the cluster switched to feature level {level}, this program has {version.FEATURE_LEVEL}: "
            "upgrade this node"
        )
    changed = level > ledger.level
    ledger.level = max(ledger.level, level)
    return Done(changed)


def _apply_incarnation(ledger: Ledger, command: Incarnation) -> Done:
    node, incarnation = command.node, command.incarnation
    changed = incarnation > ledger.incarnations.get(node, -1)
    if changed:
        ledger.incarnations[node] = incarnation
    return Done(changed)


def _apply_members(ledger: Ledger, command: Members) -> Done | Refused:
    if not ledger.changes_members:
        # Refuse a MEMBERS beside other commands: Raft takes members only from an entry with one (entries.members_in).
        return Refused("malformed", "a change of members must be the only command of its log entry")
    ledger.members, ledger.members_index = command, ledger.applied
    for member in command:
        if member.joined:
            ledger.incarnations.setdefault(member.name, JOINED)
    return Done(True)


def _apply_settings(ledger: Ledger, command: Any) -> Done | Refused:
    try:
        settings = Settings.from_map(command)
    except ValueError as error:
        return Refused("bad_config", str(error))
    changed = settings != ledger.settings
    ledger.settings = settings
    return Done(changed)


def _apply_audited(ledger: Ledger, command: Audited) -> Result:
    if command.kind == Command.AUDITED:
        return Refused("malformed", "an audited command must not contain another audited command")
    ledger.by = command.token
    return access.note(ledger, command, _apply_command(ledger, command.kind, command.body))


def _apply_publish(ledger: Ledger, command: Publish) -> Result:
    ledger.by = command.by
    return publish.apply_publish(ledger, command)


def _apply_settle(ledger: Ledger, command: SettleLeases) -> Result:
    return (settling.apply_nack if command.nack else settling.apply_ack)(ledger, command)


_APPLY: dict[int, Callable[[Ledger, Any], Result]] = {
    Command.NOOP: _apply_noop,
    Command.PUBLISH: _apply_publish,
    Command.GRANT: granting.apply_grant,
    Command.SETTLE: _apply_settle,
    Command.EXTEND: settling.apply_extend,
    Command.EXPIRE: settling.apply_expire,
    Command.CANCEL: changes.apply_cancel,
    Command.RESCHEDULE: changes.apply_reschedule,
    Command.CURSOR: _apply_cursor,
    Command.TOPIC_PUT: topicchanges.apply_put,
    Command.TOPIC_DELETE: schedules.apply_topic_delete,
    Command.FEATURE: _apply_feature,
    Command.INCARNATION: _apply_incarnation,
    Command.SETTINGS: _apply_settings,
    Command.SHARD_MAP: shards.apply_shard_map,
    Command.REDRIVE: dead.apply_redrive,
    Command.PURGE: topicchanges.apply_purge,
    Command.ALERTED: dead.apply_alerted,
    Command.TOKEN_CREATE: access.apply_token_create,
    Command.TOKEN_REVOKE: access.apply_token_revoke,
    Command.AUDITED: _apply_audited,
    Command.MEMBERS: _apply_members,
    Command.SCHEDULE_PUT: schedules.apply_put,
    Command.SCHEDULE_DELETE: schedules.apply_delete,
    Command.SCHEDULE_FIRE: firing.apply_fire,
    Command.SCHEDULE_STATE: schedules.apply_state,
    Command.SCHEDULE_RUN: firing.apply_run,
    Command.SUBSCRIPTION_PUT: topicchanges.apply_subscription_put,
    Command.JOB_BEGIN: bulk.apply_begin,
    Command.JOB_STEP: bulk.apply_step,
    Command.JOB_STOP: bulk.apply_stop,
    Command.SUBSCRIPTION_FILL: bulk.apply_fill,
    Command.TOPIC_EXPIRY: topicexpiry.apply_expiry,
    Command.BATCH_OPEN: batches.apply_open,
    Command.BATCH_SEAL: batches.apply_seal,
    Command.BATCH_CANCEL: batches.apply_cancel,
    Command.BATCH_STEP: ending.apply_step,
    Command.BATCHES: ending.maintain,
    **maintenance.JOBS,
}
