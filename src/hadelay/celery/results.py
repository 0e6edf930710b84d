"""The result backend. A result is a scheduled message with the task's id in its client key, due when it expires.

Nobody receives these messages: a reader gets the body by the key. A new state replaces the message of the state before.
A reader that waits for a new state waits for the end of the present message, because the new state replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from celery import states
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import TimeoutError

from hadelay.celery.address import address_of, client_of, masked
from hadelay.client.background import wait
from hadelay.client.queues import id_of
from hadelay.client.wire import ADAPTER_TIMEOUT_S
from hadelay.errors import Conflict, HadelayError, NotFound

#: Lifetime, in seconds, of results that do not expire in Celery: clusters refuse messages that are due after 730 days.
_LONGEST_S = 700 * 86_400
#: Limit, in seconds, of the time that one request waits for a new state of a task.
_LONG_POLL_S = 20.0
OnMessage = Callable[[dict[str, Any]], object]
#: Limit of concurrent reads of results.
_READS = 20


class Backend(KeyValueStoreBackend):
    """Result backend that keeps results in the cluster of its URL; hadelay:// without hosts means the cluster of the
    broker."""

    supports_autoexpire = True
    supports_native_join = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        url, conf = self.url or "hadelay://", self.app.conf
        broker, ssl = str(conf.broker_read_url or conf.broker_url), None
        if not url.partition("://")[2].strip("/") and broker.startswith("hadelay"):
            url, ssl = broker, conf.broker_use_ssl
        address = address_of(url, ssl)
        options = conf.result_backend_transport_options or {}
        self._client = client_of(address, float(options.get("timeout", ADAPTER_TIMEOUT_S)))
        self._topic = f"{address.prefix}celery-results"

    def get(self, key: bytes) -> bytes | None:
        return wait(self._read(key))

    def mget(self, keys: Iterable[bytes]) -> list[bytes | None]:
        async def read() -> list[bytes | None]:
            turn = asyncio.Semaphore(_READS)

            async def one(key: bytes) -> bytes | None:
                async with turn:
                    return await self._read(key)

            return await asyncio.gather(*map(one, keys))

        return wait(read())

    def set(self, key: bytes, value: str | bytes) -> None:
        self._put(key, value, "replace")

    def delete(self, key: bytes) -> None:
        with contextlib.suppress(NotFound, Conflict):  # ignore: there is no result, or it has expired
            self._client.cancel(topic=self._topic, key=id_of(key.decode()))

    def wait_for_pending(
        self,
        result: Any,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_message: OnMessage | None = None,
        on_interval: Callable[[], object] | None = None,
        callback: Any = None,
        propagate: bool = True,
    ) -> Any:
        """Wait for a result; `result.get` calls this. on_message: called with each new state, as in the Redis backend;
        if states replace each other quickly, it may get only the last one."""
        meta = self.wait_for(result.id, timeout, interval, no_ack, on_interval, on_message)
        result._maybe_set_cache(meta)
        return result.maybe_throw(propagate=propagate, callback=callback)

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Callable[[], object] | None = None,
        on_message: OnMessage | None = None,
    ) -> Any:
        """Wait for the end of a task; returns the task's state. Raises TimeoutError after `timeout` seconds."""
        self._ensure_not_eager()
        until = None if timeout is None else time.monotonic() + timeout
        present, reported = "", None
        while True:
            meta = self.get_task_meta(task_id)
            if on_message is not None and meta["status"] != states.PENDING and meta != reported:
                reported = meta
                on_message(meta)
            if meta["status"] in states.READY_STATES:
                return meta
            left_s = _LONG_POLL_S if until is None else min(_LONG_POLL_S, until - time.monotonic())
            if left_s <= 0:
                raise TimeoutError("The operation timed out.")
            if not present:
                # Store an empty message, or find the message of the present state; then read the state again. A state
                # stored after this line ends that message, and so the wait below.
                present = self._put(self.get_key_for_task(task_id), b"", "keep")
                continue
            if on_interval is not None:
                on_interval()
                left_s = min(left_s, interval)
            if self._client.get(present, wait=left_s).state != "scheduled":
                present = ""

    def exception_safe_to_retry(self, error: Exception) -> bool:
        return isinstance(error, HadelayError) and error.retryable

    def as_uri(self, include_password: bool = False) -> str:
        return self.url if include_password else masked(self.url)

    def __reduce__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "expires": self.expires, "url": self.url})

    def _put(self, key: bytes, value: str | bytes, on_conflict: Any) -> str:
        """Store the message of a result; with on_conflict="keep", only if there is none. Returns the id of the present
        message."""
        body = value.encode() if isinstance(value, str) else value
        delay_s = min(self.expires or _LONGEST_S, _LONGEST_S)
        return self._client.put(
            self._topic,
            body,
            content_type=self.content_type,
            key=id_of(key.decode()),
            on_conflict=on_conflict,
            delay=delay_s,
            ttl=1,
        ).id

    async def _read(self, key: bytes) -> bytes | None:
        """Value of a result's key. None if there is no message, or only an empty one, which a waiting reader stored."""
        try:
            found = await self._client._async().get(topic=self._topic, key=id_of(key.decode()), body=True)
        except NotFound:
            return None
        return found.body or None if found.state == "scheduled" else None
