"""Promises about leases: who holds a message, and for how long (chaos/sim/promises.py has the others)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from chaos.sim.cluster import SimCluster
from chaos.sim.evidence import (
    COLD_MS,
    RATE,
    ROUNDING_MS,
    change_bound_ms,
    lease_began,
    message_of,
    was_cold,
)
from chaos.sim.history import HandOut, Message, Violation
from chaos.sim.watch import WATCH_S
from hadelay.server.webhooks.pool import CONSUMER


def resurrected(cluster: SimCluster) -> Iterator[Violation]:
    """I5: nothing is handed out after an ack of it was answered yes."""
    acked: dict[int, float] = {}
    for h in cluster.history.hand_outs:
        if h.acked is not None:
            acked[h.id] = min(h.acked, acked.get(h.id, h.acked))
    cluster.history.count("checked I5 resurrection", len(acked))
    for h in cluster.history.hand_outs:
        if h.answered > acked.get(h.id, h.answered):
            yield Violation("I5 resurrection", f"{h.id:x} handed out again after its ack", frozenset({h.id}))


def double_leases(cluster: SimCluster) -> Iterator[Violation]:
    """I6: in commit mode no two requests get the same attempt of a message, and attempt k + 1 is not handed out
    while the lease of attempt k runs, unless that was given back. In interval mode a change of leader may repeat an
    attempt, and then one of the two is marked `redelivered`. What is redriven begins anew. And after the last attempt
    that its topic allows there is no other."""
    by_id: dict[int, list[HandOut]] = defaultdict(list)
    for h in cluster.history.hand_outs:
        by_id[h.id].append(h)
    for message_id, hand_outs in by_id.items():
        hand_outs.sort(key=lambda h: h.answered)
        _share_fate(hand_outs)
        message = message_of(cluster, hand_outs[0])
        redrives = cluster.history.meant("redrive", message, message_id) if message is not None else []
        excused = {h.attempt for h in hand_outs if h.excused}
        for n, h in enumerate(hand_outs):
            for earlier in hand_outs[:n]:
                if any(order.between(earlier.answered, h.answered) for order in redrives):
                    continue
                judge = _repeated if cluster.sync == "interval" else _overlap
                promise, why = judge(earlier, h, cluster)
                if why:
                    yield Violation(promise, f"{message_id:x}: {why}", frozenset({message_id}))
                elif message is not None and _beyond(earlier, h, message, cluster, excused):
                    text = f"{message_id:x}: attempt {h.attempt} of {cluster.workload.max_attempts}"
                    yield Violation("attempts", text, frozenset({message_id}))


def _beyond(one: HandOut, two: HandOut, message: Message, cluster: SimCluster, excused: set[int]) -> bool:
    """The lease of `one` ended under the topic's limits, and was the last. (In interval mode a hand-out that was not
    recorded in time may count twice.) excused: attempts that were given back without counting, if that arrived."""
    limited = cluster.history.limited
    if cluster.sync != "commit" or message.topic != cluster.workload.limited:
        return False
    if limited is None or one.answered < limited:
        return False
    tries = one.attempt - sum(attempt <= one.attempt for attempt in excused)
    if tries == cluster.workload.max_attempts:
        cluster.history.count("checked attempts")
    return two.attempt > one.attempt and tries >= cluster.workload.max_attempts


def _share_fate(hand_outs: list[HandOut]) -> None:
    """A request that was answered twice is one lease: what the consumer did with one answer, it did with the other."""
    answers: dict[tuple[int, str, bytes], list[HandOut]] = defaultdict(list)
    for h in hand_outs:
        answers[h.attempt, h.consumer, h.request_id].append(h)
    for same in answers.values():
        for name in ("nack_invoked", "extend_invoked"):
            first = min((at for h in same if (at := getattr(h, name)) is not None), default=None)
            for h in same:
                setattr(h, name, first)


#: A promise, and how it is broken; empty if it is not.
_Judged = tuple[str, str]


def _same_request(one: HandOut, two: HandOut) -> bool:
    return (one.consumer, one.request_id) == (two.consumer, two.request_id)


def _repeated(one: HandOut, two: HandOut, cluster: SimCluster) -> _Judged:
    promise = "I6 double lease, interval"
    if one.attempt != two.attempt or _same_request(one, two):
        return promise, ""
    cluster.history.count(f"checked {promise}")
    if one.term != two.term and (one if one.term > two.term else two).redelivered:
        return promise, ""
    return promise, f"attempt {one.attempt} went to {one.consumer} and {two.consumer}, unmarked"


def _overlap(one: HandOut, two: HandOut, cluster: SimCluster) -> _Judged:
    promise = "I6 double lease, attempts"
    cluster.history.count(f"checked {promise}")
    if one.attempt == two.attempt:
        same = _same_request(one, two)
        return promise, "" if same else f"attempt {one.attempt} went to {one.consumer} and {two.consumer}"
    if two.attempt < one.attempt:
        return promise, f"attempt {two.attempt} to {two.consumer} after attempt {one.attempt} to {one.consumer}"
    if two.attempt != one.attempt + 1 or (one.nack_invoked is not None and one.nack_invoked < two.answered):
        return promise, ""
    promise = "I6 double lease, overlap"
    cluster.history.count(f"checked {promise}")
    extended_ms = cluster.extended.get((one.term, one.seq, one.position))
    until_ms = one.until_ms if extended_ms is None else extended_ms
    # Both in cluster time, which never runs backwards: exact.
    if two.now_ms < until_ms:
        early_ms = until_ms - two.now_ms
        return promise, f"attempt {two.attempt} to {two.consumer} {early_ms} ms before {one.consumer}'s lease ends"
    if extended_ms is not None:
        return promise, ""
    promise = "I6 double lease, true time"
    cluster.history.count(f"checked {promise}")
    left_s = (one.until_ms - one.now_ms) / 1000 * (1 - RATE) - ROUNDING_MS / 1000
    leaders = sum(one.answered < at < two.answered + WATCH_S for at in cluster.elected)
    left_s -= change_bound_ms(cluster) * leaders / 1000
    if was_cold(cluster, two.answered):
        left_s -= COLD_MS / 1000
    early_s = one.answered + left_s - two.answered
    return promise, f"attempt {two.attempt} {early_s:.3f} s of true time before the lease ends" if early_s > 0 else ""


def calls_apart(cluster: SimCluster) -> Iterator[Violation]:
    """Webhooks: in commit mode the receiver has one call about a message at a time; and none before the time that it
    asked for with a Retry-After, unless the message was rescheduled or died."""
    calls: dict[int, list[HandOut]] = defaultdict(list)
    for h in cluster.history.hand_outs if cluster.receiver is not None else ():
        if h.consumer == CONSUMER:
            calls[h.id].append(h)
    for message_id, some in calls.items():
        for one, two in pairwise(some):
            if cluster.sync == "commit":
                cluster.history.count("checked webhooks, one at a time")
                if two.answered < one.ended:
                    text = f"{message_id:x}: attempt {two.attempt} is called about, and attempt {one.attempt} not over"
                    yield Violation("webhooks, one at a time", text, frozenset({message_id}))
            message = message_of(cluster, two)
            if not one.retry_after_ms or message is None or cluster.history.moved(message):
                continue
            if one.attempt >= cluster.workload.max_attempts:
                continue  # dead, and redriven
            if cluster.sync == "interval" and two.leading > one.leading:
                continue  # the first leader fell before it recorded the call: no other node knows of the Retry-After
            cluster.history.count("checked webhooks, Retry-After")
            passed_ms = (two.answered - one.ended) * 1000
            leaders = sum(one.answered < at < two.answered + WATCH_S for at in cluster.elected)
            short_ms = one.retry_after_ms - passed_ms * (1 + RATE) - ROUNDING_MS - change_bound_ms(cluster) * leaders
            if was_cold(cluster, two.answered):
                short_ms -= COLD_MS
            if short_ms > 0:
                text = f"{message_id:x}: called {short_ms:.1f} ms before the time of its Retry-After"
                yield Violation("webhooks, Retry-After", text, frozenset({message_id}))


def fenced(cluster: SimCluster) -> Iterator[Violation]:
    """I16: no leader leases anything once an entry of a newer term counts: its grants are committed in its own term,
    and in interval mode, where hand-outs precede their commit, it hands out nothing that did not count by then (as did
    what a repeated request is answered with: its lease was extended through the log)."""
    for (term, seq), (at, _, committed) in cluster.grants.items():
        cluster.history.count("checked I16 fenced leader, grant")
        if committed != term:
            text = f"grant {term}.{seq} is committed in term {committed}, t={at:.4f}"
            yield Violation("I16 fenced leader, grant", text)
    for h in cluster.history.hand_outs if cluster.sync == "interval" else ():
        if lease_began(cluster, h)[0] < h.answered:
            continue
        cluster.history.count("checked I16 fenced leader, interval")
        newer = [term for term, began in cluster.term_began.items() if term > h.leading and began < h.answered]
        if newer:
            text = f"{h.id:x} handed out by {h.node}, leader of term {h.leading}, in term {max(newer)}"
            yield Violation("I16 fenced leader, interval", text, frozenset({h.id}), h.node)
