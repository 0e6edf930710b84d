"""Check of a leader's counters in memory: each counter equals the number of objects that it counts. For tests and the
simulator. A counter that is not lowered would stop hand-outs only after hours or days, which no run waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadelay.handout.deadlines import Deadlines, K
from hadelay.handout.dispatcher import Dispatcher
from hadelay.handout.queues import TopicTurn
from hadelay.server.delivery.loop import DeliveryLoop

if TYPE_CHECKING:
    from hadelay.server.node import Node

#: Longest delay, in ms, until an EXPIRE is proposed again after a failure, with a margin for a busy event loop.
_REPEATED_MS = 200


def check(core: Dispatcher) -> None:
    """Check the counters of the hand-out. Raises AssertionError with the first wrong counter. Call this only between
    two events of the event loop."""
    windows, waiting, rests = core.windows, core.waiting, core.matcher.rests
    topics = list(windows.by_name.values())
    resting = sum(len(topic.group_rate.resting) for topic in topics if topic.group_rate is not None)
    assert rests.size == resting, f"{rests.size} entries rest, and {resting} are found"
    entries = sum(len(window.entries) for topic in topics for window in topic.windows())
    assert windows.size == entries + resting, f"windows count {windows.size} entries, not {entries} + {resting}"
    offered = sum(topic.in_flight for topic in topics)
    in_flight = len(windows.in_flight)
    assert in_flight == offered + resting, f"{in_flight} entries are in flight, and topics count {offered} + {resting}"
    named = sum(len(poll.topics) for poll in waiting.queues)
    assert waiting.named == named, f"polls name {waiting.named} topics, not {named}"
    filters = sum(len(topic.filtered) for topic in topics)
    assert waiting._filters == filters, f"{waiting._filters} filters, not {filters}"
    for poll, queues in waiting.queues.items():
        assert all(poll in queue.waiters for queue in queues), f"{poll.consumer} does not wait where it is said to"
    waiters = sum(len(queue.waiters) for topic in topics for queue in topic.queues())
    assert waiters == sum(map(len, waiting.queues.values())), f"{waiters} waiters are in queues"
    assert set(waiting.deadlines) == set(waiting.queues), "polls wait without a timeout, or time out without waiting"
    idle = {queue for topic in topics for queue in topic.filtered.values() if not queue.waiters}
    assert set(waiting.idle) == idle, f"{len(waiting.idle)} queues with a filter count as idle, and {len(idle)} are"
    for topic in topics:
        _check_turn(topic)


def _check_turn(topic: TopicTurn) -> None:
    """Check that each queue with waiting receives and ready messages is in line for hand-outs, unless a limit of its
    topic stops it."""
    for queue in topic.queues():
        if queue.can_go:
            assert queue in topic.turns, f"a queue of {topic.name} has polls and messages, and no turn"
            assert topic.active or topic.cause, f"{topic.name} has polls and messages, and no turn"


def check_node(node: Node) -> None:
    """Check the counters of a node that leads: those of its hand-out, of its group commit, and of the topics that
    consumers ask for."""
    delivery, commit = node.delivery, node.group_commit
    if delivery._grants is not None:
        check(delivery._grants.core)
    assert commit.inflight == len(commit._sent), f"{commit.inflight} batches in flight, not {len(commit._sent)}"
    publishing = sum(batch.publishes > 0 for batch in commit._sent)
    assert commit._publishing == publishing, f"{commit._publishing} batches with publishes, not {publishing}"
    asked = sum(len(topics) for _, topics in delivery.askers._asked)
    assert delivery.askers._names == asked, f"consumers name {delivery.askers._names} topics, not {asked}"


def _time_of(deadlines: Deadlines[K], key: K) -> float | None:
    known = deadlines._live.get(key)
    return None if known is None else known[0]


def check_leases(delivery: DeliveryLoop) -> None:
    """Check that a leader looks at each grant when its first lease ends, or when a failed EXPIRE is repeated."""
    expiry = delivery._expiry
    if expiry._proposed:
        return
    latest_ms = delivery._now() + _REPEATED_MS
    for key, grant in delivery.ledger.grants.items():
        until_ms = grant.next_until_ms()
        at_ms = _time_of(expiry._leases, key)
        assert at_ms is not None, f"the leader never looks at the leases of grant {key}, which end at {until_ms}"
        assert at_ms <= max(until_ms, latest_ms), f"the leases of grant {key} end at {until_ms}, not {at_ms:.0f}"
