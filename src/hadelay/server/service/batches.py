"""Service for batches: messages with one common completion callback."""

from collections.abc import Callable

from hadelay.api.batches import ONS, Batch, Batches, BatchFailure, BatchFailures
from hadelay.api.service import Actor
from hadelay.api.text import format_instant
from hadelay.codec import batches as codec
from hadelay.codec.batches import CANCELLED, ENDED, EXPIRED, MAX_FAILURES, SEALED, Spec
from hadelay.codec.results import Done
from hadelay.codec.wire import cut_name
from hadelay.errors import NotFound
from hadelay.ledger.batches import batches, members
from hadelay.ledger.batches.batches import Found
from hadelay.ledger.hours.lookup import ENDED as STATE_OF
from hadelay.model import encode_id
from hadelay.server.service.part import Service, once_begun


class BatchService(Service):
    async def open(self, key: str, spec: Spec, by: Actor) -> tuple[bool, Batch[str]]:
        """Open a batch. Returns (whether it is new, the batch). Raises Conflict if another batch has the key, NotFound,
        LimitReached, BadRequest."""
        result = await self._propose(codec.encode_open(key, spec, cut_name(by.token)))
        assert isinstance(result, Done)
        with once_begun():
            return result.changed, await self.get(key, stale=False)

    async def get(self, key: str, *, stale: bool) -> Batch[str]:
        """Describe a batch. A batch is known until 7 days after its end. Raises NotFound."""
        await self._confirm(stale)
        return _document(self._found(key))

    async def topic_of(self, key: str) -> str:
        """Topic to which a batch's callback goes. Raises NotFound."""
        await self._confirm()
        return self._found(key).stored.spec.topic

    def _found(self, key: str) -> Found:
        found = batches.find(self._node.ledger, key)
        if found is None:
            raise NotFound(f"there is no batch {key!r}; ended batches are forgotten after 7 days")
        return found

    async def page(
        self, before: int | None, limit: int, *, stale: bool, may: Callable[[str], bool] = lambda topic: True
    ) -> Batches:
        """A page of batches, the newest first, which begins after the batch with number `before`. Leaves out batches
        whose callbacks go to topics that `may` refuses."""
        await self._confirm(stale)
        found = batches.listing(self._node.ledger, before, limit)
        shown = [_document(one) for one in found if may(one.stored.spec.topic)]
        return Batches(shown, str(found[-1].number) if len(found) == limit else None)

    async def failures(self, key: str, start: int, limit: int, *, stale: bool) -> BatchFailures:
        """A page of a batch's failed messages, from the one with number `start` on. Raises NotFound."""
        await self._confirm(stale)
        number = self._found(key).number
        found = members.failures_of(self._node.ledger, number, min(start, MAX_FAILURES), limit)
        rows = [BatchFailure(encode_id(one.id), format_instant(one.at_ms), str(STATE_OF[one.event])) for one in found]
        return BatchFailures(rows, str(start + limit) if len(found) == limit else None)

    async def seal(self, key: str, by: Actor | None = None) -> Batch[str]:
        """Seal the batch: no further message can join it. by: token for an entry in the audit trail; None: no entry.
        Raises NotFound."""
        return await self._changed(key, "seal", codec.encode_seal(key), by)

    async def cancel(self, key: str, by: Actor | None = None) -> Batch[str]:
        """Begin to cancel the waiting messages of a batch. by: token for an entry in the audit trail; None: no entry.
        Raises NotFound."""
        return await self._changed(key, "cancel", codec.encode_cancel(key), by)

    async def _changed(self, key: str, action: str, command: bytes, by: Actor | None) -> Batch[str]:
        if by is None:
            await self._propose(command)
        else:
            await self._administer(by, f"batch.{action}", key, command)
        with once_begun():
            return await self.get(key, stale=False)


def _document(found: Found) -> Batch[str]:
    _, stored, state = found
    flags = state.flags
    return Batch(
        batch=stored.key,
        state=(
            "expired"
            if flags & EXPIRED
            else "done"
            if flags & ENDED
            else "cancelled"
            if flags & CANCELLED
            else "sealed"
            if flags & SEALED
            else "open"
        ),
        on=ONS[stored.spec.on],
        topic=stored.spec.topic,
        joined=state.joined,
        pending=state.joined - state.settled,
        acked=state.acked,
        dead=state.dead,
        expired=state.expired,
        cancelled=state.cancelled,
        progress=round(state.settled / state.joined, 4) if state.joined else float(bool(flags & ENDED)),
        opened_at=format_instant(state.opened_ms),
        sealed_at=format_instant(state.sealed_ms) if state.sealed_ms else None,
        ended_at=format_instant(state.ended_ms) if state.ended_ms else None,
        until=format_instant(state.until_ms),
        callback_id=encode_id(state.callback) if state.callback else None,
        creator=stored.creator or None,
    )
