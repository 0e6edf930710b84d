"""Checks of leases: which consumer has a message, and for how long. chaos/sim/promises.py has checks of other
promises."""

from collections import defaultdict
from functools import partial
from itertools import pairwise

from chaos.sim.cluster import SimCluster
from chaos.sim.evidence import RATE, ahead_ms, lease_began, took_effect
from chaos.sim.history import HandOut, Message
from hadelay.server.webhooks.pool import CONSUMER


def resurrected(cluster: SimCluster) -> None:
    """I5: no message is handed out after its ack was confirmed. A repeated receive whose lease was extended before the
    ack counts as earlier, even if its answer is later."""
    acked: dict[int, float] = {}
    for h in cluster.history.hand_outs:
        if h.acked is not None:
            acked[h.id] = min(h.acked, acked.get(h.id, h.acked))
    for h in cluster.history.hand_outs:
        if h.id in acked:
            text = f"{h.id:x} handed out again after its ack"
            cluster.history.decide("I5 resurrection", took_effect(cluster, h) > acked[h.id], text, h.id)


def dead_is_over(cluster: SimCluster) -> None:
    """I5: no message is handed out after its consumer ended it as dead, unless it was redriven since."""
    history = cluster.history
    for hand_outs in _by_id([h for h in history.hand_outs if h.dead is not None]).values():
        ended = min(hand_outs, key=lambda h: h.dead or 0.0)
        message = history.message_of(ended.body)
        redrives = [] if message is None else history.meant("redrive", message, ended.id)
        for h in history.hand_outs:
            if h.id == ended.id and ended.dead is not None and ended.nack_invoked is not None:
                late = took_effect(cluster, h) > ended.dead
                redriven = any(order.between(ended.nack_invoked, h.answered) for order in redrives)
                text = f"{h.id:x} handed out again after its consumer ended it as dead"
                history.decide("I5 resurrection, dead", late and not redriven, text, h.id)


def double_leases(cluster: SimCluster) -> None:
    """I6: in commit mode no two receives get the same attempt of a message, and attempt k + 1 is not handed out while
    the lease of attempt k runs, unless the consumer gave the message back. In interval mode a new leader may repeat an
    attempt, and one of both hand-outs is marked `redelivered`. A redriven message starts anew. No attempt follows the
    last one that the topic allows."""
    judge = _repeated if cluster.sync == "interval" else _overlap
    for message_id, hand_outs in _by_id(cluster.history.hand_outs).items():
        hand_outs.sort(key=partial(took_effect, cluster))
        _share_settlements(hand_outs)
        message = cluster.history.message_of(hand_outs[0].body)
        redrives = cluster.history.meant("redrive", message, message_id) if message is not None else []
        excused = {h.attempt for h in hand_outs if h.excused}
        # A restored cluster does not know which attempts before the backup were given back without counting.
        seen = next((n for n, h in enumerate(hand_outs) if h.attempt == 1), len(hand_outs)) if cluster.group else 0
        for n, h in enumerate(hand_outs):
            for at, earlier in enumerate(hand_outs[:n]):
                if not any(order.between(earlier.answered, h.answered) for order in redrives):
                    judge(earlier, h, cluster)
                    if message is not None and at >= seen:
                        _beyond(earlier, h, message, cluster, excused)


def _by_id(hand_outs: list[HandOut]) -> dict[int, list[HandOut]]:
    found: dict[int, list[HandOut]] = defaultdict(list)
    for h in hand_outs:
        found[h.id].append(h)
    return found


def _beyond(one: HandOut, two: HandOut, message: Message, cluster: SimCluster, excused: set[int]) -> None:
    """Check, in commit mode, that no attempt of a message exceeds the topic's limit of attempts. Interval mode is not
    checked: there, a hand-out that is not yet in the log may count twice. excused: attempts whose nack, if it arrived,
    asked not to count the attempt."""
    limited, most = cluster.history.limited, cluster.workload.max_attempts
    if cluster.sync != "commit" or message.topic != cluster.workload.limited or limited is None:
        return
    tries = one.attempt - sum(attempt <= one.attempt for attempt in excused)
    if one.answered >= limited and tries >= most:
        text = f"{one.id:x}: attempt {two.attempt} of {most}"
        cluster.history.decide("attempts", two.attempt > one.attempt, text, one.id)


def _share_settlements(hand_outs: list[HandOut]) -> None:
    """Copy the settlement of a hand-out to its repetitions: repeated receives get the same lease."""
    answers: dict[tuple[int, str, bytes], list[HandOut]] = defaultdict(list)
    for h in hand_outs:
        answers[h.attempt, h.consumer, h.request_id].append(h)
    for same in answers.values():
        for name in ("nack_invoked", "extend_invoked"):
            first = min((at for h in same if (at := getattr(h, name)) is not None), default=None)
            for h in same:
                setattr(h, name, first)


def _same_request(one: HandOut, two: HandOut) -> bool:
    return (one.consumer, one.request_id) == (two.consumer, two.request_id)


def _repeated(one: HandOut, two: HandOut, cluster: SimCluster) -> None:
    """Check, in interval mode, that a repeated attempt of a message is marked as redelivered."""
    if one.attempt == two.attempt and not _same_request(one, two):
        marked = one.term != two.term and (one if one.term > two.term else two).redelivered
        text = f"{one.id:x}: attempt {one.attempt} went to {one.consumer} and {two.consumer}, unmarked"
        cluster.history.decide("I6 double lease, interval", not marked, text, one.id)


def marked(cluster: SimCluster) -> None:
    """I6, interval mode: a leader's hand-outs that are not in the log have due times within the bounds that the
    replicated state had at the end of the leader's term. And a first attempt is marked as redelivered only if the
    message was handed out before, or is within the bounds of an earlier term; a rescheduled message is exempt."""
    if cluster.sync != "interval" or cluster.group:
        return
    history, bounds = cluster.history, cluster.bounds
    for hand_outs in _by_id(history.hand_outs).values():
        hand_outs.sort(key=lambda h: h.answered)
        for n, h in enumerate(hand_outs):
            message = history.message_of(h.body)
            ended = [bound for bound in bounds if bound[0] > h.leading][:1]
            if ended:
                unrecorded = (h.term, h.seq) not in cluster.grants
                text = f"{h.id:x}, due {h.deliver_at_ms}, handed out unrecorded in term {h.leading}; bounds {ended}"
                history.decide("I6 double lease, bounds", unrecorded and not _is_within(h, ended), text, h.id)
            if not h.redelivered or h.attempt > 1 or h.again or message is None:
                continue
            history.count("marked truly", bool(n))
            history.count("marked in vain", not n)
            # If no command was applied in this term, its bounds were noted when the next term began: include those,
            # too.
            unnoted = not any(bound[0] == h.leading for bound in bounds)
            before = [bound for bound in bounds if bound[0] <= h.leading] + (ended if unnoted else [])
            may_be = n or history.moved(message) or _is_within(h, before)
            text = f"{h.id:x}, due {h.deliver_at_ms}, is marked in term {h.leading}; bounds {before}"
            history.decide("I6 double lease, marks", not may_be, text, h.id)


def _is_within(h: HandOut, bounds: list[tuple[int, int, int]]) -> bool:
    return any(first_ms <= h.deliver_at_ms <= last_ms for _, first_ms, last_ms in bounds)


def _overlap(one: HandOut, two: HandOut, cluster: SimCluster) -> None:
    """Check, in commit mode, that leases of one message do not overlap."""
    decide, what = cluster.history.decide, f"{one.id:x}: attempt {two.attempt} to {two.consumer}"
    again = two.attempt < one.attempt or (two.attempt == one.attempt and not _same_request(one, two))
    text = f"{what} after attempt {one.attempt} to {one.consumer}"
    decide("I6 double lease, attempts", again, text, one.id)
    if two.attempt != one.attempt + 1 or (one.nack_invoked is not None and one.nack_invoked < two.answered):
        return
    extensions = cluster.extended.get((one.term, one.seq, one.position))
    extended_ms = extensions[-1][0] if extensions else None
    # The lease's end and the next grant are in cluster time, which never runs backwards: the comparison is exact.
    early_ms = (one.until_ms if extended_ms is None else extended_ms) - two.now_ms
    text = f"{what} {early_ms} ms before {one.consumer}'s lease ends"
    decide("I6 double lease, overlap", early_ms > 0, text, one.id)
    if extended_ms is None and early_ms <= 0:
        left_s = (one.until_ms - one.now_ms) / 1000 * (1 - RATE) - ahead_ms(cluster, one.answered, two.answered) / 1000
        early_s = one.answered + left_s - two.answered
        text = f"{what} {early_s:.3f} s of true time before the lease ends"
        decide("I6 double lease, true time", early_s > 0, text, one.id)


def calls_apart(cluster: SimCluster) -> None:
    """Webhooks: in commit mode, the receiver gets one call at a time about a message. After an answer with Retry-After,
    no call comes earlier, unless the message was rescheduled or became a dead letter."""
    history = cluster.history
    for some in _by_id([h for h in history.hand_outs if h.consumer == CONSUMER]).values():
        for one, two in pairwise(some):
            if cluster.sync == "commit":
                text = f"{one.id:x}: attempt {two.attempt} is called before attempt {one.attempt} is over"
                history.decide("webhooks, one at a time", two.answered < one.ended, text, one.id)
            message = history.message_of(two.body)
            if not one.retry_after_ms or message is None or history.moved(message):
                continue
            if one.attempt >= cluster.workload.max_attempts:
                continue  # no violation: the message became a dead letter and was redriven between the calls
            if cluster.sync == "interval" and two.leading > one.leading:
                continue  # no violation: the old leader may have ended before it recorded the Retry-After
            passed_ms = (two.answered - one.ended) * 1000
            short_ms = one.retry_after_ms - passed_ms * (1 + RATE) - ahead_ms(cluster, one.answered, two.answered)
            text = f"{one.id:x}: called {short_ms:.1f} ms before the time of its Retry-After"
            history.decide("webhooks, Retry-After", short_ms > 0, text, one.id)


def fenced(cluster: SimCluster) -> None:
    """I16: no leader leases messages once an entry of a newer term is committed: grants are committed in the leader's
    own term. In interval mode, where hand-outs precede their commit, the leader hands out only grants that were
    committed by then (or repeated answers whose leases were extended through the log)."""
    decide = cluster.history.decide
    for (term, seq), (at, _, committed) in cluster.grants.items():
        text = f"grant {term}.{seq} is committed in term {committed}, t={at:.4f}"
        decide("I16 fenced leader, grant", committed != term, text)
    for h in cluster.history.hand_outs if cluster.sync == "interval" else ():
        if lease_began(cluster, h)[0] >= h.answered:
            newer = [term for term, began in cluster.term_began.items() if term > h.leading and began < h.answered]
            text = f"{h.id:x} handed out by {h.node}, leader of term {h.leading}, in term {max(newer, default=0)}"
            decide("I16 fenced leader, interval", bool(newer), text, h.id, who=h.node)
