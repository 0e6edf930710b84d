"""Administrator of one topic in the simulated world: sets limits, slows hand-outs down, purges, and redrives dead
letters."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from chaos.sim import receiver
from chaos.sim.cluster import RETENTION_S, SimCluster
from chaos.sim.door import Client, Request
from chaos.sim.evidence import forgets
from chaos.sim.history import Message, Order
from chaos.sim.producer import target_of
from chaos.sim.views import may_leave
from hadelay.api.messages import Message as Found
from hadelay.api.service import Actor, ListRequest
from hadelay.errors import HadelayError, NotFound
from hadelay.ledger.topics.topicchanges import DEAD, READY, SCHEDULED
from hadelay.model import FIRST, Key, State, decode_id
from hadelay.rights import Token
from hadelay.server.service.node import NodeService

_STATES = {"scheduled": SCHEDULED, "ready": READY, "dead": DEAD}
#: Values of the parameter `states` in purge requests: states of the messages to purge.
_PURGES = (["scheduled", "ready"], ["scheduled"], ["ready"], ["dead"], ["scheduled", "ready", "dead"])
#: Settings that slow down a topic's hand-outs or refuse its publishes; the client sets one of them at a time.
_SLOW: tuple[dict[str, Any], ...] = (
    {"rate": 8.0, "catch_up_rate": 20.0}, {"concurrency": 2}, {"publish_rate": 4.0}, {"max_messages": 12},
    {"max_bytes": 3000}, {"paused": True}, {"paused": False},
)  # fmt: skip
#: Quotas that the administrator's topic has in some runs.
_QUOTAS: dict[str, Any] = {"publish_rate": 4.0, "max_messages": 12, "max_bytes": 3000}
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"lease_ms": 900, "ttl_ms": 5000, "retention_ms": 1000, "dispatch_sync": "commit", "paused_reason": "moving"},
    {"dead_letter": "jobs", "dead_retention_ms": 5000, "max_attempts": 3, "backoff": []}, {"dead_letter": "scrap"},
    {"backoff": {"min_ms": 5, "max_ms": 1}}, {"backoff": [-1]}, {"backoff": {"min": 1}}, {"rate": -1.0}, {"rate": "x"},
    {"max_attempts": 1 << 40}, {"lease_ms": 0}, {"concurrency": 0}, {"dispatch_sync": "never"}, {"paused": 1},
    {"no": 1}, {"webhook": {"url": "ftp://a"}}, {"webhook": {"url": "https://a", "secrets": ["x"]}}, {"webhook": 5},
    {"webhook": {"url": "https://a", "headers": {"host": "b"}}}, {"alert": {"url": ""}}, {"dead_letter": "not a name"},
)  # fmt: skip


class AdminClient(Client):
    """Client that administers the topic with a limit of attempts. In the drain (`good`: the end of the run, without
    faults), it redrives all dead letters until none is left."""

    cluster: SimCluster

    def start(self) -> None:
        self.slows = self.random.random() < 0.4
        self.topic, self.workload = self.cluster.workload.limited, self.cluster.workload
        self._limit()
        if self.workload.brief:
            self._put(self.workload.brief, {"retention_ms": self.workload.retention_ms})
        for topic in self.workload.topics[-2:] if self.workload.group_concurrency else ():
            self._group(topic)

    def _group(self, topic: str) -> None:
        """Set the topic's `group_concurrency`; repeat the request until the cluster accepts it."""
        config: dict[str, Any] = {"group_concurrency": self.workload.group_concurrency}
        if topic != self.topic:
            config |= {"max_attempts": 60_000, "group_rate": self.workload.group_rate or None}

        def done() -> None:
            self.history.grouped.add(topic)
            self.history.rated = self.history.rated if topic == self.topic else self.world.now

        self._put(topic, config, done)

    def _put(self, topic: str, config: dict[str, Any], done: Callable[[], None] = lambda: None) -> None:
        """Change settings of a topic; repeat the request until the cluster accepts it, and then call `done`."""

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is None:
                self.note(f"{topic} has {config} now")
                done()
            elif not self.stopped:
                self.world.after(0.2, self._put, topic, config, done)

        self.ask(lambda service: service.topics.put_topic(topic, config, Actor()), replied)

    def _limit(self) -> None:
        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                if not self.stopped:
                    self.world.after(0.2, self._limit)
                return
            self.history.limited = self.world.now
            self.note(f"{self.topic} has limits now")
            self._next()

        steps = {"min_ms": 20, "max_ms": 400, "factor": 3, "jitter": 0.5}
        backoff = self.random.choice(([50, 300], steps))
        config: dict[str, Any] = {"max_attempts": self.workload.max_attempts, "backoff": backoff}
        if self.workload.crowded:
            self.history.slowed = True
            config |= _QUOTAS
        if self.cluster.receiver is not None:
            config |= {"webhook": receiver.SETTINGS, "alert": receiver.ALERT}
        self.ask(lambda service: service.topics.put_topic(self.topic, config, Actor()), replied)

    def _next(self) -> None:
        self.world.after(0.4 if self.good else self.random.expovariate(1 / 1.5), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part = self.next_act()
        rng = self.random
        if self.good:
            if self.history.slowed:
                self._configure(dict.fromkeys(name for slow in _SLOW for name in slow))
            # Redrive all dead letters in the drain, even if this client's acts are left out of the run: consumers must
            # get them.
            self._look()
        elif self.cluster.parts.take(part):
            if self.workload.group_concurrency and rng.random() < 0.2:
                # Never lower the limit to 1: a topic with group_concurrency 1 refuses receives with tag filters.
                self._configure({"group_concurrency": self.workload.group_concurrency + rng.randrange(3)})
            elif self.slows and rng.random() < 0.3:
                self.history.slowed = True
                self._configure(rng.choice(_SLOW))
            elif rng.random() < 0.1:
                self._grant_access()
            elif rng.random() < 0.1:
                self._manage()
            elif rng.random() < self.workload.purges:
                self._purge(rng.choice(_PURGES))
            else:
                self._look()
        self._next()

    def _configure(self, config: dict[str, Any]) -> None:
        """Set the topic's settings, without retries: in the drain, the client repeats all its requests in a loop."""

        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{self.topic} gets {config}: {error.type if error is not None else 'done'}")
            self.history.count("configured", error is None)

        self.ask(lambda service: service.topics.put_topic(self.topic, config, Actor()), replied)

    def _manage(self) -> None:
        """Create, configure or delete a topic that has no messages; some of the settings are invalid."""

        def replied(result: Any, error: HadelayError | None) -> None:
            self.history.count("topic refused", error is not None and not error.retryable)

        force, config = self.random.random() < 0.5, self.random.choice(_SETTINGS)
        chance = self.random.random()
        if chance < 0.3:
            self.ask(lambda service: service.topics.put_topic("scrap~side", {}, Actor()), replied)
        elif chance < 0.6:
            self.ask(lambda service: service.topics.delete_topic("scrap", force=force, by=Actor()), replied)
        else:
            self.ask(lambda service: service.topics.put_topic("scrap", config, Actor()), replied)

    def _grant_access(self) -> None:
        """Create or revoke an access token."""
        digest = sha256(b"%d" % self.random.randrange(6)).digest()
        scopes = self.random.choice((["consume"], ["publish:ord*", "read"], ["admin"], ["nonsense"]))
        lifetime_ms = self.random.choice((None, 1, 60_000))
        revokes = self.random.random() < 0.4

        async def change(service: NodeService) -> None:
            if revokes:
                await service.access.revoke_token(Token("", digest, (), 0, None).id, Actor())
            else:
                await service.access.create_token("somebody", digest, scopes, lifetime_ms, Actor())

        def replied(result: Any, error: HadelayError | None) -> None:
            self.history.count("access changed", error is None)

        self.ask(change, replied)

    def _order(self, order: Order, request: Request, what: str) -> None:
        """Send a purge or redrive. The history has each repetition of the request as an order of its own, because an
        unanswered order may be carried out later."""
        self.history.orders.append(order)

        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{what}: {error.type if error is not None else result}", *(order.ids or ()))
            if error is None:
                order.answered = self.world.now
                self.history.count(order.kind)
            for outcome in result if isinstance(result, list) else ():
                self.history.count(f"redrive {outcome}")

        self.ask(request, replied)

    def _purge(self, states: list[str]) -> None:
        order = Order("purge", self.topic, self.world.now, sum(_STATES[state] for state in states))
        self._order(
            order, lambda service: service.messages.purge(self.topic, states, Actor()), f"purge of {' '.join(states)}"
        )

    def _look(self) -> None:
        def listed(page: Any, error: HadelayError | None) -> None:
            letters = page[0] if error is None else []
            if letters and not self.stopped:
                self._redrive([decode_id(letter.id) for letter in letters])

        self.ask(lambda service: service.messages.dead_letters(self.topic, b"", 100, body=True, stale=False), listed)

    def _redrive(self, ids: list[int]) -> None:
        order = Order("redrive", self.topic, self.world.now)
        if self.good or self.random.random() < 0.4:
            rate = None if self.good else self.random.choice((None, 5.0))
            self._order(
                order, lambda service: service.messages.redrive_all(self.topic, rate, Actor()), "redrive of all"
            )
        else:
            some = self.random.sample(ids, min(len(ids), self.random.randint(1, 3)))
            order.ids = frozenset(some)
            self._order(order, lambda service: service.messages.redrive(self.topic, some, Actor()), "redrive")


class Reader(Client):
    """Client that looks messages up and pages through a topic, at any node. Messages that were confirmed before the
    request must be found."""

    cluster: SimCluster

    def start(self) -> None:
        self.stopped = not self.cluster.parts.take(self.name)
        self._next()

    def _next(self) -> None:
        if not self.stopped:
            self.world.after(self.random.expovariate(1 / 0.6), self._read)

    def _read(self) -> None:
        known = [m for m in self.history.messages[-self.random.choice((6, 60)) :] if m.id is not None]
        process = self.cluster.any_process(self.random)
        self._next()
        if process is not None and process.node is not None:
            may_leave(self.cluster, process.node, self.random.choice(self.cluster.names))
        if process is None or not known or self.stopped:
            return
        message = self.random.choice(known)
        by_key = message.client_key is not None and self.random.random() < 0.5
        listed = self.random.choice((None, *State))
        ended, since = self._ended(message)
        target = target_of(message, by_key)

        async def read(service: NodeService) -> Found[str] | None:
            if listed is not None:
                await self._page(service, message.topic, listed)
            try:
                return await service.messages.describe(target, body=False, stale=False)
            except NotFound:
                return None

        def replied(found: Found[str] | None, error: HadelayError | None) -> None:
            if error is not None:
                self.history.count(f"read {error.type}")
                return
            # The cluster may forget a message that ended, after a suspension for hours or in a topic with a brief
            # retention, but only when the retention of the message is over.
            brief = message.topic == self.cluster.workload.brief
            retention_s = self.cluster.workload.retention_ms / 1000 if brief else RETENTION_S
            kept = not forgets(self.cluster, message) or (ended and self.world.now < since + retention_s - 1.0)
            self.history.count("read within a brief retention", bool(brief and ended and kept))
            text = f"{process.name} knows nothing of message {message.number}, {ended or 'answered as stored before'}"
            purged = self.history.meant("purge", message, -1 if by_key else message.id or 0)
            self.cluster.decide("stale read", bool(found is None and kept and not purged), text, message.id or 0)
            if found is not None:
                self._compare(message, found, ended, by_key)

        self.door.ask(process, read, replied)

    def _ended(self, message: Message) -> tuple[str, float]:
        """Returns (final state that the message certainly has: acked, cancelled, or "" if unknown; earliest time at
        which its retention may have begun)."""
        acks = [h.ack_invoked or h.answered for h in self.history.hand_outs if h.id == message.id and h.acked]
        if acks:
            return "acked", min(acks)
        if message.cancelled is None:
            return "", 0.0
        # A message that another message had already replaced is answered as cancelled, too.
        replaced = self.history.may_be_replaced(message, message.id or 0)
        return "cancelled", message.invoked if replaced else message.cancel_invoked or 0.0

    def _compare(self, message: Message, found: Found[str], ended: str, by_key: bool) -> None:
        """Check the answer to a look-up. ended: final state of the message, "" if unknown. by_key: the look-up was by
        client key, and must find the message that was published last with the key."""
        number, wrong = decode_id(found.id), not by_key
        other = next((m for m in self.history.messages if m.id == number), None)
        if number == message.id:
            wrong = found.state != (ended or found.state)
        elif by_key and other is not None:
            redriven = any(order.kind == "redrive" and order.topic == message.topic for order in self.history.orders)
            older = other.stored is not None and other.stored < message.invoked and not redriven
            wrong = older or (other.topic, other.client_key) != (message.topic, message.client_key)
        text = f"message {message.number}, {ended or 'which may wait'}, is read as {found}"
        self.cluster.decide("reads", wrong, text, message.id or 0)

    async def _page(self, service: NodeService, topic: str, listed: State) -> None:
        """Read all pages of a list; check that each page begins after the page before, and that no message appears
        twice."""
        after: Key | None = FIRST
        while after is not None:
            ask = ListRequest(frozenset({listed}), 0, 1 << 52, (), after, 7)
            messages, behind = await service.messages.list_messages(topic, ask, stale=False)
            ids = {message.id for message in messages}
            assert len(ids) == len(messages), messages
            assert behind is None or behind > after, (behind, after)
            self.history.count("listed", len(ids))
            after = behind
