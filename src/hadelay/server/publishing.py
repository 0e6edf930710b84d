"""Entrance to group commit: takes publishes and other commands of this node's users, and batches of followers.

A publish is judged, split if it is too large for one entry, and its answers are merged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from hadelay.api.publishoptions import OPTIONS
from hadelay.api.service import PublishDone, Receipts
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import is_whole, kind_of
from hadelay.codec.meta import unpack
from hadelay.codec.results import Refused
from hadelay.errors import Conflict, DiskFull, HadelayError, Impossible, NoLeader, OutcomeUnknown, Overloaded
from hadelay.ledger.messages.idempotency import is_known
from hadelay.model import Draft
from hadelay.raft.ports import Done
from hadelay.server.checkpoints import Replica
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.guard import Guard
from hadelay.server.leadership import Leadership
from hadelay.server.link import Reply
from hadelay.server.peers import Peers
from hadelay.version import FIRST_LEVEL

#: Number of bytes that a draft (a message to publish) counts as, besides its payload: record header, row, list
#: overhead.
_DRAFT_BYTES = 128
#: Numbers of bytes by which a client key, and each topic of a batch after the first, raise the counted size of a log
#: entry: apply takes as long for a key, or for a topic that may be new, as for payload of this size.
_KEY_BYTES, _TOPIC_BYTES = 256, 1_024

#: Commands that no follower may send to the leader: only the leader changes members, after it has checked the change.
_NEVER = frozenset({Command.MEMBERS})
#: Commands that only the leader may propose. A FEATURE command with an unknown level, for example, would stop every
#: node, also after a restart.
_LEADERS = frozenset({Command.FEATURE, Command.INCARNATION})


#: Field of Draft → feature level that it needs, if above the first. Until the cluster has switched to that level, nodes
#: refuse publishes with the field: apply would refuse all publishes of the same command.
LEVEL_OF_OPTION = {row.draft or name: row.level for name, row in OPTIONS.items() if row.level > FIRST_LEVEL}


def _newer(drafts: list[Draft], level: int) -> str:
    """First option of these drafts that needs a higher feature level than `level`; "" if there is none."""
    for option, needed in LEVEL_OF_OPTION.items():
        if needed > level and any(getattr(draft, option) for draft in drafts):
            return option
    return ""


def _too_new(drafts: list[Draft], level: int) -> HadelayError | None:
    new = _newer(drafts, level)
    return Conflict(f"{new}: not before every node is upgraded (feature_level of GET /v1/cluster)") if new else None


class Publishing:
    """Checks publishes and other commands, and queues them for group commit. One object per node."""

    def __init__(
        self,
        leadership: Leadership,
        group_commit: GroupCommit,
        delivery: DeliveryLoop,
        peers: Peers,
        replica: Replica,
        *,
        guard: Guard,
        max_queue_bytes: int,
    ) -> None:
        """max_queue_bytes: limit of unanswered publishes; beyond it, publishes and batches of followers are refused."""
        self._leadership, self._group_commit, self._delivery = leadership, group_commit, delivery
        self._peers, self._replica, self._guard = peers, replica, guard
        self._max_queue_bytes = max_queue_bytes
        peers.link.handlers["submit"] = self._on_submit

    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone, by: str = "") -> None:
        """Commit the drafts (messages to publish), in one entry if they fit. `request_key` is the idempotency key of
        all of them; the error is Impossible if the key was used for other drafts. by: name of the request's token, ""
        without one.

        Raises nothing: errors come through `done`, which may be called before this returns. Overloaded, DiskFull and
        LimitReached mean that nothing was stored."""
        if self._leadership.drained:
            node = self._group_commit.node
            done(None, Overloaded(f"{node} is drained: ask another node", retry_after_ms=0))
            return
        if LEVEL_OF_OPTION and _newer(drafts, self._leadership.level):
            self._leadership.confirm(
                lambda: _too_new(drafts, self._leadership.level), partial(self._publish, drafts, request_key, done, by)
            )
        else:
            self._publish(drafts, request_key, done, by, None)

    def _publish(
        self,
        drafts: list[Draft],
        request_key: bytes | None,
        done: PublishDone,
        by: str,
        refused_as_new: HadelayError | None,
    ) -> None:
        if refused_as_new is not None:
            done(None, refused_as_new)
            return
        refused: dict[int, HadelayError] = {}
        for n, draft in enumerate(drafts):
            if draft.callback and (url := unpack(draft.meta).cb) and (problem := self._guard.literal_problem(url)):
                refused[n] = Impossible(f"callback: {problem}")
        if refused:
            kept = [n for n in range(len(drafts)) if n not in refused]
            done = partial(_gather(1, partial(_merge, done, _receipts(len(drafts), refused), [kept])), 0)
            drafts = [drafts[n] for n in kept]
            if not drafts:
                done(Receipts([], []), None)
                return
        error = self._refusal(drafts, request_key)
        if error is not None:
            done(None, error)
        else:
            self._queue(drafts, request_key, done, by if by and self._makes_rows(drafts, request_key) else "")

    def _refusal(self, drafts: list[Draft], request_key: bytes | None) -> HadelayError | None:
        """Return the error if these messages are refused before they are queued, else None."""
        if self._peers.full and self._leadership.leading:
            return DiskFull(self._peers.no_space(), retry_after_ms=5_000)
        refusals = self._group_commit.refusals
        error = refusals.throttled(drafts)
        if error is None or is_known(self._replica.ledger, drafts, request_key):
            return None
        refusals.counts["publish_rate"] += len(drafts)
        return error

    def _makes_rows(self, drafts: list[Draft], request_key: bytes | None) -> bool:
        """Whether the publish may make rows of tables that all tenants share: then apply must know its token. All other
        publishes share a command, whatever their tokens."""
        return (
            request_key is not None
            or any(draft.idem is not None or draft.unique_ms or draft.callback for draft in drafts)
            or any(self._replica.ledger.known_topic(name) is None for name in {draft.topic for draft in drafts})
        )

    def _queue(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone, by: str) -> None:
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
            group_commit.enqueue(drafts, request_key, size, done, by)
        else:
            self._split(drafts, request_key, done, by)

    def _split(self, drafts: list[Draft], key: bytes | None, done: PublishDone, by: str) -> None:
        """Queue a batch too large for one log entry in parts. With a request key, each part gets its own key, so that a
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
        answered = _gather(len(parts), partial(_merge, done, _receipts(len(drafts)), parts))
        for n, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            part_key = None if key is None else b"%d:%s" % (n, key)
            self._group_commit.enqueue(drafts[part.start : part.stop], part_key, size, partial(answered, n), by)

    def _costs(self, drafts: list[Draft]) -> list[int]:
        """Bytes that each draft counts as, in the queue and in an entry. Copies for subscriptions count, because apply
        files each of them: so applying an entry takes no longer with subscriptions than without."""
        subscriptions, copies = self._replica.ledger.topics.subscriptions, dict[str, int]()
        costs = []
        for draft in drafts:
            cost = _DRAFT_BYTES + len(draft.body) + len(draft.meta)
            if draft.idem is not None:
                cost += _KEY_BYTES
            if draft.key is not None:
                cost += _KEY_BYTES
            if draft.topic not in copies:
                cost += _TOPIC_BYTES if copies else 0
                copies[draft.topic] = _DRAFT_BYTES * len(subscriptions.get(draft.topic, ()))
            costs.append(cost + copies[draft.topic])
        return costs

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Propose any command except a publish; possible on every node. term: see GroupCommit.propose. In interval
        mode, the grants of hand-outs are proposed first, because apply checks leases against them."""
        self._delivery.before_settlement()
        self._group_commit.propose(command, self._delivery.in_order(command, done), term)

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
            # Check the whole batch first: one malformed command would spoil the other commands of the same entry.
            raise ValueError("submit: a batch must be a list of complete commands that a follower may send")
        part, full = _gather(len(commands), partial(_answer, reply)), self._peers.no_space()
        for n, command in enumerate(commands):
            if kind_of(command) in _LEADERS:
                part(n, Refused("malformed", "only the leader may propose this command"), None)
            elif full and command[0] == Command.PUBLISH:
                part(n, Refused("disk_full", full), None)
            else:
                self.propose(self._delivery.settling(command), partial(part, n), leading)


def _gather(count: int, done: Callable[[list[Any], list[HadelayError]], None]) -> Callable[[int, Any, Any], None]:
    """Make a callback answered(number of a part, result, error), which collects the answers of `count` parts and then
    calls done(results, errors). For a part that failed, the result is None."""
    results: list[Any] = [None] * count
    errors: list[HadelayError] = []
    missing = count

    def answered(n: int, result: Any, error: HadelayError | None) -> None:
        nonlocal missing
        results[n] = result
        if error is not None:
            errors.append(error)
        missing -= 1
        if not missing:
            done(results, errors)

    return answered


def _receipts(count: int, problems: dict[int, HadelayError] | None = None) -> Receipts:
    return Receipts([0] * count, [0] * count, problems=problems or {})


def _merge(
    done: PublishDone,
    whole: Receipts,
    parts: Sequence[Sequence[int]],
    found: list[Receipts | None],
    errors: list[HadelayError],
) -> None:
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


def _answer(reply: Reply, results: list[Any], errors: list[HadelayError]) -> None:
    if not errors:
        reply(results, None)
    elif len(errors) == len(results) and all(isinstance(error, NoLeader) for error in errors):
        reply(None, errors[0])
    else:
        # Do not answer NoLeader: the follower would send all commands again, and some may be in the log.
        reply(None, OutcomeUnknown("leadership changed before all commands finished"))
