"""Requests of AsyncClient for batches with one completion callback."""

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from hadelay.client import wire
from hadelay.client.paths import segment
from hadelay.client.requests import Requests
from hadelay.client.types import BatchFailure, BatchInfo, Body, Delay
from hadelay.client.wire import each, new_key, payload_of, plain

On = Literal["complete", "success", "death"]


class BatchRequests(Requests):
    """Client methods for batches."""

    async def open_batch(
        self,
        topic: str,
        body: Body | None = None,
        *,
        key: str | None = None,
        on: On = "complete",
        ttl: Delay | None = None,
        delay: Delay | None = None,
        content_type: str | None = None,
        tags: Sequence[str] = (),
        meta: Mapping[str, str] | None = None,
        message_ttl: Delay | None = None,
    ) -> BatchInfo:
        """Open a batch: messages join with `put(…, batch=key)`. Once the batch is sealed and all members are settled,
        one message is published to `topic`.

        body: payload of that message, as of `put`. Default: a JSON document with the counts of the batch. key: name of
        the batch, at most 128 characters. Default: a random one. on: publish in any case ("complete"), if every member
        was acked ("success"), or if a member died ("death"). ttl: an unfinished batch expires after this time, without
        a callback. Default: 7 days. delay, content_type, tags, meta, message_ttl: of the callback. A repetition with
        the same key and arguments returns the batch as it is; raises Conflict if the arguments differ.
        """
        callback = {
            "topic": topic,
            "delay": plain(delay),
            "ttl": plain(message_ttl),
            "content_type": content_type,
            "tags": each(tags) or None,
            "meta": dict(meta) if meta else None,
        }
        if body is not None:
            data, kind = payload_of(body, content_type)
            callback |= {"body_base64": b64encode(data).decode(), "content_type": kind or None}
        document = {"key": key or new_key(), "on": on, "callback": _present(callback), "ttl": plain(ttl)}
        return await self._send("POST", "/v1/batches", _present(document), BatchInfo)

    async def batch(self, key: str, *, stale: bool = False) -> BatchInfo:
        """Get a batch, with the numbers of its members by outcome. It can be read for 7 days after its end. Raises
        NotFound."""
        return await self._get(_path(key), BatchInfo, stale=stale)

    async def batches(self, *, page: int = 1_000, stale: bool = False) -> AsyncIterator[BatchInfo]:
        """Batches, the newest first. page: batches per request."""
        query: dict[str, Any] = {"limit": page, "stale": stale}
        while True:
            found = await self._get("/v1/batches", wire.WireBatches, **query)
            for batch in found.batches:
                yield batch
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def seal_batch(self, key: str) -> BatchInfo:
        """Let no further message join a batch: it ends with its last member, at once if all are settled."""
        return await self._send("POST", _path(key) + ":seal", {}, BatchInfo)

    async def cancel_batch(self, key: str) -> BatchInfo:
        """Seal a batch, and begin to cancel its members that wait. Leased members go on; if they are nacked, repeat the
        call to cancel them."""
        return await self._send("POST", _path(key) + ":cancel", {}, BatchInfo)

    async def batch_failures(self, key: str, *, page: int = 1_000) -> AsyncIterator[BatchFailure]:
        """The first 1,000 members of a batch that died, expired or were cancelled. page: members per request."""
        query: dict[str, Any] = {"limit": page}
        while True:
            found = await self._get(_path(key) + "/failures", wire.WireBatchFailures, **query)
            for failure in found.failures:
                yield failure
            if found.cursor is None:
                return
            query["cursor"] = found.cursor


def _path(key: str) -> str:
    return f"/v1/batches/{segment(key)}"


def _present(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
