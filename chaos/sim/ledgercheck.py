"""Check of a ledger's consistency after a log entry. For tests and the simulator: the check reads the whole ledger, and
is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from chaos.sim import batchcheck, groupcheck
from hadelay.codec.formats import RESULT_ATTEMPT, SECONDS_PER_HOUR
from hadelay.codec.schedules import State, Stored
from hadelay.ledger.hours import retries
from hadelay.ledger.hours.hourstate import HourState, bitmap, indexes_of
from hadelay.ledger.hours.lookup import TTL_OF, stored_entry
from hadelay.ledger.hours.transitions import FLAG_KEYED, FLAG_TTL, ID_KEY, PLACE, PLACE_VALUE
from hadelay.ledger.leases import ackresults, dead
from hadelay.ledger.messages import copies, idempotency, ttl, unique
from hadelay.ledger.messages import keys as keys_
from hadelay.ledger.schedules import schedules
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import DEAD_HOURS, MOVES, NEVER_MS, Event

if TYPE_CHECKING:
    from hadelay.ledger.state import Ledger

#: Events after which an index entry counts as ended.
_ENDS = (Event.ACKED, Event.TTL_EXPIRED, Event.CANCELLED, *MOVES)


def check(ledger: Ledger) -> None:
    """Check the whole ledger. Raises AssertionError with the first inconsistency."""
    _check_grants(ledger)
    hours = {hour: ledger.store.entries(hour, slice(0, ledger.store.count(hour))) for hour in ledger.store.hours()}
    alive = {hour: rows for hour, rows in hours.items() if hour < DEAD_HOURS}
    #: Four counts per topic: open entries; their bytes; open entries that were purged; and waiting entries with a
    #: failed attempt.
    counted = np.zeros((4, len(ledger.topics.all)), np.int64)
    for hour, rows in alive.items():
        _check_hour(ledger, hour, rows, counted)
    for topic, (opened, _, tombstoned, retrying) in zip(ledger.topics.all, counted.T.tolist(), strict=True):
        name = f"topic {topic.name}"
        assert topic.open == opened, f"{name}: open {topic.open}, {opened}"
        assert topic.tombstoned == tombstoned, f"{name}: tombstoned {topic.tombstoned}"
        assert topic.retrying == retrying, f"{name}: retrying {topic.retrying}, {retrying}"
        redriven = topic.settled[Event.REDRIVEN]
        ended = sum(topic.settled) - topic.settled[Event.MOVED] - 2 * redriven
        assert topic.published == topic.open + ended, f"{name}: published {topic.published} ≠ {topic.open} + {ended}"
        assert topic.generation == ledger.topics.generations[topic.number], f"{name}: generation"
        assert topic.floor == ledger.topics.floors[topic.number] <= topic.generation, f"{name}: floor"
        with_work = bool(topic.tombstoned or topic.marks or topic.redrive)
        assert with_work == (topic.number in ledger.topics.with_work), f"{name}: with_work"
        expires = topic.exists and topic.settings.expires_after_ms is not None
        assert expires == (topic.number in ledger.topics.expiring), f"{name}: expiring"
        assert topic.alerted <= topic.settled[Event.DEAD], f"{name}: alerted"
        for index, belongs in _indexed(topic).items():
            assert belongs == (topic.number in getattr(ledger.topics, index)), f"{name}: {index}"
    _check_results(ledger, {hour: rows for hour, rows in hours.items() if hour not in alive}, counted[1])
    for topic, size in zip(ledger.topics.all, counted[1].tolist(), strict=True):
        assert topic.bytes == size, f"topic {topic.name}: {topic.bytes} ≠ {size} bytes"
    _check_dead(ledger, {hour: rows for hour, rows in hours.items() if hour not in alive})
    _check_ttl(ledger, alive)
    _check_schedules(ledger)
    periods, ends = (ledger.tables.range(table, limit=1 << 20) for table in (unique.UNIQ, unique.UNIQEND))
    by_end = [(unique.PERIOD.unpack_from(value)[2].to_bytes(8, "big") + key, b"") for key, value in periods]
    assert sorted(by_end) == ends, "the tables of unique keys differ"
    assert len(periods) == ledger.unique_count, f"{ledger.unique_count} unique keys, {len(periods)} rows"
    for hour, rows in hours.items():
        _check_ends(ledger, hour, rows)
    _check_references(ledger)
    for at, count in ((ledger.key_epoch - 1, ledger.key_count_before), (ledger.key_epoch, ledger.key_count)):
        found = len(ledger.tables.range(idempotency.table(at), limit=1 << 30))
        assert found == count, f"{count} idempotency keys, {found} rows"
    groupcheck.check(ledger)
    batchcheck.check(ledger)
    _check_fills(ledger)


def _indexed(topic: TopicState) -> dict[str, bool]:
    """Name of a set of topics → whether this topic has to be in it. Loops of the ledger read such a set instead of all
    topics."""
    settings = topic.settings
    calls = bool(settings.on_success or settings.on_failure)
    return {
        "calls_back": calls or topic.names_own,
        "routing": calls or settings.dead_letter != "keep",
        "webhooks": settings.webhook is not None,
        "grouping": settings.group_concurrency is not None,
        "died": topic.settled[Event.DEAD] > 0,
    }


def _check_ends(ledger: Ledger, hour: int, rows: np.ndarray) -> None:
    """Check that the cause and the time of each entry's end agree with the hour's dispatch log."""
    hour_state = ledger.hours.get(hour)
    if hour_state is None:
        assert not ledger.store.event_count(hour), f"hour {hour}: events, but no state"
        return
    events = ledger.store.events(hour)
    ends = events[np.isin(events["event"], _ENDS)]
    silent = BitMap()
    if hour >= DEAD_HOURS:
        # These entries are settled without an event in the dispatch log: results of acks; dead letters that a job
        # deleted; and entries that were dropped with their hour.
        silent |= bitmap(rows["index"][rows["attempt"] == RESULT_ATTEMPT]) | BitMap(range(hour_state.retire_at))
        silent |= hour_state.others.get(Event.MOVED, BitMap())
    assert bitmap(np.unique(ends["index"])) | silent == hour_state.settled, f"hour {hour}: settled, and not in the log"
    last = np.zeros(len(rows), np.uint8)
    last[ends["index"]] = ends["event"]
    for event in Event:
        if event in _ENDS and event is not Event.ACKED:
            logged = bitmap(np.flatnonzero(last == event).astype(np.uint32))
            assert hour_state.others.get(event, BitMap()) - silent == logged - silent, (
                f"hour {hour}: ended by {event.name}"
            )
    over = ends[~np.isin(ends["event"], MOVES)]
    at_ms = int(over["at_ms"].max()) if len(over) else 0
    assert hour_state.settled_at_ms == at_ms, f"hour {hour}: settled at {hour_state.settled_at_ms}, not {at_ms}"
    topics = bitmap(np.unique(rows["topic"][over["index"]]).astype(np.uint32))
    assert hour_state.topics == topics, f"hour {hour}: topics of messages that ended"


def _check_references(ledger: Ledger) -> None:
    """Check that the rows of tables about messages name only messages that still exist."""

    def known(first_id: int) -> bool:
        return any(stored_entry(ledger, one) is not None for one in (first_id, *copies.copies_of(ledger, first_id)))

    for raw, value in ledger.tables.range(PLACE, limit=1 << 30):
        (first_id,), (hour, index) = ID_KEY.unpack(raw), PLACE_VALUE.unpack_from(value)
        assert stored_entry(ledger, first_id) is not None, f"{first_id:x} is not at {hour}, {index}"
    keys = dict(ledger.tables.range(keys_.KEYOF, limit=1 << 30))
    for raw in keys:
        (first_id,) = ID_KEY.unpack(raw)
        assert known(first_id), f"{first_id:x} is gone, and has a client key"
    for key, value in ledger.tables.range(keys_.KEY, limit=1 << 30):
        assert keys.get(ID_KEY.pack(int.from_bytes(value[:8], "little"))) == key, (
            f"the client key {key!r} has no message"
        )
    visited = {ttl.KEY.unpack(key)[1] for key, _ in ledger.tables.range(ttl.TTL, limit=1 << 30)}
    for raw, _ in ledger.tables.range(TTL_OF, limit=1 << 30):
        (first_id,) = ID_KEY.unpack(raw)
        entry = stored_entry(ledger, first_id)
        is_dead = entry is not None and entry.hour >= DEAD_HOURS
        assert is_dead or first_id in visited, f"the TTL of {first_id:x} is never forgotten"


def _check_grants(ledger: Ledger) -> None:
    leased: dict[int, list[int]] = {}
    by_topic = [0] * len(ledger.topics.all)
    for key, grant in ledger.grants.items():
        unsettled = grant.rows[grant.rows["open"] == 1]
        assert grant.key == key, f"grant {key} says it is {grant.key}"
        assert grant.left == len(unsettled) > 0, f"grant {key}: {grant.left} left of {len(unsettled)}"
        assert all(grant.rows["open"][at] for at in grant.progress), f"grant {key}: progress of a lease that ended"
        for row in unsettled:
            leased.setdefault(int(row["hour"]), []).append(int(row["index"]))
            by_topic[row["topic"]] += 1
    for hour, indexes in leased.items():
        assert len(set(indexes)) == len(indexes), f"hour {hour}: leased twice"
    for hour, hour_state in ledger.hours.items():
        assert hour_state.leased == bitmap(np.array(leased.pop(hour, []), np.uint32)), f"hour {hour}: leased"
    assert not leased, f"leased in hours nothing is known of: {sorted(leased)}"
    for topic in ledger.topics.all:
        assert topic.leased == by_topic[topic.number], f"topic {topic.name}: leased {topic.leased}"
    for consumer, requests in ledger.requests.items():
        for request_id, key in requests.items():
            assert key in ledger.grants, f"{consumer}/{request_id!r} outlived its grant"


def _check_hour(ledger: Ledger, hour: int, rows: np.ndarray, counted: np.ndarray) -> None:
    count = len(rows)
    is_open = np.ones(count, bool)
    waiting = np.ones(count, bool)
    if hour_state := ledger.hours.get(hour):
        settled, leased = indexes_of(hour_state.settled), indexes_of(hour_state.leased)
        assert not hour_state.settled.intersect(hour_state.leased), f"hour {hour}: settled and leased"
        assert not count or not len(settled) or settled[-1] < count, f"hour {hour}: settled beyond its end"
        for event, bits in hour_state.others.items():
            assert bits.issubset(hour_state.settled), f"hour {hour}: {event.name} but not settled"
        is_open[settled] = False
        waiting = is_open.copy()
        waiting[leased] = False
        unblocked = is_open.copy()
        unblocked[indexes_of(hour_state.blocked)] = False
        assert hour_state.blocked.issubset(bitmap(rows["index"][waiting])), f"hour {hour}: blocked but not waiting"
        _check_seconds(ledger, hour, rows[unblocked])
    assert ledger.open_entries(hour) == np.count_nonzero(is_open), f"hour {hour}: open"
    topics, width = rows["topic"][is_open], counted.shape[1]
    counted[0] += np.bincount(topics, minlength=width)
    counted[1] += np.bincount(topics, rows["size"][is_open], width).astype(np.int64)
    keyed = np.count_nonzero(rows["flags"][hour_state.retire_at if hour_state else 0 :] & FLAG_KEYED)
    assert keyed == (hour_state.keyed if hour_state else 0), f"hour {hour}: {keyed} have a key"
    tombstoned = waiting & ~ledger.topics.alive(rows)
    counted[2] += np.bincount(rows["topic"][tombstoned], minlength=width)
    failed = waiting & retries.failed(rows)
    retrying = hour_state.retrying if hour_state else BitMap()
    assert retrying == bitmap(rows["index"][failed]), f"hour {hour}: retrying"
    counted[3] += np.bincount(rows["topic"][failed & ledger.topics.alive(rows)], minlength=width)


def _check_seconds(ledger: Ledger, hour: int, unblocked: np.ndarray) -> None:
    seconds = ledger.hours[hour].open_seconds
    if hour > ledger.now_hour:
        assert seconds is None, f"hour {hour}: counted by second before it began"
    elif seconds is None:
        # The hour has no counts by second yet: it began without open entries, and got only blocked entries since then.
        assert not len(unblocked), f"hour {hour}: not counted by second, {len(unblocked)} open"
    else:
        assert (seconds == np.bincount(unblocked["second"], minlength=SECONDS_PER_HOUR)).all(), f"hour {hour}: seconds"


def _check_results(ledger: Ledger, hours: dict[int, np.ndarray], sizes: np.ndarray) -> None:
    """Check that each result of an ack has one row and one index entry, which is settled; adds its bytes to `sizes` of
    its topic."""
    found: dict[bytes, bytes] = {}
    for hour, rows in hours.items():
        hour_state = ledger.hours.get(hour, HourState())
        results = rows[rows["attempt"] == RESULT_ATTEMPT]
        results = results[results["index"] >= hour_state.retire_at]
        assert len(results) == hour_state.results, f"hour {hour}: {len(results)} results"
        for row in results:
            assert row["index"] in hour_state.settled, f"hour {hour}: an open result"
            found[ID_KEY.pack(int(row["first_id"]))] = PLACE_VALUE.pack(hour, int(row["index"]))
            sizes[row["topic"]] += row["size"]
    known = dict(ledger.tables.range(ackresults.RESULTS, limit=1 << 30))
    assert known == found, f"{len(known)} rows of results, {len(found)} results"


def _check_dead(ledger: Ledger, hours: dict[int, np.ndarray]) -> None:
    """Check that the table `dead` has one row for each dead letter and no others, that each dead letter's id refers to
    its index entry, and that each topic's count of dead letters is right."""
    letters = {}
    for hour, rows in hours.items():
        hour_state = ledger.hours.get(hour)
        for row in rows:
            if hour_state is None or row["index"] not in hour_state.settled:
                topic, died_ms, first_id = int(row["topic"]), int(row["deliver_at_ms"]), int(row["first_id"])
                letters[dead.KEY.pack(topic, died_ms, first_id)] = (hour, int(row["index"]))
    known = ledger.tables.range(dead.DEAD, b"", None, 1 << 30)
    assert [key for key, _ in known] == sorted(letters), "table dead"
    counts = [0] * len(ledger.topics.all)
    for key, place in letters.items():
        topic, died_ms, first_id = dead.KEY.unpack(key)
        stored = ledger.tables.get(PLACE, ID_KEY.pack(first_id))
        assert stored is not None, f"dead letter {first_id:x} has no place"
        assert PLACE_VALUE.unpack_from(stored) == place, f"dead letter {first_id:x}: place"
        counts[topic] += died_ms > ledger.topics[topic].dead_mark_ms
    for found in ledger.topics.all:
        assert found.dead == counts[found.number], f"topic {found.name}: dead {found.dead} ≠ {counts[found.number]}"


def _check_ttl(ledger: Ledger, hours: dict[int, np.ndarray]) -> None:
    """Check that the maintenance job TTL_EXPIRE will visit each open entry with a TTL: when the TTL ends or, for a
    leased message, after the lease."""
    filed = [ttl.KEY.unpack(key) for key, _ in ledger.tables.range(ttl.TTL, b"", None, 1 << 30)]
    looked_at = {first_id: at_ms for at_ms, first_id in sorted(filed, reverse=True)}
    for hour, rows in hours.items():
        for row in rows[rows["flags"] & FLAG_TTL != 0]:
            ended, leased = ledger.outcome_of(hour, int(row["index"]))
            if ended is not None or not ledger.topics.owed(row.reshape(1))[0]:
                continue
            first_id = int(row["first_id"])
            expire_ms = ttl.expire_ms(ledger, first_id)
            assert expire_ms < NEVER_MS, f"{first_id:x} has a TTL, but nobody knows which"
            assert looked_at.get(first_id, NEVER_MS) <= (NEVER_MS - 1 if leased else expire_ms), (
                f"{first_id:x} expires unseen"
            )


def _check_schedules(ledger: Ledger) -> None:
    """S3: the agenda (table of schedules by next occurrence) has one row per schedule that is not paused, and the
    ledger's counts of schedules equal the numbers of rows."""
    if not ledger.schedules.count:
        assert not ledger.tables.range(schedules.STATE, limit=1), "a schedule is not counted"
        assert not ledger.tables.range(schedules.AGENDA, limit=1), "the agenda has a row of no schedule"
        return
    states = dict(ledger.tables.range(schedules.STATE, limit=1 << 20))
    stored = dict(ledger.tables.range(schedules.SCHED, limit=1 << 20))
    assert states.keys() == stored.keys(), "a schedule has no state, or a state no schedule"
    assert ledger.schedules.count == len(states), f"{ledger.schedules.count} schedules, {len(states)} rows"
    found = {raw: (State.unpack(states[raw]), Stored.unpack(stored[raw])) for raw in states}
    size = sum(len(schedule.template) for _, schedule in found.values())
    assert ledger.schedules.bytes == size, f"templates: {ledger.schedules.bytes} ≠ {size} bytes"
    agenda = {name.encode(): at_ms for _, at_ms, name in schedules.agenda(ledger, b"", NEVER_MS, 1 << 20)}
    wanted = {raw: state.next for raw, (state, _) in found.items() if not state.paused}
    assert agenda == wanted, f"agenda: {agenda} ≠ {wanted}"
    of_topic = {schedule.spec.topic.encode() + b"\0" + raw for raw, (_, schedule) in found.items()}
    assert dict(ledger.tables.range(schedules.OF_TOPIC, limit=1 << 20)).keys() == of_topic, "topics of schedules"
    for raw, (state, _) in found.items():
        times = [made.occurrence for made in state.ring if not made.manual]
        assert times == sorted(set(times)), f"schedule {raw!r}: {times}"


def _check_fills(ledger: Ledger) -> None:
    """Check that the tables of copies that fills made agree with each other and with the hours in which the copies are,
    and that acked messages are kept only for running fills."""
    of_copy = dict(ledger.tables.range(copies.COPYOF, limit=1 << 20))
    assert len(of_copy) == ledger.filled_copies, f"{ledger.filled_copies} copies of fills, {len(of_copy)} rows"
    known: dict[bytes, bytes] = {}
    for published, stored in ledger.tables.range(copies.COPIES, limit=1 << 20):
        of = [copies.FilledCopy(*each) for each in copies.COPY.iter_unpack(stored)]
        assert len({copy.topic for copy in of}) == len(of) > 0, f"two copies of {published.hex()}: {of}"
        known |= {ID_KEY.pack(copy.id): published for copy in of}
    # Rows of the table `copies` may be fewer: they leave out copies for subscriptions that were deleted.
    assert known.items() <= of_copy.items(), "the tables of copies differ"
    places = set()
    for hour, hour_state in ledger.hours.items():
        at = indexes_of(hour_state.filled)
        places |= {(hour, index) for index in at.tolist()}
        for copy in ledger.store.entries(hour, at)["first_id"].tolist() if len(at) else ():
            assert ID_KEY.pack(copy) in of_copy, f"hour {hour}: {copy:x} is no copy of a fill"
        assert hour_state.unfilled.keys() <= ledger.fills.keys(), f"hour {hour}: acked messages kept for no fill"
        for bits in hour_state.unfilled.values():
            assert bits.issubset(hour_state.settled), f"hour {hour}: kept for a fill, but not acked"
    assert len(places) == len(of_copy), "a copy of a fill is in no hour"
    running = {
        number: job
        for job in ledger.jobs.values()
        for number in job.topics
        if job.spec.action == "fill" and not job.ended_ms
    }
    assert running == ledger.fills, f"fills: {ledger.fills}"
    assert all(ledger.topic(job.spec.subscription) for job in running.values()), "a fill without its subscription"
