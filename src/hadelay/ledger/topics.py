"""Topics: their settings and counters, and how a million messages are deleted in no time.

Every index entry carries the *generation* its topic had when it was filed. Deleting a topic adds one to the
generation: whatever still waits under an older one is cancelled from that moment, without being touched. Nobody hands
it out, GET says `cancelled`, and SWEEP writes it down in slices, later (ledger/maintenance.py). A purge is the same,
without the end of the topic.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.results import Done, Refused
from hadelay.ledger.ports import TOPIC
from hadelay.model import Event
from hadelay.settings.topic import (
    NEWEST_DEFAULTS,
    TopicSettings,
    disputed_url,
    merged,
    problem,
    settings_of,
    unmasked,
    with_defaults,
)
from hadelay.version import BOUNDED, MASKED_HEADERS, MASKED_OF_ORIGIN, PLAIN_URLS, RETRY_DEFAULTS

if TYPE_CHECKING:
    from hadelay.ledger.state import DelayState

MAX_GENERATION = 0xFFFF
#: Partial purges of a topic that SWEEP has not been through: whoever looks at a waiting message asks them all.
MAX_MARKS = 100
#: What PURGE may name, as bits.
SCHEDULED, READY, DEAD = 1, 2, 4
#: Below this many numbers counting them one by one is quicker than numpy.
_FEW = 200


@dataclass(slots=True)
class Mark:
    """A purge of what was scheduled, or ready, at at_ms; SWEEP writes it down. Older generations only."""

    generation: int
    at_ms: int
    ready: bool

    def means(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        due = rows["deliver_at_ms"] <= self.at_ms
        return np.asarray((rows["generation"] < self.generation) & (due == self.ready))


@dataclass(slots=True)
class RedriveJob:
    """The redrive of all that a topic's dead letters were at upto_ms, in the order of their deaths."""

    upto_ms: int
    #: Messages per second, None: as fast as it goes.
    rate: float | None
    start_ms: int
    #: So many were redriven since start_ms, up to this one: (died_at_ms, first id).
    count: int = 0
    after: tuple[int, int] = (0, 0)

    def waits(self, now_ms: int) -> bool:
        """Its rate allows nothing yet."""
        return self.rate is not None and 1 + int(self.rate * (now_ms - self.start_ms) / 1000) <= self.count

    def allowed(self, now_ms: int) -> int:
        """How many more may be redriven by now. What was missed by more than a second is not caught up with."""
        if self.rate is None:
            return 1 << 30
        due = 1 + int(self.rate * (now_ms - self.start_ms) / 1000) - self.count
        most = 1 + int(self.rate)
        if due > most:
            self.start_ms, self.count, due = now_ms, 1 - most, most
        return due


@dataclass(slots=True)
class Topic:
    number: int
    name: str
    #: False once deleted; the number and the generation stay, for when the name comes back.
    exists: bool = True
    generation: int = 0
    #: How often it was deleted: client keys of an earlier life are none of this one.
    lives: int = 0
    #: Entries of older generations were cancelled: with a deletion, or a purge.
    floor: int = 0
    #: What PUT set, and the same over the defaults (settings/topic.py). Changed by `configure` alone.
    config: dict[str, Any] = field(default_factory=dict)
    settings: TopicSettings = field(init=False, repr=False)
    #: Not settled: waiting or leased, doomed ones included.
    open: int = 0
    leased: int = 0
    #: Waiting under an older generation: cancelled, not yet swept.
    doomed: int = 0
    published: int = 0
    #: Of the records of what is open.
    bytes: int = 0
    #: Up to when the tokens of publish_rate are spent (ledger/flow.py).
    spent_ns: int = 0
    #: Dead letters that are kept.
    dead: int = 0
    #: Those that died at or before this time are gone.
    dead_mark_ms: int = 0
    redrive: RedriveJob | None = None
    #: Of how many deaths, `settled[DEAD]` in all, somebody was told (`alert`).
    alerted: int = 0
    #: Partial purges that SWEEP has not been through yet.
    marks: list[Mark] = field(default_factory=list)
    #: By Event, of messages (a move settles an entry, not a message): acked, cancelled, expired, dead, and redriven.
    #: Never goes down.
    settled: list[int] = field(default_factory=lambda: [0] * (max(Event) + 1))

    def __post_init__(self) -> None:
        self.configure(self.config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.settings = settings_of(config)

    def last_death_ms(self, now_ms: int) -> int:
        """No letter that is there at now_ms died later. One that died in the ms of a purge, or of the beginning of a
        redrive, but after it, was given the next ms (ledger/dead.py)."""
        upto_ms = max(self.dead_mark_ms, self.redrive.upto_ms if self.redrive else 0)
        return max(now_ms, upto_ms + 1 if self.dead else upto_ms)

    @property
    def waiting(self) -> int:
        """Scheduled and ready; which of the two is a question of the time, and the dispatcher's to answer."""
        return self.open - self.leased - self.doomed

    @property
    def pending(self) -> int:
        return self.open - self.doomed


class Topics:
    """All of them by number, dense from 0, with the generations as an array for whole columns at once."""

    def __init__(self) -> None:
        self.all: list[Topic] = []
        #: What is filed now, and the oldest that is not cancelled: deletion and purge move it.
        self.generations = np.zeros(64, np.uint16)
        self.floors = np.zeros(64, np.uint16)
        #: Numbers of topics that are not done with: doomed, marked, being redriven.
        self.chores: set[int] = set()

    def __getitem__(self, number: int) -> Topic:
        return self.all[number]

    def add(self, topic: Topic) -> None:
        assert topic.number == len(self.all), "numbers of topics are given in order"
        self.all.append(topic)
        if topic.number >= len(self.generations):
            self.generations = np.concatenate([self.generations, np.zeros_like(self.generations)])
            self.floors = np.concatenate([self.floors, np.zeros_like(self.floors)])
        self.generations[topic.number], self.floors[topic.number] = topic.generation, topic.floor
        self.note_chores(topic)

    def alive(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Per INDEX row: its topic was neither deleted nor purged since it was filed."""
        return np.asarray(self.floors[rows["topic"]] <= rows["generation"])

    def marked(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Per waiting INDEX row: a partial purge means it."""
        meant = np.zeros(len(rows), np.bool_)
        for number in self.chores:
            for mark in self.all[number].marks:
                meant |= (rows["topic"] == number) & mark.means(rows)
        return meant

    def owed(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Per waiting INDEX row: neither a deletion nor a purge, whole or partial, means it."""
        alive = self.alive(rows)
        return alive & ~self.marked(rows) if self.chores else alive

    def end(self, topic: Topic) -> None:
        """All that waits in the topic is cancelled. A running lease wins: those settle, or are cancelled on return."""
        topic.doomed = topic.open - topic.leased
        topic.floor, topic.marks = topic.generation, []
        self.floors[topic.number] = topic.floor
        self.note_chores(topic)

    def end_dead(self, topic: Topic, now_ms: int) -> None:
        """The topic's dead letters are gone from now on; their bytes go with their hours (ledger/dead.py)."""
        topic.dead_mark_ms = topic.last_death_ms(now_ms)
        topic.dead, topic.redrive = 0, None
        self.note_chores(topic)

    def note_chores(self, topic: Topic) -> None:
        if topic.doomed or topic.marks or topic.redrive is not None:
            self.chores.add(topic.number)
        else:
            self.chores.discard(topic.number)

    def to_sweep(self) -> bool:
        return any(self.all[number].doomed or self.all[number].marks for number in self.chores)

    def swept(self) -> None:
        """SWEEP has been through all hours since the last mark was made."""
        for number in list(self.chores):
            self.all[number].marks = []
            self.note_chores(self.all[number])


def by_topic(numbers: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """(topic, how many) of a column of topic numbers; almost always there is just one."""
    first = int(numbers[0])
    if len(numbers) == 1 or (numbers == first).all():
        return [(first, len(numbers))]
    if len(numbers) < _FEW:
        return sorted(Counter(numbers.tolist()).items())
    distinct, counts = np.unique(numbers, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))


def by_topic_bytes(rows: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """(topic, how many, bytes of their records) of rows with `topic` and `size`."""
    if len(rows) == 1:
        return [(int(rows["topic"][0]), 1, int(rows["size"][0]))]
    counted = by_topic(rows["topic"])
    if len(counted) == 1:
        return [(*counted[0], int(rows["size"].sum(dtype=np.int64)))]
    sizes = np.bincount(rows["topic"], rows["size"])
    return [(number, count, int(sizes[number])) for number, count in counted]


def topic_for(state: DelayState, name: str, *, create: bool) -> Topic | None:
    """The living topic of that name; made now if `create` and there is room."""
    topic = known_topic(state, name)
    if topic is not None and topic.exists:
        return topic
    if not create:
        return None
    if topic is None:
        if len(state.topics.all) >= state.settings.max_topics:
            return None
        topic = Topic(state.names.register(TOPIC, name), name)
        state.topics.add(topic)
    topic.exists = True
    if state.level >= RETRY_DEFAULTS:
        topic.configure({"defaults": NEWEST_DEFAULTS})
    state.listener.on_topic(topic)
    return topic


def known_topic(state: DelayState, name: str) -> Topic | None:
    """The topic of that name, deleted or not."""
    try:
        return state.topics[state.names.number(TOPIC, name)]
    except KeyError:
        return None


def apply_put(state: DelayState, command: tuple[str, Any]) -> Done | Refused:
    name, config = command
    wrong = problem(config, state.settings)
    if not wrong:
        config, wrong = with_defaults(config, state.level)
    if not wrong and state.level >= MASKED_HEADERS:
        before = topic_for(state, name, create=False)
        known = {} if before is None else before.config
        config, wrong = unmasked(known, config, any_origin=state.level < MASKED_OF_ORIGIN)
    if not wrong and state.level >= PLAIN_URLS:
        wrong = disputed_url(config)
    if not wrong and config.get("dead_letter") == name:
        wrong = f"dead_letter: {name} would get its own dead letters back, for ever; name another topic, or keep"
    if wrong:
        return Refused("bad_config", wrong)
    topic = topic_for(state, name, create=True)
    if topic is None:
        return Refused("too_many_topics", f"there are {len(state.topics.all)} topics already")
    after = merged(topic.config, config)
    changed = after != topic.config
    topic.configure(after)
    state.listener.on_topic(topic)
    return Done(changed)


def apply_delete(state: DelayState, command: tuple[str, bool]) -> Done | Refused:
    name, force = command
    topic = topic_for(state, name, create=False)
    if topic is None:
        return Refused("no_topic", f"there is no topic {name!r}")
    if topic.pending and not force:
        return Refused("topic_not_empty", f"{topic.pending} messages of {name!r} are pending")
    if topic.generation == MAX_GENERATION:
        return Refused("too_many_generations", f"{name!r} was deleted {MAX_GENERATION} times: use another name")
    begin_generation(state, topic)
    topic.lives += 1
    state.topics.end(topic)
    state.topics.end_dead(topic, state.now_ms)
    topic.exists = False
    topic.configure({})
    state.listener.on_purged(topic)
    state.listener.on_topic(topic)
    return Done()


def begin_generation(state: DelayState, topic: Topic) -> None:
    topic.generation += 1
    state.topics.generations[topic.number] = topic.generation
    state.sweep = (0, 0)


def apply_purge(state: DelayState, command: tuple[str, int]) -> Done | Refused:
    """Cancel what a topic holds in these states (bits) and was published before. O(1): ADR 78."""
    name, states = command
    topic = topic_for(state, name, create=False)
    if topic is None:
        return Refused("no_topic", f"there is no topic {name!r}")
    waiting = states & (SCHEDULED | READY)
    bounded = state.level >= BOUNDED
    if bounded and not topic.pending:
        waiting = 0  # it changes nothing: spare the generation
    if bounded and waiting == SCHEDULED and len(topic.marks) >= MAX_MARKS:
        return Refused("too_many_marks", f"{MAX_MARKS} purges of {name!r} are still being written down: try later")
    if waiting and topic.generation == MAX_GENERATION:
        return Refused("too_many_generations", f"{name!r} was purged {MAX_GENERATION} times: use another name")
    if waiting:
        begin_generation(state, topic)
    if waiting == SCHEDULED | READY:
        state.topics.end(topic)
        state.listener.on_purged(topic)
    elif waiting:
        if bounded and waiting == READY:
            # What those before it mean, it means too.
            topic.marks = [mark for mark in topic.marks if not mark.ready]
        topic.marks.append(Mark(topic.generation, state.now_ms, waiting == READY))
        state.topics.note_chores(topic)
    if states & DEAD:
        state.topics.end_dead(topic, state.now_ms)
    state.listener.on_topic(topic)
    return Done()
