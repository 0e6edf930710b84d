"""The owner of a topic of the simulated world: he limits and slows it, purges it, and brings its dead letters back."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

from chaos.sim.clients import Client, Reply
from chaos.sim.history import Order
from hadelay.codec.commands import (
    encode_audited,
    encode_purge,
    encode_redrive,
    encode_token_create,
    encode_token_revoke,
    encode_topic_delete,
    encode_topic_put,
)
from hadelay.codec.results import Done, RedriveOutcome, RedriveResult, Refused
from hadelay.errors import HadelayError, NoLeader
from hadelay.ledger import dead
from hadelay.ledger.topics import DEAD, READY, SCHEDULED
from hadelay.rights import Token

#: What slows a topic down.
_SLOW: tuple[dict[str, Any], ...] = (
    {"rate": 8.0, "catch_up_rate": 20.0}, {"concurrency": 2}, {"publish_rate": 4.0}, {"max_messages": 12},
    {"max_bytes": 3000}, {"paused": True}, {"paused": False},
)  # fmt: skip
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"lease_ms": 900, "ttl_ms": 5000, "retention_ms": 1000, "dispatch_sync": "commit", "paused_reason": "moving"},
    {"dead_letter": "jobs", "dead_retention_ms": 5000, "max_attempts": 3, "backoff": []}, {"dead_letter": "scrap"},
    {"backoff": {"min_ms": 5, "max_ms": 1}}, {"backoff": [-1]}, {"backoff": {"min": 1}}, {"rate": -1.0}, {"rate": "x"},
    {"max_attempts": 1 << 40}, {"lease_ms": 0}, {"concurrency": 0}, {"dispatch_sync": "never"}, {"paused": 1},
    {"no": 1}, {"webhook": {"url": "ftp://a"}}, {"webhook": {"url": "https://a", "secrets": ["x"]}}, {"webhook": 5},
    {"webhook": {"url": "https://a", "headers": {"host": "b"}}}, {"alert": {"url": ""}}, {"dead_letter": "not a name"},
)  # fmt: skip


class Owner(Client):
    """Of the topic with limits: sets them, purges it now and then, and brings its dead letters back: in the drain
    (`good`) all of them, until there are none."""

    def start(self) -> None:
        self.good, self.acts = False, 0
        #: Whether he slows the topic down at times.
        self.slows = self.random.random() < 0.4
        self.topic, self.workload = self.cluster.workload.limited, self.cluster.workload
        self._limit()

    def _ask(self, command: bytes, replied: Reply) -> None:
        process = self.cluster.any_process(self.random)
        if process is None:
            self.world.after(0.1, replied, None, NoLeader("no node runs"))
        else:
            self.door.call(process, lambda node, done: node.propose(command, done), replied)

    def _limit(self) -> None:
        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                if not self.stopped:
                    self.world.after(0.2, self._limit)
                return
            assert isinstance(result, Done), result
            self.history.limited = self.world.now
            self.note(f"{self.topic} has limits now")
            self._next()

        steps = {"min_ms": 20, "max_ms": 400, "factor": 3, "jitter": 0.5}
        config = {"max_attempts": self.workload.max_attempts, "backoff": self.random.choice(([50, 300], steps))}
        self._ask(encode_topic_put(self.topic, config), replied)

    def _next(self) -> None:
        self.world.after(0.4 if self.good else self.random.expovariate(1 / 1.5), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        self.acts += 1
        part = f"{self.name}.{self.acts}"
        self.random = random.Random(f"{self.cluster.seed} {part}")
        # What died is brought back in the end, whatever else is left out: that much is owed.
        if not self.good and not self.cluster.parts.take(part):
            pass
        elif self.good and self.history.slowed:
            self._configure(dict.fromkeys(name for slow in _SLOW for name in slow))
            self._look()
        elif not self.good and self.slows and self.random.random() < 0.3:
            self.history.slowed = True
            self._configure(self.random.choice(_SLOW))
        elif not self.good and self.random.random() < 0.1:
            self._grant_access()
        elif not self.good and self.random.random() < 0.1:
            self._manage()
        elif not self.good and self.random.random() < self.workload.purges:
            self._purge(self.random.choice((SCHEDULED | READY, SCHEDULED, READY, DEAD, SCHEDULED | READY | DEAD)))
        else:
            self._look()
        self._next()

    def _configure(self, config: dict[str, Any]) -> None:
        """Nothing is known of what is not answered: in the end he says it again and again."""

        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{self.topic} gets {config}: {error.type if error is not None else result}")
            self.history.count("configured", error is None)

        self._ask(encode_topic_put(self.topic, config), replied)

    def _manage(self) -> None:
        """A topic that nobody uses: set up, rightly or wrongly, and deleted."""

        def replied(result: Any, error: HadelayError | None) -> None:
            self.history.count("topic refused", isinstance(result, Refused))

        if self.random.random() < 0.3:
            self._ask(encode_topic_delete("scrap", self.random.random() < 0.5), replied)
        else:
            self._ask(encode_topic_put("scrap", self.random.choice(_SETTINGS)), replied)

    def _grant_access(self) -> None:
        """To somebody, or no longer."""
        digest = sha256(b"%d" % self.random.randrange(6)).digest()
        scopes = self.random.choice((["consume"], ["publish:ord*", "observe"], ["admin"], ["nonsense"]))
        lifetime_ms = self.random.choice((None, 1, 60_000))
        command = encode_token_create("somebody", digest, scopes, lifetime_ms)
        if self.random.random() < 0.4:
            command = encode_token_revoke(Token("", digest, (), 0, None).id)

        def replied(result: Any, error: HadelayError | None) -> None:
            self.history.count("access changed", isinstance(result, Done))

        self._ask(encode_audited(self.cluster.names[0], "", "owner", "POST", "/v1/tokens", command), replied)

    def _order(self, order: Order, command: bytes, what: str) -> None:
        """What is not answered may be carried out later: it is not asked for again, but anew."""
        self.history.orders.append(order)

        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{what}: {error.type if error is not None else result}", *(order.ids or ()))
            if error is None:
                order.answered = self.world.now
                self.history.count(order.kind)
            if isinstance(result, RedriveResult):
                for outcome in result.outcomes.tolist():
                    self.history.count(f"redrive {RedriveOutcome(outcome).name}")

        self._ask(command, replied)

    def _purge(self, states: int) -> None:
        order = Order("purge", self.topic, self.world.now, states)
        self._order(order, encode_purge(self.topic, states), f"purge {states}")

    def _look(self) -> None:
        """What the node that is asked knows of dead letters may be old."""
        process = self.cluster.any_process(self.random)

        def listed(ids: Any, error: HadelayError | None) -> None:
            if error is None and ids and not self.stopped:
                self._redrive(ids)

        if process is not None:
            self.door.call(process, lambda node, done: done(self._dead(node), None), listed)

    def _dead(self, node: Any) -> list[int]:
        topic = node.state.topic(self.topic)
        return [] if topic is None else [first_id for _, first_id in dead.listing(node.state, topic, b"", 100)]

    def _redrive(self, ids: list[int]) -> None:
        if self.good or self.random.random() < 0.4:
            rate = None if self.good else self.random.choice((None, 5.0))
            order = Order("redrive", self.topic, self.world.now)
            self._order(
                order, encode_redrive(self.cluster.names[0], self.topic, [], all=True, rate=rate), "redrive of all"
            )
        else:
            some = self.random.sample(ids, min(len(ids), self.random.randint(1, 3)))
            order = Order("redrive", self.topic, self.world.now, ids=frozenset(some))
            self._order(order, encode_redrive(self.cluster.names[0], self.topic, some), "redrive")
