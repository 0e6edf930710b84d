"""Topics: their settings and counters, and how a million messages are deleted in no time.

Every index entry carries the *generation* its topic had when it was filed. Deleting a topic adds one to the
generation: whatever still waits under an older one is cancelled from that moment, without being touched. Nobody hands
it out, GET says `cancelled`, and SWEEP writes it down in slices, later (core/upkeep.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hadelay.core.ports import TOPIC
from hadelay.core.results import Done, Refused
from hadelay.core.topicconfig import TopicSettings, merged, problem, settings_of
from hadelay.model import Event

if TYPE_CHECKING:
    from hadelay.core.state import DelayState

MAX_GENERATION = 0xFFFF


@dataclass(slots=True)
class Topic:
    number: int
    name: str
    #: False once deleted; the number and the generation stay, for when the name comes back.
    exists: bool = True
    generation: int = 0
    #: What PUT set, and the same over the defaults (core/topicconfig.py). Changed by `configure` alone.
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
    #: Dead letters that are kept.
    dead: int = 0
    #: By Event, of messages (a move settles an entry, not a message): acked, cancelled, expired, dead. Never goes down.
    settled: list[int] = field(default_factory=lambda: [0] * (max(Event) + 1))

    def __post_init__(self) -> None:
        self.configure(self.config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.settings = settings_of(config)

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
        self.generations = np.zeros(64, np.uint16)

    def __getitem__(self, number: int) -> Topic:
        return self.all[number]

    def add(self, topic: Topic) -> None:
        assert topic.number == len(self.all), "numbers of topics are given in order"
        self.all.append(topic)
        if topic.number >= len(self.generations):
            self.generations = np.concatenate([self.generations, np.zeros_like(self.generations)])
        self.generations[topic.number] = topic.generation

    def alive(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Per INDEX row: its topic was not deleted since it was filed."""
        return np.asarray(self.generations[rows["topic"]] == rows["generation"])

    def doomed(self) -> int:
        return sum(topic.doomed for topic in self.all)


def by_topic(numbers: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """(topic, how many) of a column of topic numbers; almost always there is just one."""
    first = int(numbers[0])
    if len(numbers) == 1 or (numbers == first).all():
        return [(first, len(numbers))]
    distinct, counts = np.unique(numbers, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))


def by_topic_bytes(rows: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """(topic, how many, bytes of their records) of rows with `topic` and `size`."""
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
    # A running lease wins: those settle, or are cancelled instead of coming back.
    topic.doomed = topic.open - topic.leased
    topic.generation += 1
    state.topics.generations[topic.number] = topic.generation
    topic.exists = False
    topic.configure({})
    if topic.doomed:
        state.sweep = (0, 0)
    state.listener.on_topic(topic)
    return Done()
