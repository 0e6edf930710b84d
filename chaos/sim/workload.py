"""Load of a simulated run: topics, rates and shares; and the parts of a run, each of which can be left out."""

import random
from dataclasses import dataclass

HOUR_S = 3600


@dataclass(frozen=True)
class Workload:
    topics: tuple[str, ...] = ("orders", "mail", "jobs")
    #: Limit of attempts in the last topic, which has an administrator.
    max_attempts: int = 2
    #: Share of the messages of the last topic that always fail.
    failing: float = 0.3
    purges: float = 0.15
    leases_ms: tuple[int, ...] = (700, 2000, 5000)
    cancels: float = 0.04
    #: Share of batches that are published again, under the same Idempotency-Key, after the publish was answered.
    repeated: float = 0.05
    #: Share of messages with a client key, and number of different client keys.
    keyed: float = 0.15
    keys: int = 8
    #: Share of messages that are rescheduled, and share of messages with a TTL.
    reschedules: float = 0.08
    ttls: float = 0.15
    #: Share of messages with tags, and the tags to choose from.
    tagged: float = 0.4
    tags: tuple[str, ...] = ("red", "green", "blue")
    #: Share of receives with tag filters.
    selective: float = 0.25
    #: True: the last topic has quotas from the start.
    crowded: bool = False
    #: Longest usual delay, in ms.
    longest_ms: int = 4500
    #: Share of messages with a far longer delay: these are still pending at the end of the run.
    far: float = 0.03
    #: Retention of settled messages of the first topic, in ms; 0: for as long as their hour is kept.
    retention_ms: int = 0
    #: Limit of the messages of one group that are leased at the same time, in the last two topics; 0: no groups.
    group_concurrency: int = 0
    #: Limit per second of hand-outs of one group, in the topic whose groups are checked for order; 0: none.
    group_rate: float = 0.0
    #: Share of messages with a group, in topics with a limit per group.
    grouped: float = 0.8
    #: Names of the message groups.
    groups: tuple[str, ...] = ("a", "b", "c")

    @property
    def limited(self) -> str:
        return self.topics[-1]

    @property
    def brief(self) -> str:
        """The topic whose settled messages are forgotten within seconds; "" if there is none."""
        return self.topics[0] if self.retention_ms else ""

    @property
    def in_order(self) -> str:
        """The topic whose groups are checked for order and overlap: nobody purges or redrives its messages."""
        return self.topics[-2]

    def delay_ms(self, rng: random.Random) -> int:
        chance = rng.random()
        if chance < self.far:
            return rng.choice((2, 5, 100)) * HOUR_S * 1000 + rng.randrange(100_000)
        if chance < 0.2:
            return rng.choice((-5000, 0, 0, 1))
        if chance < 0.6:
            return rng.randrange(1, 800)
        return rng.randrange(800, self.longest_ms)


class Parts:
    """Parts of the work of a run's clients and faults. Each part has a name and its own random stream, so a run can
    leave one out without changing the others. only: names of the parts to do; None: all."""

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self.only = only
        #: Names of all parts that the run has asked for so far, done or left out, in order.
        self.seen: list[str] = []

    def take(self, name: str) -> bool:
        self.seen.append(name)
        return self.only is None or name in self.only
