"""What nodes send each other over the link (docs/spec/node-link.md), byte for byte: during an upgrade the other side is
the version before. Numbers of calls are drawn; here they are 1.

`pytest tests/server/test_golden_link.py --rewrite` accepts today's bytes: a change of what crosses the link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from chaos.sim.cluster import SimCluster
from hadelay import errors
from hadelay.api.service import Actor
from hadelay.codec import results
from hadelay.codec.commands import encode_noop
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.errors import HadelayError
from hadelay.model import Draft
from hadelay.rights import Rights
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.leadership import Leadership
from hadelay.server.link import CALL, Link
from hadelay.server.logbook import Logbook
from hadelay.server.node import Node
from hadelay.server.peers import Peers, PeerStatus
from hadelay.server.service.node import NodeService
from hadelay.server.sessions import KEY_BYTES, SharedSessions
from tests import scenarios
from tests.ledger.world import START_MS
from tests.server.test_groupcommit import Timers
from tests.server.test_lost_disks import publish, wait_for_leader

GOLDEN = Path(__file__).parent / "golden" / "link.txt"


def numbered(payload: bytes) -> bytes:
    """The frame's body, its number 1 unless it is a note's."""
    number, *rest = msgpack.unpackb(payload, strict_map_key=False)
    assert msgpack.packb([number, *rest]) == payload
    return msgpack.packb([1 if number else 0, *rest])


async def block(cluster: SimCluster) -> None:
    """Publish two messages of one group, whose topic hands out one at a time."""
    leader = cluster.leader()
    assert leader is not None
    settings = NodeService(leader).topics.put_topic("grouped", {"group_concurrency": 1}, Actor(), subscribes=False)
    done = asyncio.ensure_future(settings)
    for _ in range(200):
        cluster.world.run_for(0.05)
        await asyncio.sleep(0)
    assert await done
    one = Draft("grouped", 3_600_000, True, 0, 0, pack(Meta(group="g")), b"x", group=hash_group("g"))
    leader.publishing.publish([one, one], None, lambda result, error: None)
    cluster.world.run_for(1.0)


async def asked(cluster: SimCluster, node: Node) -> dict[str, bytes]:
    """Of every call that a follower makes, the first frame; also of a `ready` that is about some topics alone."""
    found: dict[str, bytes] = {}
    send = node.link._send

    def record(peer: str, kind: int, payload: bytes) -> bool:
        _, op, about = msgpack.unpackb(payload, strict_map_key=False)
        if kind == CALL:
            found.setdefault("ready of a topic" if op == "ready" and about is not None else op, numbered(payload))
        return send(peer, kind, payload)

    async def until(op: str, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        for _ in range(200):
            if op in found:
                break
            cluster.world.run_for(0.05)
            await asyncio.sleep(0)
        assert op in found
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    service, leader = NodeService(node), node.raft.leader
    assert leader is not None
    node.link._send = record
    node.publishing.propose(encode_noop(), lambda result, error: None)
    cluster.world.run_for(1.0)
    node.repairer.repair(498_666, ".idx", 64, 128, lambda data: None)
    await until("ready", service.topics.list_topics(stale=False))
    await until("ready of a topic", service.topics.get_topic("orders", stale=False))
    await until("consumers", service.topics.get_topic("orders", stale=False))
    await until("blocked", service.topics.get_topic("grouped", stale=False))
    await until("groups", service.groups.list_groups(None, may=lambda name: True, stale=False))
    await until("attention", service.attention.report(Rights(["read:orders-*"])))
    await until("members", service.cluster.add_member("n4", "h.example:9", Actor()))
    await until("drain", service.cluster.drain(leader, True, Actor()))
    await until("transfer", service.cluster.transfer(None, Actor()))
    node.link._send = send
    del found["hello"]
    found.pop("logbook", None)
    return found


def hello(*, ready: bool, known: bool) -> bytes:
    """The note that each node sends the others once a second."""
    sent: list[bytes] = []
    runtime: Any = SimpleNamespace(wall_ms=lambda: START_MS, monotonic=lambda: 12.5, random=Timers().random)
    clock: Any = SimpleNamespace(ready=ready, read=lambda mono: START_MS + 1)
    link = Link(runtime, lambda peer, kind, payload: sent.append(payload) is None)
    me = PeerStatus("n1", "http://h:1", "0.1.0", 3, 42, False)
    peers = Peers(["n1", "n2"], runtime, link, clock, lambda: me)
    if known:
        peers._ahead["n2"] = 100.0
    peers._send("n2")
    return numbered(sent[0])


def sessions() -> bytes:
    """The note of a node that knows two keys of sessions, and one that was closed."""
    sent: list[bytes] = []
    shared = SharedSessions(Link(Timers(), lambda peer, kind, payload: sent.append(payload) is None), lambda: ["n2"])
    shared._take([bytes([n]) * KEY_BYTES for n in (2, 1)], ["abc"])
    return numbered(sent[-1])


def logbook() -> bytes:
    """The note of a node that led, handed over, and served a backup."""
    sent: list[bytes] = []
    link = Link(Timers(), lambda peer, kind, payload: sent.append(payload) is None)
    raft: Any = SimpleNamespace(
        name="n1", is_leader=False, peers=("n2",), core=SimpleNamespace(left="handed over: it is stopping"),
        elections=SimpleNamespace(cause=("n3", False, 0.25)), membership=SimpleNamespace(sole_voter=False),
    )  # fmt: skip
    clock: Any = SimpleNamespace(ready=True, read=lambda mono: START_MS)
    book = Logbook(Timers(), raft, link, clock)
    book.on_leader(7)
    book.backup_began("9-0000beef", START_MS, 4_096).read_bytes = 64
    book.backup_ended("9-0000beef", complete=True)
    book.on_follower()
    return numbered(sent[-1])


def consumers() -> Any:
    """The answer of a leader to a node that asks for the consumers of a topic."""
    stub: Any = SimpleNamespace(
        leading=3, _raft=SimpleNamespace(name="n1"),
        _delivery=SimpleNamespace(consumers=lambda topic: [("worker-1", START_MS, "", True)]),
    )  # fmt: skip
    found: list[Any] = []
    Leadership._on_consumers(stub, "n2", "orders", lambda result, error: found.append(result))
    return found[0]


def blocked() -> Any:
    """The answer of a leader to a node that asks since when messages of a topic wait behind their groups."""
    stub: Any = SimpleNamespace(
        leading=3, _replica=SimpleNamespace(ledger=SimpleNamespace(topic=lambda name: SimpleNamespace(number=4))),
        _delivery=SimpleNamespace(groups=SimpleNamespace(waits_since_ms=lambda number: START_MS)),
    )  # fmt: skip
    found: list[Any] = []
    Leadership._on_blocked(stub, "n2", "orders", lambda result, error: found.append(result))
    return found[0]


def reports() -> Any:
    """Of one topic with ready messages, and one that something was handed out of."""
    recent = {1: (3, 10, 20, 30), 4: (5, 6, 7, 8)}
    stub: Any = SimpleNamespace(
        ready_counts=lambda numbers: {1: (2, START_MS)},
        lateness=SimpleNamespace(recent=lambda now, numbers: recent),
        _now=lambda: START_MS,
    )
    return DeliveryLoop.topic_reports(stub, [1, 4])


def u(*values: int, kind: type = np.uint8) -> Any:
    return np.array(values, kind)


RESULTS = [
    results.PublishResult(
        ids=u(1 << 63, 2, kind=np.uint64),
        deliver_at_ms=u(3, 4, kind=np.int64),
        codes=u(0, 5),
        duplicate=u(1, 0, kind=np.bool_),
        others=u(6, 7, kind=np.uint64),
    ),
    results.PublishResult(
        ids=u(1, kind=np.uint64), deliver_at_ms=u(2, kind=np.int64), codes=u(0), duplicate=u(0, kind=np.bool_)
    ),
    results.GrantResult(
        term=1, seq=2, granted=u(1, 0, kind=np.bool_), attempts=u(3, 4, kind=np.uint16), until_ms=5, existing=(6, 7)
    ),
    results.LeaseResult(outcomes=u(0, 1), until_ms=2),
    results.ExpireResult(returned=1, remaining=[(2, 3)]),
    results.CancelResult(outcomes=u(1, 2)),
    results.RedriveResult(outcomes=u(3, 4)),
    results.RescheduleResult(outcomes=u(1), ids=u(2, kind=np.uint64), deliver_at_ms=u(3, kind=np.int64)),
    results.JobResult(done=True, count=7),
    results.Done(changed=False),
    results.Refused(code="no_topic", detail="there is none"),
    results.JobBegun(job=3, again=True),
]


def answered(result: Any, error: HadelayError | None = None) -> bytes:
    """The frame of an answer, or a refusal."""
    sent: list[bytes] = []
    link = Link(Timers(), lambda peer, kind, payload: sent.append(bytes((kind,)) + payload) is None)
    link.handlers["x"] = lambda peer, payload, reply: reply(result, error)
    link.on_message("n2", CALL, msgpack.packb([1, "x", None]))
    return sent[0]


def taken(frame: bytes) -> tuple[Any, HadelayError | None]:
    """What the one that asked makes of it."""
    found: list[tuple[Any, HadelayError | None]] = []
    link = Link(Timers(), lambda peer, kind, payload: True)
    link._waiting[1] = ("n2", lambda result, error: found.append((result, error)), SimpleNamespace(cancel=lambda: None))  # type: ignore[assignment]
    link.on_message("n2", frame[0], frame[1:])
    return found[0]


async def test_frames(request: pytest.FixtureRequest) -> None:
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(2.0)
    publish(cluster, b"x")
    await block(cluster)
    nodes = [m.process.node for m in cluster.machines.values() if m.process is not None and m.process.node is not None]
    follower = next(node for node in nodes if not node.leading)
    frames = {f"call {op}": body for op, body in sorted((await asked(cluster, follower)).items())}
    frames["note hello"] = hello(ready=True, known=True)
    frames["note hello at first"] = hello(ready=False, known=False)
    frames["note logbook"] = logbook()
    frames["note sessions"] = sessions()
    frames["answer to submit"] = answered(RESULTS)
    frames["answer to ready"] = answered(reports())
    frames["answer to consumers"] = answered(consumers())
    frames["answer to consumers of no leader"] = answered(None)
    frames["answer to blocked"] = answered(blocked())
    frames["answer to bytes"] = answered(memoryview(b"\0\1\2"))
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HadelayError)]
    for kind in sorted(kinds, key=lambda kind: kind.type):
        error = kind("/f", 7, "x") if kind is errors.DamagedFile else kind("why", retry_after_ms=5, outcome="leased")
        frames[f"refusal {kind.type}"] = answered(None, error)
    scenarios.same(GOLDEN, "".join(f"{name}: {frame.hex()}\n" for name, frame in frames.items()), request)


def test_frames_of_before_are_taken() -> None:
    frames = {
        name: bytes.fromhex(text)
        for name, _, text in (line.partition(": ") for line in GOLDEN.read_text().splitlines())
        if not name.startswith(("call", "note"))
    }
    assert len(frames) > 20
    for name, frame in frames.items():
        result, error = taken(frame)
        again = answered(result, error)
        if name == "refusal damaged-file":
            assert type(error) is HadelayError
        else:
            assert again == frame, name
    found = taken(frames["answer to submit"])[0]
    assert [type(one) for one in found] == [type(one) for one in RESULTS]
    for one, other in zip(found, RESULTS, strict=True):
        for name in type(other).__dataclass_fields__:
            assert np.array_equal(getattr(one, name), getattr(other, name)), (type(other), name)
