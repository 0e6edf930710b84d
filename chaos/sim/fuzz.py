"""Fuzz client of some runs: topics that route dead letters to each other, reused keys, forced deletions, valid and
invalid settings, truncated commands and commands at the wrong time.

Nobody else consumes its messages, and no check of the outside follows them. The client is there for I2 and I12: all
nodes do the same, across crashes and files, and their counts agree with their entries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chaos.sim.door import Client, Reply, whole
from hadelay.api.service import Handed, ReceiveRequest, SettleKind
from hadelay.codec import commands
from hadelay.codec.commandtypes import Command, Job
from hadelay.errors import HadelayError, is_disk_full
from hadelay.ledger.topics.topicchanges import DEAD, READY, SCHEDULED
from hadelay.model import DEAD_HOURS, HOUR_MS, KEEP, REJECT, REPLACE, Draft
from hadelay.rights import SCOPES, Rights
from hadelay.server.service.duecounts import DueCounts

if TYPE_CHECKING:
    from chaos.sim.cluster import SimCluster

#: Names of the fuzz client's topics; the last topic has settings, but no messages.
TOPICS = ("side", "aside", "bare")
_URL = "https://a.example/in"
#: Settings that the fuzz client's topics with messages always have, so that their messages soon become dead letters.
_MORTAL: dict[str, Any] = {"max_attempts": 1, "dead_retention_ms": HOUR_MS}
#: Settings, valid and invalid: first for the fuzz client's topics with messages; then for its topic without messages,
#: with webhooks and alerts.
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"dead_letter": "aside"}, {"max_attempts": 2, "backoff": [5]}, {"dead_letter": None},
    {"retention_ms": 1000}, {"lease_ms": 900}, {"ttl_ms": 600}, {"concurrency": 3},
    {"backoff": {"min_ms": 5, "max_ms": 9, "factor": 0}}, {"backoff": {"min_ms": 5, "max_ms": 9, "jitter": 2}},
    {"backoff": 5}, {"paused_reason": 5},
)  # fmt: skip
_BARE: tuple[dict[str, Any], ...] = (
    {"webhook": {"url": _URL, "secrets": ["whsec_0123456789abcdef"], "headers": {"x-a": "b" * 20}}},
    {"webhook": {"url": _URL, "headers": {"x-a": "****bbbb"}}}, {"webhook": {"url": _URL, "headers": {"x-c": "****"}}},
    {"webhook": {"url": _URL, "timeout_ms": 500}}, {"webhook": {"secrets": []}}, {"webhook": {"url": _URL, "no": 1}},
    {"webhook": {"url": _URL, "secrets": ["****cdef"]}}, {"webhook": {"url": _URL, "secrets": []}},
    {"webhook": {"url": _URL, "headers": 5}}, {"webhook": {"url": _URL, "headers": {"a b": "c"}}},
    {"webhook": {"url": _URL, "headers": {"host": "c"}}}, {"webhook": {"url": _URL, "headers": {"a": 5}}},
    {"alert": {"url": _URL, "secret": "0123456789abcdef"}}, {"alert": {"url": _URL}}, {"alert": None, "webhook": None},
    *({"alert": {"url": url}} for url in (
        5, "https://a b", "https://[a", "ftp://a", "https://", "https://b:c@a", "https://a#b", "http://a:0",
    )),
)  # fmt: skip
#: Cluster limits that the fuzz client sets: invalid ones, and some that have no effect on simulated runs.
_LIMITS: tuple[Any, ...] = (
    {"max_reasons": 9_000}, {}, {"max_reasons": 0}, {"none": 1}, {"max_delay_ms": 1 << 52}, [],
)  # fmt: skip
#: Scopes of the tokens that the fuzz client creates.
_SCOPES = ("publish:a*d*", "read:side")
#: Seconds from the start of a run until this client configures its topics: in most runs, the cluster has a leader by
#: then.
_FOUNDED_S = 1.0
#: Layout of a command's header: kind and size of the command.
_FRAME = struct.Struct("<BI")
#: Kinds of commands that the fuzz client may truncate.
_BREAKABLE = (Command.PUBLISH, Command.CANCEL, Command.RESCHEDULE, Command.REDRIVE, Command.TOPIC_PUT)


class FuzzClient(Client):
    cluster: SimCluster

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster, "fuzz")
        self.requests = 0
        self.ids: list[int] = []

    def start(self, until: float) -> None:
        self.until = until
        if self.cluster.fuzzed:
            for topic in TOPICS[:2]:
                self.world.after(_FOUNDED_S, self._ask, commands.encode_topic_put(topic, _MORTAL))
            self._next()

    def _next(self) -> None:
        self.world.after(self.random.expovariate(1 / 0.12), self._act)

    def _act(self) -> None:
        if self.stopped or self.world.now >= self.until:
            return
        part = self.next_act()
        if self.cluster.parts.take(part):
            act = self.random.choice((self._publish, self._poll, self._poll, self._configure, self._order, self._odd))
            self.history.count("fuzz")
            act()
        self._next()

    def _at_some_node(self, call: Callable[[Any, Reply], None], replied: Callable[[Any], None]) -> None:
        process = self.cluster.any_process(self.random)
        if process is not None:
            self.door.call(process, call, lambda result, error: replied(result) if error is None else None)

    def _ask(self, command: bytes) -> None:
        self._at_some_node(lambda node, done: node.publishing.propose(command, done), lambda result: None)

    def _publish(self) -> None:
        rng = self.random
        drafts = [
            Draft(
                rng.choice(TOPICS[:2]), rng.choice((0, 5, 300, 2000, HOUR_MS, 1 << 48)), True, 0, rng.choice((0, 700)),
                b"", b"%d" % rng.randrange(3), rng.choice((None, b"row %d" % rng.randrange(40))),
                rng.choice((None, b"key %d" % rng.randrange(4))), rng.choice((KEEP, REPLACE, REJECT)), 0,
                rng.random() < 0.1,
            )
            for _ in range(rng.randint(1, 6))
        ]  # fmt: skip
        key = rng.choice((None, b"fuzz %d" % rng.randrange(20)))

        def stored(receipts: Any) -> None:
            self.ids = [*self.ids, *(one for one in receipts.ids if one)][-30:]

        self._at_some_node(lambda node, done: node.publishing.publish(drafts, key, done), stored)

    def _poll(self) -> None:
        """Poll, then ack some messages, nack some and forget the others; settle some leases twice, or with malformed
        tokens."""
        rng = self.random
        self.requests += 1
        request_id, topics = b"%d" % (self.requests - rng.randrange(2)), list(rng.choice((TOPICS[:1], TOPICS[:2])))
        ask = ReceiveRequest(topics, self.name, request_id, 5, rng.choice((0, 300)), 400)

        def replied(handed: Handed | None, error: HadelayError | None) -> None:
            leases = [message.lease for message in handed.messages] if handed is not None else []
            if leases and not self.stopped:
                leases += leases[: rng.choice((0, 0, 1))] + ["none"] * rng.choice((0, 0, 1))
                kind: SettleKind = rng.choice(("ack", "nack", "nack"))
                delay_ms, reason = rng.choice((None, 0, 50)), rng.choice(("", "no"))
                if rng.random() < 0.8:
                    self.ask(lambda service: service.consume.settle(kind, leases, delay_ms, reason), lambda *_: None)

        leader = self.cluster.leading()
        process = self.cluster.process(leader.name if leader is not None else None)
        if process is not None:
            self.door.ask(process, lambda service: service.consume.receive(ask), replied)

    def _configure(self) -> None:
        rng = self.random
        topic = rng.choice(TOPICS)
        config = rng.choice(_BARE) if topic == "bare" else _MORTAL | rng.choice(_SETTINGS)
        self._ask(commands.encode_topic_put(topic, config))

    def _order(self) -> None:
        rng, topic = self.random, self.random.choice(TOPICS[:2])
        some = rng.sample(self.ids, min(len(self.ids), 2))
        some += some[:1]
        self._ask(
            rng.choice((
                lambda: commands.encode_topic_delete(topic, rng.random() < 0.5),
                lambda: commands.encode_purge(topic, rng.choice((SCHEDULED, READY | DEAD))),
                lambda: commands.encode_purge(topic, DEAD),
                lambda: commands.encode_redrive("fuzz", topic, some),
                lambda: commands.encode_redrive("fuzz", topic, [], all=True, rate=rng.choice((None, 3.0))),
                lambda: commands.encode_cancel("fuzz", some, [(topic, b"key 1")]),
                lambda: commands.encode_reschedule("fuzz", 200, True, some, [(topic, b"key 2")]),
                lambda: commands.encode_reschedule("fuzz", 1 << 50, True, some[:1]),
                lambda: commands.encode_alerted(topic, rng.randrange(4)),
            ))()
        )  # fmt: skip

    def _limits(self, limits: Any) -> Any:
        """Add the run's idempotency window to the cluster limits that this client sets: with a shorter window, a
        request that a producer repeats after hours would be stored twice."""
        return {"idempotency_window_ms": self.cluster.window_ms, **limits} if isinstance(limits, dict) else limits

    def _odd(self) -> None:
        """Propose commands that only the cluster proposes, at the wrong time; limits; tokens; and bytes that are no
        command."""
        rng = self.random
        hour = self.world.wall_ms() // HOUR_MS + rng.randint(-2, 1)
        command = rng.choice((
            lambda: commands.encode_maintain(Job.RETIRE, hour),
            lambda: commands.encode_maintain(Job.ROLL_FORWARD, hour, 5),
            lambda: commands.encode_maintain(Job.DROP_DEAD, hour + rng.choice((0, DEAD_HOURS))),
            commands.encode_noop,
            lambda: commands.encode_settings(self._limits(rng.choice(_LIMITS))),
            lambda: commands.encode_token_create(rng.choice(("", "fuzz")), rng.randbytes(rng.choice((31, 32))), [], 1),
            lambda: commands.encode_token_create("fuzz", bytes(32), list(_SCOPES), rng.choice((-1, 3000))),
            lambda: commands.encode_token_revoke(bytes(6).hex()),
            lambda: commands.encode_audited("fuzz", "", "", "", "", commands.encode_noop()),
            lambda: commands.encode_cancel("fuzz", [1], [("nowhere", b"key")]),
            lambda: commands.encode_redrive("fuzz", "nowhere", []),
            lambda: commands.encode_topic_put("bare", rng.choice(_BARE)),
        ))()  # fmt: skip
        chance = rng.random()
        if chance < 0.2:
            command = commands.encode_audited("fuzz", "", "", "", "", command)
        elif chance < 0.4:
            body = command[5 : rng.randrange(5, len(command) + 1)] + bytes(rng.choice((0, 0, 3)))
            command = _FRAME.pack(rng.choice((*_BREAKABLE, command[0], 200)), len(body)) + body
        self._ask(command)
        self._at_some_node(lambda node, done: done(_look(node), None), lambda result: None)


def _look(node: Any) -> list[int]:
    """Send read requests: rights, counts of due messages, and files; also ask for the repair of an undamaged entry.
    Returns the hours with entries."""
    for token in node.ledger.tokens.values():
        rights = Rights(token.scopes if token.holds(node.ledger.now_ms) else ())
        assert not rights.may("admin", None) or all(rights.may(scope, "side") for scope in SCOPES)
        rights.may("publish", "aside")
    now_ms = node.ledger.now_ms
    for topic in (None, "side", "orders"):
        counting = DueCounts(node.replica).count(topic, now_ms - HOUR_MS, now_ms + 3 * HOUR_MS, 60_000)
        assert all(count > 0 for count in whole(counting)[1])
    store = node.storage.hours
    hours: list[int] = store.hours()
    for hour in hours[-2:]:
        try:
            assert len(store.read_file(hour, ".idx", 0, 320)) <= 320
        # Ignore the error of a full disk: reading a file first writes the hour's buffered messages
        except OSError as error:
            if not is_disk_full(error):
                raise
        node._damaged(hour, store.count(hour) - 1, "nothing")
    return hours
