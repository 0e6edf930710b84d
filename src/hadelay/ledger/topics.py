"""Topics: their settings and counters, and how a million messages are deleted in no time.

Every index entry carries the *generation* its topic had when it was filed. Deleting a topic adds one to the
generation: whatever still waits under an older one is cancelled from that moment, without being touched. Nobody hands
it out, GET says `cancelled`, and SWEEP writes it down in slices, later (ledger/maintenance.py). A purge is the same,
without the end of the topic.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hadelay.codec.formats import U32, Mask, Rows
from hadelay.model import Event
from hadelay.settings.topic import TopicSettings, settings_of

#: Below this many numbers counting them one by one is quicker than numpy.
_FEW = 200


@dataclass(slots=True)
class PurgeMark:
    """A purge of what was scheduled, or ready, at at_ms; SWEEP writes it down. Older generations only."""

    generation: int
    at_ms: int
    ready: bool

    def means(self, rows: Rows) -> Mask:
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
    #: Not settled: waiting or leased, tombstoned ones included.
    open: int = 0
    leased: int = 0
    #: Waiting under an older generation: cancelled, not yet swept.
    tombstoned: int = 0
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
    marks: list[PurgeMark] = field(default_factory=list)
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
        return self.open - self.leased - self.tombstoned

    @property
    def pending(self) -> int:
        return self.open - self.tombstoned


class Topics:
    """All of them by number, dense from 0, with the generations as an array for whole columns at once."""

    def __init__(self) -> None:
        self.all: list[Topic] = []
        #: What is filed now, and the oldest that is not cancelled: deletion and purge move it.
        self.generations = np.zeros(64, np.uint16)
        self.floors = np.zeros(64, np.uint16)
        #: Numbers of topics that are not done with: tombstoned, marked, being redriven.
        self.with_work: set[int] = set()

    def __getitem__(self, number: int) -> Topic:
        return self.all[number]

    def add(self, topic: Topic) -> None:
        assert topic.number == len(self.all), "numbers of topics are given in order"
        self.all.append(topic)
        if topic.number >= len(self.generations):
            self.generations = np.concatenate([self.generations, np.zeros_like(self.generations)])
            self.floors = np.concatenate([self.floors, np.zeros_like(self.floors)])
        self.generations[topic.number], self.floors[topic.number] = topic.generation, topic.floor
        self.note_work(topic)

    def alive(self, rows: Rows) -> Mask:
        """Per INDEX row: its topic was neither deleted nor purged since it was filed."""
        return np.asarray(self.floors[rows["topic"]] <= rows["generation"])

    def marked(self, rows: Rows) -> Mask:
        """Per waiting INDEX row: a partial purge means it."""
        meant = np.zeros(len(rows), np.bool_)
        for number in self.with_work:
            for mark in self.all[number].marks:
                meant |= (rows["topic"] == number) & mark.means(rows)
        return meant

    def owed(self, rows: Rows) -> Mask:
        """Per waiting INDEX row: neither a deletion nor a purge, whole or partial, means it."""
        alive = self.alive(rows)
        return alive & ~self.marked(rows) if self.with_work else alive

    def end(self, topic: Topic) -> None:
        """All that waits in the topic is cancelled. A running lease wins: those settle, or are cancelled on return."""
        topic.tombstoned = topic.open - topic.leased
        topic.floor, topic.marks = topic.generation, []
        self.floors[topic.number] = topic.floor
        self.note_work(topic)

    def end_dead(self, topic: Topic, now_ms: int) -> None:
        """The topic's dead letters are gone from now on; their bytes go with their hours (ledger/dead.py)."""
        topic.dead_mark_ms = topic.last_death_ms(now_ms)
        topic.dead, topic.redrive = 0, None
        self.note_work(topic)

    def note_work(self, topic: Topic) -> None:
        if topic.tombstoned or topic.marks or topic.redrive is not None:
            self.with_work.add(topic.number)
        else:
            self.with_work.discard(topic.number)

    def unfinished(self) -> list[Topic]:
        """Topics that a SWEEP or a redrive has to go on with, by number."""
        return [self.all[number] for number in sorted(self.with_work)]

    def to_sweep(self) -> bool:
        return any(self.all[number].tombstoned or self.all[number].marks for number in self.with_work)

    def swept(self) -> None:
        """SWEEP has been through all hours since the last mark was made."""
        for number in list(self.with_work):
            self.all[number].marks = []
            self.note_work(self.all[number])


def by_topic(numbers: U32) -> list[tuple[int, int]]:
    """(topic, how many) of a column of topic numbers; almost always there is just one."""
    first = int(numbers[0])
    if len(numbers) == 1 or (numbers == first).all():
        return [(first, len(numbers))]
    if len(numbers) < _FEW:
        return sorted(Counter(numbers.tolist()).items())
    distinct, counts = np.unique(numbers, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))


def by_topic_bytes(rows: Rows) -> list[tuple[int, int, int]]:
    """(topic, how many, bytes of their records) of rows with `topic` and `size`."""
    if len(rows) == 1:
        return [(int(rows["topic"][0]), 1, int(rows["size"][0]))]
    counted = by_topic(rows["topic"])
    if len(counted) == 1:
        return [(*counted[0], int(rows["size"].sum(dtype=np.int64)))]
    sizes = np.bincount(rows["topic"], rows["size"])
    return [(number, count, int(sizes[number])) for number, count in counted]
