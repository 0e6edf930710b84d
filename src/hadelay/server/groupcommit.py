"""Group commit: waiting commands go into the log together, while the entries before them are being committed.

Every change passes through here, on every node. On the leader a batch becomes one Raft entry, stamped with cluster
time. On a follower the same bytes go over the node link into the leader's queue, and from there into its next entry.
Answers are definite: NoLeader and Overloaded mean that nothing happened; OutcomeUnknown, that a batch left this node
and no answer came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hadelay.api.service import Histogram, Receipts
from hadelay.codec.commands import encode_publish
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import PublishResult, RowCode
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.model import Draft
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.ports import Done
from hadelay.server.outlet import Outlet, Way
from hadelay.server.refusals import Refusals, refusal

#: Limit of batches with publishes in flight. Two keep the disks busy; more would only make batches smaller, except on a
#: slow disk, where syncs overlap.
_MAX_INFLIGHT_PUBLISHES, _MAX_INFLIGHT_SLOW = 2, 3
#: Limit of batches with publishes in flight while the leader's journal is between two syncs; higher, because waiting
#: publishes would else miss the next sync of a slow disk.
_MAX_INFLIGHT_BETWEEN_SYNCS = 4
#: Limit of all batches in flight on the leader: commands are small, and a client waits for each.
_MAX_INFLIGHT = 4
#: Limit of all batches in flight on a follower: the leader merges them into its next log entry.
_MAX_INFLIGHT_FORWARDED = 8
#: Pause before a batch that found no leader is sent again, in seconds.
_RETRY_S = 0.02
#: Timeout, in seconds, of a batch that was sent to a former leader; it begins when another node leads.
_OVERTAKEN_S = 0.05
_TOO_LATE = "the request waited too long for its turn on this node: nothing happened"
#: Bucket bounds of the histogram hadelay_commit_duration_seconds.
_COMMITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: Limit of commands in one log entry, which encodes their number as a u16.
_MAX_COMMANDS = 16_384


@dataclass(eq=False, slots=True)
class Pending:
    """A command that waits for its log entry; or drafts (messages to publish) that share one answer and one entry."""

    done: Done
    #: Number of bytes that the command or the drafts count as, in the queue and in an entry.
    size: int
    since: float
    #: The encoded command; empty for drafts.
    command: bytes = b""
    #: The only term in which this node may propose the command; 0: any leader may, in any term.
    term: int = 0
    drafts: list[Draft] = field(default_factory=list)
    #: Idempotency key of a whole publish request with several drafts (messages to publish).
    key: bytes | None = None
    #: Name of the token that published, if apply has to know it (see Publishing); else "".
    by: str = ""


class GroupCommit:
    """Queues commands and publishes, and sends them in batches. Call `flush_soon` when the outlet may be ready."""

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
        #: Total size of this node's publishes that are not answered, in bytes.
        self.queued_bytes = 0
        #: Number of batches in flight, and number of those batches with publishes.
        self.inflight = 0
        self._publishing = 0
        self.batches = 0
        #: Histogram of the time from sending a batch to the answer of apply.
        self.commits = Histogram.of(_COMMITS_S)
        self.paused = False
        #: Called on the leader when a batch closes. Returns a command that is to be written with the batch, or None.
        self.rider: Callable[[], tuple[bytes, Done] | None] = lambda: None
        self._sent: list[_Batch] = []
        #: Publishes in the order of their arrival: drafts of this node's users, and PUBLISH commands of other nodes.
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

    def enqueue(self, drafts: list[Draft], key: bytes | None, size: int, done: Done, by: str = "") -> None:
        """Queue drafts (messages to publish) that go into one entry. Only Publishing calls this, after its checks."""
        self.queued_bytes += size
        self._publishes.append(Pending(done, size, self.runtime.monotonic(), drafts=drafts, key=key, by=by))
        self._schedule()

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Queue a command. Commands keep their order and do not wait for publishes; callers limit their number. term:
        only this node may propose the command, as the leader of that term; NoLeader once the term is over."""
        queue = self._publishes if command[0] == Command.PUBLISH else self._commands
        queue.append(Pending(done, len(command), self.runtime.monotonic(), command, term))
        self._schedule()

    def propose_as_leader(self, command: bytes, done: Done) -> None:
        """Queue a command for the term that this node leads now: in a later term, nobody waits for the command."""
        if term := self.outlet.way().term:
            self.propose(command, done, term)
        else:
            self.runtime.call_soon(done, None, NoLeader("this node does not lead (any more)"))

    def flush_soon(self) -> None:
        """Schedule sending. To be called when the outlet may be ready, or another node may lead."""
        if self._sent:
            to = self.outlet.way().to
            for batch in self._sent:
                batch.leader_is(to)
        if self._publishes or self._commands:
            self._schedule()

    def hold(self, paused: bool) -> None:
        """Hold back all batches during a planned transfer of leadership (paused is True), or release them."""
        self.paused = paused
        self.flush_soon()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.runtime.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self.reject_stale()
        # `_resting` is True for a moment after a refused batch: without this pause, an outlet that refuses at once
        # would be called in an endless loop.
        while not (self.paused or self._resting) and (self._publishes or self._commands):
            way = self.outlet.way()
            full = self._publishing >= _MAX_INFLIGHT_PUBLISHES
            shut = full and not (self._publishing < _MAX_INFLIGHT_SLOW and self.outlet.slow())
            most = _MAX_INFLIGHT if way.to == self.node else _MAX_INFLIGHT_FORWARDED
            if (shut or not self._publishes) and (self.inflight >= most or not self._commands):
                return
            if not way.ready:
                self._wait_for_leader()
                return
            if self._send_batch(way, shut) > self.max_entry_bytes // 2:
                # Send only one large batch per turn of the event loop: encoding a large batch takes long
                self._schedule()
                return

    def between_syncs(self) -> None:
        """Send one more batch on the leader before the next sync of its journal begins, unless the batch would be much
        smaller than those in flight: each batch costs processor time on all nodes."""
        if not self._publishes or self._publishing >= _MAX_INFLIGHT_BETWEEN_SYNCS or self.paused or self._resting:
            return
        inflight = sum(batch.publishes for batch in self._sent)
        if 2 * len(self._publishes) >= inflight and (way := self.outlet.way()).term:
            self._send_batch(way, False)

    def reject_stale(self) -> None:
        """Reject publishes, and commands of users, that are older than the commit timeout: clients may have retried
        elsewhere, and idempotency keys may expire before they are sent."""
        oldest = self.runtime.monotonic() - self.commit_timeout_s
        while self._publishes and (late := self._publishes[0]).since < oldest:
            self._publishes.popleft()
            self.queued_bytes -= late.size if late.drafts else 0
            late.done(None, Overloaded(_TOO_LATE, retry_after_ms=1_000))
        if self._commands and self._commands[0].since < oldest:
            stale = [one for one in self._commands if one.since < oldest and not one.term]
            self._commands = deque(one for one in self._commands if one.since >= oldest or one.term)
            for one in stale:
                one.done(None, Overloaded(_TOO_LATE, retry_after_ms=1_000))

    def _send_batch(self, way: Way, shut: bool) -> int:
        """Send one batch and return its size in bytes. shut: without publishes, of which too many are in flight."""
        room, term = self.max_entry_bytes, way.term
        publishes, room = ([], room) if shut else _take(self._publishes, room, term)
        commands = _take(self._commands, room, term)[0] if room > 0 or not publishes else []
        if not publishes and not commands:
            return 0
        groups, submitted = _group(publishes) if publishes else ([], [])
        commands = submitted + commands
        if term and (riding := self.rider()) is not None:
            commands.append(Pending(riding[1], len(riding[0]), self.runtime.monotonic(), riding[0], term))
        encoded = []
        for group in groups:
            first = group[0]
            drafts = first.drafts if len(group) == 1 else [draft for one in group for draft in one.drafts]
            encoded.append(encode_publish(self.node, drafts, first.key, first.by))
        for command in commands:
            encoded.append(command.command)
        batch = _Batch(self, publishes, groups, commands, way.to)
        self.inflight += 1
        self.batches += 1
        self._publishing += batch.publishes > 0
        self._sent.append(batch)
        self.outlet.send(way, encoded, batch.answer)
        return sum(map(len, encoded))

    def settled(self, batch: _Batch, again: bool) -> None:
        """Handle the answer to a batch. again: nothing happened, so the commands return to the head of the queue."""
        self.inflight -= 1
        self._publishing -= batch.publishes > 0
        self._sent.remove(batch)
        if again:
            self._publishes.extendleft(reversed(batch.taken))
            self._commands.extendleft(reversed([c for c in batch.commands if c.command[0] != Command.PUBLISH]))
            self._wait_for_leader()
            if not self._resting:
                self._resting = True
                self.runtime.call_later(_RETRY_S, self._rested)
            return
        for publish in batch.taken:
            if publish.drafts:
                self.queued_bytes -= publish.size
        if self._leaderless is not None:
            self._leaderless.cancel()
            self._leaderless = None
        if self._publishes or self._commands:
            self._schedule()

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
    """A batch in flight. It is answered exactly once: by results, by an error, or by its timeout."""

    __slots__ = ("began", "commands", "groups", "open", "overtaken", "publishes", "queue", "taken", "timer", "to")

    def __init__(
        self,
        queue: GroupCommit,
        taken: list[Pending],
        groups: list[list[Pending]],
        commands: list[Pending],
        to: str | None,
    ) -> None:
        """taken: publishes in the order of their arrival: those of this node's users are also in `groups`, one group
        for each PUBLISH, and those of other nodes in `commands`. to: the node that gets the batch."""
        self.queue, self.taken, self.groups, self.commands = queue, taken, groups, commands
        #: Number of publishes of this node's users, plus number of PUBLISH commands of other nodes.
        self.publishes = len(taken)
        self.open, self.overtaken = True, False
        self.to = to
        self.began = queue.runtime.monotonic()
        self.timer = queue.runtime.call_later(queue.commit_timeout_s, self._timeout)

    def leader_is(self, leader: str | None) -> None:
        """Shorten the timeout of a batch that was sent to another node once a different node leads: a leader that is
        paused or cut off does not answer. (For batches that this node proposed, Raft itself gives the answer.)"""
        if leader in (None, self.to) or self.to == self.queue.node or self.overtaken:
            return
        self.overtaken = True
        self.timer.cancel()
        self.timer = self.queue.runtime.call_later(_OVERTAKEN_S, self._timeout)

    def _timeout(self) -> None:
        self.answer(None, OutcomeUnknown("no majority answered in time; the request may still take effect"))

    def answer(self, results: Sequence[Any] | None, error: HadelayError | None) -> None:
        if not self.open:
            return
        self.open = False
        self.timer.cancel()
        if error is None and (
            not isinstance(results, list | tuple) or len(results) != len(self.groups) + len(self.commands)
        ):
            error = OutcomeUnknown("the leader's answer does not fit this batch; the request may still take effect")
        again = isinstance(error, NoLeader)
        self.queue.settled(self, again)
        if again:
            return
        if error is not None:
            for one in [*(p for group in self.groups for p in group), *self.commands]:
                one.done(None, error)
            return
        assert results is not None
        self.queue.commits.observe(self.queue.runtime.monotonic() - self.began)
        for group, result in zip(self.groups, results, strict=False):
            _answer(self.queue.refusals, group, result)
        for command, result in zip(self.commands, results[len(self.groups) :], strict=True):
            command.done(result, None)


def _take(queue: deque[Pending], room: int, term: int) -> tuple[list[Pending], int]:
    """Take commands from the head of the queue: as many as fit into `room` bytes of a log entry, at least one. Returns
    them and the room that is left. A command for another term than `term` is answered NoLeader, and is not taken."""
    taken: list[Pending] = []
    while queue and len(taken) < _MAX_COMMANDS and (queue[0].size <= room or not taken):
        one = queue.popleft()
        if one.term not in (0, term):
            one.done(None, NoLeader("this node's term as the leader ended before the command was proposed"))
            continue
        taken.append(one)
        room -= one.size
    return taken, room


def _group(publishes: list[Pending]) -> tuple[list[list[Pending]], list[Pending]]:
    """Group publishes of this node's users into commands: those without a request key share one command per token name;
    each with a request key gets its own. Returns the groups, and the PUBLISH commands of other nodes."""
    shared: dict[str, list[Pending]] = {}
    alone: list[list[Pending]] = []
    submitted: list[Pending] = []
    for publish in publishes:
        if not publish.drafts:
            submitted.append(publish)
        elif publish.key is None:
            shared.setdefault(publish.by, []).append(publish)
        else:
            alone.append([publish])
    return [*shared.values(), *alone], submitted


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
