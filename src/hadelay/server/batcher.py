"""Group commit: whatever is waiting goes into the log together, while the entries before it are on their way.

Every change passes through here, on every node. On the leader a batch becomes one Raft entry, stamped with cluster
time; on a follower the same encoded commands travel to the leader's batcher over the node link, which puts them into
its own next entry untouched. An answer is definite: NoLeader and Overloaded mean that nothing happened; once a batch
has left this node and no answer came, it is OutcomeUnknown.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from hadelay.codec.commands import Command, encode_publish
from hadelay.codec.publishcommand import Draft
from hadelay.codec.results import PublishResult, Refused, RowCode
from hadelay.errors import (
    Conflict,
    DiskFull,
    HadelayError,
    Impossible,
    LimitReached,
    NoLeader,
    NotFound,
    OutcomeUnknown,
    Overloaded,
)
from hadelay.model import encode_id
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.ports import Done
from hadelay.server.api import Histogram, PublishDone, Receipts

#: A record's header, row and list overhead: what a draft costs besides its payload.
_DRAFT_BYTES = 128
#: What apply does for a key, and for each topic of a batch, which may be a new one: as much as for so many bytes.
_KEY_BYTES, _TOPIC_BYTES = 256, 1_024
#: Entries with publishes on their way at once. Two keep the disks busy; more would only make batches smaller.
_MAX_INFLIGHT_PUBLISHES = 2
#: Entries on their way at once, with whatever is in them: commands are small, and somebody waits for each (somebody's
#: message is due, for a grant).
_MAX_INFLIGHT = 4
#: The same on their way to a leader, in whose next entry they meet: waiting here too would save little.
_MAX_INFLIGHT_FORWARDED = 8
#: How soon a batch is tried again that found no leader where it went.
_RETRY_S = 0.02
#: How long the answer of a leader that was followed by another may still be on its way.
_OVERTAKEN_S = 0.1
#: A topic's settings may change: nobody is shut out for longer without asking again.
_LONGEST_SHUT_MS = 1_000
_LIMITS = {
    RowCode.TOO_MANY_MESSAGES: "max_messages",
    RowCode.TOO_MANY_BYTES: "max_bytes",
    RowCode.TOO_FAST: "publish_rate",
}
#: Upper bounds of hadelay_commit_duration_seconds.
_COMMITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: How a PUBLISH begins.
_PUBLISH = bytes([Command.PUBLISH])
#: The most commands in one entry (its count is a u16).
_MAX_COMMANDS = 16_384


class Outlet(Protocol):
    """Where batches go: the local Raft node, or the link to the leader."""

    def ready(self) -> bool:
        """Somebody is there to take a batch now."""
        ...

    def term(self) -> int:
        """The term this node leads, 0 when it does not."""
        ...

    def to(self) -> str | None:
        """The node that gets a batch now, this one if it leads; None when nobody is known to lead."""
        ...

    def send(self, commands: list[bytes], done: Callable[[Sequence[Any] | None, HadelayError | None], None]) -> None:
        """`done` gets a result per command. Its NoLeader means: nothing happened, try again."""
        ...


class _Publish:
    """Drafts that share one answer, at most one entry's worth of them."""

    __slots__ = ("bytes", "done", "drafts", "key", "since")
    #: No matter who leads.
    term = 0

    def __init__(self, drafts: list[Draft], key: bytes | None, size: int, done: PublishDone, since: float) -> None:
        self.drafts, self.key, self.bytes, self.done, self.since = drafts, key, size, done, since

    def fail(self, error: HadelayError) -> None:
        self.done(None, error)


class _Command:
    __slots__ = ("bytes", "command", "done", "publishes", "since", "term")

    def __init__(self, command: bytes, done: Done, term: int, since: float) -> None:
        self.command, self.bytes, self.done, self.term, self.since = command, len(command), done, term, since
        #: It is another node's.
        self.publishes = command[:1] == _PUBLISH

    def fail(self, error: HadelayError) -> None:
        self.done(None, error)


class Batcher:
    """See the module. `kick` it whenever an outlet may have become ready."""

    def __init__(
        self,
        node: str,
        runtime: Runtime,
        outlet: Outlet,
        *,
        max_entry_bytes: int,
        max_queue_bytes: int,
        leaderless_wait_s: float,
        commit_timeout_s: float,
        retry_after_ms: Callable[[str], int] = lambda topic: 0,
        is_known: Callable[[list[Draft], bytes | None], bool] = lambda drafts, request_key: False,
    ) -> None:
        """retry_after_ms: when a topic's publish rate lets the next message through. is_known: that these drafts, with
        this request key, were stored before."""
        self.node, self.runtime, self.outlet = node, runtime, outlet
        self.max_entry_bytes, self.max_queue_bytes = max_entry_bytes, max_queue_bytes
        self.leaderless_wait_s, self.commit_timeout_s = leaderless_wait_s, commit_timeout_s
        self.retry_after_ms = retry_after_ms
        self.is_known = is_known
        #: Rows refused by a topic's limits, by the limit's name.
        self.refused: Counter[str] = Counter()
        #: Topic → until when publishes of it are refused here, unasked: apply said that they come too fast.
        self._shut: dict[str, float] = {}
        self.queued_bytes = 0
        self.inflight = 0
        #: Those of them with publishes.
        self._publishing = 0
        self.batches = 0
        #: From leaving this queue to the answer of apply.
        self.commits = Histogram.of(_COMMITS_S)
        self.held = False
        self._sent: list[_Batch] = []
        #: This node's, and those of others: in the order they came, so that neither keep the other waiting.
        self._publishes: deque[_Publish | _Command] = deque()
        self._commands: deque[_Command] = deque()
        self._scheduled = self._resting = False
        self._leaderless: Handle | None = None

    def __repr__(self) -> str:
        return f"<Batcher {len(self._publishes)} publishes {len(self._commands)} commands {self.inflight} in flight>"

    @property
    def waiting_publishes(self) -> int:
        return len(self._publishes)

    @property
    def waiting_commands(self) -> int:
        return len(self._commands)

    # asking

    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        if self._shut and (wait_ms := self._shut_ms(drafts)) and not self.is_known(drafts, request_key):
            self.refused["publish_rate"] += len(drafts)
            done(None, _too_fast(drafts[0].topic, wait_ms))
            return
        if request_key is not None and drafts[0].idem is None and all(draft.idem != request_key for draft in drafts):
            # The key of a request is its first row's too: of one row it is nothing else, and then many requests share
            # one command; and more rows, or fewer, under the same key do not make a second message of the first.
            drafts = [replace(drafts[0], idem=request_key), *drafts[1:]]
            request_key = None if len(drafts) == 1 else request_key
        size = _cost(drafts[0]) if len(drafts) == 1 else sum(_costs(drafts))
        if self.queued_bytes + size > self.max_queue_bytes and self.queued_bytes:
            done(None, Overloaded("too many publishes are waiting for their commit on this node", retry_after_ms=200))
            return
        self.queued_bytes += size
        if size <= self.max_entry_bytes:
            self._publishes.append(_Publish(drafts, request_key, size, done, self.runtime.monotonic()))
        else:
            self._publishes.extend(self._split(drafts, request_key, done))
        if not self._scheduled:
            self._schedule()

    def _shut_ms(self, drafts: list[Draft]) -> int:
        """How long all of these are to wait; 0: apply decides."""
        topic = drafts[0].topic
        until = self._shut.get(topic, 0.0)
        left_ms = math.ceil((until - self.runtime.monotonic()) * 1000)
        if left_ms <= 0:
            self._shut.pop(topic, None)
            return 0
        return left_ms if all(draft.topic == topic for draft in drafts) else 0

    def _shut_for(self, topic: str) -> int:
        """It came too fast: in how many ms there is room again, as far as this node knows."""
        wait_ms = self.retry_after_ms(topic)
        if wait_ms:
            self._shut[topic] = self.runtime.monotonic() + min(wait_ms, _LONGEST_SHUT_MS) / 1000
        return wait_ms

    def problem(self, code: RowCode, topic: str, other: int = 0) -> HadelayError:
        """What a row of that topic is answered with."""
        cause = _LIMITS.get(code)
        if cause is None:
            return _problem(code, topic, other)
        self.refused[cause] += 1
        if code == RowCode.TOO_FAST:
            return _too_fast(topic, self._shut_for(topic))
        return LimitReached(
            f"the pending messages of {topic!r} are as many as it may have ({cause})", retry_after_ms=1_000
        )

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Commands keep their order, and do not wait for another node's publishes. They are few and small: no limit but
        the callers' own. With a `term`, only this node as its leader may propose it, then or never: NoLeader as soon as
        that is over."""
        one = _Command(command, done, term, self.runtime.monotonic())
        (self._publishes if one.publishes else self._commands).append(one)
        if not self._scheduled:
            self._schedule()

    def kick(self) -> None:
        if self._sent:
            to = self.outlet.to()
            for batch in self._sent:
                batch.leader_is(to)
        if not self._scheduled and (self._publishes or self._commands):
            self._schedule()

    def hold(self, held: bool) -> None:
        """While held nothing leaves: a planned transfer is under way."""
        self.held = held
        self.kick()

    # sending

    def _schedule(self) -> None:
        self._scheduled = True
        self.runtime.call_soon(self._flush)

    def _split(self, drafts: list[Draft], key: bytes | None, done: PublishDone) -> list[_Publish]:
        """A batch too large for one entry, in parts with keys of their own, so that a retry of all is harmless."""
        parts: list[tuple[list[Draft], int]] = []
        size = self.max_entry_bytes
        for draft, cost in zip(drafts, _costs(drafts), strict=True):
            if size + cost > self.max_entry_bytes:
                parts.append(([], 0))
                size = 0
            size += cost
            parts[-1][0].append(draft)
            parts[-1] = (parts[-1][0], size)
        gather, now = _Gather(len(parts), done), self.runtime.monotonic()
        return [
            _Publish(part, None if key is None else b"%d:%s" % (n, key), cost, gather.part(n), now)
            for n, (part, cost) in enumerate(parts)
        ]

    def _flush(self) -> None:
        self._scheduled = False
        self._refuse_late()
        # An outlet may refuse at once: then it rests, or this loop would never end.
        while not (self.held or self._resting) and (self._publishes or self._commands):
            shut = self._publishing >= _MAX_INFLIGHT_PUBLISHES
            most = _MAX_INFLIGHT if self.outlet.to() == self.node else _MAX_INFLIGHT_FORWARDED
            if (shut or not self._publishes) and (self.inflight >= most or not self._commands):
                return
            if not self.outlet.ready():
                self._wait_for_leader()
                return
            if self._send_batch(shut) > self.max_entry_bytes // 2:
                self._schedule()  # encoding a large one is enough for one turn of the loop
                return

    def _refuse_late(self) -> None:
        """Of who waited for so long somebody else may have asked again by now, and the time for which its key is
        remembered may be over when it leaves (seed 71940). Another node has answered its own already."""
        oldest = self.runtime.monotonic() - self.commit_timeout_s
        while self._publishes and (late := self._publishes[0]).since < oldest:
            self._publishes.popleft()
            self.queued_bytes -= late.bytes if isinstance(late, _Publish) else 0
            late.fail(Overloaded("publishes wait too long for their turn on this node", retry_after_ms=1_000))

    def _send_batch(self, shut: bool) -> int:
        """Its bytes. shut: without publishes."""
        taken = [] if shut else _take(self._publishes, self.max_entry_bytes)
        room = self.max_entry_bytes - sum(p.bytes for p in taken)
        commands = _take(self._commands, room) if room > 0 or not taken else []
        term = self.outlet.term()
        for one in [one for one in [*taken, *commands] if one.term not in (0, term)]:
            one.fail(NoLeader("the term it was meant for is over"))
        publishes = [p for p in taken if isinstance(p, _Publish)]
        commands = [c for c in [*taken, *commands] if isinstance(c, _Command) and c.term in (0, term)]
        if not publishes and not commands:
            return 0
        groups = _group(publishes)
        encoded = [encode_publish(self.node, [d for p in group for d in p.drafts], group[0].key) for group in groups]
        encoded += [c.command for c in commands]
        self.inflight += 1
        self.batches += 1
        batch = _Batch(self, groups, commands)
        self._publishing += batch.publishes
        self._sent.append(batch)
        batch.send(encoded)
        return sum(map(len, encoded))

    def settled(self, batch: _Batch, publishes: list[_Publish], commands: list[_Command], again: bool) -> None:
        """A batch is over; `again`: nothing happened, it goes back to the head of the queue."""
        self.inflight -= 1
        self._publishing -= batch.publishes
        self._sent.remove(batch)
        if again:
            self._publishes.extendleft(reversed([*publishes, *(c for c in commands if c.publishes)]))
            self._commands.extendleft(reversed([c for c in commands if not c.publishes]))
            self._wait_for_leader()
            if not self._resting:
                self._resting = True
                self.runtime.call_later(_RETRY_S, self._rested)
            return
        self.queued_bytes -= sum(p.bytes for p in publishes)
        if self._leaderless is not None:
            self._leaderless.cancel()
            self._leaderless = None
        self.kick()

    def _rested(self) -> None:
        self._resting = False
        self.kick()

    def _wait_for_leader(self) -> None:
        if self._leaderless is None:
            self._leaderless = self.runtime.call_later(self.leaderless_wait_s, self._give_up)

    def _give_up(self) -> None:
        self._leaderless = None
        error = NoLeader(
            "no majority of the cluster can be reached; nothing was stored. Try again, or another node",
            retry_after_ms=500,
        )
        waiting: list[_Publish | _Command] = [*self._publishes, *self._commands]
        self._publishes.clear()
        self._commands.clear()
        self.queued_bytes -= sum(w.bytes for w in waiting if isinstance(w, _Publish))
        for one in waiting:
            one.fail(error)


class _Batch:
    """One batch on its way, answered once: by its results, by an error, or by the clock."""

    __slots__ = ("batcher", "began", "commands", "groups", "open", "overtaken", "publishes", "timer", "to")

    def __init__(self, batcher: Batcher, groups: list[list[_Publish]], commands: list[_Command]) -> None:
        self.batcher, self.groups, self.commands = batcher, groups, commands
        self.publishes = bool(groups) or any(command.publishes for command in commands)
        self.open, self.overtaken = True, False
        self.to = batcher.outlet.to()
        self.began = batcher.runtime.monotonic()
        self.timer = batcher.runtime.call_later(batcher.commit_timeout_s, self._timeout)

    def send(self, encoded: list[bytes]) -> None:
        self.batcher.outlet.send(encoded, self._done)

    def leader_is(self, leader: str | None) -> None:
        """A leader that is paused or cut off answers nothing and breaks no link: what was sent to it must not keep the
        next leader waiting. What this node proposed itself Raft answers, when it is deposed."""
        if leader in (None, self.to) or self.to == self.batcher.node or self.overtaken:
            return
        self.overtaken = True
        self.timer.cancel()
        self.timer = self.batcher.runtime.call_later(_OVERTAKEN_S, self._timeout)

    def _timeout(self) -> None:
        self._done(None, OutcomeUnknown("no majority answered in time; the request may still take effect"))

    def _done(self, results: Sequence[Any] | None, error: HadelayError | None) -> None:
        if not self.open:
            return
        self.open = False
        self.timer.cancel()
        publishes = [p for group in self.groups for p in group]
        if error is None and (
            not isinstance(results, list | tuple) or len(results) != len(self.groups) + len(self.commands)
        ):
            error = OutcomeUnknown("the leader's answer is not one to this batch")
        again = isinstance(error, NoLeader)
        self.batcher.settled(self, publishes, self.commands, again)
        if again:
            return
        if error is not None:
            for publish in publishes:
                publish.done(None, error)
            for command in self.commands:
                command.done(None, error)
            return
        assert results is not None
        self.batcher.commits.observe(self.batcher.runtime.monotonic() - self.began)
        for group, result in zip(self.groups, results, strict=False):
            _answer(self.batcher, group, result)
        for command, result in zip(self.commands, results[len(self.groups) :], strict=True):
            command.done(result, None)


def _cost(draft: Draft) -> int:
    """Bytes that it counts as, in the queue and in an entry."""
    cost = _DRAFT_BYTES + len(draft.body) + len(draft.meta)
    if draft.idem is not None:
        cost += _KEY_BYTES
    return cost if draft.key is None else cost + _KEY_BYTES


def _costs(drafts: list[Draft]) -> Iterator[int]:
    """Of the drafts of one request."""
    seen = {drafts[0].topic}
    for draft in drafts:
        if draft.topic in seen:
            yield _cost(draft)
        else:
            seen.add(draft.topic)
            yield _cost(draft) + _TOPIC_BYTES


_One = TypeVar("_One", bound=_Publish | _Command)


def _take(queue: deque[_One], room: int) -> list[_One]:
    """The head of the queue, as much as fits into one entry and at least one."""
    taken: list[_One] = []
    while queue and len(taken) < _MAX_COMMANDS and (queue[0].bytes <= room or not taken):
        taken.append(queue.popleft())
        room -= taken[-1].bytes
    return taken


def _group(publishes: list[_Publish]) -> list[list[_Publish]]:
    """Which publishes share a command: all but those with a request key that covers several drafts."""
    shared = [p for p in publishes if p.key is None]
    return ([shared] if shared else []) + [[p] for p in publishes if p.key is not None]


def _answer(batcher: Batcher, group: list[_Publish], result: Any) -> None:
    if not isinstance(result, PublishResult):
        error = refusal(result)
        for publish in group:
            publish.done(None, error)
        return
    ids, ats = result.ids.tolist(), result.deliver_at_ms.tolist()
    others = [] if result.others is None else result.others.tolist()
    plain = not others and not result.codes.any() and not result.duplicate.any()
    first = 0
    for publish in group:
        last = first + len(publish.drafts)
        receipts = Receipts(ids[first:last], ats[first:last])
        if not plain:
            receipts.duplicates = frozenset(result.duplicate[first:last].nonzero()[0].tolist())
            receipts.problems = {
                n: batcher.problem(
                    RowCode(result.codes[first + n]), publish.drafts[n].topic, *others[first + n : first + n + 1]
                )
                for n in result.codes[first:last].nonzero()[0].tolist()
            }
            receipts.replaced = {
                n: other for n, other in enumerate(others[first:last]) if other and n not in receipts.problems
            }
        publish.done(receipts, None)
        first = last


def refusal(result: Refused) -> HadelayError:
    """What a command that was refused as a whole is answered with."""
    if result.code == "disk_full":
        return DiskFull(result.detail, retry_after_ms=5_000)
    return HadelayError(f"refused ({result.code}): {result.detail}")


def _too_fast(topic: str, wait_ms: int) -> HadelayError:
    return LimitReached(f"more than the publish_rate of {topic!r}: come again later", retry_after_ms=max(1, wait_ms))


def _problem(code: RowCode, topic: str, other: int = 0) -> HadelayError:
    if code == RowCode.TOO_FAR:
        return Impossible("deliver_at is further ahead than this cluster allows (limits.max_delay)")
    if code == RowCode.KEY_CONFLICT:
        return Impossible("this Idempotency-Key was used with another payload or other options: take a new key")
    if code == RowCode.KEY_PENDING:
        return Conflict(
            "a message with this key is pending; `id` is the first one's", outcome="pending", id=encode_id(other)
        )
    if code == RowCode.KEY_LEASED:
        detail = "the message with this key is leased, too late to replace it; publish again when it is settled"
        return Conflict(detail, outcome="leased", id=encode_id(other))
    if code == RowCode.NO_CALLBACK:
        return Impossible(
            f"callback: {topic} does not allow a message to name its own URL; its webhook's allow_per_message would"
        )
    if code == RowCode.NO_TOPIC:
        return NotFound(f"there is no topic {topic!r}, and topics are not created by publishing here: PUT it first")
    if code == RowCode.HOUR_FULL:
        return LimitReached("that hour holds as many messages as it can: choose another time")
    return LimitReached("the cluster has as many topics as it allows")


class _Gather:
    """Puts the receipts of a split batch together; an error answers for all: unknown once a part is or may be in."""

    def __init__(self, parts: int, done: PublishDone) -> None:
        self.receipts: list[Receipts | None] = [None] * parts
        self.missing, self.done, self.error = parts, done, None

    error: HadelayError | None

    def part(self, n: int) -> PublishDone:
        def finished(receipts: Receipts | None, error: HadelayError | None) -> None:
            self.receipts[n] = receipts
            if self.error is None or isinstance(error, OutcomeUnknown):
                self.error = error
            self.missing -= 1
            if not self.missing:
                self._answer()

        return finished

    def _answer(self) -> None:
        if self.error is not None:
            stored = any(r is not None for r in self.receipts)
            self.done(None, OutcomeUnknown("a part of the batch is stored, a part is not") if stored else self.error)
            return
        whole = Receipts([], [])
        for part in self.receipts:
            assert part is not None
            base = len(whole.ids)
            whole.duplicates |= frozenset(n + base for n in part.duplicates)
            whole.problems = whole.problems | {n + base: p for n, p in part.problems.items()}
            whole.replaced = whole.replaced | {n + base: other for n, other in part.replaced.items()}
            whole.ids += part.ids
            whole.deliver_at_ms += part.deliver_at_ms
        self.done(whole, None)
