"""Messages that can be settled: `AsyncMessage` of AsyncClient, and how a lease is settled. client/sync.py has the twin
that blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec
from msgspec import UNSET

from hadelay.client import exactjson
from hadelay.client.types import AckOutcome, Delay, ExtendOutcome, Leases, Message, NackOutcome
from hadelay.errors import BadRequest
from hadelay.model import MAX_RESULT

log = logging.getLogger(__name__)


class How(NamedTuple):
    """How to settle a lease; the fields of a nack are the arguments of `nack`."""

    verb: Literal["ack", "nack"]
    delay: Delay | None = None
    reason: str | None = None
    counts: bool = True
    dead: bool = False
    #: Whether each ack of this kind carries a result.
    results: bool = False


ACK, ACK_WITH_RESULT = How("ack"), How("ack", results=True)
GIVE_BACK = How("nack", 0, "the consumer stopped", counts=False)


class Leasing(Protocol):
    """Interface of a client that its messages use: requests about leases."""

    async def ack(self, leases: Leases, *, results: Sequence[Any] | None = None) -> list[AckOutcome]: ...
    async def nack(
        self,
        leases: Leases,
        *,
        delay: Delay | None = None,
        reason: str | None = None,
        count: bool = True,
        dead: bool = False,
    ) -> list[NackOutcome]: ...
    async def extend(self, leases: Leases, *, lease: Delay, progress: str | None = None) -> list[ExtendOutcome]: ...


class Settler(Protocol):
    """Interface of a consumer that its messages use to settle their leases."""

    async def settle(self, message: AsyncMessage, how: How, result: Any = None) -> str: ...
    async def give_back(self, message: AsyncMessage, why: BaseException) -> None: ...


async def settled(client: Leasing, how: How, leases: list[str], results: Sequence[Any] = ()) -> Sequence[str]:
    """Settle leases; returns an outcome for each. results: one for each ack, if `how.results`."""
    if how.results:
        return await client.ack(leases, results=results)
    if how.verb == "ack":
        return await client.ack(leases)
    try:
        return await client.nack(leases, delay=how.delay, reason=how.reason, count=how.counts, dead=how.dead)
    except BadRequest:
        if how is not GIVE_BACK:
            raise
        # A node of an older version refuses the field `count`. Nack without it, although the attempt then counts.
        return await client.nack(leases, delay=how.delay, reason=how.reason)


class AsyncMessage(Message, kw_only=True):
    """A message of `AsyncClient.receive` or `consume`. `async with` acks the message at the end, or nacks it on an
    exception.

    A stop is no failure: after a cancellation, Ctrl-C or SystemExit the message goes back at once, and the attempt does
    not count. So put a timeout inside: one around `async with` cancels it.
    """

    #: Whether the consumer noticed that the lease was lost: another consumer may have the message.
    lost: bool = False
    _client: Leasing | None = None
    _consumer: Settler | None = None
    _settled: bool = False

    async def ack(self, result: Any = UNSET) -> AckOutcome:
        """Ack the message: done, or not worth doing. Returns `acked`, `already_acked` or `lease_lost` (others may have
        the message now). result: whatever msgspec encodes as JSON, at most 64 KiB; kept with the message, and shown by
        `get` to whoever waits for it."""
        if result is UNSET:
            return cast(AckOutcome, await self._settle(ACK))
        # Encode the result now. The request that carries this ack may carry others: an encoding error there would fail
        # them all.
        encoded = exactjson.encode(result, "result")
        if len(encoded) > MAX_RESULT:
            raise ValueError(f"the result has {len(encoded)} bytes of JSON; at most {MAX_RESULT} are allowed")
        return cast(AckOutcome, await self._settle(ACK_WITH_RESULT, msgspec.Raw(encoded)))

    async def nack(
        self, delay: Delay | None = None, *, reason: str | None = None, count: bool = True, dead: bool = False
    ) -> NackOutcome:
        """Nack the message: it is due again after `delay`, or the topic's backoff. `reason` is stored, at most 128
        bytes. count: False gives it back unhandled, so that the attempt does not count. dead: no further attempt; the
        message is a dead letter now."""
        return cast(NackOutcome, await self._settle(How("nack", delay, reason, count, dead)))

    async def snooze(self, delay: Delay, *, reason: str | None = None) -> NackOutcome:
        """Nack the message until later: it is due again after `delay`, and the attempt does not count."""
        return await self.nack(delay, reason=reason, count=False)

    async def extend(self, lease: Delay, *, progress: str | None = None) -> ExtendOutcome:
        """Extend the lease to `lease` from now, in addition to the extensions by a consumer. progress: at most 128
        bytes for people, shown by `get` until the lease ends."""
        return (await self._leasing().extend(self, lease=lease, progress=progress))[0]

    async def _settle(self, how: How, result: Any = None) -> str:
        if self._consumer is not None:
            return await self._consumer.settle(self, how, result)
        self._settled = True
        return (await settled(self._leasing(), how, [self.lease], [result]))[0]

    def _leasing(self) -> Leasing:
        assert self._client is not None, "a client made this message"
        return self._client

    async def __aenter__(self) -> AsyncMessage:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._settled:
            return
        if error is None:
            await self.ack()
            return
        try:
            if isinstance(error, Exception):
                await self.nack(reason=reason_of(error))
            elif self._consumer is not None:
                await self._consumer.give_back(self, error)
            else:
                await self._settle(GIVE_BACK)
        except Exception as failure:
            # If the nack fails, only log that: the handler's error is raised, and the message's lease expires.
            log.warning("message %s was not given back: %s", self.id, failure)


def reason_of(error: BaseException) -> str:
    """An exception as a nack's reason: its class and text, at most 128 bytes of printable text."""
    return printable(f"{type(error).__name__}: {error}".strip(": "))


def printable(reason: str) -> str:
    """A text as a nack's reason: at most 128 bytes of printable text."""
    text = "".join(c if c.isprintable() else " " for c in reason)
    return text.encode("utf-8", "replace")[:128].decode("utf-8", "ignore")
