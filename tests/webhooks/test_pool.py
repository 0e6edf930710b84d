"""Limits of the pool: how many calls at once, whose turn it is, and leases that outlast the wait."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from chaos.sim.cluster import SimCluster
from chaos.sim.file import SimFile
from chaos.sim.tables import SimBackend
from hadelay.codec.commands import encode_cancel, encode_purge, encode_redrive, encode_topic_delete
from hadelay.codec.results import CancelOutcome
from hadelay.ledger.leases.dead import DEAD
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.ledger.topics.topics import TopicState
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.reading import VerifiedReader
from hadelay.settings.node import Config, WebhooksConfig
from tests.webhooks.world import Call, World


class Limited(SimCluster):
    def __init__(self, seed: int, **limits: Any) -> None:
        self.limits = WebhooksConfig(**limits)
        super().__init__(seed, names=("n1",))
        self.ready_window = 65_536

    def config(self, name: str) -> Config:
        return msgspec.structs.replace(super().config(name), webhooks=self.limits)


def most_at_once(calls: list[Call]) -> int:
    """The most calls that were under way together."""
    ends = [(call.answered or float("inf"), -1) for call in calls]
    steps = sorted([(call.at, 1) for call in calls] + ends)
    under_way = peak = 0
    for _, step in steps:
        under_way += step
        peak = max(peak, under_way)
    return peak


def hook(world: World, topic: str, url: str = "", **settings: Any) -> None:
    world.put(topic, webhook={"url": url or f"http://{topic}/", "timeout_ms": 1_000}, backoff=[600_000], **settings)


def test_calls_at_once() -> None:
    world = World(Limited(1, topic_calls=8))
    hook(world, "t")
    hook(world, "u", concurrency=3)
    world.publish("t", *[b"x"] * 50)
    world.publish("u", *[b"x"] * 20)
    world.until(lambda: len(world.calls) == 70)
    assert most_at_once([call for call in world.calls if call.url == "http://t/"]) == 8
    assert most_at_once([call for call in world.calls if call.url == "http://u/"]) == 3


def test_calls_at_once_to_one_host_are_limited_over_all_topics() -> None:
    world = World(Limited(1, host_calls=4))
    hook(world, "t", "http://host/a")
    hook(world, "u", "http://host/b")
    hook(world, "v", "http://other/")
    for topic in "tuv":
        world.publish(topic, *[b"x"] * 30)
    world.until(lambda: len(world.calls) == 90)
    assert most_at_once([call for call in world.calls if "//host/" in call.url]) == 4
    assert most_at_once([call for call in world.calls if "//other/" in call.url]) == 4
    assert most_at_once(world.calls) == 8


def test_every_topic_has_its_share_of_too_few_calls() -> None:
    """Two receivers hang; the third topic waits for its first turn, and then has a third."""
    world = World(Limited(1, max_calls=9))
    for topic in ("a", "b", "c"):
        hook(world, topic)
    world.script["http://a/"] = world.script["http://b/"] = ["hang"]
    world.publish("a", *[b"x"] * 40)
    world.publish("b", *[b"x"] * 40)
    world.run(1.5)
    world.publish("c", *[b"x"] * 60)
    began = world.cluster.world.now
    mine = lambda: [call for call in world.calls if call.url == "http://c/"]  # noqa: E731
    world.until(lambda: len(mine()) == 60)
    assert world.cluster.world.now - began < 3.0
    assert most_at_once(world.calls) == 9


def test_a_lease_lasts_until_its_turn_has_come() -> None:
    """One call at a time, each a second long: the last ones wait for longer than a lease, and lose none by it."""
    world = World(Limited(1, max_calls=1))
    hook(world, "t")
    world.script["http://t/"] = ["hang"]
    ids = world.publish("t", *[b"x"] * 16)
    world.until(lambda: len(world.calls) == 16)
    assert sorted(call.id for call in world.calls) == ids
    assert {call.attempt for call in world.calls} == {1}
    assert most_at_once(world.calls) == 1
    assert world.pool().reports.lost == 0


def test_a_topic_that_is_deleted_is_called_no_more() -> None:
    world = World(Limited(1))
    hook(world, "t")
    world.publish("t", *[b"x"] * 5)
    world.until(lambda: len(world.calls) == 5)
    world.put("t", webhook=None)
    world.publish("t", b"x")
    world.run(2.0)
    assert len(world.calls) == 5
    assert world.pool().queues == {}
    hook(world, "t")
    world.until(lambda: len(world.calls) == 6)


def test_a_receiver_that_is_gone_is_left_alone() -> None:
    """410: what was fetched for it and not called about goes back, and is there when somebody resumes."""
    world = World(Limited(1))
    hook(world, "t")
    world.put("t", backoff=[100])
    world.script["http://t/"] = ["410"]
    ids = world.publish("t", *[b"x"] * 120)
    world.run(1)
    assert len(world.calls) < 50
    assert world.pool().busy is False
    world.script["http://t/"] = ["200"]
    world.put("t", paused=None, paused_reason=None)
    world.until(lambda: all(world.state(one) == "acked" for one in ids))
    reported = {(call.attempt, call.request.headers.get("hadelay-uncounted")) for call in world.calls}
    assert {(1, None), (2, "1")} <= reported, "what went back was no attempt"


def test_a_pause_ends_calls_and_a_resume_goes_on_with_them() -> None:
    """What was fetched before stays leased, however long it takes, and costs no attempt."""
    world = World(Limited(1, topic_calls=2))
    hook(world, "t", max_attempts=1)
    world.script["http://t/"] = ["hang", "hang", "200"]
    ids = world.publish("t", *[b"x"] * 6)
    world.until(lambda: len(world.calls) == 2)
    world.put("t", paused=True)
    calls = len(world.calls)
    world.run(60)
    assert len(world.calls) == calls
    topic = world.settle().ledger.topic("t")
    assert topic is not None
    assert (topic.leased, topic.dead) == (2, 2)
    world.put("t", paused=None)
    world.until(lambda: len(world.calls) == 6)
    world.run(1)
    assert sorted(map(world.state, ids)) == ["acked"] * 4 + ["dead"] * 2


@pytest.mark.parametrize("delete", [False, True])
def test_no_call_is_made_for_purged_messages(delete: bool) -> None:
    world = World(Limited(1, topic_calls=2))
    hook(world, "t")
    world.script["http://t/"] = ["hang"]
    ids = world.publish("t", *[b"x"] * 6)
    world.until(lambda: len(world.calls) == 2)
    command = encode_topic_delete("t", force=True) if delete else encode_purge("t", SCHEDULED | READY)
    world.do(lambda node, done: node.publishing.propose(command, done))
    calls = {call.id for call in world.calls}
    world.run(10)
    assert {call.id for call in world.calls} == calls
    assert [world.state(one) for one in ids if one not in calls] == ["cancelled"] * 4
    if not delete:
        world.script["http://t/"] = ["200"]
        (new,) = world.publish("t", b"y")
        world.until(lambda: world.state(new) == "acked")


def test_records_that_come_from_the_disk_keep_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call at a time: whatever has to be read first is called first, and nothing else is read meanwhile."""
    cached, fetched, reading, most = SimFile.pread_cached, VerifiedReader._fetch, 0, 0

    def fetch(reader: VerifiedReader, extents: Any, found: Any, done: Callable[[], None], lane: str) -> None:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)

        def over() -> None:
            nonlocal reading
            reading -= 1
            done()

        fetched(reader, extents, found, over, lane)

    monkeypatch.setattr(VerifiedReader, "_fetch", fetch)
    monkeypatch.setattr(SimFile, "pread_cached", lambda *a: None if a[2] // 100 % 3 else cached(*a))
    world = World(Limited(1, topic_calls=1))
    hook(world, "t")
    ids = world.publish("t", *[b"x" * 200] * 30)
    world.until(lambda: len(world.calls) == 30)
    assert most == 1
    assert [call.id for call in world.calls] == ids


def test_a_message_purged_while_its_record_is_read_is_not_called_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimFile, "pread_cached", lambda *a: None)
    waiting: list[Callable[[], None]] = []
    fetched = VerifiedReader._fetch
    monkeypatch.setattr(VerifiedReader, "_fetch", lambda *a: fetched(*a[:-2], lambda: waiting.append(a[-2]), a[-1]))
    world = World(Limited(1))
    hook(world, "t")
    world.publish("t", b"x")
    world.until(lambda: waiting)
    world.do(lambda node, done: node.publishing.propose(encode_purge("t", READY | SCHEDULED), done))
    world.put("t", backoff=[1_000])  # its queue is looked through, and the message is not in it
    waiting[0]()
    world.run(1)
    assert not world.calls


def test_no_call_is_made_for_a_message_cancelled_before_its_grant_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In interval mode messages wait for their calls before their grants are committed. Here the cancel precedes the
    grant in the log, as if it was proposed a moment before the message was fetched."""
    monkeypatch.setattr(DeliveryLoop, "before_settlement", lambda loop: None)

    class Interval(Limited):
        def config(self, name: str) -> Config:
            config = super().config(name)
            dispatch = msgspec.structs.replace(config.dispatch, sync="interval", interval_ms=1_000)
            return msgspec.structs.replace(config, dispatch=dispatch)

    world = World(Interval(1, topic_calls=1))
    world.answer_s = lambda: 0.03
    hook(world, "t")
    first, second = world.publish("t", b"x", b"y")
    world.until(lambda: world.calls)
    result = world.do(lambda node, done: node.publishing.propose(encode_cancel("n1", [second]), done))
    assert CancelOutcome(result.outcomes[0]) is CancelOutcome.CANCELLED
    world.run(2)
    assert [call.id for call in world.calls] == [first]


def test_a_death_during_an_alert_is_in_the_next_alert() -> None:
    world = World(Limited(1))
    world.answer_s = lambda: 0.5
    hook(world, "t", max_attempts=1, alert={"url": "http://alert/"})
    world.script["http://t/"] = ["500"]
    world.publish("t", b"first")
    world.until(lambda: world.calls)
    world.run(0.7)
    world.publish("t", b"second")

    def alerts() -> list[Call]:
        return [call for call in world.calls if call.url == "http://alert/"]

    world.until(lambda: len(alerts()) == 2, 120)
    one, two = alerts()
    died = next(call for call in world.calls if call.request.body == b"second").answered
    assert died is not None
    assert one.at < died < (one.answered or 0.0)
    assert [msgspec.json.decode(call.request.body)["died"] for call in (one, two)] == [1, 1]


def test_an_alert_about_many_letters_that_are_gone_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver of alerts is down; meanwhile all letters are redriven."""
    world = World(Limited(1))
    hook(world, "t", max_attempts=1, alert={"url": "http://alert/"})
    world.script |= {"http://t/": ["500"], "http://alert/": ["500"]}
    node = world.settle()
    topic = node.ledger.topic("t")
    assert topic is not None
    world.publish("t", *[b"x"] * 600)
    world.until(lambda: topic.dead == 600, 120)
    node.checkpoints.begin()
    world.until(lambda: not node.storage.checkpointing)
    never = {"checkpoint_bytes": 1 << 40, "far_buffer_bytes": 1 << 40, "checkpoint_interval_ms": 1 << 40}
    node.checkpoints.config = msgspec.structs.replace(node.checkpoints.config, **never)
    world.put("t", paused=True)
    world.do(lambda node, done: node.publishing.propose(encode_redrive("n1", "t", [], all=True), done))
    world.until(lambda: topic.dead == 0)
    slices = [0]
    scan = SimBackend.scan

    def counted(backend: SimBackend, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        if table == DEAD:
            slices[-1] += 1
            node.runtime.call_soon(slices.append, 0)
        return scan(backend, table, start, limit)

    before = len(world.calls)
    monkeypatch.setattr(SimBackend, "scan", counted)
    world.script["http://alert/"] = ["200"]
    world.until(lambda: len(world.calls) > before, 120)
    assert msgspec.json.decode(world.calls[-1].request.body)["died"] == 600
    assert sum(slices) > 1
    assert max(slices) == 1


@pytest.mark.parametrize("of", ["pool", "alerts"])
def test_a_new_leader_looks_at_a_few_topics_per_turn_and_at_no_others(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Limited(1))
    for n in range(5):
        hook(world, f"t{n}", max_attempts=1)
        world.script[f"http://t{n}/"] = ["500"]
        world.publish(f"t{n}", b"dies")
        world.put(f"plain{n}")
    node = world.settle()
    world.until(lambda: sum(topic.dead for topic in node.ledger.topics.all) == 5)
    world.run(1)
    part = getattr(world.hooks[node], of)
    turns, on_topic = [set[str]()], part.on_topic

    def counted(topic: TopicState) -> None:
        turns[-1].add(topic.name)
        node.runtime.call_soon(turns.append, set())
        on_topic(topic)

    monkeypatch.setattr(part, "on_topic", counted)
    monkeypatch.setattr(sys.modules[type(part).__module__], "TOPICS_AT_ONCE", 2)
    node.runtime.call_soon(part.on_leader, node.leading)
    world.run(0.1)
    assert set.union(*turns) == {f"t{n}" for n in range(5)}
    assert max(map(len, turns)) == 2


def test_the_health_of_a_receiver() -> None:
    world = World(SimCluster(5))
    world.put("t", webhook={"url": "http://t/", "timeout_ms": 1_000}, backoff=[5_000])
    world.script["http://t/"] = ["503", "503", "200"]
    pool = world.pool()
    world.publish("t", b"x")
    world.until(lambda: len(world.calls) == 2 and world.calls[1].answered)
    number = next(iter(pool.queues))
    found = pool.health(number)
    assert found is not None
    assert (found.calls, found.retries, found.failed, found.status, found.error) == (2, 1, 2, 503, "HTTP 503")
    assert found.error_at_ms - found.failing_since_ms >= 5_000
    world.until(lambda: len(world.calls) == 3 and world.calls[2].answered)
    assert (found.calls, found.retries, found.failed, found.failing_since_ms, found.status) == (3, 2, 0, 0, 200)
    assert found.error == "HTTP 503"
    assert [other.pool.health(number) for other in world.hooks.values() if other.pool is not pool] == [None, None]
    world.put("t", webhook={"url": "http://u/"})
    world.until(lambda: (fresh := pool.health(number)) is not None and not fresh.calls)
