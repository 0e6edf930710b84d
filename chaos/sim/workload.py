"""Workload of a run: rates, shares, and which parts of the workload are done."""

import random
from dataclasses import dataclass

HOUR_S = 3600


@dataclass(frozen=True)
class Workload:
    topics: tuple[str, ...] = ("orders", "mail", "jobs")
    #: Topics; the last one has an administrator (chaos/sim/admin.py), and some of its messages always fail.
    max_attempts: int = 2
    failing: float = 0.3
    purges: float = 0.15
    leases_ms: tuple[int, ...] = (700, 2000, 5000)
    cancels: float = 0.04
    #: Share of batches that are published again under the same key after they were answered.
    repeated: float = 0.05
    #: Shares of messages that have one of a few client keys, that are rescheduled, and that have a TTL.
    keyed: float = 0.15
    keys: int = 8
    reschedules: float = 0.08
    ttls: float = 0.15
    #: Share of messages that have tags, and share of receives that ask for tags.
    tagged: float = 0.4
    tags: tuple[str, ...] = ("red", "green", "blue")
    selective: float = 0.25
    #: No delay is longer than this, but for the few that stay until the end.
    longest_ms: int = 4500
    far: float = 0.03

    @property
    def limited(self) -> str:
        return self.topics[-1]

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
    """Parts of a run's clients and nemesis, each with a name and its own random stream: a run can leave one out without
    changing the others (chaos/sim/cli.py). only: names of the parts to do, or all."""

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self.only = only
        #: Names of all parts that the run drew, in order.
        self.seen: list[str] = []

    def take(self, name: str) -> bool:
        self.seen.append(name)
        return self.only is None or name in self.only
