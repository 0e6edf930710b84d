"""What /metrics shows of real nodes, and what a label attack costs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.api.service import Histogram, Values
from hadelay.handout.polls import Delivery, Poll
from hadelay.http.metrics import FAMILIES as HTTP_FAMILIES
from hadelay.http.metrics import lines
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import Draft, Event
from hadelay.server.metrics import FAMILIES, OTHER, NodeMetrics
from hadelay.server.node import Node
from hadelay.server.webhooks.calls import CallRequest, Done, Reply
from hadelay.server.webhooks.pool import Pool, Webhooks
from hadelay.settings.node import Config, LimitsConfig
from tests.server.test_lost_disks import wait_for_leader

ALL = [*FAMILIES.values(), *HTTP_FAMILIES]
#: https://prometheus.io/docs/practices/naming/, as promtool's linter has it.
UNITS = {"seconds", "bytes"}
OTHER_UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|kib|mib|kilobytes|megabytes|percent)(_|$)")


def never(request: CallRequest, done: Done) -> None:
    """A caller that is not called."""
    raise AssertionError


def collect(metrics: NodeMetrics) -> tuple[dict[str, Values], int]:
    """(values by name, how many slices it took)"""
    slices, count = metrics.collect(), 1
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return {family.name.removeprefix("hadelay_"): values for family, values in end.value}, count
        count += 1


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_names_are_by_the_rules(family: Any) -> None:
    name = family.name
    assert re.fullmatch(r"(hadelay|process)_[a-z]+(_[a-z0-9]+)*", name)
    assert name.endswith("_total") == (family.kind == "counter")
    assert not OTHER_UNITS.search(name)
    assert not re.search(r"_(count|sum|bucket|counter|gauge|histogram)$", name)
    if family.kind == "histogram":
        assert name.rpartition("_")[2] in UNITS
    assert family.help
    assert not family.help.endswith(".")
    assert all(re.fullmatch("[a-z]+", label) and label not in ("le", "instance", "job") for label in family.labels)


def test_names_are_not_given_twice() -> None:
    assert len({family.name for family in ALL}) == len(ALL)


def publish(cluster: SimCluster, node: Node, topics: list[str], delay_ms: int = 0) -> None:
    answers: list[Any] = []
    drafts = [Draft(topic, delay_ms, True, 0, 0, b"", b"x" * 100) for topic in topics]
    node.publishing.publish(drafts, None, lambda result, error: answers.append(error))
    cluster.world.run_until(cluster.world.now + 5, stop=lambda: bool(answers))
    assert answers == [None]


def receive(cluster: SimCluster, node: Node, topic: str, most: int) -> Delivery:
    answers: list[Any] = []
    poll = Poll("me", b"1", (topic,), most, 30_000, 5_000, lambda delivery, error: answers.append(delivery))
    node.delivery.poll(poll)
    cluster.world.run_until(cluster.world.now + 6, stop=lambda: bool(answers))
    (delivery,) = answers
    assert isinstance(delivery, Delivery)
    return delivery


def test_the_metrics_of_a_cluster() -> None:
    cluster = SimCluster(3, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.0)
    leader = cluster.leader()
    assert leader is not None
    publish(cluster, leader, ["orders"] * 3 + ["trips"])
    publish(cluster, leader, ["orders"], delay_ms=3_600_000)
    cluster.world.run_for(2.0)
    receive(cluster, leader, "orders", 1)
    follower = next(node for node in cluster.nodes() if node is not leader)
    for snapshot in ("1-good", "2-bad"):
        follower.logbook.backup_began(snapshot, follower.now_ms(), 9)
        follower.logbook.backup_ended(snapshot, complete=snapshot == "1-good")
        cluster.world.run_for(2.5)
    values, _ = collect(NodeMetrics(leader, Webhooks(leader, never)))
    assert set(values) == set(FAMILIES)
    assert isinstance(values["backup_age_seconds"], float)
    assert 4.5 < values["backup_age_seconds"] < 5.5, "every node is told of each node's backups"
    assert values["messages"] == {("waiting",): 4, ("blocked",): 0, ("leased",): 1, ("dead",): 0}
    assert (values["ready_messages"], values["topics"], values["published_messages_total"]) == (3, 2, 5)
    assert isinstance(values["oldest_ready_age_seconds"], float)
    assert 6 < values["oldest_ready_age_seconds"] < 9
    states = values["topic_messages"]
    assert isinstance(states, dict)
    assert [states["orders", state] for state in ("scheduled", "ready", "leased", "dead")] == [1, 2, 1, 0]
    late = values["topic_lateness_seconds"]
    assert isinstance(late, dict)
    assert 1 < late["orders", "0.5"] <= late["orders", "0.99"] < 5
    assert ("trips", "0.5") not in late
    assert (values["raft_is_leader"], values["raft_has_leader"], values["clock_ready"]) == (1, 1, 1)
    skews, peers = values["clock_skew_seconds"], values["raft_peer_up"]
    assert isinstance(skews, dict)
    assert set(skews) == {("n1",), ("n2",), ("n3",)}
    assert all(abs(skew) < 0.2 for skew in skews.values())
    assert isinstance(peers, dict)
    assert sorted(peers.values()) == [1, 1]
    for name in ("delivery_lateness_seconds", "commit_duration_seconds", "log_fsync_duration_seconds"):
        histogram = values[name]
        assert isinstance(histogram, Histogram)
        assert sum(histogram.counts) > 0, name


def test_the_delay_of_schedules_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimCluster(3, names=("n1",), restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    (node,) = cluster.nodes()
    monkeypatch.setattr(node.delivery, "schedule_delay_ms", lambda: 1_500)
    values, _ = collect(NodeMetrics(node, Webhooks(node, never)))
    assert values["schedule_delay_seconds"] == 1.5


def test_a_follower_shows_what_is_the_clusters_and_nothing_of_topics() -> None:
    cluster = SimCluster(4, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.0)
    leader = cluster.leader()
    assert leader is not None
    publish(cluster, leader, ["orders"] * 3)
    cluster.world.run_for(1.0)
    follower = next(node for node in cluster.nodes() if node is not leader)
    values, _ = collect(NodeMetrics(follower, Webhooks(follower, never)))
    assert values["messages"] == {("waiting",): 3, ("blocked",): 0, ("leased",): 0, ("dead",): 0}
    absent = {
        "ready_messages", "oldest_ready_age_seconds", "oldest_blocked_age_seconds", "groups_wrong",
        "raft_peer_lag_entries", "raft_peer_rtt_seconds", "backup_age_seconds", "attention",
    }  # fmt: skip
    assert set(FAMILIES) - set(values) == absent | {name for name in FAMILIES if name.startswith("topic_")}


# ---- many topics


class Crowd:
    """A leader with many topics, and a clock that runs a microsecond per look."""

    def __init__(self, topics: int, shown: int) -> None:
        self.cluster = cluster = SimCluster(5, names=("n1",), restart=False)
        cluster.start_all()
        wait_for_leader(cluster)
        leader = cluster.leader()
        assert leader is not None
        self.node = leader
        all_topics = leader.ledger.topics
        for number in range(topics):
            topic = TopicState(number, f"topic-{number}", published=number % 10, open=number % 10, bytes=100)
            topic.settled[Event.ACKED] = 1
            all_topics.add(topic)
        limits = LimitsConfig(metrics_topics=shown)
        leader.config = Config(node=leader.config.node, limits=limits)
        self.metrics = NodeMetrics(leader)

    def series(self) -> dict[str, dict[tuple[str, ...], float]]:
        values, self.slices = collect(self.metrics)
        return {name: v for name, v in values.items() if name.startswith("topic_") and isinstance(v, dict)}


def names(series: dict[str, dict[tuple[str, ...], float]], family: str) -> set[str]:
    return {labels[0] for labels in series[family]}


def test_the_busiest_have_series_of_their_own_and_the_others_are_one() -> None:
    crowd = Crowd(2_000, 50)
    series = crowd.series()
    busiest = {f"topic-{number}" for number in range(9, 500, 10)}
    assert names(series, "topic_published_messages_total") == busiest
    assert names(series, "topic_messages") == busiest | {OTHER}
    assert series["topic_messages"][OTHER, "scheduled"] == sum(n % 10 for n in range(2_000)) - 50 * 9
    assert series["topic_pending_bytes"][OTHER,] == 100 * 1_950
    assert sum(len(rows) for rows in series.values()) < 51 * 14


def test_a_topic_in_the_metrics_stays_until_it_is_deleted() -> None:
    crowd = Crowd(100, 3)
    before = names(crowd.series(), "topic_published_messages_total")
    assert before == {"topic-9", "topic-19", "topic-29"}
    topics = crowd.node.ledger.topics
    topics[50].published = 1_000_000
    assert names(crowd.series(), "topic_published_messages_total") == before
    topics[19].exists = False
    assert names(crowd.series(), "topic_published_messages_total") == {"topic-9", "topic-29"}
    assert names(crowd.series(), "topic_published_messages_total") == {"topic-9", "topic-29", "topic-50"}


@pytest.mark.parametrize("shown", [0, 100, 1_000])
def test_all_are_shown_when_there_is_room(shown: int) -> None:
    crowd = Crowd(100, shown)
    found = names(crowd.series(), "topic_messages")
    assert found == ({f"topic-{n}" for n in range(100)} if shown else {OTHER})


def test_topics_are_summed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(1_000, 1_000)
    crowd.series()
    # A look at the clock is 1 ms later than the one before.
    now = iter(range(1_000_000))
    runtime = crowd.node.runtime
    monkeypatch.setattr(runtime, "monotonic", lambda: next(now) / 1000)
    crowd.series()
    # Two times 1,000 topics, 32 at a time; every third look is 2 ms after the yield before.
    assert crowd.slices > 2 * 1_000 // 32 // 3


def test_a_histogram_is_written_cumulative() -> None:
    histogram = Histogram.of((0.5, 1.0))
    for value in (0.5, 0.6, 7.0):
        histogram.observe(value)
    name = FAMILIES["commit_duration_seconds"]
    assert "".join(lines(name, histogram)).splitlines()[2:] == [
        'hadelay_commit_duration_seconds_bucket{le="0.5"} 1',
        'hadelay_commit_duration_seconds_bucket{le="1.0"} 2',
        'hadelay_commit_duration_seconds_bucket{le="+Inf"} 3',
        "hadelay_commit_duration_seconds_sum 8.1",
        "hadelay_commit_duration_seconds_count 3",
    ]


def test_a_histogram_that_grows_while_it_is_written_adds_up() -> None:
    histogram = Histogram.of((0.5, 1.0))
    text = ""
    for part in lines(FAMILIES["commit_duration_seconds"], histogram):
        text += part
        histogram.observe(0.1)
    values = [line.split()[1] for line in text.splitlines()[2:] if "_sum" not in line]
    assert len(set(values)) == 1


def test_webhook_outcomes_are_few() -> None:
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    cluster.world.run_for(1.0)
    pool = Pool(cluster.nodes()[0], never)
    for number in range(100):
        pool._count(Reply(0, f"certificate {number} is wrong", None, 0.1))
    assert len(pool.outcomes) <= 33
    assert sum(pool.outcomes.values()) == sum(pool.durations.counts) == 100


def test_a_family_of_many_rows_comes_in_parts() -> None:
    awkward = 'a"b\\c\nd'
    values = {(f"topic-{n}" if n else awkward,): n / 2 for n in range(1_000)}
    parts = list(lines(FAMILIES["topic_pending_bytes"], values))
    rows = "".join(parts).splitlines()
    assert rows[2] == r'hadelay_topic_pending_bytes{topic="a\"b\\c\nd"} 0.0'
    assert rows[3:] == [f'hadelay_topic_pending_bytes{{topic="topic-{n}"}} {n / 2}' for n in range(1, 1_000)]
    assert len(parts) > 5


def test_a_family_that_changes_between_two_parts_is_written_as_it_was() -> None:
    values = {(f"topic-{n}",): 0.0 for n in range(500)}
    parts = lines(FAMILIES["topic_pending_bytes"], values)
    text = next(parts) + next(parts)
    values["another",] = 1.0
    text += "".join(parts)
    assert text.count("\nhadelay_topic_pending_bytes{") == 500
