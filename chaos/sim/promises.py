"""The promises, one function each; the docstring is the definition. Numbers are those of research; I13, I14, I17 and
the chain of I12 are watched as the run goes (SimCluster). I4 does not arise, since publishers ask until they know; I7
is a count (`redelivered`), and I11, the order of hand-outs, is not promised.

All but the replica checks read the history: what the outside saw on the true clock; of the log they take when a grant
was committed. Cluster time may be slewed by 500 ppm and crystals drift by 50 ppm; that much, rounding, and a little for
each new leader, is what "not early" allows.

Each counts what it had to decide on: what never came up was not tested.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from chaos.sim import ledgercheck
from chaos.sim.cluster import WATCH_S, SimCluster
from chaos.sim.door import whole
from chaos.sim.fuzz import TOPICS
from chaos.sim.history import HandOut, Message, Violation, number_of
from hadelay.ledger import checkpoint
from hadelay.ledger.describe import describe
from hadelay.ledger.keys import KEY, KEYOF
from hadelay.ledger.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.state import Ledger
from hadelay.ledger.topicchanges import DEAD, READY, SCHEDULED
from hadelay.ledger.transitions import FLAG_KEYED, PLACE_KEY
from hadelay.model import DEAD_HOURS, KEEP, Event, State
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.server.webhooks.pool import CONSUMER
from hadelay.storage.store import Storage

#: Drift of a crystal.
_DRIFT = 50e-6
#: How much faster than true time cluster time may run.
_RATE = 600e-6
_ROUNDING_MS = 1.5
#: Nodes know the leader's clock as well as links are quick (2 ms here, and a restarted node may hear it at second
#: hand): so much a new leader may be ahead of the last one, unless one restarted behind a slow link (`_change_ms`).
_CHANGE_MS = 5.0
#: What the wall clocks of an agreeing majority may be off, so what a cold start of the whole cluster may move time by.
_COLD_MS = 2 * 250.0
#: An absolute time is as good as the wall clocks that a majority agreed on.
_SKEW_MS = 250.0
#: So long after the last fault, and the last change of leader, nothing is later than that.
_QUIET_S, _LATE_MS = 2.0, 1_000
#: A TTL that is over is written down within this time, while there is a leader.
_EXPIRES_MS = 3_000


def _latest(cluster: SimCluster) -> list[Node]:
    """The node that has applied most, if any is up."""
    return sorted(cluster.nodes(), key=lambda node: -node.raft.applied_index)[:1]


def _message(cluster: SimCluster, h: HandOut) -> Message | None:
    number = number_of(h.body)
    messages = cluster.history.messages
    return messages[number] if number is not None and number < len(messages) else None


def _begun(cluster: SimCluster, h: HandOut) -> tuple[float, int]:
    """When its lease began, at the latest: true time, and cluster time."""
    at, now_ms, _ = cluster.grants.get((h.term, h.seq), (h.answered, h.now_ms, 0))
    return min(at, h.answered), min(now_ms, h.now_ms)


def lost(cluster: SimCluster) -> Iterator[Violation]:
    """I1: a message whose publish was answered yes is where its clients have put it: it waits or is leased, unless it
    ended in a way that one of them asked for. (That nothing due still waits is I15.)"""
    nodes = _latest(cluster)
    if not nodes:
        return
    by_id: dict[int, list[Message]] = defaultdict(list)
    for message in cluster.history.messages:
        if message.id is not None:
            by_id[message.id].append(message)  # those that were kept away by another one are known by its id
    acked = {h.id for h in cluster.history.hand_outs if h.ack_invoked is not None}
    for message_id, messages in by_id.items():
        place, state = _where(nodes[0], message_id)
        cluster.history.count("checked I1 lost")
        cluster.history.count(f"ends {state}")
        if state in _WAITING or (state == State.ACKED and message_id in acked):
            continue
        if state == "gone" and cluster.history.slept and message_id in acked:
            continue
        if not any(_may_end(cluster, message, message_id, state, place) for message in messages):
            text = f"message {messages[0].number} ({message_id:x}) was stored and is {state}"
            yield Violation("I1 lost", text, frozenset({message_id}))


_WAITING = (State.SCHEDULED, State.READY, State.LEASED)


def _may_end(cluster: SimCluster, message: Message, message_id: int, state: str, place: EntryRef | None) -> bool:
    """Whether its clients asked for that, as far as they know."""
    history, workload = cluster.history, cluster.workload
    purged = 0
    for order in history.meant("purge", message, message_id):
        purged |= order.states
    gone = state == "gone" and history.slept
    if state == State.CANCELLED or gone:
        replaced = (message.topic, message.client_key) in history.replaced_keys
        if replaced or message.cancel_invoked is not None or purged & (SCHEDULED | READY):
            return True
    if state == State.EXPIRED or gone:
        return bool(message.ttl_ms or (gone and purged & DEAD))
    if state == State.DEAD and place is not None:
        return message.topic == workload.limited and int(place.rows["attempt"][0]) >= workload.max_attempts
    return state == "gone" and bool(purged & DEAD)


def cancelled_means_never(cluster: SimCluster) -> Iterator[Violation]:
    """I3, for cancel: nothing is handed out after its cancel was answered yes."""
    for message in cluster.history.messages:
        if message.cancelled is not None:
            cluster.history.count("checked I3 phantom, cancelled")
            late = [h for h in cluster.history.hand_outs if h.id == message.id and h.answered > message.cancelled]
            if late:
                yield Violation(
                    "I3 phantom, cancelled", f"message {message.number} handed out after its cancel", _ids(message)
                )


def purged_means_never(cluster: SimCluster) -> Iterator[Violation]:
    """I3, for a purge of all that waits: what was stored before it is not leased after it was answered, unless it was
    a dead letter and is redriven."""
    purges = [order for order in cluster.history.orders if order.kind == "purge" and order.answered is not None]
    whole = [order for order in purges if order.states & (SCHEDULED | READY) == SCHEDULED | READY]
    for h in cluster.history.hand_outs if whole else ():
        message, (begun, _) = _message(cluster, h), _begun(cluster, h)
        if message is None or message.stored is None or message.topic != cluster.workload.limited:
            continue
        redrives = cluster.history.meant("redrive", message, h.id)
        for order in whole:
            if message.stored < order.invoked:
                cluster.history.count("checked I3 phantom, purged")
                late = order.answered is not None and begun > order.answered
                # A redrive of all may go on, at its rate, long after it was answered.
                if late and not any(r.between(order.invoked if r.ids else 0.0, h.answered) for r in redrives):
                    text = f"message {message.number} handed out after a purge"
                    yield Violation("I3 phantom, purged", text, _ids(message))


def phantoms(cluster: SimCluster) -> Iterator[Violation]:
    """I3: what is handed out is a message that somebody published, whole."""
    for h in cluster.history.hand_outs:
        cluster.history.count("checked I3 phantom")
        message = _message(cluster, h)
        cluster.history.count("checked I3 phantom, body", message is not None)
        if message is None:
            yield Violation("I3 phantom", f"{h.id:x} carries a body that nobody sent", frozenset({h.id}))
        elif message.body != h.body:
            yield Violation("I3 phantom, body", f"{h.id:x} is not message {message.number}", frozenset({h.id}))


def as_asked(cluster: SimCluster) -> Iterator[Violation]:
    """Filters: who asks for tags gets only messages that have them, and those are what they were published with."""
    for h in cluster.history.hand_outs:
        message = _message(cluster, h)
        cluster.history.count("checked I3 phantom, tags", bool(h.tags))
        if message is not None and message.tags != h.tags:
            yield Violation(
                "I3 phantom, tags", f"{h.id:x} has the tags {h.tags}, not {message.tags}", frozenset({h.id})
            )
        if h.wanted is not None:
            cluster.history.count("checked filters")
            every, some = set(h.wanted.all_of), set(h.wanted.any_of)
            if not (every <= set(h.tags) and (not some or some & set(h.tags))):
                text = f"{h.id:x}, with the tags {h.tags}, went to {h.consumer}, who asked for {h.wanted}"
                yield Violation("filters", text, frozenset({h.id}))


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
        message = _message(cluster, hand_outs[0])
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
    left_s = (one.until_ms - one.now_ms) / 1000 * (1 - _RATE) - _ROUNDING_MS / 1000
    leaders = sum(one.answered < at < two.answered + WATCH_S for at in cluster.elected)
    left_s -= _change_ms(cluster) * leaders / 1000
    if _cold(cluster, two.answered):
        left_s -= _COLD_MS / 1000
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
            message = _message(cluster, two)
            if not one.retry_after_ms or message is None or cluster.history.moved(message):
                continue
            if one.attempt >= cluster.workload.max_attempts:
                continue  # dead, and redriven
            cluster.history.count("checked webhooks, Retry-After")
            passed_ms = (two.answered - one.ended) * 1000
            leaders = sum(one.answered < at < two.answered + WATCH_S for at in cluster.elected)
            short_ms = one.retry_after_ms - passed_ms * (1 + _RATE) - _ROUNDING_MS - _change_ms(cluster) * leaders
            if _cold(cluster, two.answered):
                short_ms -= _COLD_MS
            if short_ms > 0:
                text = f"{message_id:x}: called {short_ms:.1f} ms before the time of its Retry-After"
                yield Violation("webhooks, Retry-After", text, frozenset({message_id}))


def two_ids(cluster: SimCluster) -> Iterator[Violation]:
    """I8: one idempotency key is one message under one id: the one that was told, every time, and handed out."""
    for told, first, other in cluster.history.second_ids:
        yield Violation(
            "I8 duplicate, told", f"message {told} got ids {first:x} and {other:x}", frozenset({first, other})
        )
    seen = {m.number: m.id for m in cluster.history.messages if m.id is not None}
    for h in cluster.history.hand_outs:
        number = number_of(h.body)
        cluster.history.count("checked I8 duplicate, handed out", number in seen)
        if number is not None and seen.setdefault(number, h.id) != h.id:
            ids = frozenset({h.id, seen[number]})
            yield Violation(
                "I8 duplicate, handed out", f"message {number} is {seen[number]:x}, and handed out as {h.id:x}", ids
            )


def early(cluster: SimCluster) -> Iterator[Violation]:
    """I9: no message is handed out before its time: not in cluster time (exactly), and, for a delay, not before that
    much true time has passed since the request, nor, for a time of day, before that true time less the skew allowed.
    Once a majority had to start cold again, time came from wall clocks again, which may be off by the skew bound."""
    for h in cluster.history.hand_outs:
        message = _message(cluster, h)
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
            short_ms = message.when_ms - passed_ms * (1 + _RATE) - _ROUNDING_MS - _change_ms(cluster) * leaders
        else:
            short_ms = message.when_ms - _SKEW_MS - (cluster.world.epoch_ms + h.answered * 1000)
        if _cold(cluster, h.answered):
            short_ms -= _COLD_MS
        kind = "delay" if message.relative else "time of day"
        cluster.history.count(f"checked I9 early, {kind}")
        if short_ms > 0:
            text = f"message {number} ({kind} {message.when_ms}) handed out {short_ms:.1f} ms early, t={h.answered:.4f}"
            yield Violation(f"I9 early, {kind}", text, frozenset({h.id}))


def _cold(cluster: SimCluster, at: float) -> bool:
    """A majority had lost the time and took it from the wall clocks before `at`, other than when the cluster began:
    also soon after that, for whoever led first may die before another one heard of its time. From then on there may be
    two times: a node that was cut off meanwhile goes by the old one until it hears the new leader."""
    return any(start <= at for start in cluster.cold_starts[1:])


def _change_ms(cluster: SimCluster) -> float:
    """So much a new leader may be ahead of the last one. A restarted node that had slow answers only may be wrong by
    half of what their bounds left open (ClusterClock._learn), at most half of the skew bound: a limit that
    docs/explanation/time-and-dispatch.md tells of. Crystals of two suspended machines drift apart meanwhile."""
    return _CHANGE_MS + cluster.doubt_ms + cluster.slept_s * 1000 * 2 * _DRIFT


def clock_runs_true(cluster: SimCluster) -> Iterator[Violation]:
    """I9, its cause: between any two committed entries cluster time advances no faster than slew and drift allow (until
    a majority has to start cold)."""
    least: tuple[float, int] | None = None
    change_ms = _change_ms(cluster)
    for at, now_ms in sorted(cluster.stamps):
        if _cold(cluster, at):
            return
        lead_ms = now_ms - at * 1000 * (1 + _RATE)
        cluster.history.count("checked I9 early, clock")
        # A leader is seen up to WATCH_S after it began.
        leaders = sum(t <= at + WATCH_S for t in cluster.elected)
        if least is not None and lead_ms - least[0] > 2 * _ROUNDING_MS + change_ms * (leaders - least[1]):
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
        message = _message(cluster, h)
        if cluster.history.slowed and message is not None and message.topic == cluster.workload.limited:
            continue
        late_ms = h.now_ms - h.deliver_at_ms
        if h.attempt == 1 and not h.redelivered and h.answered - late_ms / 1000 > quiet:
            cluster.history.count("checked I10 late")
            if late_ms > _LATE_MS:
                yield Violation("I10 late", f"{h.id:x} handed out {late_ms} ms late", frozenset({h.id}))


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
        if _begun(cluster, h)[0] < h.answered:
            continue
        cluster.history.count("checked I16 fenced leader, interval")
        newer = [term for term, began in cluster.term_began.items() if term > h.leading and began < h.answered]
        if newer:
            text = f"{h.id:x} handed out by {h.node}, leader of term {h.leading}, in term {max(newer)}"
            yield Violation("I16 fenced leader, interval", text, frozenset({h.id}), h.node)


def in_time(cluster: SimCluster) -> Iterator[Violation]:
    """TTL: nothing is leased once its time is over (in commit mode, where apply decides), nor ends before."""
    history, nodes = cluster.history, _latest(cluster)
    for h in history.hand_outs if cluster.sync == "commit" else ():
        message, (_, begun_ms) = _message(cluster, h), _begun(cluster, h)
        over_ms = _over_ms(cluster, message, h.id) if message is not None else None
        if over_ms is not None:
            history.count("checked TTL, leased")
            if begun_ms >= over_ms:
                text = f"{h.id:x} leased {begun_ms - over_ms} ms after its end"
                yield Violation("TTL, leased", text, frozenset({h.id}))
    for message in history.messages if nodes else ():
        over_ms = None if message.id is None else _over_ms(cluster, message, message.id)
        place, state = _where(nodes[0], message.id or 0) if over_ms is not None else (None, "")
        if over_ms is not None and place is not None and state == State.EXPIRED:
            behind_ms = nodes[0].ledger.now_ms - over_ms
            history.count("checked TTL, written", behind_ms > _EXPIRES_MS)
            if (
                behind_ms > _EXPIRES_MS
                and nodes[0].ledger.outcome_of(place.hour, int(place.rows["index"][0]))[0] is None
            ):
                text = f"{message.id:x} is over for {behind_ms} ms, and nobody wrote that down"
                yield Violation("TTL, written", text, _ids(message))
            description = describe(nodes[0].ledger, message.id or 0)
            ended = description.history[-1:] if description is not None else []
            for end in ended if ended and ended[0].event is Event.TTL_EXPIRED else ():
                history.count("checked TTL, ended")
                if end.at_ms < over_ms:
                    yield Violation("TTL, ended", f"{message.id:x} ended {over_ms - end.at_ms} ms early", _ids(message))


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
    for node in _latest(cluster):
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
                yield Violation("max_wait", text, _ids(message))


def _published_ms(node: Node, message_id: int) -> int | None:
    description = describe(node.ledger, message_id)
    return None if description is None else description.published_at_ms


def _redriven_ms(node: Node, message_id: int) -> int:
    """0: never."""
    description = describe(node.ledger, message_id)
    history = description.history if description is not None else []
    return max((one.at_ms for one in history if one.event is Event.REDRIVEN), default=0)


def measured(node: Node) -> dict[str, Any]:
    """What /metrics says, by the family's name without its prefix."""
    return {family.name.removeprefix("hadelay_"): values for family, values in whole(NodeMetrics(node).collect())}


def honest(cluster: SimCluster) -> Iterator[Violation]:
    """I18: what /metrics says of the cluster lies between what clients know and what they asked for."""
    history = cluster.history
    stored = len({m.id for m in history.messages if m.id is not None})
    acked = len({h.id for h in history.hand_outs if h.acked is not None})
    asked = len({h.id for h in history.hand_outs if h.ack_invoked is not None})
    # Their states are equal by now: one is asked where everything is.
    ids = {m.id for m in history.messages if m.id is not None}
    waiting = sum(_where(node, i)[1] in _WAITING for node in cluster.nodes()[:1] for i in ids)
    for node in cluster.nodes():
        values = measured(node)
        messages, settled = values["messages"], values["settled_messages_total"]
        aside = [topic for topic in node.ledger.topics.all if topic.name in TOPICS]
        published, done = sum(t.published for t in aside), sum(t.settled[Event.ACKED] for t in aside)
        bounds = {
            "published": (values["published_messages_total"] - published, stored, len(history.messages)),
            "acked": (settled["acked",] - done, acked, asked),
        }
        for name, (value, least, most) in bounds.items():
            history.count("checked I18 metrics honesty")
            if not least <= value <= most:
                text = f"{node.name} says {value} were {name}, and it is {least} to {most}"
                yield Violation("I18 metrics honesty", text, who=node.name)
        history.count("checked I18 metrics honesty, waiting")
        if messages["waiting",] + messages["leased",] < waiting:
            text = f"{node.name} says {messages}, and {waiting} wait or are leased"
            yield Violation("I18 metrics honesty, waiting", text, who=node.name)


def diverged(cluster: SimCluster) -> Iterator[Violation]:
    """I12: at one applied index every node has byte-identical files, equal state, and the same chain of entries."""
    nodes = cluster.nodes()
    first = nodes[0]
    cluster.history.count("checked I12 divergence, replicas", len(nodes) - 1)
    want = fingerprint(first)
    for node in nodes[1:]:
        have = fingerprint(node)
        for part in want:
            if have.get(part) != want[part]:
                text = f"{node.name} and {first.name} differ in {part}: {have.get(part)!r:.200} {want[part]!r:.200}"
                yield Violation("I12 divergence, replicas", text, who=node.name)


def fingerprint(node: Node) -> dict[str, Any]:
    return {"applied index": node.raft.applied_index, **state_parts(node.ledger, node.storage)}


def state_parts(ledger: Ledger, storage: Storage) -> dict[str, Any]:
    """Everything that has to be equal, by part: what the node would tell `check replicas`, and what its readers see."""
    main, per_hour = checkpoint.dump(ledger, everything=True)
    hours = storage.hours
    parts: dict[str, Any] = {
        "chain": ledger.chain,
        "state": zlib.crc32(main),
        "file checksums": hours.checksums(),
        "tables": zlib.crc32(repr(_tables(storage)).encode()),
    }
    for hour in hours.hours():
        parts[f"entries of {hour}"] = zlib.crc32(hours.entries(hour, slice(None)).tobytes())
        parts[f"events of {hour}"] = zlib.crc32(hours.events(hour).tobytes())
        parts[f"state of {hour}"] = zlib.crc32(per_hour.get(hour, b""))
    return parts


def _tables(storage: Storage) -> list[list[tuple[bytes, bytes]]]:
    names = (b"place", b"key", b"keyof", b"ttl", b"ttlof", b"dead")
    return [storage.tables.range(name, limit=100_000) for name in names]


def conserved(cluster: SimCluster) -> Iterator[Violation]:
    """I2: on every node bitmaps, grants and counters agree with the entries: published = open + ended, per topic."""
    for node in cluster.nodes():
        cluster.history.count("checked I2 conservation")
        try:
            ledgercheck.check(node.ledger)
        except AssertionError as error:
            yield Violation("I2 conservation", f"{node.name}: {error}", who=node.name)


def nothing_forgotten(cluster: SimCluster) -> Iterator[Violation]:
    """The sweeper looks for messages that are owed and that the wheels do not know. There must not be any, nor a link
    of a chain that is broken, but on a node whose files rotted."""
    for node in (node for node in cluster.nodes() if node.name not in cluster.rotten):
        cluster.history.count("checked forgotten")
        if node.dispatcher.sweeper_found or node.dispatcher.damaged_links:
            text = f"{node.dispatcher.sweeper_found} by the sweeper, {node.dispatcher.damaged_links} broken links"
            yield Violation("forgotten", f"{node.name} found {text}", who=node.name)


def one_per_key(cluster: SimCluster) -> Iterator[Violation]:
    """Of the messages with one client key at most one is pending, and the key finds it; unless a dead letter may have
    been redriven before the cluster knew better (codec/formats.py, ONE_PER_KEY)."""
    orders = cluster.history.orders
    redrives = [order for order in orders if order.kind == "redrive" and order.invoked < cluster.switched]
    for node in cluster.nodes():
        ledger = node.ledger
        for hour in (hour for hour in ledger.store.hours() if hour < DEAD_HOURS):
            rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
            rows = rows[(rows["flags"] & FLAG_KEYED != 0) & ledger.topics.alive(rows)]
            for topic, first_id, index in rows[["topic", "first_id", "index"]].tolist():
                if ledger.outcome_of(hour, index)[0] is None:
                    mine = (order for order in redrives if order.topic == ledger.topics[topic].name)
                    if any(order.ids is None or first_id in order.ids for order in mine):
                        continue
                    cluster.history.count("checked one per key")
                    found = _found_by_key_of(ledger, first_id)
                    if found != first_id:
                        text = f"{first_id:x} is pending and its key finds {found:x}"
                        yield Violation("one per key", text, frozenset({first_id, found}), node.name)


def converged(cluster: SimCluster, drained: bool, seconds: float) -> Iterator[Violation]:
    """I15: within a bound after healing one node leads, every node has applied everything, and nothing that was due
    is left: each message was handed out and acked, or ended as its clients asked, and none is dead."""
    cluster.history.count("checked I15 liveness")
    if drained:
        return
    nodes = cluster.nodes()
    leaders = [node.name for node in nodes if node.leading]
    applied = {node.name: (node.raft.applied_index, node.raft.last_index) for node in nodes}
    left = unsettled(cluster)
    text = f"{seconds:.1f} s after healing: leaders {leaders}, applied {applied}, {len(left)} messages not settled"
    yield Violation("I15 liveness", text, frozenset(m.id for m in left[:1] if m.id is not None))


def unsettled(cluster: SimCluster) -> list[Message]:
    """Messages that are due and not known to be over."""
    done = {h.id for h in cluster.history.hand_outs if h.acked is not None}
    now_ms = max((node.ledger.now_ms for node in cluster.nodes()), default=0)
    return [
        m
        for m in cluster.history.messages
        if m.id not in done
        and m.cancelled is None
        and not m.refused
        and not (m.deliver_at_ms is not None and m.deliver_at_ms > now_ms + 60_000)
        and not (m.id is not None and _settled(cluster, m))
    ]


def _settled(cluster: SimCluster, message: Message) -> bool:
    """Over without a client having heard so: the answer was lost, or its time or a purge ended it. Or dead, while
    another message that waits for its time has its client key: then no redrive brings it back."""
    leader = cluster.leader()
    if leader is None or message.id is None:
        return False
    state = _where(leader, message.id)[1]
    if state == State.DEAD and message.client_key:
        other = _found_by_key_of(leader.ledger, message.id)
        return other != message.id and _where(leader, other)[1] == State.SCHEDULED
    return state not in (*_WAITING, State.DEAD)


def _found_by_key_of(ledger: Ledger, first_id: int) -> int:
    """The message that the client key of this one finds; 0 if none."""
    key = ledger.tables.get(KEYOF, PLACE_KEY.pack(first_id)) or b""
    return int.from_bytes((ledger.tables.get(KEY, key) or bytes(8))[:8], "little")


def _where(node: Node, message_id: int) -> tuple[EntryRef | None, str]:
    """Its entry and its state; `gone` when nothing is known of it."""
    place = find_entry(node.ledger, message_id)
    return place, "gone" if place is None else state_of(node.ledger, place, node.ledger.now_ms)


def _ids(message: Message) -> frozenset[int]:
    return frozenset() if message.id is None else frozenset({message.id})


#: Those that read the history, and those that read healed replicas.
OUTSIDE = (
    phantoms, as_asked, two_ids, lost, cancelled_means_never, purged_means_never, fenced, resurrected, double_leases,
    early, clock_runs_true, calls_apart, in_time, debounced, nothing_forgotten, late,
)  # fmt: skip
REPLICAS = (diverged, conserved, one_per_key, honest)

#: Every promise, or branch of one, under the name that violations have; "checked …" is how often it was decided on.
CHECKED = (
    "I1 lost", "I2 conservation", "I3 phantom", "I3 phantom, body", "I3 phantom, tags", "I3 phantom, cancelled",
    "I3 phantom, purged", "I5 resurrection", "I6 double lease, attempts", "I6 double lease, overlap",
    "I6 double lease, true time", "I6 double lease, interval", "I8 duplicate, told", "I8 duplicate, handed out",
    "I9 early, cluster time", "I9 early, delay", "I9 early, time of day", "I9 early, clock", "I10 late",
    "I12 divergence, entries", "I12 divergence, results", "I12 divergence, replicas", "I13 log safety, leaders",
    "I13 log safety, votes", "I13 log safety, vote on disk", "I13 log safety, term",
    "I13 log safety, commit index back", "I13 log safety, commit index ahead", "I13 log safety, members",
    "I14 durability, majority", "I14 durability, restart", "I14 durability, applied", "I15 liveness",
    "I16 fenced leader, grant", "I16 fenced leader, interval", "I17 fail-stop, own error",
    "I17 fail-stop, failed sync", "I18 metrics honesty", "I18 metrics honesty, waiting", "attempts", "TTL, leased",
    "TTL, ended", "TTL, written", "max_wait", "one per key", "filters", "stale read", "forgotten", "campaigns",
    "what leaders count", "hang-ups", "webhooks, one at a time", "webhooks, Retry-After",
)  # fmt: skip
