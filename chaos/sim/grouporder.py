"""Checks G2 to G6 of message groups (docs/spec/lifecycle.md), in runs with message groups. Check G1 is in
chaos/sim/groupcheck.py."""

from collections import defaultdict
from itertools import pairwise

from chaos.sim.cluster import SimCluster
from chaos.sim.evidence import RATE, ahead_ms, lease_began, took_effect
from chaos.sim.history import HandOut, Message
from hadelay.ledger.groups.messagegroups import GROUP, is_live, unpack_group


def _by_group(cluster: SimCluster) -> dict[str, list[tuple[HandOut, Message]]]:
    """Message group → hand-outs of its messages, in order of time; only of the topic whose groups are checked."""
    found: dict[str, list[tuple[HandOut, Message]]] = defaultdict(list)
    for h in sorted(cluster.history.hand_outs, key=lambda h: h.answered):
        message = cluster.history.message_of(h.body)
        if message is not None and message.group is not None and message.topic == cluster.workload.in_order:
            found[message.group].append((h, message))
    return found


def groups_apart(cluster: SimCluster) -> None:
    """G2: at most `group_concurrency` messages of one group are leased at the same time. With 1, messages of one grant
    count as one message (G6 checks their number)."""
    most = cluster.workload.group_concurrency
    for group, hand_outs in _by_group(cluster).items():
        until: dict[tuple[int, int], float] = {}
        for h, _ in hand_outs:  # use the earliest end: a repeated receive gets the same lease again
            lease = h.id, h.attempt
            until[lease] = min(_leased_until(cluster, h), until.get(lease, float("inf")))
        for h, _ in hand_outs:
            at = took_effect(cluster, h)
            running = (other for other, _ in hand_outs if took_effect(cluster, other) <= at)
            leased = {
                other.id
                for other in running
                if at < until[other.id, other.attempt] and not (most == 1 and _together(h, other))
            }
            text = f"{sorted(f'{i:x}' for i in leased)} of group {group} are leased at once, t={at:.4f}"
            cluster.history.decide("G2 groups apart", len(leased | {h.id}) > most, text, *leased)


def _together(one: HandOut, other: HandOut) -> bool:
    return (one.term, one.seq) == (other.term, other.seq)


def _leased_until(cluster: SimCluster, h: HandOut) -> float:
    """True time until which the lease of a hand-out certainly lasted: no request had settled or extended it, and it had
    not run out."""
    left_s = (h.until_ms - h.now_ms) / 1000 * (1 - RATE)
    asked = [at for at in (h.ack_invoked, h.nack_invoked, h.extend_invoked) if at is not None]
    end = min([h.answered + left_s, *asked])
    return end - ahead_ms(cluster, h.answered, end) / 1000


def groups_in_order(cluster: SimCluster) -> None:
    """G3: with `group_concurrency` 1, a message is leased only after all messages of its group with both an earlier
    publish and an earlier due time have ended, or are leased in front of it by the same grant."""
    history = cluster.history
    if cluster.workload.group_concurrency != 1:
        return
    moved = history.moved_keys | history.cancelled_keys
    for group, hand_outs in _by_group(cluster).items():
        members = [
            m
            for m in history.messages
            if m.group == group and m.topic == cluster.workload.in_order and m.deliver_at_ms is not None
            and m.id is not None and not (history.moved(m) or m.unsure or m.ttl_ms or m.cancel_invoked is not None)
            and not history.meant("job cancel", m, m.id)
            and (m.client_key is None or (m.topic, m.client_key) not in moved)
            and not history.may_be_replaced(m, m.id) and history.own_id(m)
        ]  # fmt: skip
        acked: dict[int, float] = {}
        for h, _ in hand_outs:
            if h.ack_invoked is not None:
                acked[h.id] = min(h.ack_invoked, acked.get(h.id, h.ack_invoked))
        places = {(h.id, h.term, h.seq): h.position for h, _ in hand_outs}
        for h, message in hand_outs:
            if message not in members:
                continue
            began = lease_began(cluster, h)[0]
            for other in members:
                before = (other.deliver_at_ms or 0, other.id or 0) < (message.deliver_at_ms or 0, message.id or 0)
                if before and other.stored is not None and other.stored < began:
                    text = f"{h.id:x} of group {group} is leased before {other.id:x} has ended"
                    in_front = places.get((other.id or 0, h.term, h.seq), h.position) < h.position
                    overtaken = acked.get(other.id or 0, began + 1) > h.answered and not in_front
                    history.decide("G3 groups in order", overtaken, text, h.id, other.id)


def groups_in_runs(cluster: SimCluster) -> None:
    """G6: with `group_concurrency` 1, a grant has as many messages of one group as its receive asked for, or fewer."""
    if cluster.workload.group_concurrency != 1:
        return
    for group, hand_outs in _by_group(cluster).items():
        grants: dict[tuple[int, int], set[int]] = defaultdict(set)
        for h, _ in hand_outs:
            grants[h.term, h.seq].add(h.id)
        for h, _ in hand_outs:
            ids = grants[h.term, h.seq]
            text = f"{len(ids)} messages of group {group} are leased together, not {h.group_max}, t={h.answered:.4f}"
            cluster.history.decide("G6 groups in runs", len(ids) > h.group_max, text, *ids)
            cluster.history.count("runs of groups", len(ids) > 1)


def groups_in_pace(cluster: SimCluster) -> None:
    """G5: hand-outs of one group are at least an interval of 1 / `group_rate` apart in cluster time, also over changes
    of leader."""
    rate, rated = cluster.workload.group_rate, cluster.history.rated
    if not rate or rated is None:
        return
    for group, hand_outs in _by_group(cluster).items():
        leases: dict[tuple[int, int, int], tuple[int, float, int]] = {}
        for h, _ in hand_outs:  # a repeated receive gets the same lease again, which counts once
            at, stamp_ms = lease_began(cluster, h)
            # Messages are granted up to 100 ms ahead, and handed out when they are due.
            leases[h.term, h.seq, h.id] = max(stamp_ms, h.deliver_at_ms), at, h.id
        began = sorted(lease for lease in leases.values() if lease[1] >= rated)
        for (first_ms, _, first), (next_ms, at, other) in pairwise(began):
            text = f"{other:x} of group {group} is leased {next_ms - first_ms} ms after {first:x}, t={at:.4f}"
            cluster.history.decide("G5 groups in pace", next_ms - first_ms < 1000 / rate, text, first, other)


def groups_released(cluster: SimCluster) -> None:
    """G4: after all faults are healed, no group has a blocked message while it may hand out one more; and no leader's
    own search over the groups has found such a group."""
    for node in cluster.nodes():
        wrong = node.delivery.groups.wrong if node.leading else 0
        cluster.history.decide("G4 groups released", wrong > 0, f"{node.name} found {wrong} groups", who=node.name)
        for key, stored in node.ledger.tables.range(GROUP, b"", None, 1 << 30):
            group = unpack_group(stored)
            text = f"{node.name}: {group.blocked} messages of group {key.hex()} wait behind {group.heads}"
            stuck = group.blocked > 0 and len(group.heads) < group.limit and is_live(node.ledger, key)
            cluster.history.decide("G4 groups released", stuck, text, who=node.name)
