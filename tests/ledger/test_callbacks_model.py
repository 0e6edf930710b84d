"""Callbacks of whole log entries: several ACKs, NACKs and EXPIREs in one entry, with leases that are held, ran out, are
named twice or lost, beside a small model of which of them count. Each lease that counts has its one callback."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from chaos.sim.mutations.table import broken
from hadelay.codec import commands
from hadelay.codec.ackparts import CallReply, encode_replies, encode_results
from hadelay.codec.commands import DEAD_NOW
from hadelay.codec.meta import Meta, pack, unpack
from hadelay.codec.records import decode_record
from hadelay.codec.results import ExpireResult, LeaseOutcome
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.model import decode_id, encode_id
from hadelay.settings.cluster import Settings
from tests.ledger.test_callbacks import HOOK, records
from tests.ledger.world import World, draft

DONE, ACKED, LOST = map(int, (LeaseOutcome.DONE, LeaseOutcome.ALREADY_ACKED, LeaseOutcome.LEASE_LOST))
#: Limit of pending messages of the topic `done`: callbacks beyond it are filed, and counted.
ROOM = 6
TOPICS: dict[str, dict[str, Any]] = {
    "both": {"on_success": "done", "on_failure": "failed", "max_attempts": 2},
    "acks": {"on_success": "done", "max_attempts": 1},
    "own": {"on_failure": "failed", "max_attempts": 1, "webhook": HOOK},
    "quiet": {"max_attempts": 2},
    # A callback has no callback, also if the settings of its topic ask for one.
    "done": {"on_success": "done", "on_failure": "done", "max_messages": ROOM, "max_attempts": 1},
    "failed": {}, "mine": {},
}  # fmt: skip
#: A topic that cannot be created, because there are as many topics as there may be.
BEYOND = "beyond"


@dataclass
class Lease:
    row: np.void
    message: Message
    #: held; late: ran out, and the message was not leased since; acked; lost.
    state: str = "held"
    #: Whether the ack came when the lease had run out.
    was_late: bool = False


@dataclass
class Message:
    id: int
    topic: str
    own: str | None
    is_callback: bool = False
    hand_outs: int = 0
    #: waiting, leased, ended
    state: str = "waiting"
    leases: list[Lease] = field(default_factory=list)


class Model:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(Settings(max_topics=len(TOPICS)))
        for name, config in TOPICS.items():
            self.world.one(commands.encode_topic_put(name, {"backoff": [0], **config}))
        self.messages: dict[int, Message] = {}
        self.leases: list[Lease] = []
        #: Callbacks that were filed: (topic, document), without the texts of errors.
        self.reported: list[tuple[str, dict[str, Any]]] = []
        self.counts: Counter[str] = Counter()
        #: What the node had counted before its restarts.
        self.counted: Counter[str] = Counter()
        #: Number of pending messages of the topic `done`.
        self.pending = 0

    def publish(self) -> None:
        drafts, owns = [], []
        for _ in range(self.rng.randrange(1, 5)):
            topic = self.rng.choice(["both", "both", "acks", "own", "own", "quiet"])
            own = self.rng.choice([None, "mine", BEYOND]) if topic == "own" else None
            meta = pack(Meta(os=own)) if own else b""
            drafts.append(replace(draft(topic), meta=meta, callback=own is not None))
            owns.append(own)
        ids = self.world.ids(*drafts)
        for id_, one, own in zip(ids, drafts, owns, strict=True):
            self.messages[id_] = Message(id_, one.topic, own)

    def lease(self) -> None:
        self._find_callbacks()
        waiting = [m for m in self.messages.values() if m.state == "waiting"]
        some = self.rng.sample(waiting, min(len(waiting), self.rng.randrange(1, 6)))
        if some:
            for row, m in zip(self.world.lease(*(m.id for m in some)), some, strict=True):
                m.hand_outs += 1
                m.state = "leased"
                for old in m.leases:
                    old.state = "lost" if old.state == "late" else old.state
                m.leases.append(Lease(row, m))
                self.leases.append(m.leases[-1])

    def _find_callbacks(self) -> None:
        """Callbacks are messages, too."""
        for message_id in self._filed("done"):
            self.messages.setdefault(message_id, Message(message_id, "done", None, is_callback=True))

    def _filed(self, topic: str) -> dict[int, bytes]:
        """Bodies of the callbacks in a topic by id: not the results of acks, which lie beside dead letters."""
        found = map(decode_record, records(self.world, topic))
        return {record.first_id: record.body for record in found if unpack(record.meta).re}

    def settle(self) -> None:
        """Several commands in one entry of the log."""
        made = [self._command() for _ in range(self.rng.randrange(1, 5))]
        results = self.world.apply(*(command for command, _ in made))
        for result, (_, judge) in zip(results, made, strict=True):
            expected = list(judge)
            if not isinstance(result, ExpireResult):
                assert result.outcomes.tolist() == expected  # type: ignore[union-attr]

    def _command(self) -> tuple[bytes, Iterator[int]]:
        """(command, generator of its outcomes, which changes the model)"""
        kind = self.rng.choice(["ack", "ack", "ack", "nack", "dead", "expire"])
        if kind == "expire" and self.world.ledger.grants:
            self.world.now += 40_000
            return commands.encode_expire([*self.world.ledger.grants]), self._expire()
        named = self.rng.choices(self.leases[-30:], k=self.rng.randrange(1, 9))
        rows = np.array([lease.row for lease in named], self.leases[0].row.dtype)
        if kind in ("nack", "dead"):
            delay_ms = DEAD_NOW if kind == "dead" else 0
            return commands.encode_nack("n1", rows, delay_ms, "no"), self._nack(named, kind == "dead")
        replies = [self.rng.choice([None, CallReply(200 + n, "a/b", b"%d" % n, False)]) for n in range(len(named))]
        texts = [self.rng.choice([None, b"[%d]" % n]) for n in range(len(named))]
        results = encode_results(texts) if any(texts) else b""
        whole = commands.encode_ack("n1", rows, results, encode_replies(replies))
        return whole, self._ack(named, replies, texts)

    def _ack(self, named: list[Lease], replies: list[Any], texts: list[bytes | None]) -> Iterator[int]:
        # Leases that ran out are judged after the others.
        outcomes: dict[int, int] = {}
        for late in (False, True):
            for at, lease in enumerate(named):
                if at not in outcomes and (late or lease.state == "held"):
                    counts = lease.state in ("held", "late")
                    outcomes[at] = DONE if counts else ACKED if lease.state == "acked" else LOST
                    if counts:
                        lease.was_late, lease.state, lease.message.state = late, "acked", "ended"
                        self.pending -= lease.message.is_callback
        for at in sorted(outcomes):
            if outcomes[at] == DONE:
                self._tell_success(named[at], replies[at], texts[at])
        yield from (outcomes[at] for at in sorted(outcomes))

    def _nack(self, named: list[Lease], dead: bool) -> Iterator[int]:
        for lease in named:
            if lease.state == "held":
                self._failed(lease, "lost", dead)
                yield DONE
            else:
                yield ACKED if lease.state == "acked" and not lease.was_late else LOST

    def _expire(self) -> Iterator[int]:
        for lease in self.leases:
            if lease.state == "held":
                self._failed(lease, "late", False)
        yield from ()

    def _failed(self, lease: Lease, state: str, dead: bool) -> None:
        m = lease.message
        lease.state, m.state = state, "waiting"
        if dead or m.hand_outs >= TOPICS[m.topic]["max_attempts"]:
            lease.state, m.state = "lost", "ended"
            self.pending -= m.is_callback
            target = TOPICS[m.topic].get("on_failure")
            if target and not m.is_callback:
                self._tell(target, {"id": encode_id(m.id), "topic": m.topic, "key": None})

    def _tell_success(self, lease: Lease, reply: Any, text: bytes | None) -> None:
        m = lease.message
        target = m.own or TOPICS[m.topic].get("on_success")
        if target is None or m.is_callback:
            return
        answer: tuple[Any, ...] = (None, None, "")
        if reply is not None:
            answer = reply.status, reply.content_type, reply.body.decode()
        elif text is not None:
            answer = None, "application/json", text.decode()
        document = {"id": encode_id(m.id), "topic": m.topic, "key": None, "attempt": m.leases.index(lease) + 1}
        document |= dict(zip(("status", "content_type", "body"), answer, strict=True))
        self._tell(target, document | {"truncated": False, "schedule": None, "occurrence": None})

    def _tell(self, target: str, document: dict[str, Any]) -> None:
        if target == BEYOND:
            self.counts["lost"] += 1
            return
        self.counts["filed"] += 1
        if target == "done":
            self.counts["over_quota"] += self.pending >= ROOM
            self.pending += 1
        self.reported.append((target, document))

    def restart(self) -> None:
        self.counted += self.world.ledger.callbacks
        self.world.restart()

    def check(self) -> None:
        found = []
        for topic in ("done", "failed", "mine"):
            for document in map(json.loads, self._filed(topic).values()):
                if topic == "failed":
                    last = document.pop("errors")[-1]
                    assert last["attempt"] == self.messages[decode_id(document["id"])].hand_outs
                found.append((topic, document))
        by_text = lambda one: (one[0], json.dumps(one[1]))  # noqa: E731
        assert sorted(found, key=by_text) == sorted(self.reported, key=by_text)
        assert self.counted + self.world.ledger.callbacks == +self.counts
        assert self.world.topic("done").pending == self.pending


def run(seed: int, steps: int = 60) -> Model:
    model = Model(seed)
    for _ in range(steps):
        act = model.rng.choice([model.publish, model.lease, model.lease, model.settle, model.settle])
        model.world.now += model.rng.choice([1, 50, 1_000])
        if act != model.settle or model.leases:
            act()
        if model.rng.random() < 0.05:
            model.restart()
    model.check()
    return model


@pytest.mark.parametrize("seed", range(12))
def test_each_lease_that_counts_has_one_callback_whatever_an_entry_holds(seed: int) -> None:
    model = run(seed)
    again = World(Settings(max_topics=len(TOPICS)))
    for index, entry in enumerate(model.world.entries, 1):
        apply_entry(again.ledger, index, model.world.term, entry)
    assert checkpoint.dump(again.ledger) == checkpoint.dump(model.world.ledger)


def test_all_kinds_happen() -> None:
    counts: Counter[str] = Counter()
    for seed in range(4):
        model = run(seed)
        counts += model.counts
        counts.update(f"late {lease.was_late}" for lease in model.leases if lease.state == "acked")
        counts.update(topic for topic, _ in model.reported)
    assert set(counts) == {"filed", "lost", "over_quota", "late True", "late False", "done", "failed", "mine"}


@pytest.mark.parametrize("name", ["ack_without_callback", "death_without_callback", "called_back_again"])
def test_the_model_notices_bugs(name: str) -> None:
    with broken(name), pytest.raises(AssertionError):
        [run(seed) for seed in range(12)]
