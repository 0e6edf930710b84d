"""Checks of the promises about time: no early and no late hand-outs, TTL, and max_wait. chaos/sim/promises.py has
checks of other promises."""

from chaos.sim import evidence
from chaos.sim.cluster import SimCluster
from chaos.sim.history import Message
from chaos.sim.machines import WATCH_S
from hadelay.ledger.views.describe import describe
from hadelay.model import KEEP, NEVER_MS, Event, State
from hadelay.server.node import Node

#: Tolerance of absolute times, in ms: the difference of the wall clocks that a majority accepts.
_SKEW_MS = 250.0
#: `_QUIET_S`: seconds after the last fault or change of leader during which lateness is not checked. `_LATE_MS`:
#: largest lateness allowed afterwards, in ms.
_QUIET_S, _LATE_MS = 2.0, 1_000
#: Time, in ms, within which the end of a TTL has to be written to the log while there is a leader.
_EXPIRES_MS = 3_000


def early(cluster: SimCluster) -> None:
    """I9: no message is handed out before its due time in cluster time. By true time: none before its delay has passed
    since the request, or before its absolute time less the skew bound. After a cold start of a majority, cluster time
    comes from the wall clocks, and may be off by the skew bound, too."""
    history = cluster.history
    for h in history.hand_outs:
        message = history.message_of(h.body)
        if message is None:
            continue
        number, early_ms = message.number, h.deliver_at_ms - h.now_ms
        text = f"message {number} handed out {early_ms} ms early in cluster time"
        history.decide("I9 early, cluster time", early_ms > 0, text, h.id)
        if history.moved(message) or message.max_wait_ms:
            continue
        if message.relative:
            passed_ms = (h.answered - message.invoked) * 1000
            ahead_ms = evidence.ahead_ms(cluster, message.invoked, h.answered)
            short_ms = message.when_ms - passed_ms * (1 + evidence.RATE) - ahead_ms
        else:
            short_ms = message.when_ms - _SKEW_MS - (cluster.world.epoch_ms + h.answered * 1000)
            short_ms -= evidence.COLD_MS if evidence.was_cold(cluster, h.answered) else 0.0
        kind = "delay" if message.relative else "time of day"
        text = f"message {number} ({kind} {message.when_ms}) handed out {short_ms:.1f} ms early, t={h.answered:.4f}"
        history.decide(f"I9 early, {kind}", short_ms > 0, text, h.id)


def clock_runs_true(cluster: SimCluster) -> None:
    """I9, clock: from one committed entry to the next, cluster time advances no faster than true time plus slewing and
    drift allow. The check ends at a cold start of a majority."""
    least: tuple[float, int] | None = None
    change_ms = evidence.change_bound_ms(cluster)
    for at, now_ms in sorted(cluster.stamps):
        if evidence.was_cold(cluster, at):
            return
        lead_ms = now_ms - at * 1000 * (1 + evidence.RATE)
        if least is not None:
            # Include leaders noticed up to WATCH_S after this entry: `elected` has the times at which leaders were
            # noticed, which may be that much later than their elections.
            leaders = sum(t <= at + WATCH_S for t in cluster.elected) - least[1]
            gained_ms = lead_ms - least[0]
            text = f"cluster time ran {gained_ms:.1f} ms ahead between two entries, now {now_ms}, t={at:.4f}"
            broken = gained_ms > 2 * evidence.ROUNDING_MS + change_ms * leaders
            cluster.history.decide("I9 early, clock", broken, text)
        if least is None or lead_ms < least[0]:
            least = (lead_ms, sum(t <= at for t in cluster.elected))


def late(cluster: SimCluster) -> None:
    """I10: when the last fault and the last change of leader are some seconds ago, due messages are handed out within a
    second, because consumers poll all topics all the time. The lateness of a message that its group blocks counts from
    when the group lets it go. A topic that was slowed down is exempt."""
    history, quiet = cluster.history, max([cluster.healed_at, *cluster.elected]) + _QUIET_S
    for h in history.hand_outs:
        message = history.message_of(h.body)
        if history.slowed and message is not None and message.topic == cluster.workload.limited:
            continue
        late_ms = h.now_ms - max(h.deliver_at_ms, cluster.unblocked_ms.get(h.id, 0))
        if h.attempt == 1 and not h.redelivered and h.answered - late_ms / 1000 > quiet:
            history.decide("I10 late", late_ms > _LATE_MS, f"{h.id:x} handed out {late_ms} ms late", h.id)


def in_time(cluster: SimCluster) -> None:
    """TTL: no message is leased after the end of its TTL (checked in commit mode only), and no message expires before
    that end."""
    history = cluster.history
    for h in history.hand_outs if cluster.sync == "commit" else ():
        message, (_, begun_ms) = history.message_of(h.body), evidence.lease_began(cluster, h)
        over_ms = _over_ms(cluster, message, h.id) if message is not None else None
        if over_ms is not None:
            text = f"{h.id:x} leased {begun_ms - over_ms} ms after its end"
            history.decide("TTL, leased", begun_ms >= over_ms, text, h.id)
    for node in evidence.latest(cluster):
        for message in history.messages:
            over_ms = None if message.id is None else _over_ms(cluster, message, message.id)
            if message.id is not None and over_ms is not None:
                _expired(cluster, node, message.id, over_ms)


def _expired(cluster: SimCluster, node: Node, message_id: int, over_ms: int) -> None:
    """Check that the expiry of a message is in the log soon after the end of its TTL, and not before."""
    place, state = evidence.where(node, message_id)
    if place is None or state != State.EXPIRED:
        return
    behind_ms = node.ledger.now_ms - over_ms
    if behind_ms > _EXPIRES_MS:
        unwritten = node.ledger.outcome_of(place.hour, int(place.rows["index"][0]))[0] is None
        text = f"{message_id:x} reached the end of its TTL {behind_ms} ms ago, and no expiry is in the log"
        cluster.history.decide("TTL, written", unwritten, text, message_id)
    for end in _ended_ms(node, message_id, Event.TTL_EXPIRED)[-1:]:
        text = f"{message_id:x} ended {over_ms - end} ms early"
        cluster.history.decide("TTL, ended", end < over_ms, text, message_id)


def _over_ms(cluster: SimCluster, message: Message, message_id: int) -> int | None:
    """End of the message's TTL in cluster time; None without a TTL, if the publish may have returned the id of a
    pending message with the same client key, or if the message's due time is uncertain."""
    if not message.ttl_ms or message.id != message_id or message.deliver_at_ms is None:
        return None
    kept = message.client_key is not None and message.on_conflict == KEEP
    history = cluster.history
    unsure = message.unsure or (message.topic, message.client_key) in history.moved_keys
    moved = unsure or history.meant("redrive", message, message_id) or history.meant("job move", message, message_id)
    return None if kept or moved else message.deliver_at_ms + message.ttl_ms


def debounced(cluster: SimCluster) -> None:
    """max_wait: a message that replaced others under one client key is due at most max_wait after the first publish of
    the series, or after its last redrive."""
    history = cluster.history
    replaced = {m.id: m.replaces for m in history.messages if m.id is not None and m.replaces is not None}
    for node in evidence.latest(cluster):
        for message in history.messages:
            if message.id is None or not message.max_wait_ms or history.moved(message):
                continue
            if message.deliver_at_ms in (None, NEVER_MS):  # a restored cluster may not know the due time
                continue
            published_ms = evidence.published_ms(node, message.id)
            chain = [message.id]
            while chain[-1] in replaced:
                chain.append(replaced[chain[-1]])
            redriven_ms = [at for one in chain for at in _ended_ms(node, one, Event.REDRIVEN)]
            began_ms = max(evidence.published_ms(node, chain[-1]), *redriven_ms, 0)
            if published_ms and began_ms:
                text = f"message {message.number} is due {message.deliver_at_ms - began_ms} ms after its chain began"
                broken = message.deliver_at_ms > max(began_ms + message.max_wait_ms, published_ms)
                history.decide("max_wait", broken, text, message.id)


def _ended_ms(node: Node, message_id: int, event: Event) -> list[int]:
    """Times, in Unix ms, of all events of one type in a message's history."""
    description = describe(node.ledger, message_id)
    return [] if description is None else [one.at_ms for one in description.history if one.event is event]
