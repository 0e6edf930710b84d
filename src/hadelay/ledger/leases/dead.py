"""Dead letters: what happens to a message after its last attempt, and how it is redriven.

A message that may not be tried again is *moved*, like any other, but with Event.DEAD, and into a dead hour: the one in
which its topic's dead_retention ends, shifted by DEAD_HOURS. That hour is dropped as a whole when it is over. No wheel,
scan or histogram looks there. deliver_at_ms of the entry is the time of death; so the keys of table `dead`,

    dead  {topic u32, died_at_ms u64, first id u64} big-endian → nothing

can be made from the entry alone. The last failures are in table `place` (ledger/hours/transitions.py). A topic whose
dead_letter names another topic keeps no letters: the message goes to that topic, due now, attempt 0, under its id; if
it dies there, too, that topic keeps it, so that no two topics send each other their dead for ever.

A client key is of one pending message at a time: a letter whose key another message has meanwhile stays dead (ADR 160).

Purging is a watermark: letters that died at or before `topic.dead_mark_ms` are gone. Later deaths have a later ms.
"""

import struct
from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import Alerted, Maintain, RedriveCommand
from hadelay.codec.formats import I64, INDEX, NODE, Rows
from hadelay.codec.results import JobResult, RedriveOutcome, RedriveResult, Refused
from hadelay.ledger.groups import messagegroups
from hadelay.ledger.hours.hourstate import bitmap, is_in, rows_by_value
from hadelay.ledger.hours.lookup import find_entries, find_entry, state_of
from hadelay.ledger.hours.transitions import (
    FLAG_KEYED,
    FLAG_ROUTED,
    FLAGS_OF_MESSAGE,
    ID_KEY,
    PLACE,
    Leaving,
    file_anew,
    filed,
    fitting,
)
from hadelay.ledger.leases.ackresults import forget_results
from hadelay.ledger.leases.callbacks import died
from hadelay.ledger.messages import fills, ttl
from hadelay.ledger.messages.copies import published_id
from hadelay.ledger.messages.keys import forget_keys, leave_key, take_again
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topicchanges import topic_or_new
from hadelay.ledger.topics.topics import RedriveJob, TopicState, by_topic
from hadelay.model import DEAD_HOURS, HOUR_MS, Event, State

DEAD = b"dead"
KEY = struct.Struct(">IQQ")
#: Limit of the dead letters that one command looks at, in some milliseconds; the next command continues.
MAX_SLICE = 1_000
#: Limit of the records that one redrive command copies, in bytes; the next command continues.
REDRIVE_BYTES = 4 << 20
#: Dead letters in the order of their deaths: (cursor behind the letter, message id) of each.
Letters = list[tuple[bytes, int]]


def die(ledger: Ledger, leaving: Leaving) -> None:
    """End leased messages (INDEX rows) after the last attempt: keep or route them as dead letters."""
    rows = leaving.rows
    for number, _ in by_topic(rows["topic"]):
        mine = rows["topic"] == number
        topic = ledger.topics[number]
        routed = mine & (rows["flags"] & FLAG_ROUTED == 0)
        routes = topic.settings.dead_letter not in ("keep", topic.name) and routed.any()
        to = topic_or_new(ledger, topic.settings.dead_letter) if routes else None
        if to is None:
            routed[:] = False
        else:
            _route(ledger, leaving.some(routed), topic, to)
        kept = mine & ~routed
        if kept.any():
            _keep(ledger, leaving.some(kept), topic)
        if number in ledger.topics.calls_back:
            died(ledger, leaving.some(mine), topic)
        ledger.listener.on_dead(topic)


def _keep(ledger: Ledger, leaving: Leaving, topic: TopicState) -> None:
    rows = leaving.rows
    # Times of death must be later than those of purged letters, and of letters that are being redriven: else the purge
    # or redrive would include these new letters.
    died_ms = max(ledger.now_ms, topic.dead_mark_ms + 1, topic.redrive.upto_ms + 1 if topic.redrive else 0)
    until_ms = died_ms + topic.settings.dead_retention_ms
    new = rows.copy()
    new["deliver_at_ms"] = died_ms
    new["second"] = until_ms % HOUR_MS // 1000
    new["attempt"] = np.minimum(rows["attempt"], 0xFFFD) + 1
    new["flags"] &= FLAGS_OF_MESSAGE
    hours = np.full(len(rows), DEAD_HOURS + until_ms // HOUR_MS)
    file_anew(ledger, leaving, hours, new, Event.DEAD, attempts=rows["attempt"] + 1)
    topic.dead += len(rows)
    for first_id in rows["first_id"].tolist():
        ledger.tables.put(DEAD, KEY.pack(topic.number, died_ms, first_id), b"")


def _route(ledger: Ledger, leaving: Leaving, topic: TopicState, to: TopicState) -> None:
    rows = leaving.rows
    # Forget client keys: a key is valid only in its topic, which the message leaves.
    for first_id in rows["first_id"][rows["flags"] & FLAG_KEYED != 0].tolist():
        leave_key(ledger, topic.name, first_id)
    flags: NDArray[np.uint16] = rows["flags"] & np.uint16(0xFFFF ^ FLAG_KEYED) | np.uint16(FLAG_ROUTED)
    to.published += len(rows)
    file_in(ledger, leaving, to, flags, Event.DEAD, attempts=rows["attempt"] + 1, source=topic.number)


def file_in(
    ledger: Ledger,
    leaving: Leaving,
    topic: TopicState,
    flags: NDArray[np.uint16],
    event: Event,
    *,
    attempts: NDArray[np.uint16],
    due_ms: I64 | int = 0,
    source: int | None = None,
) -> None:
    """Move messages to new index entries in `topic`, due at due_ms, but not before now, with attempt 0. source:
    number of the topic from which the messages are routed away."""
    new = leaving.rows.copy()
    new["topic"], new["generation"] = topic.number, topic.generation
    new["deliver_at_ms"] = filing_ms = np.maximum(due_ms, np.full(len(new), ledger.now_ms, np.int64))
    new["second"] = filing_ms % HOUR_MS // 1000
    new["attempt"] = 0
    new["flags"] = flags & FLAGS_OF_MESSAGE
    hours: I64 = filing_ms // HOUR_MS
    file_anew(ledger, leaving, hours, new, event, attempts=attempts, source=source)
    topic.open += len(new)
    topic.bytes += int(new["size"].sum(dtype=np.int64))
    ttl.begin_again(ledger, new, filing_ms)
    blocked = messagegroups.rejoin(ledger, hours, new) if ledger.grouped_dead else None
    filed(ledger, hours, new, blocked)


def apply_redrive(ledger: Ledger, command: RedriveCommand) -> RedriveResult | JobResult | Refused:
    """Redrive dead letters by id, with an outcome each; or begin to redrive all, which REDRIVE_SOME continues."""
    topic = ledger.topic(command.topic)
    if topic is None:
        return Refused("no_topic", f"there is no topic {command.topic!r}")
    node = ledger.number_of(NODE, command.node)
    if command.all:
        purged = (topic.dead_mark_ms + 1, 0)
        topic.redrive = RedriveJob(topic.last_death_ms(ledger.now_ms), command.rate, ledger.now_ms, after=purged)
        ledger.topics.note_work(topic)
        ledger.listener.on_topic(topic)
        return JobResult(not topic.dead, topic.dead)
    places = [find_entry(ledger, first_id) for first_id in command.ids[:MAX_SLICE]]
    outcomes = np.full(len(command.ids), RedriveOutcome.NOT_FOUND, np.uint8)
    outcomes[MAX_SLICE:] = RedriveOutcome.AGAIN
    room = REDRIVE_BYTES
    chosen: dict[int, set[int]] = {}
    coming: set[int] = set()
    for at, place in enumerate(places):
        if place is None or int(place.rows["topic"][0]) != topic.number:
            continue
        found = state_of(ledger, place, ledger.now_ms)
        if found is not State.DEAD:
            outcomes[at] = RedriveOutcome[found.name]
            continue
        room -= int(place.rows["size"][0]) if place.index not in chosen.get(place.hour, ()) else 0
        if room < 0 and chosen:
            outcomes[at] = RedriveOutcome.AGAIN
            continue
        if not _may_come(ledger, place.rows[0], coming):
            outcomes[at] = RedriveOutcome.KEY_TAKEN
            continue
        chosen.setdefault(place.hour, set()).add(place.index)
        outcomes[at] = RedriveOutcome.REDRIVEN
    for hour, indexes in chosen.items():
        rows = ledger.store.entries(hour, np.array(sorted(indexes), np.uint32))
        _redrive(ledger, topic, Leaving(hour, rows, node=node))
    return RedriveResult(outcomes)


def _may_come(ledger: Ledger, row: np.void, coming: set[int]) -> bool:
    """Whether a dead letter may be redriven: no other pending message may have its client key. If so, adds its
    published message to `coming`, the published messages of all letters to redrive."""
    if not int(row["flags"]) & FLAG_KEYED:
        return True
    published = published_id(ledger, int(row["first_id"])) if ledger.topics.subscriptions else int(row["first_id"])
    if published is None or not take_again(ledger, published, coming):
        return False
    coming.add(published)
    return True


def redrive_some(ledger: Ledger, command: Maintain) -> JobResult | Refused:
    """Redrive the next dead letters of a topic, in the order of their deaths, as many as the rate allows."""
    topic = ledger.topic(command.topic)
    if topic is None:
        return Refused("no_topic", f"there is no topic {command.topic!r}")
    job = topic.redrive
    if job is None:
        return JobResult(True, 0)
    topic.before_change()  # the redrive, changed below, is in the topic's row of a checkpoint
    limit = min(max(command.limit, 1), MAX_SLICE, job.allowed(ledger.now_ms))
    if not limit:
        return JobResult(False, 0)
    end = KEY.pack(topic.number, job.upto_ms + 1, 0)
    found = ledger.tables.range(DEAD, KEY.pack(topic.number, *job.after), end, limit)
    letters = [KEY.unpack(at)[1:] for at, _ in found]
    hours, indexes = find_entries(ledger, [first_id for _, first_id in letters])
    rows = np.zeros(len(letters), INDEX)
    for hour, where in rows_by_value(hours):
        rows[where] = ledger.store.entries(hour, indexes[where].astype(np.uint32))
    count = fitting(rows["size"], REDRIVE_BYTES)
    coming: set[int] = set()
    free = np.fromiter((_may_come(ledger, row, coming) for row in rows[:count]), np.bool_, count)
    for hour, where in rows_by_value(hours[:count][free]):
        _redrive(ledger, topic, Leaving(hour, rows[:count][free][where]))
    job.count += count
    if count:
        died_ms, first_id = letters[count - 1]
        job.after = (died_ms, first_id + 1)
    # A finished redrive stays until the millisecond in which it began is over: messages that die in that millisecond
    # must get a later time of death (last_death_ms).
    if count == len(found) < limit and ledger.now_ms > job.upto_ms:
        topic.redrive = None
        ledger.topics.note_work(topic)
    return JobResult(topic.redrive is None, count)


def redrive_letters(ledger: Ledger, topic: TopicState, leaving: Leaving) -> int:
    """Redrive dead letters now; returns their number. A letter stays dead if another message has its client key."""
    coming: set[int] = set()
    free = np.fromiter((_may_come(ledger, row, coming) for row in leaving.rows), np.bool_, len(leaving.rows))
    if free.any():
        _redrive(ledger, topic, leaving.some(free))
    return int(free.sum())


def _redrive(ledger: Ledger, topic: TopicState, leaving: Leaving) -> None:
    rows = leaving.rows
    for died_ms, first_id in zip(rows["deliver_at_ms"].tolist(), rows["first_id"].tolist(), strict=True):
        ledger.tables.delete(DEAD, KEY.pack(topic.number, died_ms, first_id))
    file_in(ledger, leaving, topic, rows["flags"], Event.REDRIVEN, attempts=rows["attempt"])


def delete_letters(ledger: Ledger, leaving: Leaving) -> int:
    """Delete dead letters of one hour; returns their number. Like purged letters, they are not found any more."""
    _forget(ledger, leaving.hour, leaving.rows)
    ledger.hour_state(leaving.hour).settle(bitmap(leaving.rows["index"]), Event.MOVED)
    return len(leaving.rows)


def drop_hour(ledger: Ledger, command: Maintain) -> JobResult | Refused:
    """Drop an hour of dead letters whose retention is over: forget its letters in slices, then delete its files."""
    hour = command.hour
    if hour < DEAD_HOURS:
        return Refused("not_dead", f"hour {hour} is not an hour of dead letters")
    count = ledger.store.count(hour)
    if hour in ledger.retired or not count:
        return JobResult(True, 0)
    if hour - DEAD_HOURS >= ledger.now_hour:
        return Refused("hour_running", f"the retention of hour {hour - DEAD_HOURS} is not over")
    if fills.holds(ledger, hour):
        return Refused("hour_open", f"a subscription that is being filled still needs hour {hour}")
    hour_state = ledger.hour_state(hour)
    start = hour_state.retire_at
    # In a topic with subscriptions, forgetting a client key reads the index: forget fewer letters at once.
    most = MAX_SLICE // 4 if ledger.topics.subscriptions else MAX_SLICE
    end = min(start + min(max(command.limit, 1), most), count)
    rows = ledger.store.entries(hour, slice(start, end))
    if hour_state.results:
        forget_results(ledger, hour_state, rows)
    rows = rows[~is_in(rows["index"], hour_state.settled)]
    if len(rows):
        _forget(ledger, hour, rows)
        hour_state.settle(bitmap(rows["index"]), Event.CANCELLED)
    hour_state.retire_at = end
    if end < count and (ledger.open_entries(hour) or hour_state.results):
        return JobResult(False, len(rows))
    if hour_state.filled:
        return JobResult(False, fills.forget_some(ledger, hour, MAX_SLICE))
    ledger.retire_hour(hour)
    return JobResult(True, len(rows))


def _forget(ledger: Ledger, hour: int, rows: Rows) -> None:
    """Delete the table rows of dead letters; the caller settles their entries."""
    forget_keys(ledger, hour, rows)
    for number, died_ms, first_id in zip(
        rows["topic"].tolist(), rows["deliver_at_ms"].tolist(), rows["first_id"].tolist(), strict=True
    ):
        topic = ledger.topics[number]
        if died_ms > topic.dead_mark_ms:
            topic.dead -= 1
            if topic.settings.expires_after_ms is not None:
                topic.used_ms = ledger.now_ms
        ledger.tables.delete(DEAD, KEY.pack(number, died_ms, first_id))
        ledger.tables.delete(PLACE, ID_KEY.pack(first_id))
    ttl.forget(ledger, rows["first_id"].tolist())
    if ledger.grouped_dead:
        messagegroups.forget(ledger, rows["first_id"].tolist())


def apply_alerted(ledger: Ledger, command: Alerted) -> JobResult | Refused:
    topic = ledger.topic(command.topic)
    if topic is None:
        return Refused("no_topic", f"there is no topic {command.topic!r}")
    reported = min(command.deaths, topic.settled[Event.DEAD]) - topic.alerted
    topic.alerted += max(reported, 0)
    return JobResult(topic.alerted == topic.settled[Event.DEAD], max(reported, 0))


def listing(ledger: Ledger, topic: TopicState, after: bytes, limit: int) -> Generator[None, None, Letters]:
    """List the next dead letters after the cursor `after` (b"": from the first on). A generator that yields after each
    slice, since letters redriven or deleted since the last checkpoint are skipped one by one. Letters of the result may
    be gone when it returns."""
    start = max(KEY.pack(topic.number, topic.dead_mark_ms + 1, 0), KEY.pack(topic.number, 0, 0)[:4] + after + b"\0")
    found = yield from ledger.tables.range_slices(DEAD, start, KEY.pack(topic.number + 1, 0, 0), limit)
    return [(at[4:], KEY.unpack(at)[2]) for at, _ in found]
