"""The promises, one function each, over what the outside saw; the docstring is the definition (ADR 101).

The simulator's checks (hadelay.testing.invariants) know when a node answered. From outside there is only an interval:
a thing happened after it was asked for and before the answer was here. Each check takes the end that cannot accuse a
cluster that kept its promise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chaos.flat import growing
from chaos.history import Given, History

#: Cluster time is slewed by at most 500 ppm, and crystals drift.
_RATE = 600e-6
#: Times are told in milliseconds, rounded.
_ROUNDING_MS = 2.0
#: What a new leader's time may be ahead of the last one's.
_CHANGE_MS = 5.0
#: What the wall clocks of an agreeing majority may be apart: a cold start of all nodes takes its time from them.
_COLD_MS = 2 * 250.0
#: States of a message that is still to come.
PENDING = ("scheduled", "ready", "leased")
#: What every node counts, of all topics: metrics without their prefix.
ACKED, *OTHER_ENDS = (
    f'settled_messages_total{{outcome="{outcome}"}}' for outcome in ("acked", "cancelled", "expired", "dead")
)
PARTS = (ACKED, *OTHER_ENDS, 'messages{state="waiting"}', 'messages{state="leased"}')
COUNTED = ("raft_applied_index", "published_messages_total", *PARTS, "sweeper_found_messages_total")


@dataclass(frozen=True)
class Verdict:
    name: str
    what: str
    violations: list[str]


def check(history: History, sync: str = "commit") -> list[Verdict]:
    found = []
    for name, checker in CHECKERS.items():
        what = " ".join((checker.__doc__ or "").partition(": ")[2].split())
        skipped = sync != "commit" and checker in (double_leases, deposed)
        found.append(Verdict(name, what, [] if skipped else sorted(checker(history))))
    return found


def lost(history: History) -> Iterator[str]:
    """I1: a message whose publish was answered yes, and which nobody tried to cancel, was handed out before the end."""
    if not history.of("drained"):
        return  # interrupted: what was not handed out was not waited for
    given = {g.id for g in history.given}
    asked = {event["id"]: event["state"] for event in history.of("asked-for")}
    for put in history.puts.values():
        if put.id is not None and put.id not in given and put.cancel_asked is None:
            state = asked.get(put.id, "never handed out")
            if state not in PENDING:  # then it is late: I15
                yield f"message {put.n} ({put.id}), stored at {put.stored:.3f} s, is {state}"


def miscounted(history: History) -> Iterator[str]:
    """I2: in the end, on every node, published is settled, waiting and leased, and nothing was found that the wheels
    had forgotten."""
    for event in history.of("counted"):
        count = event["counts"]
        if event["ours"] and count["published_messages_total"] != sum(count[name] for name in PARTS):
            yield f"{event['node']} counts {', '.join(f'{name} {number}' for name, number in count.items())}"
        if count["sweeper_found_messages_total"]:
            yield f"{event['node']} had forgotten {count['sweeper_found_messages_total']} messages"


def phantoms(history: History) -> Iterator[str]:
    """I3: what is handed out was published, is whole, was not refused, and not cancelled before it was asked for."""
    for g in history.given:
        put = history.puts.get(g.n)
        if put is None or not g.whole:
            yield f"{g.id}, received at {g.got:.3f} s, is not what anybody published"
        elif put.refused:
            yield f"message {g.n} ({g.id}) was refused, and handed out at {g.got:.3f} s"
        elif put.cancelled is not None and g.asked > put.cancelled:
            yield f"message {g.n} ({g.id}), cancelled at {put.cancelled:.3f} s, was handed out at {g.got:.3f} s"


def resurrected(history: History) -> Iterator[str]:
    """I5: nothing is handed out to a receive that began after an ack of it was answered yes."""
    acked: dict[str, float] = {}
    for g in history.given:
        if g.acked is not None:
            acked[g.id] = min(g.acked, acked.get(g.id, g.acked))
    for g in history.given:
        if g.asked > acked.get(g.id, g.asked):
            yield f"message {g.n} ({g.id}), acked at {acked[g.id]:.3f} s, was handed out at {g.got:.3f} s"


def double_leases(history: History) -> Iterator[str]:
    """I6: no two receives get one attempt of a message, and none gets a later attempt, in cluster time, before the
    lease of the one before ended, unless that was handed back."""
    for one, two in _neighbours(history):
        if one.attempt == two.attempt:
            if one.request != two.request:
                yield f"message {one.n} ({one.id}): attempt {one.attempt} went to {one.consumer} and {two.consumer}"
        elif two.now_ms < one.until_ms - _ROUNDING_MS and (one.nack_asked is None or one.nack_asked > two.got):
            left_ms = one.until_ms - two.now_ms
            yield f"message {one.n} ({one.id}): attempt {two.attempt}, and that before has {left_ms} ms left"


def _neighbours(history: History) -> Iterator[tuple[Given, Given]]:
    by_id: dict[str, list[Given]] = defaultdict(list)
    for g in history.given:
        by_id[g.id].append(g)
    for several in by_id.values():
        # A receive that was asked twice was granted once, and extended: what counts is its last answer.
        several.sort(key=lambda g: (g.attempt, g.request, g.got))
        yield from pairwise(several)


def two_ids(history: History) -> Iterator[str]:
    """I8: one idempotency key is one message under one id, in every answer and whenever it is handed out."""
    for n, first, other in history.second_ids:
        yield f"message {n} was told to be {first} and {other}"
    ids: dict[int, str] = {put.n: put.id for put in history.puts.values() if put.id is not None}
    for g in history.given:
        if g.n >= 0 and ids.setdefault(g.n, g.id) != g.id:
            yield f"message {g.n} is {ids[g.n]}, and was handed out as {g.id} too"


def early(history: History) -> Iterator[str]:
    """I9: no message is here before its delay has passed since its publish began, on this machine's monotonic clock;
    nor does a node hand it out before its deliver_at in cluster time."""
    changes = [event["t"] for event in history.of("leader")]
    cold = [e["t"] for e in history.of("fault") if len(e["nodes"]) > len(e["all"]) // 2]
    clocks = any(e["kind"] == "clock" for e in history.of("fault")) or any(e["clocks"] > 1 for e in history.of("load"))
    for g in history.given:
        if g.now_ms < g.due_ms - _ROUNDING_MS:
            yield f"message {g.n} ({g.id}): {g.due_ms - g.now_ms} ms early in cluster time, at {g.got:.3f} s"
        put = history.puts.get(g.n)
        if put is None:
            continue
        passed_ms = (g.got - put.asked) * 1000
        allowed_ms = _ROUNDING_MS + passed_ms * _RATE
        short_ms = put.delay_s * 1000 - passed_ms - allowed_ms
        if short_ms > 0:
            # A leader is seen a while after it leads.
            short_ms -= _CHANGE_MS * sum(put.asked < at < g.got + 1 for at in changes)
            if clocks and any(at < g.got for at in cold):
                short_ms -= _COLD_MS
        if short_ms > 0:
            yield f"message {g.n} ({g.id}): {short_ms:.1f} ms early, at {g.got:.3f} s"


def late(history: History) -> Iterator[str]:
    """I10: while nothing is broken, and has not been for a second, a message is handed out for the first time at most
    limits.late_s after it was due."""
    limit_s = max([event["late_s"] for event in history.of("load")], default=0.0)
    if not limit_s:
        return
    spans = fault_spans(history)
    begins = [began for began, _ in spans]
    for g in first_given(history).values():
        due = g.got - (g.now_ms - g.due_ms) / 1000
        before = bisect_left(begins, g.got)
        since = max(due, spans[before - 1][1] if before else 0.0)
        if g.got - since > limit_s:
            yield f"message {g.n} ({g.id}), due at {due:.3f} s, was handed out at {g.got:.3f} s"


def first_given(history: History) -> dict[str, Given]:
    """By id, when each message was first handed out."""
    return {g.id: g for g in reversed(history.given)}


def overtaken(history: History) -> int:
    """I11, not promised: how many messages were asked for only after another was here that was due a second later."""
    given = sorted(first_given(history).values(), key=lambda g: g.due_ms)
    dues = [g.due_ms for g in given]
    soonest = list(accumulate([g.got for g in reversed(given)], min))[::-1]  # of this one and all due later
    later = [bisect_left(dues, due + 1000) for due in dues]
    return sum(at < len(given) and soonest[at] < g.asked for g, at in zip(given, later, strict=True))


def fault_spans(history: History) -> list[tuple[float, float]]:
    """From each fault until every node was ready again and a second more, in which what it held up is handed out; in
    order, and those that overlap as one."""
    again = [event["t"] for event in history.of("recovered")]
    spans: list[tuple[float, float]] = []
    for event in sorted(history.of("healed"), key=lambda event: float(event["began"])):
        began, healed = event["began"], event["t"]
        at = bisect_left(again, healed)
        end = (again[at] if at < len(again) else healed) + 1.0
        if spans and began <= spans[-1][1]:
            began, end = spans[-1][0], max(end, spans.pop()[1])
        spans.append((began, end))
    return spans


def diverged(history: History) -> Iterator[str]:
    """I12: after healing every node has the same files, by length and checksum, at one applied index."""
    for event in history.of("replicas"):
        if event["code"]:
            yield event["said"]


def unsafe(history: History) -> Iterator[str]:
    """I13: nobody names two leaders of one term, and of one process neither term nor applied index goes back."""
    for event in history.of("unsafe"):
        yield f"{event['why']} at {event['t']:.3f} s"


def unsynced(history: History) -> Iterator[str]:
    """I14: between the beginning of a publish and its yes a majority of nodes completed a sync, where chaos preloads
    what counts them."""
    nodes = max([event["nodes"] for event in history.of("load")], default=0)
    for put in history.puts.values():
        if put.syncs is not None and put.syncs < nodes // 2 + 1:
            yield f"message {put.n} ({put.id}) was stored at {put.stored:.3f} s, and {put.syncs} of {nodes} had synced"


def deposed(history: History) -> Iterator[str]:
    """I16: what a receive gets was not granted in an older term than what was here before that receive began."""
    newest = 0
    got = sorted(history.given, key=lambda g: g.got)
    at = 0
    for g in sorted(history.given, key=lambda g: g.asked):
        while at < len(got) and got[at].got < g.asked:
            newest = max(newest, got[at].term)
            at += 1
        if g.term < newest:
            yield f"message {g.n} ({g.id}), asked for at {g.asked:.3f} s, is of term {g.term}, and {newest} had begun"


def stuck(history: History) -> Iterator[str]:
    """I15: after healing every node is ready again within the limit, all owed messages are handed out, and no leader's
    place stays empty for longer than allowed."""
    for event in history.of("not-recovered"):
        yield f"{event['s']:.1f} s after healing at {event['t'] - event['s']:.3f} s: {event['why']}"
    for event in history.of("asked-for"):
        if event["state"] in PENDING:
            yield f"{event['id']} is still {event['state']} at the end"


def dishonest(history: History) -> Iterator[str]:
    """I18: every node counts the same, as many published as were answered yes, or may have been stored without an
    answer, and as many acked as were answered yes, or were at least handed out."""
    for event in history.of("uncounted"):
        yield f"nodes could not be counted at one applied index: {event['why']}"
    events = [event for event in history.of("counted") if event["ours"]]
    sure = sum(put.id is not None for put in history.puts.values())
    acked, given = {g.id for g in history.given if g.acked is not None}, {g.id for g in history.given}
    limits = {
        "published_messages_total": (sure, sum(not put.refused for put in history.puts.values())),
        ACKED: (len(acked), len(given)),
    }
    for event in events:
        for name, (least, most) in limits.items():
            if not least <= event["counts"][name] <= most:
                yield f"{event['node']}: {name} is {event['counts'][name]}, and {least} to {most} were seen"
        for name, count in event["counts"].items():
            if not name.startswith("sweeper") and count != events[0]["counts"][name]:
                yield f"{name} is {count} on {event['node']}, and {events[0]['counts'][name]} on {events[0]['node']}"


def ended(history: History) -> Iterator[str]:
    """I17: no node ends by itself, unless its disk failed it."""
    for event in history.of("ended"):
        if not event["may"]:
            yield f"{event['node']} ended by itself at {event['t']:.3f} s with exit code {event['code']}: see its log"


def unmet(history: History) -> Iterator[str]:
    """crash points: a node ended at each that the scenario lists (none that was drawn is owed)."""
    if not history.of("drained"):
        return
    listed = {point for event in history.of("points") for point in event["points"]}
    yield from (f"nobody came by {point}" for point in listed - history.met())


CHECKERS: dict[str, Callable[[History], Iterator[str]]] = {
    "I1 lost": lost,
    "I2 conservation": miscounted,
    "I3 phantom": phantoms,
    "I5 resurrection": resurrected,
    "I6 double lease": double_leases,
    "I8 duplicate": two_ids,
    "I9 early": early,
    "I10 late": late,
    "I12 divergence": diverged,
    "I13 log safety": unsafe,
    "I14 durability": unsynced,
    "I15 liveness": stuck,
    "I16 fencing": deposed,
    "I17 fail-stop": ended,
    "I18 honesty": dishonest,
    "flat": growing,
    "crash points": unmet,
}
