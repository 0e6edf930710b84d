"""Promises about time: nothing early, nothing late, TTL and max_wait (chaos/sim/promises.py has the others)."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.sim.cluster import SimCluster
from chaos.sim.evidence import (
    COLD_MS,
    RATE,
    ROUNDING_MS,
    change_bound_ms,
    ids_of,
    latest,
    lease_began,
    message_of,
    was_cold,
    where,
)
from chaos.sim.history import Message, Violation
from chaos.sim.watch import WATCH_S
from hadelay.ledger.describe import describe
from hadelay.model import KEEP, Event, State
from hadelay.server.node import Node

#: An absolute time is as good as the wall clocks that a majority agreed on.
_SKEW_MS = 250.0
#: So long after the last fault, and the last change of leader, nothing is later than that.
_QUIET_S, _LATE_MS = 2.0, 1_000
#: A TTL that is over is written down within this time, while there is a leader.
_EXPIRES_MS = 3_000


def early(cluster: SimCluster) -> Iterator[Violation]:
    """I9: no message is handed out before its time: not in cluster time (exactly), and, for a delay, not before that
    much true time has passed since the request, nor, for a time of day, before that true time less the skew allowed.
    Once a majority had to start cold again, time came from wall clocks again, which may be off by the skew bound."""
    for h in cluster.history.hand_outs:
        message = message_of(cluster, h)
        if message is None:
            continue
        number = message.number
        cluster.history.count("checked I9 early, cluster time")
        if h.now_ms < h.deliver_at_ms:
            text = f"message {number} handed out {h.deliver_at_ms - h.now_ms} ms early in cluster time"
            yield Violation("I9 early, cluster time", text, frozenset({h.id}))
        if cluster.history.moved(message) or message.max_wait_ms:
            continue
        if message.relative:
            passed_ms = (h.answered - message.invoked) * 1000
            leaders = sum(message.invoked < at < h.answered + WATCH_S for at in cluster.elected)
            short_ms = message.when_ms - passed_ms * (1 + RATE) - ROUNDING_MS - change_bound_ms(cluster) * leaders
        else:
            short_ms = message.when_ms - _SKEW_MS - (cluster.world.epoch_ms + h.answered * 1000)
        if was_cold(cluster, h.answered):
            short_ms -= COLD_MS
        kind = "delay" if message.relative else "time of day"
        cluster.history.count(f"checked I9 early, {kind}")
        if short_ms > 0:
            text = f"message {number} ({kind} {message.when_ms}) handed out {short_ms:.1f} ms early, t={h.answered:.4f}"
            yield Violation(f"I9 early, {kind}", text, frozenset({h.id}))


def clock_runs_true(cluster: SimCluster) -> Iterator[Violation]:
    """I9, its cause: between any two committed entries cluster time advances no faster than slew and drift allow (until
    a majority has to start cold)."""
    least: tuple[float, int] | None = None
    change_ms = change_bound_ms(cluster)
    for at, now_ms in sorted(cluster.stamps):
        if was_cold(cluster, at):
            return
        lead_ms = now_ms - at * 1000 * (1 + RATE)
        cluster.history.count("checked I9 early, clock")
        # A leader is seen up to WATCH_S after it began.
        leaders = sum(t <= at + WATCH_S for t in cluster.elected)
        if least is not None and lead_ms - least[0] > 2 * ROUNDING_MS + change_ms * (leaders - least[1]):
            text = f"cluster time ran {lead_ms - least[0]:.1f} ms ahead between two entries, now {now_ms}, t={at:.4f}"
            yield Violation("I9 early, clock", text)
            return
        if least is None or lead_ms < least[0]:
            least = (lead_ms, sum(t <= at for t in cluster.elected))


def late(cluster: SimCluster) -> Iterator[Violation]:
    """I10: some seconds after the last fault and the last change of leader, what falls due is handed out within a
    second: consumers ask all the time, for all topics. Unless the topic was slowed down meanwhile."""
    quiet = max([cluster.healed_at, *cluster.elected]) + _QUIET_S
    for h in cluster.history.hand_outs:
        message = message_of(cluster, h)
        if cluster.history.slowed and message is not None and message.topic == cluster.workload.limited:
            continue
        late_ms = h.now_ms - h.deliver_at_ms
        if h.attempt == 1 and not h.redelivered and h.answered - late_ms / 1000 > quiet:
            cluster.history.count("checked I10 late")
            if late_ms > _LATE_MS:
                yield Violation("I10 late", f"{h.id:x} handed out {late_ms} ms late", frozenset({h.id}))


def in_time(cluster: SimCluster) -> Iterator[Violation]:
    """TTL: nothing is leased once its time is over (in commit mode, where apply decides), nor ends before."""
    history, nodes = cluster.history, latest(cluster)
    for h in history.hand_outs if cluster.sync == "commit" else ():
        message, (_, begun_ms) = message_of(cluster, h), lease_began(cluster, h)
        over_ms = _over_ms(cluster, message, h.id) if message is not None else None
        if over_ms is not None:
            history.count("checked TTL, leased")
            if begun_ms >= over_ms:
                text = f"{h.id:x} leased {begun_ms - over_ms} ms after its end"
                yield Violation("TTL, leased", text, frozenset({h.id}))
    for message in history.messages if nodes else ():
        over_ms = None if message.id is None else _over_ms(cluster, message, message.id)
        place, state = where(nodes[0], message.id or 0) if over_ms is not None else (None, "")
        if over_ms is not None and place is not None and state == State.EXPIRED:
            behind_ms = nodes[0].ledger.now_ms - over_ms
            history.count("checked TTL, written", behind_ms > _EXPIRES_MS)
            if (
                behind_ms > _EXPIRES_MS
                and nodes[0].ledger.outcome_of(place.hour, int(place.rows["index"][0]))[0] is None
            ):
                text = f"{message.id:x} is over for {behind_ms} ms, and nobody wrote that down"
                yield Violation("TTL, written", text, ids_of(message))
            description = describe(nodes[0].ledger, message.id or 0)
            ended = description.history[-1:] if description is not None else []
            for end in ended if ended and ended[0].event is Event.TTL_EXPIRED else ():
                history.count("checked TTL, ended")
                if end.at_ms < over_ms:
                    yield Violation(
                        "TTL, ended", f"{message.id:x} ended {over_ms - end.at_ms} ms early", ids_of(message)
                    )


def _over_ms(cluster: SimCluster, message: Message, message_id: int) -> int | None:
    """When its TTL is over; None if it has none, if its id may be another message's, which was kept, or if nobody knows
    which time it was given last."""
    if not message.ttl_ms or message.id != message_id or message.deliver_at_ms is None:
        return None
    kept = message.client_key is not None and message.on_conflict == KEEP
    history = cluster.history
    unsure = message.unsure or (message.topic, message.client_key) in history.moved_keys
    moved = unsure or history.meant("redrive", message, message_id)
    return None if kept or moved else message.deliver_at_ms + message.ttl_ms


def debounced(cluster: SimCluster) -> Iterator[Violation]:
    """max_wait: of messages that replaced one another none is due later than that after the first was published, or
    after one of them was redriven: then it begins anew."""
    by_id = {m.id: m for m in cluster.history.messages if m.id is not None and m.replaces is not None}
    for node in latest(cluster):
        for message in cluster.history.messages:
            if message.id is None or not message.max_wait_ms or cluster.history.moved(message):
                continue
            published_ms = _published_ms(node, message.id)
            chain = [message.id]
            while (replaced := by_id[chain[-1]].replaces if chain[-1] in by_id else None) is not None:
                chain.append(replaced)
            began_ms = max((_published_ms(node, chain[-1]) or 0, *(_redriven_ms(node, one) for one in chain)))
            if published_ms is None or not began_ms or message.deliver_at_ms is None:
                continue
            cluster.history.count("checked max_wait")
            if message.deliver_at_ms > max(began_ms + message.max_wait_ms, published_ms):
                text = f"message {message.number} is due {message.deliver_at_ms - began_ms} ms after its chain began"
                yield Violation("max_wait", text, ids_of(message))


def _published_ms(node: Node, message_id: int) -> int | None:
    description = describe(node.ledger, message_id)
    return None if description is None else description.published_at_ms


def _redriven_ms(node: Node, message_id: int) -> int:
    """0: never."""
    description = describe(node.ledger, message_id)
    history = description.history if description is not None else []
    return max((one.at_ms for one in history if one.event is Event.REDRIVEN), default=0)
