"""Bindings that processes share: which queues get the messages of an exchange.

A binding is a scheduled message with a client key, tagged with its exchange. Nobody receives these messages. The
process that made a binding replaces its message long before it is due, so that the bindings of a killed process end by
themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from contextlib import suppress
from typing import NamedTuple

from hadelay.celery.address import Address
from hadelay.client import Client, Put
from hadelay.client.background import Running, wait
from hadelay.errors import HadelayError, NotFound

#: Lifetimes in seconds: of the bindings of temporary queues, and of the bindings of other queues.
_TEMPORARY_S, _DURABLE_S = 600.0, 30 * 86_400.0
_REFRESH_S = _TEMPORARY_S / 3
#: Timeout of the deletion of a binding, in seconds: a stopping worker should not wait long.
_REMOVE_S = 2.0
#: Time, in seconds, for which bindings that were read from the cluster are cached.
_CACHED_S = 1.0


class Binding(NamedTuple):
    exchange: str
    routing_key: str
    queue: str
    #: Time, in ms, after which messages in a temporary queue (one that ends with its consumer) expire. None: not
    #: temporary.
    temporary_ms: int | None


def tag_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


class Bindings:
    """Bindings of one application, stored in the cluster. Each transport has its own instance."""

    def __init__(self, client: Client, address: Address) -> None:
        self._client, self._topic = client, f"{address.prefix}celery-bindings"
        self._made: set[Binding] = set()
        self._read: dict[str, tuple[float, list[Binding]]] = {}
        self._refreshing: Running[None] | None = None

    def add(self, binding: Binding) -> None:
        """Store a binding in the cluster, and renew it until `remove` is called."""
        self._made.add(binding)
        self._read.pop(binding.exchange, None)
        for result in self._client.put_many([self._put(binding)]):
            if isinstance(result, HadelayError):
                raise result
        if self._refreshing is None:
            self._refreshing = Running(self._refresh())

    def remove(self, queue: str) -> None:
        """Delete the bindings of a queue that this process made."""
        for binding in [one for one in list(self._made) if one.queue == queue]:
            self._made.discard(binding)
            self._read.pop(binding.exchange, None)
            # Ignore errors: a binding that nobody renews expires by itself.
            with suppress(HadelayError, TimeoutError):
                cancel = self._client._async().cancel(topic=self._topic, key=_key(binding))
                wait(asyncio.wait_for(cancel, _REMOVE_S))

    def of(self, exchange: str, *, fresh: bool) -> list[Binding]:
        """Bindings of an exchange. fresh: read them from the cluster even if they are cached."""
        at, found = self._read.get(exchange, (-_CACHED_S, []))
        if fresh or time.monotonic() - at > _CACHED_S:
            found = wait(self._list(exchange))
            self._read[exchange] = time.monotonic(), found
        return found

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()

    async def _list(self, exchange: str) -> list[Binding]:
        found = []
        with suppress(NotFound):
            async for message in self._client._async().messages(self._topic, tags=[tag_of(exchange)]):
                found.append(Binding(*json.loads(message.meta["binding"])))
        return found

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            with suppress(HadelayError):  # ignore errors: the next refresh publishes all bindings again
                await self._client._async().put_many([self._put(binding) for binding in list(self._made)])

    def _put(self, binding: Binding) -> Put:
        lifetime_s = _DURABLE_S if binding.temporary_ms is None else _TEMPORARY_S
        return Put(
            topic=self._topic,
            key=_key(binding),
            on_conflict="replace",
            delay=lifetime_s,
            ttl=1,
            tags=[tag_of(binding.exchange)],
            meta={"binding": json.dumps(binding)},
        )


def _key(binding: Binding) -> str:
    return tag_of("\0".join(binding[:3]))
