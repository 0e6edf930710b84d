"""A message in taskiq's worker, until its ack."""

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from hadelay.client import AsyncMessage
from hadelay.model import MAX_RESULT

# taskiq runs a call, saves its result and acks it in one asyncio task, so the two context variables below belong to one
# call.
#: Result that the ack of the call in this asyncio task has to carry.
_RESULT: ContextVar[bytes | None] = ContextVar("hadelay_taskiq_result", default=None)
#: Whether the call of this asyncio task was acked.
_ACKED: ContextVar[bool] = ContextVar("hadelay_taskiq_acked", default=False)


class Delivery:
    """A message in taskiq's worker. ended: called once, when the message is acked or taskiq has dropped it."""

    def __init__(self, message: AsyncMessage, ended: Callable[[], None]) -> None:
        self._message, self._ended, self._loop = message, ended, asyncio.get_running_loop()

    async def ack(self) -> None:
        _ACKED.set(True)
        result = _RESULT.get()
        try:
            if result is None:
                await self._message.ack()
            else:
                await self._message.ack(msgspec.Raw(result))
        finally:
            # Call `ended` here and not in __del__: the traceback of a failed call refers to this object in a cycle, so
            # the object may be freed much later.
            ended, self._ended = self._ended, _nothing
            ended()

    def __del__(self) -> None:
        """Nack a message that taskiq dropped without an ack: its middleware raised an error, or its call had to ack by
        itself and did not. Without a nack, the lease would be extended for ever."""
        with contextlib.suppress(RuntimeError):  # ignore a closed event loop: it extends no leases
            self._loop.call_soon_threadsafe(_forgotten, self._message, self._ended)


def _nothing() -> None:
    pass


def _forgotten(message: AsyncMessage, ended: Callable[[], None]) -> None:
    ended()
    if not message._settled:
        _nacks.add(task := asyncio.create_task(message.nack(reason="taskiq ended the call without an ack")))
        task.add_done_callback(_nacks.discard)


#: Nacks under way, which are referenced here because an event loop keeps only weak references to its tasks.
_nacks: set[asyncio.Task[object]] = set()


def keep(result: bytes) -> bool:
    """Let the ack carry this result. Returns False if the message is already acked, so that the result is lost."""
    if len(result) > MAX_RESULT:
        raise ValueError(f"the result has {len(result)} bytes of JSON; at most {MAX_RESULT} are kept")
    _RESULT.set(result)
    return not _ACKED.get()
