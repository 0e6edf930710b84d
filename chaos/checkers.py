"""Checkers, one per promise of the cluster (such as that no message is lost), over what clients saw. The docstring of a
checker is its definition (ADR 101).

The simulator's checkers (chaos.sim.promises) know when a node answered. Clients know only an interval: an event
happened after its request and before its answer. Each checker uses the end of the interval that cannot accuse a cluster
that kept its promise.

A checker consists of branches (ADR 212). A checker yields each case that it decides: the branch, and the violation or
"". So a run can report how often each branch decided a case.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from chaos.besides import counted, disordered, unmoved
from chaos.callbacks import unreported
from chaos.changing import outdated
from chaos.copies import miscopied
from chaos.fills import unfilled
from chaos.flat import BRANCHES, growing
from chaos.history import Given, History, Put, checksum
from chaos.lateness import late
from chaos.planned import unplanned
from chaos.sharding import divided

#: Largest rate error of cluster time: slewing changes the rate by at most 500 ppm, and quartz clocks drift.
_RATE = 600e-6
#: Rounding error of times, which are reported in whole milliseconds.
_ROUNDING_MS = 2.0
#: Largest step of cluster time when another node becomes leader.
_CHANGE_MS = 5.0
#: Largest difference between the wall clocks of a majority that agrees on the time; after a cold start of all nodes,
#: cluster time comes from these clocks.
_COLD_MS = 2 * 250.0
#: States of a message that has not ended.
PENDING = ("scheduled", "ready", "blocked", "leased")
#: Names, without prefix, of counters and gauges that each node sums over all topics.
ACKED, *OTHER_ENDS, REDRIVEN = (
    f'settled_messages_total{{outcome="{outcome}"}}'
    for outcome in ("acked", "cancelled", "expired", "dead", "redriven")
)
PARTS = (ACKED, *OTHER_ENDS, 'messages{state="waiting"}', 'messages{state="leased"}')
COUNTED = ("raft_applied_index", "published_messages_total", *PARTS, REDRIVEN, "sweeper_found_messages_total")
_NEVER = float("inf")
#: A case that a checker decided: name of the checker's branch (one of its rules), and text of the violation; "" if the
#: promise was kept.
Case = tuple[str, str]


@dataclass(frozen=True)
class Verdict:
    name: str
    what: str
    violations: list[str]
    #: Number of cases that each branch (one of the checker's rules) decided; names of the violated branches.
    decided: dict[str, int] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Checker:
    cases: Callable[[History], Iterator[Case]]
    #: Branches (rules) of the checker: name → condition that violates the branch.
    branches: dict[str, str]
    #: Names of the branches (rules) that apply only with the setting dispatch.sync = commit.
    commit_only: frozenset[str] = frozenset()


def check(history: History) -> list[Verdict]:
    return [judge(name, checker, history) for name, checker in CHECKERS.items()]


def judge(name: str, checker: Checker, history: History) -> Verdict:
    skipped = frozenset() if _commits(history) else checker.commit_only
    decided: Counter[str] = Counter(dict.fromkeys(checker.branches, 0))
    broken, violations = set(), []
    for branch, why in checker.cases(history):
        if branch in skipped:
            continue
        if branch not in checker.branches:
            raise KeyError(f"checker {name!r} declares no branch {branch!r}")
        decided[branch] += 1
        if why:
            broken.add(branch)
            violations.append(why)
    what = " ".join((checker.cases.__doc__ or "").partition(": ")[2].split())
    return Verdict(name, what, sorted(violations), dict(decided), frozenset(broken))


def _commits(history: History) -> bool:
    return all(event["sync"] == "commit" for event in history.of("load"))


class _ClusterTime:
    """Bounds of the cluster time that passes while this machine's monotonic clock advances."""

    def __init__(self, history: History) -> None:
        # Times at which leaders were first seen, which is some time after their election.
        self._leaders = sorted(event["t"] for event in history.of("leader"))
        clocks = any(e["kind"] == "clock" for e in history.of("fault"))
        clocks |= any(e["clocks"] > 1 for e in history.of("load"))
        # A majority that cold-starts takes cluster time from its wall clocks, which may differ.
        cold = (e["t"] for e in history.of("fault") if clocks and len(e["nodes"]) > len(e["all"]) // 2)
        self._cold = min(cold, default=_NEVER)

    def jumped_ms(self, since: float, until: float) -> float:
        """Largest jump of cluster time between two instants, in ms, due to changes of leader and cold starts."""
        changes = bisect_left(self._leaders, until + 1) - bisect_right(self._leaders, since)
        return _CHANGE_MS * changes + (_COLD_MS if self._cold < until else 0.0)

    def least_ms(self, since: float, until: float) -> float:
        """Smallest cluster time, in ms, that can have passed between two instants."""
        return (until - since) * 1000 * (1 - _RATE) - _ROUNDING_MS - self.jumped_ms(since, until)

    def most_ms(self, since: float, until: float) -> float:
        return (until - since) * 1000 * (1 + _RATE) + _ROUNDING_MS + self.jumped_ms(since, until)


def lost(history: History) -> Iterator[Case]:
    """I1: a message whose publish was confirmed, and which nobody tried to cancel, was handed out before the end of the
    run, or its TTL ended it. A message that was handed out ended in the way its consumer asked for. A redriven dead
    letter was handed out again."""
    if not history.of("drained"):
        return  # skip this check: an interrupted run does not wait for pending messages
    given: dict[str, list[Given]] = defaultdict(list)
    for g in history.given:
        given[g.id].append(g)
    for put in history.puts.values():
        if put.id is None or put.cancel_asked is not None:
            continue
        state = history.ends.get(put.id, ("", None))[0]
        owed = state in PENDING or state == "dead"  # no violation: I15 judges pending messages and dead letters
        where = f"message {put.n} ({put.id}), stored at {put.stored:.3f} s, is {state or 'never handed out'}"
        if put.id not in given:
            yield "never handed out", "" if owed or (put.ttl_s and state == "expired") else where
        else:
            yield "never handed out", ""
            if state:
                yield (
                    "not acked",
                    "" if owed or _ended_so(put, state, given[put.id]) else f"{where}, and was handed out",
                )
        for redrive in history.redrives.get(put.id, ()):
            if redrive.redriven is not None and redrive.asked is not None:
                again = any(g.got > redrive.asked for g in given[put.id])
                yield "redriven", "" if again or owed or put.ttl_s else f"{where}, redriven at {redrive.redriven:.3f} s"


def _ended_so(put: Put, state: str, given: list[Given]) -> bool:
    """Whether a client caused the message to end in `state`: acked, if a consumer sent an ack; expired, if the message
    has a TTL."""
    return (state == "acked" and any(g.ack_asked is not None for g in given)) or (state == "expired" and put.ttl_s > 0)


def miscounted(history: History) -> Iterator[Case]:
    """I2: at the end, on every node, published and redriven messages equal the settled, waiting and leased messages,
    and the sweeper found no due message that was missing from the timing wheels."""
    for event in history.of("counted"):
        count = event["counts"]
        if event["ours"]:
            whole = count["published_messages_total"] + count[REDRIVEN] == sum(count[name] for name in PARTS)
            yield "sum", "" if whole else f"{event['node']} counts {', '.join(f'{k} {n}' for k, n in count.items())}"
        found = count["sweeper_found_messages_total"]
        yield "forgotten", f"{event['node']} had forgotten {found} messages" if found else ""


def phantoms(history: History) -> Iterator[Case]:
    """I3: each message that was handed out was published with this body, topic, key and tags, was not refused, and was
    not cancelled before the receive began."""
    for g in history.given:
        put, this = history.puts.get(g.n), f"message {g.n} ({g.id}), received at {g.got:.3f} s,"
        yield "published", f"{this} was published by nobody" if put is None else ""
        if put is None:
            continue
        body = checksum(put.body)
        yield "body", f"{this} has the body {g.body}, not {body}" if g.body != body else ""
        for name in ("topic", "key", "tags"):
            answered, is_ = getattr(g, name), getattr(put, name)
            if answered or is_:
                yield name, f"{this} has the {name} {answered}, not {is_}" if answered != is_ else ""
        if put.refused:
            yield "refused", f"{this} was refused"
        elif put.id is not None:
            yield "refused", ""
        if put.cancel_asked is not None:
            gone = put.cancelled is not None and g.asked > put.cancelled
            yield "cancelled", f"{this} was cancelled at {put.cancelled:.3f} s" if gone else ""
    for put in history.puts.values():  # a confirmed cancel counts as a checked case even without a hand-out
        if put.cancelled is not None:
            yield "cancelled", ""


def unwanted(history: History) -> Iterator[Case]:
    """filters: a receive with tag filters gets only messages that have all tags of `tags` and one tag of `any_tags`."""
    for g in history.given:
        if g.every:
            lacking = set(g.every) - set(g.tags)
            yield (
                "all of",
                f"{g.id}, with the tags {list(g.tags)}, went to a receive for all of {list(g.every)}"
                if lacking
                else "",
            )
        if g.some:
            none = not set(g.some) & set(g.tags)
            yield (
                "one of",
                f"{g.id}, with the tags {list(g.tags)}, went to a receive for one of {list(g.some)}" if none else "",
            )


def resurrected(history: History) -> Iterator[Case]:
    """I5: no receive gets a message if the receive began after the message's ack was confirmed, or after a list showed
    the message among the dead letters, until somebody asks for its redrive."""
    acked: dict[str, float] = {}
    for g in history.given:
        if g.acked is not None:
            acked[g.id] = min(g.acked, acked.get(g.id, g.acked))
    yield from (("acked", "") for _ in acked)
    yield from (("dead", "") for seen in history.redrives.values() for _ in seen)
    for g in history.given:
        this = f"message {g.n} ({g.id}), handed out at {g.got:.3f} s,"
        if g.asked > acked.get(g.id, g.asked):
            yield "acked", f"{this} was acked at {acked[g.id]:.3f} s"
        for redrive in history.redrives.get(g.id, ()):
            if redrive.unsure:
                break
            if redrive.seen < g.asked and (redrive.asked is None or g.got < redrive.asked):
                yield "dead", f"{this} was a dead letter at {redrive.seen:.3f} s"


def double_leases(history: History) -> Iterator[Case]:
    """I6: no two receives get the same attempt of a message (interval mode: unless a new leader repeats the attempt and
    marks it). No receive gets a later attempt before the lease of the earlier attempt ended in cluster time, extensions
    included, unless the consumer gave the message back. A redriven message starts anew."""
    clock, commits = _ClusterTime(history), _commits(history)
    for one, two in _neighbours(history):
        this = f"message {one.n} ({one.id}): attempt {two.attempt}"
        if one.attempt == two.attempt:
            marked = one.term != two.term and max(one, two, key=lambda g: g.term).redelivered
            twice = one.request != two.request and (commits or not marked)
            yield "one attempt", f"{this} went to {one.consumer} and {two.consumer}" if twice else ""
            continue
        yield "one attempt", ""
        if one.nack_asked is None or one.nack_asked > two.got:
            left_ms = one.until_ms - two.now_ms
            yield (
                "lease",
                f"{this}, but the previous lease has {left_ms} ms left" if left_ms > _ROUNDING_MS else "",
            )
            if one.extended is not None and one.extend_asked is not None:
                # Smallest cluster time at which the consumer may have requested to extend the previous lease.
                asked_ms = one.now_ms + clock.least_ms(one.got, one.extend_asked)
                left_ms = int(asked_ms + one.extend_s * 1000 - two.now_ms)
                runs = left_ms > _ROUNDING_MS
                yield (
                    "extended lease",
                    f"{this}, but the previous lease is extended for {left_ms} ms" if runs else "",
                )


def _neighbours(history: History) -> Iterator[tuple[Given, Given]]:
    """Pairs of successive hand-outs of a message, ordered by attempt, without a redrive between them."""
    lives: dict[tuple[str, int], list[Given]] = defaultdict(list)
    for g in history.given:
        if (life := _life(history, g)) is not None:
            lives[g.id, life].append(g)
    for several in lives.values():
        # Sort several answers to one receive by time: each has the same grant, and the last one has the end of the
        # extended lease.
        several.sort(key=lambda g: (g.attempt, g.request, g.got))
        yield from pairwise(several)


def _life(history: History, g: Given) -> int | None:
    """Number of redrives before this hand-out; None if the lease may have been granted before or after a redrive."""
    life = 0
    for redrive in history.redrives.get(g.id, ()):
        if redrive.asked is None or g.got < redrive.asked:
            continue
        if redrive.redriven is None or g.asked < redrive.redriven:
            return None
        life += 1
    return life


def overtried(history: History) -> Iterator[Case]:
    """attempts: in a topic with a limit of attempts, a message is handed out at most that many times, and becomes a
    dead letter only after that many attempts."""
    limits = {event["topic"]: event["max_attempts"] for event in history.of("topic")}
    for g in history.given:
        if g.topic in limits:
            most = limits[g.topic]
            yield "too many", f"message {g.n} ({g.id}): attempt {g.attempt} of {most}" if g.attempt > most else ""
    for message_id, seen in history.redrives.items():
        for redrive in seen:
            few = redrive.attempt < min(limits.values(), default=0)
            yield "too few", f"{message_id} was dead after {redrive.attempt} attempts" if few else ""


def two_ids(history: History) -> Iterator[Case]:
    """I8: one idempotency key is one message with one id, in every answer and every hand-out."""
    yield from (("answers", "") for put in history.puts.values() if put.answers > 1)
    for n, first, other in history.second_ids:
        yield "answers", f"message {n} was answered as {first} and {other}"
    ids: dict[int, str] = {put.n: put.id for put in history.puts.values() if put.id is not None}
    for g in history.given:
        if g.n >= 0:
            another = ids.setdefault(g.n, g.id) != g.id
            yield "handed out", f"message {g.n} is {ids[g.n]}, and was handed out as {g.id} too" if another else ""


def early(history: History) -> Iterator[Case]:
    """I9: no message is handed out before its delay has passed since its publish (or reschedule) began, on this
    machine's monotonic clock. No node hands a message out before its deliver_at in cluster time, as the answer to the
    publish or reschedule stated it."""
    clock = _ClusterTime(history)
    for g in history.given:
        this = f"message {g.n} ({g.id}), at {g.got:.3f} s:"
        short_ms = g.due_ms - g.now_ms
        yield "cluster time", f"{this} {short_ms} ms early in cluster time" if short_ms > _ROUNDING_MS else ""
        put = history.puts.get(g.n)
        if put is None:
            continue
        branch, asked, delay_s, due_ms = _order(put, g)
        short = delay_s * 1000 - clock.most_ms(asked, g.got)
        yield branch, f"{this} {short:.1f} ms early" if short > 0 else ""
        if due_ms is not None and g.id == put.id and not history.redrives.get(g.id):
            # Accept a later due time: the network may have repeated a reschedule, which then took effect again later.
            stale = g.due_ms > due_ms if branch == "published" else g.due_ms == put.due_ms != due_ms
            wrong = g.due_ms < due_ms or (g.attempt == 1 and stale)
            yield f"{branch}, as answered", f"{this} due at {g.due_ms}, but the answer said {due_ms}" if wrong else ""


def _order(put: Put, g: Given) -> tuple[str, float, float, int | None]:
    """The publish or reschedule that sets the due time of a hand-out: ("published" or "rescheduled", time of the
    request, delay, due time in the answer). If a reschedule may or may not have taken effect, the earlier time counts
    and the answer is ignored."""
    if put.move_asked is None or g.got < put.move_asked:
        return "published", put.asked, put.delay_s, put.due_ms
    if put.moved is not None and g.asked > put.moved:
        return "rescheduled", put.move_asked, put.move_delay_s, put.moved_due_ms
    if put.asked + put.delay_s <= put.move_asked + put.move_delay_s:
        return "published", put.asked, put.delay_s, None
    return "rescheduled", put.move_asked, put.move_delay_s, None


def outlived(history: History) -> Iterator[Case]:
    """TTL: no receive that began after the end of a message's TTL gets the message, and no message ends before its TTL;
    both in cluster time. A reschedule restarts the TTL."""
    clock = _ClusterTime(history)
    for g in history.given:
        put = history.puts.get(g.n)
        # Skip rescheduled messages: the network may have repeated the reschedule, and the repetition restarts the TTL.
        over_ms = None if put is None or put.id != g.id or put.move_asked is not None else _over_ms(history, put)
        if over_ms is not None:
            behind_ms = g.now_ms - clock.most_ms(g.asked, g.got) - over_ms
            yield (
                "handed out",
                f"message {g.n} ({g.id}) was handed out {behind_ms:.0f} ms past its TTL" if behind_ms > 0 else "",
            )
    for put in history.puts.values():
        state, ended_ms = history.ends.get(put.id or "", ("", None))
        over_ms = _over_ms(history, put)
        if state == "expired" and ended_ms is not None and over_ms is not None:
            left_ms = over_ms - ended_ms
            yield "ended", f"message {put.n} ({put.id}) expired {left_ms} ms early" if left_ms > 0 else ""


def _over_ms(history: History, put: Put) -> int | None:
    """End of the message's TTL in cluster time; None without a TTL, or if the message's final due time is unknown."""
    unsure = put.move_asked is not None and put.moved is None
    due_ms = put.moved_due_ms if put.moved is not None else put.due_ms
    if not put.ttl_s or due_ms is None or unsure or history.redrives.get(put.id or ""):
        return None
    return due_ms + round(put.ttl_s * 1000)


def diverged(history: History) -> Iterator[Case]:
    """I12: after all faults are healed, the files of all nodes have equal lengths and checksums at one applied index;
    if chaos started the nodes, also equal bytes."""
    for event in history.of("replicas"):
        yield event["by"], event["said"] if event["code"] else ""


def unsafe(history: History) -> Iterator[Case]:
    """I13: no two leaders of one term are reported, and within one process neither term nor applied index goes back."""
    leaders: dict[int, str] = {}
    before: dict[tuple[str, int], tuple[int, int]] = {}
    for event in history.of("said"):
        node, term, index, at = event["node"], event["term"], event["index"], f"at {event['t']:.3f} s"
        if event["leader"]:
            known = leaders.setdefault(term, event["leader"])
            other = f"{node} says that {event['leader']} leads term {term}, which {known} leads, {at}"
            yield "two leaders", other if known != event["leader"] else ""
        if event["life"] is None:
            continue
        if last := before.get((node, event["life"])):
            yield "term", f"{node} went back from term {last[0]} to {term} {at}" if term < last[0] else ""
            yield "applied", f"{node} went back from index {last[1]} to {index} {at}" if index < last[1] else ""
        before[node, event["life"]] = term, index


def unsynced(history: History) -> Iterator[Case]:
    """I14: between the start of a publish and its confirmation, a majority of nodes synced their journals. For sampled
    messages, a majority of the journals is synced beyond the message (only if chaos counts syncs, with preload.c)."""
    nodes = max([event["nodes"] for event in history.of("load")], default=0)
    for put in history.puts.values():
        if put.syncs is not None:
            few = put.syncs < nodes // 2 + 1
            text = f"message {put.n} ({put.id}) was stored at {put.stored:.3f} s, and {put.syncs} of {nodes} had synced"
            yield "a journal", text if few else ""
    for event in history.of("placed"):
        unsynced_ = event["unsynced"]
        if event["found"]:
            text = f"message {event['n']} was stored at {event['t']:.3f} s, and not synced in {', '.join(unsynced_)}"
            yield "its place", text if 2 * len(unsynced_) >= nodes else ""


def deposed(history: History) -> Iterator[Case]:
    """I16: no receive gets a lease of an older term than the newest term that was seen before the receive began."""
    newest = 0
    got = sorted(history.given, key=lambda g: g.got)
    at = 0
    for g in sorted(history.given, key=lambda g: g.asked):
        while at < len(got) and got[at].got < g.asked:
            newest = max(newest, got[at].term)
            at += 1
        if newest > 0:
            text = f"message {g.n} ({g.id}), asked for at {g.asked:.3f} s, is of term {g.term}, and {newest} had begun"
            yield "term", text if g.term < newest else ""


def stuck(history: History) -> Iterator[Case]:
    """I15: after all faults are healed, every node becomes ready within the limit, every message that is due is handed
    out, and no failover takes longer than allowed."""
    for event in history.of("recovered"):
        why = event.get("why", "")
        yield "ready", f"{event['s']:.1f} s after healing at {event['t'] - event['s']:.3f} s: {why}" if why else ""
    for event in history.of("failover"):
        limit_s = event["limit_s"]
        if limit_s:
            text = (
                f"nobody stored anything for {event['s']:.2f} s after {event['kind']} of the leader (limits.failover_s)"
            )
            yield "failover", text if event["s"] > limit_s else ""
    for _ in history.of("drained"):
        yield "owed", ""
    for message_id, (state, _) in history.ends.items():
        yield "owed", f"{message_id} is still {state} at the end" if state in (*PENDING, "dead") else ""


def dishonest(history: History) -> Iterator[Case]:
    """I18: all nodes report equal counts. Published messages: as many as were confirmed, plus at most the unanswered
    ones. Acked messages: as many as were confirmed, and at most as many as were handed out."""
    for event in history.of("uncounted"):
        yield "one index", f"nodes could not be counted at one applied index: {event['why']}"
    events = [event for event in history.of("counted") if event["ours"]]
    sure = sum(put.id is not None for put in history.puts.values())
    acked, given = {g.id for g in history.given if g.acked is not None}, {g.id for g in history.given}
    others, done = counted(history)
    perhaps = sum(not put.refused for put in history.puts.values())
    limits = {
        "published": ("published_messages_total", sure + others, perhaps + others),
        "acked": (ACKED, len(acked) + done, len(given) + done),
    }
    for event in events:
        node, counts = event["node"], event["counts"]
        yield "one index", ""
        for branch, (name, least, most) in limits.items():
            said = f"{node}: {name} is {counts[name]}, and {least} to {most} were seen"
            yield branch, "" if least <= counts[name] <= most else said
        for name, count in counts.items():
            first = events[0]["counts"][name]
            if not name.startswith("sweeper") and event is not events[0]:
                yield (
                    "replicas",
                    f"{name} is {count} on {node}, and {first} on {events[0]['node']}" if count != first else "",
                )


def ended(history: History) -> Iterator[Case]:
    """I17: no node ends by itself, unless an injected disk error ended it."""
    for _ in history.of("said"):
        yield "ended", ""  # each answered request shows that its node runs: count one case without a violation
    for event in history.of("ended"):
        text = f"{event['node']} ended by itself at {event['t']:.3f} s with exit code {event['code']}: see its log"
        yield "ended", "" if event["may"] else text


def unmet(history: History) -> Iterator[Case]:
    """crash points: a node ended at each crash point that the scenario lists; those in randomly drawn faults may be
    missed."""
    if not history.of("drained"):
        return
    met = history.met()
    for point in {point for event in history.of("points") for point in event["points"]}:
        yield "met", "" if point in met else f"no node ended at the crash point {point}"


CHECKERS: dict[str, Checker] = {
    "I1 lost": Checker(lost, {
        "never handed out": "a publish was confirmed, and the message was never handed out",
        "not acked": "a message was handed out, nobody acked it, and it is gone",
        "redriven": "a dead letter was redriven, and never handed out again",
    }),
    "I2 conservation": Checker(miscounted, {
        "sum": "a node's counts do not add up: published and redriven is settled, waiting and leased",
        "forgotten": "a node found messages that its wheels had forgotten",
    }),
    "I3 phantom": Checker(phantoms, {
        "published": "a message came out that nobody published",
        "body": "a message came out with another body",
        "topic": "a message came out of another topic",
        "key": "a message came out with another key",
        "tags": "a message came out with other tags",
        "refused": "a message came out whose publish was refused",
        "cancelled": "a receive that began after a cancel was answered yes got that message",
    }),
    "filters": Checker(unwanted, {
        "all of": "a message lacks one of the tags that the receive asked for",
        "one of": "a message has none of the tags of which the receive asked for one",
    }),
    "I5 resurrection": Checker(resurrected, {
        "acked": "a receive that began after an ack was answered yes got that message",
        "dead": "a receive that began after a message was listed as a dead letter got it, and nobody had redriven it",
    }),
    "I6 double lease": Checker(double_leases, {
        "one attempt": "two receives got one attempt (interval mode: and the second is not marked as redelivered)",
        "lease": "a receive got the next attempt while the lease of the last one ran (commit mode)",
        "extended lease": "a receive got the next attempt while an extended lease ran (commit mode)",
    }, frozenset({"lease", "extended lease"})),
    "attempts": Checker(overtried, {
        "too many": "a message came out more often than its topic allows (commit mode)",
        "too few": "a message was a dead letter after fewer attempts than its topic allows",
    }, frozenset({"too many"})),
    "I8 duplicate": Checker(two_ids, {
        "answers": "one idempotency key was answered with two ids",
        "handed out": "one idempotency key came out under two ids",
    }),
    "I9 early": Checker(early, {
        "cluster time": "a node gave a message out before its deliver_at in cluster time",
        "published": "a message was handed out before its delay had passed on this machine's monotonic clock",
        "published, as answered": "a message came out with another deliver_at than its receipt said",
        "rescheduled": "a message was handed out before the delay of its reschedule had passed",
        "rescheduled, as answered": "a message came out with another deliver_at than the answer to the reschedule said",
    }),
    "I10 late": Checker(late, {
        "calm": "a message was later than `late_s`, and nothing was broken meanwhile",
        "beside faults": "a message was later than `late_s` and the time that the faults in force may have delayed it",
    }),
    "TTL": Checker(outlived, {
        "handed out": "a receive that began after the end of a message's TTL got it (commit mode)",
        "ended": "a message expired before the end of its TTL",
    }, frozenset({"handed out"})),
    "I12 divergence": Checker(diverged, {
        "checksums": "`hadelay check replicas` finds a difference",
        "bytes": "files of two nodes differ in their bytes (nodes that chaos started)",
    }),
    "I13 log safety": Checker(unsafe, {
        "two leaders": "two leaders of one term are named",
        "term": "the term of one process goes back",
        "applied": "the applied index of one process goes back",
    }),
    "I14 durability": Checker(unsynced, {
        "a journal": "no majority synced a journal from the start of a publish to its confirmation (with cc)",
        "its place": "a publish was confirmed, and no majority had synced the bytes of its entry (samples; with cc)",
    }),
    "I15 liveness": Checker(stuck, {
        "ready": "a node was not ready `recovery_s` after healing, and 10 s more for each 100 MB that nodes hold",
        "owed": "a message was still owed at the end",
        "failover": "a failover took longer than `failover_s`",
    }),
    "I16 fencing": Checker(deposed, {
        "term": "a receive got a lease of an older term than one that was here before it began (commit mode)",
    }, frozenset({"term"})),
    "I17 fail-stop": Checker(ended, {
        "ended": "a node ended by itself although nothing was wrong with its disk",
    }),
    "I18 honesty": Checker(dishonest, {
        "one index": "the nodes did not come to one applied index in the end",
        "published": "a node counts other publishes than were seen",
        "acked": "a node counts other acks than were seen",
        "replicas": "a node's counter differs from another node's",
    }),
    "S1 schedules": Checker(unplanned, {
        "once": "one occurrence of a schedule came out as two messages",
        "each": "an occurrence of a schedule never came out, and was not counted as missed or refused",
        "counts": "a schedule counts other messages than came out",
    }),
    "S4 changes": Checker(outdated, {
        "once": "one occurrence of a changed schedule came out as two messages (commit mode)",
        "each": "an occurrence between two others of one version never came out (commit mode)",
        "paused": "an occurrence came out for which the schedule was paused (commit mode)",
        "replaced": "an occurrence came out with the interval or the message of an earlier version (commit mode)",
        "triggered": "a trigger and its repetition made two messages, or none came out",
        "counts": "a changed schedule counts other messages than came out (commit mode)",
        "ended": "not all messages of a changed schedule were acked after healing",
    }, frozenset({"once", "each", "paused", "replaced", "counts"})),
    "G2 groups": Checker(disordered, {
        "in order": "a message was handed out before the earlier ones of its group were acked (commit mode)",
        "ended": "messages of groups were published, and not all were acked after healing",
    }),
    "F1 copies": Checker(miscopied, {
        "each": "a queue or subscription did not get a message that was published and not cancelled",
        "once": "a queue or subscription got two copies of one message",
        "early": "a copy came out before the deliver_at that the receipt of its message said",
        "acked": "a receive that began after the ack of a copy was answered yes got that copy",
        "cancelled": "a receive that began after a cancel by the published id ended a copy got that copy",
        "ended": "not all copies were acked or cancelled after healing",
    }),
    "F1 fills": Checker(unfilled, {
        "each": "a new subscription got no copy of a message that was pending when it began",
        "once": "a new subscription got two copies of a message",
        "ended": "a new subscription was not filled after healing",
    }),
    "C1 callbacks": Checker(unreported, {
        "each": "an ack or a death was confirmed, and no callback came",
        "once": "one message came to an end, and two callbacks reported it",
        "kind": "a callback reported an ack or a death that no consumer had asked for",
        "ended": "messages with callbacks were published, and not all had a callback after healing",
    }),
    "J1 jobs": Checker(unmoved, {
        "once": "a message was not moved by just the shift of a bulk job",
        "counts": "a bulk job counts other messages than it meant",
        "repeated": "a repeated request began a second bulk job",
        "ended": "a bulk job did not end after healing",
    }),
    "M1 shards": Checker(divided, {
        "one shard": "a topic exists in two shards",
        "own shard": "a topic exists in another shard than the map says",
        "once": "one idempotency key was answered with two ids, or is stored more than once over all shards",
        "ended": "a change of the shard map could not be ended by its repetition",
    }),
    "flat": Checker(growing, BRANCHES),
    "crash points": Checker(unmet, {"met": "no node ended at a crash point that the scenario lists"}),
}  # fmt: skip
