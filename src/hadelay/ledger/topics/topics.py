"""Topics: their settings and counters, and how a deletion or purge cancels all messages at once.

Every index entry has the *generation* of its topic at the time of filing. Deleting a topic adds one to the generation:
messages that wait under an older one are cancelled from that moment on, untouched. Nobody hands them out, GET says
`cancelled`, and SWEEP later writes that down in slices (ledger/hours/maintenance.py). A purge does the same to a topic
that goes on.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import Mask, Rows
from hadelay.codec.meta import Filter, filter_of
from hadelay.ledger.changedrows import TOPICS, ChangedRows, Watched
from hadelay.model import SEPARATOR, Event
from hadelay.settings.topic import TopicSettings, settings_of

#: Counters of a new topic, all 0, by the number of an Event.
_NO_EVENTS = [0] * (max(Event) + 1)
#: Below this number of rows, a Counter is faster than numpy.
_FEW = 200


class PurgeMark(msgspec.Struct, array_like=True):
    """A partial purge: cancels messages of older generations that were ready (or scheduled) at at_ms."""

    generation: int
    at_ms: int
    ready: bool

    def means(self, rows: Rows) -> Mask:
        due = rows["deliver_at_ms"] <= self.at_ms
        return np.asarray((rows["generation"] < self.generation) & (due == self.ready))


class RedriveJob(msgspec.Struct, array_like=True):
    """The redrive of the dead letters that a topic had at upto_ms, in the order of their deaths."""

    upto_ms: int
    #: Dead letters to redrive per second; None: as fast as possible.
    rate: float | None
    start_ms: int
    #: Number of dead letters redriven since start_ms.
    count: int = 0
    #: Key at which the redrive continues: (died_at_ms, first id).
    after: tuple[int, int] = (0, 0)

    def waits(self, now_ms: int) -> bool:
        """Whether the redrive's rate allows no further dead letter at now_ms."""
        return self.rate is not None and self._due(now_ms) <= 0

    def allowed(self, now_ms: int) -> int:
        """Number of dead letters that the redrive's rate allows now: at most those of one second."""
        if self.rate is None:
            return 1 << 30
        due, most = self._due(now_ms), 1 + int(self.rate)
        if due > most:
            self.start_ms, self.count, due = now_ms, 1 - most, most
        return due

    def _due(self, now_ms: int) -> int:
        return 1 + int((self.rate or 0) * (now_ms - self.start_ms) / 1000) - self.count


@dataclass(slots=True)
class TopicState(Watched):
    """One topic or subscription. `marks`, `settled` and `redrive` change in place only after before_change().
    The fields are a row of a checkpoint, in this order (ledger/rowformats.py): new ones go to the end."""

    number: int
    name: str
    #: False after the topic's deletion; a new topic of that name has the same number and the next generation.
    exists: bool = True
    generation: int = 0
    #: Number of deletions of the topic: client keys from before a deletion no longer count.
    lives: int = 0
    #: Oldest valid generation: a deletion or purge cancelled the waiting entries of older generations.
    floor: int = 0
    #: Settings of the topic, as clients set them. Only `configure` changes these and `settings`.
    config: dict[str, Any] = field(default_factory=dict)
    #: Settings of the topic, with defaults for all that clients did not set.
    settings: TopicSettings = field(init=False, repr=False)
    #: Tag filter of a subscription; None: every message passes.
    filter: Filter | None = field(init=False, repr=False)
    #: Number of messages that wait or are leased, with cancelled messages whose end SWEEP has not written yet.
    open: int = 0
    leased: int = 0
    #: Number of messages that a purge or deletion cancelled and whose end no SWEEP command has written yet.
    tombstoned: int = 0
    published: int = 0
    #: Number of open messages with a group; of those, `grouped` counts messages of valid generations.
    group_rows: int = 0
    grouped: int = 0
    #: Number of messages that wait behind their group (ledger/groups/messagegroups.py).
    blocked: int = 0
    #: Number of waiting or blocked messages of which an attempt failed (ledger/hours/retries.py).
    retrying: int = 0
    #: Size of the records of open messages, in bytes.
    bytes: int = 0
    #: Time up to which the tokens of publish_rate are spent (ledger/limits/flow.py).
    spent_ns: int = 0
    #: Number of kept dead letters.
    dead: int = 0
    #: Dead letters that died at or before this time (Unix ms) are purged.
    dead_mark_ms: int = 0
    redrive: RedriveJob | None = None
    #: Number of dead letters of which the alert URL was notified; `settled[DEAD]` counts all messages that died.
    alerted: int = 0
    #: Partial purges that SWEEP has not finished.
    marks: list[PurgeMark] = field(default_factory=list)
    #: End of the last use, in Unix ms, of a topic with `expires_after` (ledger/topics/topicexpiry.py).
    used_ms: int = 0
    #: Number of copies that this subscription did not get because it was full (on_full "drop").
    dropped: int = 0
    #: First generation since the topic's last deletion. Older messages, leased at the deletion, get no callbacks.
    born: int = 0
    #: Whether one of the open messages may be a member of a batch.
    batched: bool = False
    #: Counters by Event of acked, cancelled, expired, dead and redriven messages; moves end entries, not messages.
    settled: list[int] = field(default_factory=_NO_EVENTS.copy)

    def __post_init__(self) -> None:
        self.configure(self.config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.settings = settings_of(config)
        self.filter = filter_of(self.settings.tags, self.settings.any_tags)

    def last_death_ms(self, now_ms: int) -> int:
        """Latest time of death that a dead letter can have at now_ms. A death after a purge or the start of a redrive,
        but in the same ms, is dated 1 ms later (ledger/leases/dead.py)."""
        upto_ms = max(self.dead_mark_ms, self.redrive.upto_ms if self.redrive else 0)
        return max(now_ms, upto_ms + 1 if self.dead else upto_ms)

    @property
    def names_own(self) -> bool:
        """Whether messages may name a webhook URL and topics of callbacks of their own."""
        return self.settings.webhook is not None and self.settings.webhook.allow_per_message

    @property
    def waiting(self) -> int:
        """Number of scheduled and ready messages together; only the dispatcher tells them apart."""
        return self.open - self.leased - self.tombstoned - self.blocked

    @property
    def pending(self) -> int:
        return self.open - self.tombstoned


class TopicBook:
    """All topics by number, from 0 without gaps. Generations are also kept as arrays, to check many rows at once."""

    def __init__(self, changes: ChangedRows) -> None:
        self._changes = changes
        self.all: list[TopicState] = []
        #: Generation of new entries, by topic number.
        self.generations = np.zeros(64, np.uint16)
        #: Oldest valid generation, by topic number.
        self.floors = np.zeros(64, np.uint16)
        #: Existing subscriptions by number, by the name of their topic; a name stays even if all its subscriptions were
        #: deleted.
        self.subscriptions: dict[str, dict[int, TopicState]] = {}
        #: Numbers of topics with cancelled messages to sweep, partial purges or a redrive.
        self.with_work: set[int] = set()
        #: Numbers of topics that may expire.
        self.expiring: set[int] = set()
        #: Topics whose messages may have callbacks. This and the next sets have numbers of topics, so that loops need
        #: not look at all topics.
        self.calls_back: set[int] = set()
        #: Topics that send dead letters or callbacks to another topic.
        self.routing: set[int] = set()
        #: Topics that have a webhook.
        self.webhooks: set[int] = set()
        #: Topics that have a `group_concurrency`.
        self.grouping: set[int] = set()
        #: Topics in which a message ever became a dead letter.
        self.died: set[int] = set()

    def __getitem__(self, number: int) -> TopicState:
        return self.all[number]

    def add(self, topic: TopicState) -> None:
        assert topic.number == len(self.all), "numbers of topics are given in order"
        topic.watch(partial(self._changes.note, TOPICS, topic.number))
        topic.before_change()
        self.all.append(topic)
        if topic.number >= len(self.generations):
            self.generations = np.concatenate([self.generations, np.zeros_like(self.generations)])
            self.floors = np.concatenate([self.floors, np.zeros_like(self.floors)])
        self.generations[topic.number], self.floors[topic.number] = topic.generation, topic.floor
        self.note_work(topic)
        self.note_expiry(topic)
        self.note_settings(topic)
        if topic.settled[Event.DEAD]:
            self.died.add(topic.number)

    def note_expiry(self, topic: TopicState) -> None:
        """Note whether the topic may expire, and whether it is an existing subscription. Call this after a change of
        the topic's settings or existence."""
        expires = topic.exists and topic.settings.expires_after_ms is not None
        (self.expiring.add if expires else self.expiring.discard)(topic.number)
        of, separator, _ = topic.name.partition(SEPARATOR)
        if separator:
            existing = self.subscriptions.setdefault(of, {})
            existing.pop(topic.number, None)
            existing |= {topic.number: topic} if topic.exists else {}

    def note_settings(self, topic: TopicState) -> None:
        """Put the topic into the sets of topics with certain settings, or take it out. Call this after the settings of
        the topic were changed."""
        settings = topic.settings
        calls = bool(settings.on_success or settings.on_failure)
        for numbers, belongs in (
            (self.calls_back, calls or topic.names_own),
            (self.routing, calls or settings.dead_letter != "keep"),
            (self.webhooks, settings.webhook is not None),
            (self.grouping, settings.group_concurrency is not None),
        ):
            (numbers.add if belongs else numbers.discard)(topic.number)

    def alive(self, rows: Rows) -> Mask:
        """Which of these INDEX rows have a topic that was neither deleted nor purged since they were filed."""
        return np.asarray(self.floors[rows["topic"]] <= rows["generation"])

    def marked(self, rows: Rows) -> Mask:
        """Which of these waiting INDEX rows a partial purge has cancelled."""
        meant = np.zeros(len(rows), np.bool_)
        for topic in self.unfinished_in(rows):
            for mark in topic.marks:
                meant |= (rows["topic"] == topic.number) & mark.means(rows)
        return meant

    def owed(self, rows: Rows) -> Mask:
        """Mask of waiting INDEX rows that no deletion or purge (whole or partial) of their topic has cancelled."""
        alive = self.alive(rows)
        return alive & ~self.marked(rows) if self.with_work else alive

    def subscriptions_of(self, name: str) -> list[TopicState]:
        """The existing subscriptions of the topic with this name, in the order of their numbers."""
        existing = self.subscriptions.get(name, {})
        return [existing[number] for number in sorted(existing)]

    def end(self, topic: TopicState) -> None:
        """Cancel all waiting messages of the topic; leased messages are cancelled if they return unsettled."""
        topic.tombstoned = topic.open - topic.leased
        topic.floor, topic.marks = topic.generation, []
        topic.grouped = topic.blocked = topic.retrying = 0
        self.floors[topic.number] = topic.floor
        self.note_work(topic)

    def end_dead(self, topic: TopicState, now_ms: int) -> None:
        """Purge the topic's dead letters; their records are deleted with their hours (ledger/leases/dead.py)."""
        topic.dead_mark_ms = topic.last_death_ms(now_ms)
        topic.dead, topic.redrive = 0, None
        self.note_work(topic)

    def note_work(self, topic: TopicState) -> None:
        if topic.tombstoned or topic.marks or topic.redrive is not None:
            self.with_work.add(topic.number)
        else:
            self.with_work.discard(topic.number)

    def unfinished(self) -> list[TopicState]:
        return [self.all[number] for number in sorted(self.with_work)]

    def unfinished_in(self, rows: Rows) -> list[TopicState]:
        """The topics of these INDEX rows that have work for maintenance. Every grant calls this method, so its cost
        must not grow with the number of other topics that have work."""
        return [self.all[number] for number in self.with_work.intersection(rows["topic"].tolist())]

    def to_sweep(self) -> bool:
        return any(self.all[number].tombstoned or self.all[number].marks for number in self.with_work)

    def swept(self) -> None:
        """Drop all marks of partial purges: SWEEP has been through all hours since the last mark was made."""
        for number in list(self.with_work):
            self.all[number].marks = []
            self.note_work(self.all[number])


def by_topic(numbers: NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
    """Count a column of topic numbers: (topic, count) of each. The column almost always has just one topic."""
    first = int(numbers[0])
    if len(numbers) == 1 or (numbers == first).all():
        return [(first, len(numbers))]
    if len(numbers) < _FEW:
        return sorted(Counter(numbers.tolist()).items())
    distinct, counts = np.unique(numbers, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))


def by_topic_bytes(rows: Rows) -> list[tuple[int, int, int]]:
    """Count rows with `topic` and `size` by topic: (topic, count, bytes of the records) of each."""
    if len(rows) == 1:
        return [(int(rows["topic"][0]), 1, int(rows["size"][0]))]
    counted = by_topic(rows["topic"])
    if len(counted) == 1:
        return [(*counted[0], int(rows["size"].sum(dtype=np.int64)))]
    sizes = np.bincount(rows["topic"], rows["size"])
    return [(number, count, int(sizes[number])) for number, count in counted]
