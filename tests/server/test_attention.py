"""What the leader finds: each test plants a problem in simulated time, and reads the sentence."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from chaos.sim.cluster import SimCluster
from hadelay.api.attention import KINDS
from hadelay.codec.commands import encode_token_create
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.schedules import ANY_VERSION, KEEP_PAUSE, PAUSED, RESTORED, Made, Spec, State, encode_put
from hadelay.errors import DamagedFile
from hadelay.handout.polls import Delivery, Poll
from hadelay.ledger.schedules import schedules
from hadelay.model import Draft
from hadelay.rights import Rights
from hadelay.server.attention import KEPT, Attention, Finding, Findings
from hadelay.server.metrics import NodeMetrics
from hadelay.server.service.attention import MOST, _page, _row, cluster_findings
from hadelay.server.service.cluster import clock_problems
from hadelay.settings.shardmap import Rule, Shard, ShardMap, Shards
from tests.ledger.test_schedules import stored
from tests.server.test_metrics import collect
from tests.webhooks.world import World

MINUTE = 60.0


@pytest.fixture
def world() -> World:
    return World(SimCluster(1, names=("n1",)))


def said(world: World) -> list[str]:
    """Sentences of the report, after the next look."""
    world.run(6.0)
    answers: list[Any] = []
    world.settle().leadership.ask_leader("attention", ["*"], 1.0, lambda found, error: answers.append(found))
    world.until(lambda: answers)
    rows, more = answers[0]
    assert not more
    return [f"{row[1]} {row[0]}: {row[5]}" for row in rows]


def receive(world: World, topic: str, most: int = 1) -> Delivery:
    answers: list[Delivery | None] = []
    poll = Poll("c", b"", (topic,), most, 600_000, 1_000, lambda delivery, error: answers.append(delivery))
    world.settle().delivery.poll(poll)
    world.until(lambda: answers)
    assert answers[0] is not None
    return answers[0]


def test_nothing_needs_attention(world: World) -> None:
    world.put("fine")
    world.publish("fine", b"x", delay_ms=3_600_000)
    assert said(world) == []
    assert collect(NodeMetrics(world.settle()))[0]["attention"] == {(kind,): 0 for kind in KINDS}


def test_a_receiver_that_fails(world: World) -> None:
    world.put("orders", webhook={"url": "http://orders/", "timeout_ms": 1_000}, backoff=[1_000])
    world.script["http://orders/"] = ["503"]
    world.publish("orders", b"x")
    world.until(lambda: len(world.calls) >= 5)
    (words,) = said(world)
    assert re.fullmatch(r"bad receiver: Receiver of orders fails: \d+ calls in a row, last error: HTTP 503\.", words)
    assert collect(NodeMetrics(world.settle(), None))[0]["attention"]["receiver",] == 1  # type: ignore[index]
    world.script["http://orders/"] = ["200"]
    world.run(4.0)
    assert said(world) == [], "one success is enough"


def test_a_group_behind_its_head(world: World) -> None:
    world.put("stock", webhook={"url": "http://stock/", "timeout_ms": 1_000}, backoff=[600_000], group_concurrency=1)
    world.script["http://stock/"] = ["500"]
    meta = pack(Meta(group="customer-17"))
    drafts = [Draft("stock", 0, True, 0, 0, meta, b"x", group=hash_group("customer-17")) for _ in range(4)]
    world.do(lambda node, done: node.publishing.publish(drafts, b"k", done))
    world.until(lambda: world.calls)
    world.run(50.0)
    assert said(world) == [], "not for a minute yet"
    world.run(20.0)
    (words,) = said(world)
    first = world.calls[0].request.headers["webhook-id"]
    assert words.startswith(
        f"bad group: Group customer-17 of stock is stuck: 3 messages wait behind message {first}, whose attempt 1 "
        "failed (HTTP #), the first for 1 min"
    )


def test_a_topic_that_cannot_be_read_is_not_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it does not keep the leader from looking at the others."""
    world.put("a", webhook={"url": "http://a/", "timeout_ms": 1_000}, backoff=[1_000], max_attempts=1)
    world.put("b", webhook={"url": "http://b/", "timeout_ms": 1_000}, backoff=[1_000], max_attempts=1)
    world.script |= {"http://a/": ["500"], "http://b/": ["500"]}
    world.publish("a", b"x")
    world.publish("b", b"x")
    world.run(3.0)
    read = Attention._error

    def damaged(attention: Attention, message_id: int) -> str:
        if len(broken) == 0:
            broken.append(message_id)
        if message_id in broken:
            raise DamagedFile("2026112020.dsp", 64, "checksum")
        return read(attention, message_id)

    broken: list[int] = []
    monkeypatch.setattr(Attention, "_error", damaged)
    first, second = sorted(said(world))
    assert first.startswith("bad deaths: 1 message of b died")
    assert first.endswith("HTTP #.")
    assert second == "bad member: The leader cannot read messages of a: 2026112020.dsp, offset 64: checksum."


def test_nobody_consumes(world: World) -> None:
    world.run(MINUTE)
    world.publish("legacy", b"x", b"x")
    world.publish("paused", b"x")
    world.put("paused", paused=True, paused_reason="INC-12")
    world.run(65.0)
    found = said(world)
    assert found[0].startswith("bad idle: Nobody consumes legacy: 2 messages are ready, the oldest for 1 min")
    assert found[0].endswith("no receive since this leader leads.")
    assert found[1:] == ["warn paused: paused is paused (INC-12): 1 message waits."]
    receive(world, "legacy")
    world.run(100.0)
    (busy, _) = said(world)
    assert busy.startswith("warn late: Messages of legacy wait: 1 message is ready, the oldest for "), "it is busy"
    assert busy.endswith("its consumers are too slow.")


def test_deaths_of_the_last_hour(world: World) -> None:
    world.put("pay", webhook={"url": "http://pay/", "timeout_ms": 1_000}, max_attempts=1)
    world.script["http://pay/"] = ["503", "connection_refused"]
    world.publish("pay", b"x", b"x", b"x")
    world.until(lambda: len(world.calls) == 3)
    assert said(world) == ["bad deaths: 3 messages of pay died in the last hour: mostly connection refused."]
    leader = world.settle()
    leader.attention._now = lambda: leader.now_ms() + 3_600_000  # type: ignore[method-assign]
    assert said(world) == [], "the letters are there, and old"


def schedule(world: World, name: str, **more: Any) -> None:
    now = world.settle().now_ms()
    spec = Spec(f"of-{name}", every_ms=20_000, start_ms=now + 1_000, **more)
    world.do(
        lambda node, done: node.publishing.propose(
            encode_put(name, ANY_VERSION, KEEP_PAUSE, stored(spec, name=name)), done
        )
    )


def test_schedules(world: World) -> None:
    world.put("of-dies", webhook={"url": "http://dies/", "timeout_ms": 1_000}, max_attempts=1)
    world.script["http://dies/"] = ["500"]
    world.put("of-refused", max_messages=1)
    world.publish("of-refused", b"x", delay_ms=3_600_000)
    for name in ("dies", "refused", "fine"):
        schedule(world, name)
    world.until(lambda: len(world.calls) == 1)
    found = [words for words in said(world) if " schedule: " in words]
    assert any(words.startswith("bad schedule: The last message of schedule dies died") for words in found), found
    assert any(words.startswith("bad schedule: Schedule refused made no message at ") for words in found), found
    assert any(words.endswith("0 occurrences were missed, and 1 were refused.") for words in found), found
    assert len(found) == 2


def test_a_schedule_that_cannot_go_on(world: World) -> None:
    leader, found = world.settle(), Findings()
    state = State(1, PAUSED | RESTORED, 0, 0, 7, 0, 0, 0, 0, 0, (Made(1, 2, 0),))
    one = schedules.Found(stored(Spec("t", every_ms=1_000)), state)
    leader.attention._judge(found, "held", one, 10)
    leader.delivery._schedules.invalid = {"odd"}
    leader.attention._judge(found, "odd", one._replace(state=replace(state, flags=0)), 10)
    assert [row.sentence for row in found.rows["schedule"]] == [
        "Schedule held is paused since the cluster was restored from a backup.",
        "Schedule odd makes nothing: this node does not know its pattern or time zone.",
    ]


def test_a_backlog_that_grows(world: World) -> None:
    world.put("review", rate=0.02)
    for _ in range(16):
        world.publish("review", b"x", b"x", b"x")
        receive(world, "review", 10)
        world.run(24.0)
    (words,) = said(world)
    assert words.startswith("warn backlog: Backlog of review grows by "), words
    assert words.endswith("; its rate is 0.02 a second.")


def test_a_limit_that_is_used_up(world: World) -> None:
    world.put("one", concurrency=1)
    world.publish("one", b"x", b"x")
    receive(world, "one")
    world.run(65.0)
    (words,) = said(world)
    assert words.startswith("warn late: Messages of one wait: 1 message is ready, the oldest for 1 min")
    assert words.endswith("; its concurrency of 1 is used up.")


def test_members_leaders_and_drains() -> None:
    cluster = SimCluster(3, restart=False)
    world = World(cluster)
    assert said(world) == []
    followers = [name for name in cluster.names if name != world.settle().name]
    for name in (followers[0], followers[1], followers[0]):
        world.until(lambda: all(node.clock.ready for node in cluster.nodes()))
        world.do(lambda node, done, to=name: node.leadership.transfer(to, done))  # type: ignore[misc]
        world.until(lambda to=name: (leader := cluster.leader()) is not None and leader.name == to)  # type: ignore[misc]
        world.run(2.0)
    (words,) = said(world)
    assert words.startswith("warn leader: The leader changed ")
    assert words.endswith("handed over: it was asked to.")
    world.settle().logbook._terms.clear()
    cluster.process(followers[1]).node.raft.elections.draining = True  # type: ignore[union-attr]
    world.run(2.0)
    assert said(world) == [f"warn drained: {followers[1]} is drained: it takes no publishes and no receives."]
    cluster.kill(followers[1])
    world.run(5.0)
    assert said(world) == [
        f"bad member: {followers[1]} does not answer: start it, or read in its log why it ended.",
        "bad member: If one more member fails, the cluster stops.",
    ]
    last = world.settle()
    for name in cluster.names:
        if name != last.name:
            cluster.kill(name)
    world.run(10.0)
    assert "No leader is known" in " ".join(row.sentence for row in cluster_findings(last))


def test_a_member_is_full_behind_or_has_a_wrong_clock(world: World) -> None:
    node = world.settle()
    node.checkpoints.has_space = False
    node.clock.alarms.update({"skew:n1", "no_majority"})
    assert "The wall clocks of a majority do not agree, or are not known." in [
        row.sentence for row in cluster_findings(node)
    ]
    assert "Too little disk space on n1: every node refuses publishes until space is freed there." in [
        row.sentence for row in cluster_findings(node)
    ]


def test_clock_problems_in_words() -> None:
    clock: Any = SimpleNamespace(alarms={"skew:n2", "no_majority"}, skews=lambda mono: {"n2": -1312.6})
    node: Any = SimpleNamespace(clock=clock, runtime=SimpleNamespace(monotonic=lambda: 0.0))
    assert clock_problems(node) == [
        "the wall clocks of a majority do not agree, or are not known",
        "the wall clock of n2 is -1,313 ms off cluster time",
    ]


def test_certificates_and_tokens_that_end(world: World) -> None:
    node, day = world.settle(), 86_400
    node.certificate_s = lambda: node.runtime.wall_ms() / 1000 + 30 * day
    assert said(world) == []
    node.certificate_s = lambda: node.runtime.wall_ms() / 1000 + 1.5 * day
    assert said(world) == ["bad certificate: A certificate of n1 ends in 1 d 12 h."]
    node.certificate_s = lambda: node.runtime.wall_ms() / 1000 - 3.01 * day
    assert said(world) == ["bad certificate: A certificate of n1 expired 3 d ago."]
    node.certificate_s = lambda: 0.0
    world.do(
        lambda node, done: node.publishing.propose(encode_token_create("shop", b"x" * 32, ["read"], 100_000), done)
    )
    assert said(world) == []
    world.run(80.0)
    (words,) = said(world)
    assert words.startswith("warn token: Token shop (787878787878) ends in ")
    world.run(10.0)
    assert said(world)[0].startswith("bad token: Token shop (787878787878) expired ")


def test_backups_and_the_archive(world: World) -> None:
    node = world.settle()
    node.logbook.backup_began("s1", node.now_ms(), 10)
    assert said(world) == [], "it runs"
    node.logbook.backup_ended("s1", complete=False)
    assert said(world) == ["warn backup: The last backup, of n1, was not completed."]
    node.logbook.backup_ended("s1", complete=True)
    assert said(world) == []
    node.logbook._backups["n1", "s1"].at_ms -= 10 * 86_400_000
    assert said(world)[0].startswith("warn backup: The last backup is 10 d")
    node.logbook._backups.clear()
    node.delivery._maintenance._gate = SimpleNamespace(stays="3 hours, the first of them 2026112019", stop=int)  # type: ignore[assignment]
    (words,) = said(world)
    assert words == (
        "warn archive: Past hours stay on the disk until they are archived: 3 hours, the first of them 2026112019."
    )


def test_a_shard_map_that_is_not_in_force(world: World) -> None:
    node = world.settle()
    current = ShardMap(7, {2: Shard(node.ledger.group)}, (Rule("*", (2,)),))
    node.ledger.shards = Shards(current)
    assert said(world) == []
    node.ledger.shards = Shards(current, prepared=replace(current, version=8))
    (words,) = said(world)
    assert words.startswith(
        "warn shards: Shard 2 waits for the end of a change of the shard map, to version 8: new names"
    )
    assert gauges(world) == (1, 0)
    node.ledger.shards = Shards(current, suspended=True)
    (words,) = said(world)
    assert words.startswith("bad shards: Shard 2 was restored and creates no topics: run hadelay shards apply --at")
    assert gauges(world) == (0, 1)
    node.ledger.shards = Shards(prepared=current)
    assert said(world)[0].startswith("warn shards: This cluster waits for the end")


def gauges(world: World) -> tuple[Any, ...]:
    found, _ = collect(NodeMetrics(world.settle()))
    return tuple(found[name] for name in ("shard_map_prepared", "shard_suspended"))


def test_a_report_is_bounded_and_shows_what_the_token_may_see() -> None:
    found = Findings()
    for n in range(KEPT + 500):
        found.add(Finding("idle", "bad", "topic", f"t{n}", f"t{n}", "words", n))
    cluster = [Finding("member", "bad", "node", "n1", "", "words", 1)]
    rows, more = _page(found, Findings(), cluster, Rights(["read"]))
    assert (len(rows), more) == (MOST + 1, {"idle": KEPT + 400})
    rows, more = _page(found, Findings(), cluster, Rights(["read:t1*"]))
    assert (len(rows), more) == (MOST, {"idle": 11})
    assert {row[4][:2] for row in rows} == {"t1"}
    assert _page(found, Findings(), cluster, Rights(["publish"])) == [[], {}]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_two_actions(kind: Any) -> None:
    row = _row(Finding(kind, "bad", "group", "a b'c", "t", "words", 1, 0, "0K"))
    assert len(row.actions) == 2
    assert all(action.href.startswith("/console/") and "{" not in action.href for action in row.actions)
    assert all(action.command.startswith("hadelay ") and "{" not in action.command for action in row.actions)
