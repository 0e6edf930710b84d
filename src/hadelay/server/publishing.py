"""Entrance to group commit: publishes and other commands of this node's users, and batches of followers.

A publish is judged, split if it is too large for one entry, and its answers are merged.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from hadelay.api.service import PublishDone, Receipts
from hadelay.codec.commandtypes import PUBLISHES, Command
from hadelay.codec.entries import is_whole, kind_of
from hadelay.codec.meta import unpack
from hadelay.codec.results import Refused
from hadelay.errors import Conflict, DiskFull, HadelayError, Impossible, NoLeader, OutcomeUnknown, Overloaded
from hadelay.model import Draft
from hadelay.raft.ports import Done
from hadelay.server.gather import gather
from hadelay.server.guard import Guard
from hadelay.server.leadership import Leadership
from hadelay.server.link import Reply
from hadelay.version import CALLBACKS_LEVEL, SCHEDULER_LEVEL, UNIQUE_LEVEL

#: Number of bytes that a draft (a message to publish) counts as, besides its payload: a record's header, row and list
#: overhead.
_DRAFT_BYTES = 128
#: Numbers of bytes by which a client key, and each topic of a batch after the first, raise the counted size of a log
#: entry: apply takes as long for a key, or for a topic that may be new, as for payload of this size.
_KEY_BYTES, _TOPIC_BYTES = 256, 1_024

#: Commands that no follower may send: only the leader changes members, after it has checked the change.
_NEVER = frozenset({Command.MEMBERS})
#: Commands that only the leader may propose. A FEATURE command with an unknown level, for example, would stop every
#: node, also after a restart.
_LEADERS = frozenset({Command.FEATURE, Command.INCARNATION})


def _newer(drafts: list[Draft], level: int) -> str:
    """The option of these drafts that needs a higher feature level than this; "" if there is none."""
    if level < SCHEDULER_LEVEL and any(draft.group is not None for draft in drafts):
        return "group"
    if level < UNIQUE_LEVEL and any(draft.unique_ms for draft in drafts):
        return "unique_for"
    if level < CALLBACKS_LEVEL:
        for draft in drafts:
            if b"\xa2fw" in draft.meta and unpack(draft.meta).fw:
                return "forward"
            if draft.callback and ((meta := unpack(draft.meta)).os or meta.of):
                return "on_success, on_failure"
    return ""


class Publishing:
    """Checks publishes and other commands, and queues them for group commit. One object per node."""

    def __init__(
        self, leadership: Leadership, guard: Guard, is_known: Callable[[list[Draft], bytes | None], bool],
        max_queue_bytes: int, copies: Callable[[str], int] = lambda topic: 0,
    ) -> None:  # fmt: skip
        """is_known: whether these drafts (messages to publish), with this request key, were stored before.
        max_queue_bytes: limit of publishes without an answer; beyond, publishes and batches of followers are
        refused. copies: number of subscriptions of a topic."""
        self._group_commit, self._peers = leadership.group_commit, leadership.peers
        self._leadership, self._guard, self._is_known = leadership, guard, is_known
        self._max_queue_bytes, self._copies = max_queue_bytes, copies
        leadership.link.handlers["submit"] = self._on_submit

    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        """Commit the drafts (messages to publish), in one entry if they fit. `request_key` is the idempotency key of
        all of them; the error is Impossible if the key was used for other drafts.

        Raises nothing: errors come through `done`, which may be called before this returns. Overloaded, DiskFull and
        LimitReached mean that nothing was stored."""
        if self._leadership.drained:
            node = self._group_commit.node
            done(None, Overloaded(f"{node} is drained: ask another node", retry_after_ms=0))
            return
        if new := _newer(drafts, self._leadership.level):
            done(None, Conflict(f"{new}: not before every node is upgraded (feature_level of GET /v1/cluster)"))
            return
        refused: dict[int, HadelayError] = {
            n: Impossible(f"callback: {problem}")
            for n, draft in enumerate(drafts)
            if draft.callback and (url := unpack(draft.meta).cb) and (problem := self._guard.literal_problem(url))
        }
        if refused:
            kept = [n for n in range(len(drafts)) if n not in refused]
            done = partial(gather(1, partial(_merge, done, _receipts(len(drafts), refused), [kept])), 0)
            drafts = [drafts[n] for n in kept]
            if not drafts:
                done(Receipts([], []), None)
                return
        error = self._refusal(drafts, request_key)
        if error is not None:
            done(None, error)
        else:
            self._queue(drafts, request_key, done)

    def _refusal(self, drafts: list[Draft], request_key: bytes | None) -> HadelayError | None:
        """Return the error if these messages are refused before they are queued, else None."""
        if self._peers.full and self._leadership.leading:
            return DiskFull(self._peers.no_space(), retry_after_ms=5_000)
        refusals = self._group_commit.refusals
        error = refusals.throttled(drafts)
        if error is None or self._is_known(drafts, request_key):
            return None
        refusals.counts["publish_rate"] += len(drafts)
        return error

    def _queue(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        if request_key is not None and drafts[0].idem is None and all(draft.idem != request_key for draft in drafts):
            # Use the request's key as the first draft's own key. Requests with a single draft can then share a command,
            # and a repeated request with more or fewer drafts does not store the first draft again.
            drafts = [replace(drafts[0], idem=request_key), *drafts[1:]]
            request_key = None if len(drafts) == 1 else request_key
        group_commit = self._group_commit
        size = sum(self._costs(drafts))
        if group_commit.queued_bytes + size > self._max_queue_bytes and group_commit.queued_bytes:
            done(None, Overloaded("too many publishes are waiting for their commit on this node", retry_after_ms=200))
        elif size <= group_commit.max_entry_bytes:
            group_commit.enqueue(drafts, request_key, size, done)
        else:
            self._split(drafts, request_key, done)

    def _split(self, drafts: list[Draft], key: bytes | None, done: PublishDone) -> None:
        """Queue a batch too large for one entry in parts. With a request key, each part gets its own key, so that a
        retry of the batch is harmless."""
        most = size = self._group_commit.max_entry_bytes
        first: list[int] = []
        sizes: list[int] = []
        for n, cost in enumerate(self._costs(drafts)):
            if size + cost > most:
                first.append(n)
                sizes.append(0)
                size = 0
            size += cost
            sizes[-1] = size
        parts = [range(*ends) for ends in pairwise([*first, len(drafts)])]
        answered = gather(len(parts), partial(_merge, done, _receipts(len(drafts)), parts))
        for n, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            part_key = None if key is None else b"%d:%s" % (n, key)
            self._group_commit.enqueue(drafts[part.start : part.stop], part_key, size, partial(answered, n))

    def _costs(self, drafts: list[Draft]) -> Iterator[int]:
        """Bytes that each draft counts as, in the queue and in an entry. Copies for subscriptions count, because apply
        files each of them: an entry takes no longer with subscriptions than without."""
        copies: dict[str, int] = {}
        for draft in drafts:
            cost = _cost(draft)
            if draft.topic not in copies:
                cost += _TOPIC_BYTES if copies else 0
                copies[draft.topic] = _DRAFT_BYTES * self._copies(draft.topic)
            yield cost + copies[draft.topic]

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Propose any command other than a publish, on any node. term: see GroupCommit.propose. In interval mode
        hand-outs are proposed first, because apply checks leases against them."""
        delivery = self._leadership.delivery
        delivery.before_settlement()
        command = delivery.settling(command)
        self._group_commit.propose(command, delivery.in_order(command, done), term)

    def _on_submit(self, peer: str, commands: Any, reply: Reply) -> None:
        """Queue a follower's commands for this leader's next entry, in this term only: a later leader may have got the
        same commands, answered them, and forgotten their idempotency keys."""
        leading = self._leadership.leading
        if not leading:
            reply(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        if self._group_commit.queued_bytes > self._max_queue_bytes:
            reply(None, Overloaded("too many publishes are waiting for their commit", retry_after_ms=200))
            return
        if not isinstance(commands, list) or not all(map(is_whole, commands)) or any(c[0] in _NEVER for c in commands):
            # Check the whole batch first: a malformed command would spoil the other commands of its entry.
            raise ValueError("submit: a batch must be a list of complete commands that a follower may send")
        part, full = gather(len(commands), partial(_answer, reply)), self._peers.no_space()
        for n, command in enumerate(commands):
            if kind_of(command) in _LEADERS:
                part(n, Refused("malformed", "only the leader may propose this command"), None)
            elif full and command[0] in PUBLISHES:
                part(n, Refused("disk_full", full), None)
            else:
                self.propose(command, partial(part, n), leading)


def _receipts(count: int, problems: dict[int, HadelayError] | None = None) -> Receipts:
    return Receipts([0] * count, [0] * count, problems=problems or {})


def _merge(
    done: PublishDone, whole: Receipts, parts: Sequence[Sequence[int]],
    found: list[Receipts | None], errors: list[HadelayError],
) -> None:  # fmt: skip
    """Answer a publish request that was queued in parts. whole: receipts of all drafts, filled in here. parts:
    positions of each part's drafts. An error of one part is the answer for all: OutcomeUnknown if a part is, or may be,
    stored."""
    if errors:
        unknown = (error for error in errors if isinstance(error, OutcomeUnknown))
        stored = len(errors) < len(parts)
        partly = OutcomeUnknown("a part of the batch is stored, another part is not: repeat it with the same keys")
        done(None, partly if stored else next(unknown, errors[0]))
        return
    for at, receipts in zip(parts, found, strict=True):
        assert receipts is not None
        for n, message_id, deliver_at_ms in zip(at, receipts.ids, receipts.deliver_at_ms, strict=True):
            whole.ids[n], whole.deliver_at_ms[n] = message_id, deliver_at_ms
        whole.duplicates |= frozenset(at[n] for n in receipts.duplicates)
        whole.problems = whole.problems | {at[n]: problem for n, problem in receipts.problems.items()}
        whole.replaced = whole.replaced | {at[n]: other for n, other in receipts.replaced.items()}
    done(whole, None)


def _cost(draft: Draft) -> int:
    """Bytes that a draft (message to publish) counts as, without copies."""
    cost = _DRAFT_BYTES + len(draft.body) + len(draft.meta)
    if draft.idem is not None:
        cost += _KEY_BYTES
    return cost if draft.key is None else cost + _KEY_BYTES


def _answer(reply: Reply, results: list[Any], errors: list[HadelayError]) -> None:
    if not errors:
        reply(results, None)
    elif len(errors) == len(results) and all(isinstance(error, NoLeader) for error in errors):
        reply(None, errors[0])
    else:
        # Do not answer NoLeader: the follower would send all commands again, and some may be in the log.
        reply(None, OutcomeUnknown("leadership changed before all commands finished"))
