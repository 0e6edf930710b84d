"""The promises, one function each; the docstring is the definition. Numbers are those of research: I1, I3, I5, I6, I8,
I9, I12, I15; I13 and the chain of I12 are watched as the run goes (SimCluster).

All but the replica checks read only the history: what the outside saw on the true clock. Cluster time may be slewed by
500 ppm and crystals drift by 50 ppm; that much, rounding, and a little for each new leader, is what "not early" allows.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hadelay.core import invariants
from hadelay.core.keys import KEY, KEYOF
from hadelay.core.lifecycle import FLAG_KEYED, PLACE_KEY
from hadelay.core.state import DelayState
from hadelay.server.node import Node
from hadelay.storage.store import Storage
from hadelay.testing.cluster import WATCH_S, SimCluster, Violation
from hadelay.testing.history import HandOut, Message, number_of

#: The cold start that every cluster begins with is over by then.
FOUNDED_S = 1.0
#: How much faster than true time cluster time may run.
_RATE = 600e-6
_ROUNDING_MS = 1.5
#: Nodes know the leader's clock as well as links are quick (2 ms here, and a restarted node may hear it at second
#: hand): so much a new leader may be ahead of the last one.
_CHANGE_MS = 5.0
#: What the wall clocks of an agreeing majority may be off, so what a cold start of the whole cluster may move time by.
_COLD_MS = 2 * 250.0
#: An absolute time is as good as the wall clocks that a majority agreed on.
_SKEW_MS = 250.0


def lost(cluster: SimCluster) -> Iterator[Violation]:
    """I1: a message whose publish was answered yes, and which nobody cancelled, was handed to a consumer before the
    end, or is still owed: scheduled, ready or leased. (That nothing due is still owed is I15.)"""
    delivered = {h.id for h in cluster.history.hand_outs}
    nodes = cluster.nodes()
    for message in cluster.history.messages:
        if message.id is None or message.id in delivered or message.cancel_invoked is not None or not nodes:
            continue
        state = _state_of(nodes[0], message.id)
        if state == "cancelled" and (message.topic, message.client_key) in cluster.history.replaced_keys:
            continue  # by a message whose producer does not know yet what it replaced
        if state not in ("scheduled", "ready", "leased"):
            text = f"message {message.number} ({message.id:x}) was stored and is {state}"
            yield Violation("I1 lost", text, _ids(message))


def cancelled_means_never(cluster: SimCluster) -> Iterator[Violation]:
    """I3, for cancel: nothing is handed out after its cancel was answered yes."""
    for message in cluster.history.messages:
        if message.cancelled is not None:
            late = [h for h in cluster.history.hand_outs if h.id == message.id and h.answered > message.cancelled]
            if late:
                yield Violation("I3 phantom", f"message {message.number} handed out after its cancel", _ids(message))


def phantoms(cluster: SimCluster) -> Iterator[Violation]:
    """I3: what is handed out is a message that somebody published, whole."""
    for h in cluster.history.hand_outs:
        number = number_of(h.body)
        if number is None or number >= len(cluster.history.messages):
            yield Violation("I3 phantom", f"{h.id:x} carries a body that nobody sent", frozenset({h.id}))
            continue
        message = cluster.history.messages[number]
        if message.body != h.body:
            yield Violation("I3 phantom", f"{h.id:x} is not message {number}", frozenset({h.id}))


def resurrected(cluster: SimCluster) -> Iterator[Violation]:
    """I5: nothing is handed out after an ack of it was answered yes."""
    acked: dict[int, float] = {}
    for h in cluster.history.hand_outs:
        if h.acked is not None:
            acked[h.id] = min(h.acked, acked.get(h.id, h.acked))
    for h in cluster.history.hand_outs:
        if h.answered > acked.get(h.id, h.answered):
            yield Violation("I5 resurrection", f"{h.id:x} handed out again after its ack", frozenset({h.id}))


def double_leases(cluster: SimCluster) -> Iterator[Violation]:
    """I6: in commit mode no two requests get the same attempt of a message, and attempt k + 1 is not handed out
    while the lease of attempt k runs, unless that was given back. In interval mode a change of leader may repeat an
    attempt, and then one of the two is marked `redelivered`."""
    by_id: dict[int, list[HandOut]] = defaultdict(list)
    for h in cluster.history.hand_outs:
        by_id[h.id].append(h)
    for message_id, hand_outs in by_id.items():
        hand_outs.sort(key=lambda h: h.answered)
        _share_fate(hand_outs)
        for n, h in enumerate(hand_outs):
            for earlier in hand_outs[:n]:
                why = _repeated(earlier, h) if cluster.sync == "interval" else _overlap(earlier, h, cluster)
                if why:
                    yield Violation("I6 double lease", f"{message_id:x}: {why}", frozenset({message_id}))


def _share_fate(hand_outs: list[HandOut]) -> None:
    """A request that was answered twice is one lease: what the consumer did with one answer, it did with the other."""
    fate: dict[tuple[int, str, bytes], HandOut] = {}
    for h in hand_outs:
        first = fate.setdefault((h.attempt, h.consumer, h.request_id), h)
        for name in ("nack_invoked", "extend_invoked"):
            known = [at for at in (getattr(first, name), getattr(h, name)) if at is not None]
            setattr(first, name, min(known, default=None))
            setattr(h, name, min(known, default=None))
        first.extend_until_ms = h.extend_until_ms = max(first.extend_until_ms, h.extend_until_ms)


def _repeated(one: HandOut, two: HandOut) -> str:
    if one.attempt != two.attempt or (one.consumer, one.request_id) == (two.consumer, two.request_id):
        return ""
    if one.term != two.term and (one if one.term > two.term else two).redelivered:
        return ""
    return f"attempt {one.attempt} went to {one.consumer} and {two.consumer}, unmarked"


def _overlap(one: HandOut, two: HandOut, cluster: SimCluster) -> str:
    same_request = (one.consumer, one.request_id) == (two.consumer, two.request_id)
    if one.attempt == two.attempt:
        if same_request:
            return ""
        return f"attempt {one.attempt} went to {one.consumer} and {two.consumer}"
    if two.attempt < one.attempt:
        return f"attempt {two.attempt} to {two.consumer} after attempt {one.attempt} to {one.consumer}"
    if two.attempt != one.attempt + 1 or (one.nack_invoked is not None and one.nack_invoked < two.answered):
        return ""
    if one.extend_invoked is not None and one.extend_invoked < two.answered and not one.extend_until_ms:
        return ""  # it may have been shortened
    until_ms = one.extend_until_ms or one.until_ms
    # Both in cluster time, which never runs backwards: exact.
    if two.now_ms < until_ms:
        return f"attempt {two.attempt} to {two.consumer} {until_ms - two.now_ms} ms before {one.consumer}'s lease ends"
    if one.extend_until_ms:
        return ""
    left_s = (one.until_ms - one.now_ms) / 1000 * (1 - _RATE) - _ROUNDING_MS / 1000
    if _cold(cluster, two.answered):
        left_s -= _COLD_MS / 1000
    if two.answered < one.answered + left_s:
        return f"attempt {two.attempt} {one.answered + left_s - two.answered:.3f} s of true time before the lease ends"
    return ""


def two_ids(cluster: SimCluster) -> Iterator[Violation]:
    """I8: one idempotency key is one message under one id: the one that was told, every time, and handed out."""
    for told, first, other in cluster.history.second_ids:
        yield Violation("I8 duplicate", f"message {told} got ids {first:x} and {other:x}", frozenset({first, other}))
    seen = {m.number: m.id for m in cluster.history.messages if m.id is not None}
    for h in cluster.history.hand_outs:
        number = number_of(h.body)
        if number is not None and seen.setdefault(number, h.id) != h.id:
            ids = frozenset({h.id, seen[number]})
            yield Violation("I8 duplicate", f"message {number} is {seen[number]:x}, and handed out as {h.id:x}", ids)


def early(cluster: SimCluster) -> Iterator[Violation]:
    """I9: no message is handed out before its time: not in cluster time (exactly), and, for a delay, not before that
    much true time has passed since the request, nor, for a time of day, before that true time less the skew allowed.
    Once a majority had to start cold again, time came from wall clocks again, which may be off by the skew bound."""
    for h in cluster.history.hand_outs:
        number = number_of(h.body)
        if number is None or number >= len(cluster.history.messages):
            continue
        message = cluster.history.messages[number]
        if h.now_ms < h.deliver_at_ms:
            text = f"message {number} handed out {h.deliver_at_ms - h.now_ms} ms early in cluster time"
            yield Violation("I9 early", text, frozenset({h.id}))
        if message.rescheduled:
            continue
        if message.relative:
            passed_ms = (h.answered - message.invoked) * 1000
            leaders = sum(message.invoked < at < h.answered + WATCH_S for at in cluster.elected)
            short_ms = message.when_ms - passed_ms * (1 + _RATE) - _ROUNDING_MS - _CHANGE_MS * leaders
        else:
            short_ms = message.when_ms - _SKEW_MS - (cluster.world.epoch_ms + h.answered * 1000)
        if _cold(cluster, h.answered):
            short_ms -= _COLD_MS
        if short_ms > 0:
            kind = f"delay of {message.when_ms} ms" if message.relative else f"time {message.when_ms}"
            text = f"message {number} ({kind}) handed out {short_ms:.1f} ms early, at t={h.answered:.4f}"
            yield Violation("I9 early", text, frozenset({h.id}))


def _cold(cluster: SimCluster, at: float) -> bool:
    """A majority had lost the time and took it from the wall clocks before `at`. From then on there may be two times: a
    node that was cut off meanwhile goes by the old one until it hears the new leader."""
    return any(FOUNDED_S < start <= at for start in cluster.cold_starts)


def clock_runs_true(cluster: SimCluster) -> Iterator[Violation]:
    """I9, its cause: between any two committed entries cluster time advances no faster than slew and drift allow (until
    a majority has to start cold)."""
    least: tuple[float, int] | None = None
    for at, now_ms in sorted(cluster.stamps):
        if _cold(cluster, at):
            return
        lead_ms = now_ms - at * 1000 * (1 + _RATE)
        leaders = sum(t <= at + WATCH_S for t in cluster.elected)
        if least is not None and lead_ms - least[0] > 2 * _ROUNDING_MS + _CHANGE_MS * (leaders - least[1]):
            text = f"cluster time ran {lead_ms - least[0]:.1f} ms ahead between two entries, now {now_ms}, t={at:.4f}"
            yield Violation("I9 early", text)
            return
        if least is None or lead_ms < least[0]:
            least = (lead_ms, leaders)


def diverged(cluster: SimCluster) -> Iterator[Violation]:
    """I12: at one applied index every node has byte-identical files, equal state, and the same chain of entries."""
    nodes = cluster.nodes()
    first = nodes[0]
    want = fingerprint(first)
    for node in nodes[1:]:
        have = fingerprint(node)
        for part in want:
            if have.get(part) != want[part]:
                text = f"{node.name} and {first.name} differ in {part}: {have.get(part)!r:.200} {want[part]!r:.200}"
                yield Violation("I12 divergence", text, who=node.name)


def fingerprint(node: Node) -> dict[str, Any]:
    return {"applied index": node.raft.applied_index, **state_parts(node.state, node.storage)}


def state_parts(state: DelayState, storage: Storage) -> dict[str, Any]:
    """Everything that has to be equal, by part: what the node would tell `check replicas`, and what its readers see."""
    main, per_hour = state.dump(everything=True)
    hours = storage.hours
    parts: dict[str, Any] = {
        "chain": state.chain,
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
        try:
            invariants.check(node.state)
        except AssertionError as error:
            yield Violation("I2 conservation", f"{node.name}: {error}", who=node.name)


def nothing_forgotten(cluster: SimCluster) -> Iterator[Violation]:
    """The sweeper looks for messages that are owed and that the wheels do not know. There must not be any, nor a link
    of a chain that is broken: no file was damaged in these runs."""
    for node in cluster.nodes():
        if node.dispatcher.sweeper_found or node.dispatcher.damaged_links:
            text = f"{node.dispatcher.sweeper_found} by the sweeper, {node.dispatcher.damaged_links} broken links"
            yield Violation("forgotten", f"{node.name} found {text}", who=node.name)


def one_per_key(cluster: SimCluster) -> Iterator[Violation]:
    """Of the messages with one client key at most one is pending, and the key finds it."""
    for node in cluster.nodes():
        state = node.state
        for hour in state.store.hours():
            rows = state.store.entries(hour, slice(0, state.store.count(hour)))
            rows = rows[(rows["flags"] & FLAG_KEYED != 0) & state.topics.alive(rows)]
            for first_id, index in zip(rows["first_id"].tolist(), rows["index"].tolist(), strict=True):
                if state.fate(hour, index)[0] is None:
                    key = state.tables.get(KEYOF, PLACE_KEY.pack(first_id)) or b""
                    found = int.from_bytes((state.tables.get(KEY, key) or bytes(8))[:8], "little")
                    if found != first_id:
                        text = f"{first_id:x} is pending and its key finds {found:x}"
                        yield Violation("one per key", text, frozenset({first_id, found}), node.name)


def converged(cluster: SimCluster, drained: bool, seconds: float) -> Iterator[Violation]:
    """I15: within a bound after healing one node leads, every node has applied everything, and nothing that was due
    is left: each message was handed out and acked, or cancelled."""
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
    now_ms = max((node.state.now_ms for node in cluster.nodes()), default=0)
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
    """Over without the consumer or canceller having heard so: their answer was lost."""
    leader = cluster.leader()
    return leader is not None and _state_of(leader, message.id or 0) in ("acked", "cancelled")


def _state_of(node: Node, message_id: int) -> str:
    description = node.state.describe(message_id)
    return "unknown" if description is None else str(description.state)


def _ids(message: Message) -> frozenset[int]:
    return frozenset() if message.id is None else frozenset({message.id})


#: Those that read the history, and those that read healed replicas.
OUTSIDE = (phantoms, two_ids, lost, cancelled_means_never, resurrected, double_leases, early, clock_runs_true)
