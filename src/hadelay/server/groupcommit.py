"""Group commit: whatever is waiting goes into the log together, while the entries before it are on their way.

Every change passes through here, on every node. On the leader a batch becomes one Raft entry, stamped with cluster
time; on a follower the same encoded commands travel to the leader's queue over the node link, which puts them into
its own next entry untouched. An answer is definite: NoLeader and Overloaded mean that nothing happened; once a batch
has left this node and no answer came, it is OutcomeUnknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hadelay.api.metrics import Histogram
from hadelay.api.service import Receipts
from hadelay.codec.commands import encode_publish
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import PublishResult, RowCode
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.model import Draft
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.ports import Done
from hadelay.server.outlet import Outlet
from hadelay.server.refusals import Refusals, refusal

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
#: Upper bounds of hadelay_commit_duration_seconds.
_COMMITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: How a PUBLISH begins.
_PUBLISH = bytes([Command.PUBLISH])
#: The most commands in one entry (its count is a u16).
_MAX_COMMANDS = 16_384


@dataclass(eq=False, slots=True)
class Pending:
    """What waits for its entry: drafts that share one answer, at most one entry's worth of them, or a command."""

    done: Done
    #: Size that counts in the queue and in an entry.
    size: int
    since: float
    #: Encoded; empty for drafts.
    command: bytes = b""
    #: The only term in which this node may propose the command; 0: any, and any node may lead.
    term: int = 0
    drafts: list[Draft] = field(default_factory=list)
    #: Request key that covers several drafts.
    key: bytes | None = None

    @property
    def publishes(self) -> bool:
        """Drafts of this node, or another node's."""
        return bool(self.drafts) or self.command[:1] == _PUBLISH


class GroupCommit:
    """See the module. Call `flush_soon` whenever the outlet may have become ready."""

    def __init__(
        self,
        node: str,
        runtime: Runtime,
        outlet: Outlet,
        refusals: Refusals,
        *,
        max_entry_bytes: int,
        leaderless_wait_s: float,
        commit_timeout_s: float,
    ) -> None:
        self.node, self.runtime, self.outlet, self.refusals = node, runtime, outlet, refusals
        self.max_entry_bytes = max_entry_bytes
        self.leaderless_wait_s, self.commit_timeout_s = leaderless_wait_s, commit_timeout_s
        #: Size of this node's publishes that are not answered.
        self.queued_bytes = 0
        #: Count of entries on their way, and of those with publishes.
        self.inflight = 0
        self._publishing = 0
        self.batches = 0
        #: Durations from leaving this queue to the answer of apply.
        self.commits = Histogram.of(_COMMITS_S)
        self.held = False
        self._sent: list[_Batch] = []
        #: This node's publishes and those of others, in the order they came, so that neither keep the other waiting.
        self._publishes: deque[Pending] = deque()
        self._commands: deque[Pending] = deque()
        self._scheduled = self._resting = False
        self._leaderless: Handle | None = None

    def __repr__(self) -> str:
        return f"<GroupCommit {self.waiting_publishes} publishes {self.waiting_commands} commands {self.inflight} sent>"

    @property
    def waiting_publishes(self) -> int:
        return len(self._publishes)

    @property
    def waiting_commands(self) -> int:
        return len(self._commands)

    def enqueue(self, drafts: list[Draft], key: bytes | None, size: int, done: Done) -> None:
        """Queue drafts for one entry. Only Publishing may call this: it has judged them."""
        self.queued_bytes += size
        self._add(Pending(done, size, self.runtime.monotonic(), drafts=drafts, key=key))

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Commands keep their order, and do not wait for another node's publishes. They are few and small: no limit but
        the callers' own. With a `term`, only this node as its leader may propose it, then or never: NoLeader as soon as
        that is over."""
        self._add(Pending(done, len(command), self.runtime.monotonic(), command, term))

    def _add(self, one: Pending) -> None:
        (self._publishes if one.publishes else self._commands).append(one)
        if not self._scheduled:
            self._schedule()

    def flush_soon(self) -> None:
        if self._sent:
            to = self.outlet.to()
            for batch in self._sent:
                batch.leader_is(to)
        if not self._scheduled and (self._publishes or self._commands):
            self._schedule()

    def hold(self, held: bool) -> None:
        """While held nothing leaves: a planned transfer is under way."""
        self.held = held
        self.flush_soon()

    # sending

    def _schedule(self) -> None:
        self._scheduled = True
        self.runtime.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self.reject_stale()
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

    def reject_stale(self) -> None:
        """Reject publishes older than the commit timeout: the client may have retried elsewhere, and the time for which
        their keys are remembered may be over when they leave (seed 71940). Another node has answered its own."""
        oldest = self.runtime.monotonic() - self.commit_timeout_s
        while self._publishes and (late := self._publishes[0]).since < oldest:
            self._publishes.popleft()
            self.queued_bytes -= late.size if late.drafts else 0
            late.done(None, Overloaded("publishes wait too long for their turn on this node", retry_after_ms=1_000))

    def _send_batch(self, shut: bool) -> int:
        """Its bytes. shut: without publishes."""
        taken = [] if shut else _take(self._publishes, self.max_entry_bytes)
        room = self.max_entry_bytes - sum(one.size for one in taken)
        commands = _take(self._commands, room) if room > 0 or not taken else []
        term = self.outlet.term()
        for one in [one for one in [*taken, *commands] if one.term not in (0, term)]:
            one.done(None, NoLeader("the term it was meant for is over"))
        publishes = [one for one in taken if one.drafts]
        commands = [one for one in [*taken, *commands] if not one.drafts and one.term in (0, term)]
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

    def settled(self, batch: _Batch, publishes: list[Pending], commands: list[Pending], again: bool) -> None:
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
        self.queued_bytes -= sum(p.size for p in publishes)
        if self._leaderless is not None:
            self._leaderless.cancel()
            self._leaderless = None
        self.flush_soon()

    def _rested(self) -> None:
        self._resting = False
        self.flush_soon()

    def _wait_for_leader(self) -> None:
        if self._leaderless is None:
            self._leaderless = self.runtime.call_later(self.leaderless_wait_s, self._give_up)

    def _give_up(self) -> None:
        self._leaderless = None
        error = NoLeader(
            "no majority of the cluster can be reached; nothing was stored. Try again, or another node",
            retry_after_ms=500,
        )
        waiting = [*self._publishes, *self._commands]
        self._publishes.clear()
        self._commands.clear()
        self.queued_bytes -= sum(one.size for one in waiting if one.drafts)
        for one in waiting:
            one.done(None, error)


class _Batch:
    """One batch on its way, answered once: by its results, by an error, or by the clock."""

    __slots__ = ("began", "commands", "groups", "open", "overtaken", "publishes", "queue", "timer", "to")

    def __init__(self, queue: GroupCommit, groups: list[list[Pending]], commands: list[Pending]) -> None:
        self.queue, self.groups, self.commands = queue, groups, commands
        self.publishes = bool(groups) or any(command.publishes for command in commands)
        self.open, self.overtaken = True, False
        self.to = queue.outlet.to()
        self.began = queue.runtime.monotonic()
        self.timer = queue.runtime.call_later(queue.commit_timeout_s, self._timeout)

    def send(self, encoded: list[bytes]) -> None:
        self.queue.outlet.send(encoded, self._done)

    def leader_is(self, leader: str | None) -> None:
        """A leader that is paused or cut off answers nothing and breaks no link: what was sent to it must not keep the
        next leader waiting. What this node proposed itself Raft answers, when it is deposed."""
        if leader in (None, self.to) or self.to == self.queue.node or self.overtaken:
            return
        self.overtaken = True
        self.timer.cancel()
        self.timer = self.queue.runtime.call_later(_OVERTAKEN_S, self._timeout)

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
        self.queue.settled(self, publishes, self.commands, again)
        if again:
            return
        if error is not None:
            for one in [*publishes, *self.commands]:
                one.done(None, error)
            return
        assert results is not None
        self.queue.commits.observe(self.queue.runtime.monotonic() - self.began)
        for group, result in zip(self.groups, results, strict=False):
            _answer(self.queue.refusals, group, result)
        for command, result in zip(self.commands, results[len(self.groups) :], strict=True):
            command.done(result, None)


def _take(queue: deque[Pending], room: int) -> list[Pending]:
    """The head of the queue, as much as fits into one entry and at least one."""
    taken: list[Pending] = []
    while queue and len(taken) < _MAX_COMMANDS and (queue[0].size <= room or not taken):
        taken.append(queue.popleft())
        room -= taken[-1].size
    return taken


def _group(publishes: list[Pending]) -> list[list[Pending]]:
    """Which publishes share a command: all but those with a request key that covers several drafts."""
    shared = [p for p in publishes if p.key is None]
    return ([shared] if shared else []) + [[p] for p in publishes if p.key is not None]


def _answer(refusals: Refusals, group: list[Pending], result: Any) -> None:
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
                n: refusals.problem(
                    RowCode(result.codes[first + n]), publish.drafts[n].topic, *others[first + n : first + n + 1]
                )
                for n in result.codes[first:last].nonzero()[0].tolist()
            }
            receipts.replaced = {
                n: other for n, other in enumerate(others[first:last]) if other and n not in receipts.problems
            }
        publish.done(receipts, None)
        first = last
