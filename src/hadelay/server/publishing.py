"""The door of publishing: judges a request, splits a large batch into entries, and puts the answers together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from hadelay.api.service import PublishDone, Receipts
from hadelay.codec.meta import unpack
from hadelay.errors import DiskFull, HadelayError, Impossible, OutcomeUnknown, Overloaded
from hadelay.model import Draft
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.guard import Guard
from hadelay.server.leadership import Leadership
from hadelay.server.peers import Peers

#: Cost of a draft besides its payload, in bytes: a record's header, row and list overhead.
_DRAFT_BYTES = 128
#: What apply does for a key, and for each topic of a batch, which may be a new one: as much as for so many bytes.
_KEY_BYTES, _TOPIC_BYTES = 256, 1_024


class Publishing:
    """One per node."""

    def __init__(
        self,
        group_commit: GroupCommit,
        leadership: Leadership,
        peers: Peers,
        guard: Guard,
        is_known: Callable[[list[Draft], bytes | None], bool],
        max_queue_bytes: int,
    ) -> None:
        """is_known: that these drafts, with this request key, were stored before. max_queue_bytes: of publishes that
        are not answered; beyond, others are refused."""
        self._group_commit, self._leadership, self._peers, self._guard = group_commit, leadership, peers, guard
        self._is_known, self._max_queue_bytes = is_known, max_queue_bytes

    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        """Commit the drafts in one entry. `request_key` covers all of them: with other drafts under it, Impossible.

        Raises nothing: errors come through `done`, which may be called before this returns. Overloaded, DiskFull and
        LimitReached mean that nothing was stored."""
        if self._leadership.drained:
            node = self._group_commit.node
            done(None, Overloaded(f"{node} is drained: ask another node", retry_after_ms=0))
            return
        refused: dict[int, HadelayError] = {
            n: Impossible(f"callback: {problem}")
            for n, draft in enumerate(drafts)
            if draft.callback and (problem := self._guard.literal_problem(unpack(draft.meta).cb or ""))
        }
        if refused:
            kept = [n for n in range(len(drafts)) if n not in refused]
            drafts, done = [drafts[n] for n in kept], _Merged(1, len(drafts), done, refused).part(kept)
            if not drafts:
                done(Receipts([], []), None)
                return
        error = self._refusal(drafts, request_key)
        if error is not None:
            done(None, error)
        else:
            self._queue(drafts, request_key, done)

    def _refusal(self, drafts: list[Draft], request_key: bytes | None) -> HadelayError | None:
        """Why the drafts are not even sent."""
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
            # The key of a request is its first row's too: of one row it is nothing else, and then many requests share
            # one command; and more rows, or fewer, under the same key do not make a second message of the first.
            drafts = [replace(drafts[0], idem=request_key), *drafts[1:]]
            request_key = None if len(drafts) == 1 else request_key
        group_commit = self._group_commit
        size = _cost(drafts[0]) if len(drafts) == 1 else sum(_costs(drafts))
        if group_commit.queued_bytes + size > self._max_queue_bytes and group_commit.queued_bytes:
            done(None, Overloaded("too many publishes are waiting for their commit on this node", retry_after_ms=200))
        elif size <= group_commit.max_entry_bytes:
            group_commit.enqueue(drafts, request_key, size, done)
        else:
            self._split(drafts, request_key, done)

    def _split(self, drafts: list[Draft], key: bytes | None, done: PublishDone) -> None:
        """A batch too large for one entry, in parts with keys of their own, so that a retry of all is harmless."""
        most = size = self._group_commit.max_entry_bytes
        first: list[int] = []
        sizes: list[int] = []
        for n, cost in enumerate(_costs(drafts)):
            if size + cost > most:
                first.append(n)
                sizes.append(0)
                size = 0
            size += cost
            sizes[-1] = size
        merged = _Merged(len(first), len(drafts), done)
        for n, (start, end) in enumerate(zip(first, [*first[1:], len(drafts)], strict=True)):
            part_key = None if key is None else b"%d:%s" % (n, key)
            self._group_commit.enqueue(drafts[start:end], part_key, sizes[n], merged.part(range(start, end)))


class _Merged:
    """The answer of a request that was split. An error answers for all: unknown once a part is or may be stored."""

    def __init__(
        self, parts: int, count: int, done: PublishDone, refused: dict[int, HadelayError] | None = None
    ) -> None:
        """count: of the request's drafts. refused: those of them that are in no part."""
        self._whole = Receipts([0] * count, [0] * count, problems=refused or {})
        self._missing, self._done = parts, done
        self._stored = False
        self._error: HadelayError | None = None

    def part(self, at: Sequence[int]) -> PublishDone:
        """Answers the part with the drafts at these positions of the request."""

        def finished(receipts: Receipts | None, error: HadelayError | None) -> None:
            if receipts is not None:
                self._stored = True
                self._add(at, receipts)
            elif self._error is None or isinstance(error, OutcomeUnknown):
                self._error = error
            self._missing -= 1
            if self._missing:
                return
            if self._error is None:
                self._done(self._whole, None)
            elif self._stored:
                self._done(None, OutcomeUnknown("a part of the batch is stored, a part is not"))
            else:
                self._done(None, self._error)

        return finished

    def _add(self, at: Sequence[int], receipts: Receipts) -> None:
        whole = self._whole
        for n, message_id, deliver_at_ms in zip(at, receipts.ids, receipts.deliver_at_ms, strict=True):
            whole.ids[n], whole.deliver_at_ms[n] = message_id, deliver_at_ms
        whole.duplicates |= frozenset(at[n] for n in receipts.duplicates)
        whole.problems = whole.problems | {at[n]: problem for n, problem in receipts.problems.items()}
        whole.replaced = whole.replaced | {at[n]: other for n, other in receipts.replaced.items()}


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
