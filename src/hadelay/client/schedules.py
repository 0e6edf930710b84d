"""Requests of AsyncClient for schedules."""

from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any, TypeVar, Unpack

from hadelay.client import exactjson, wire
from hadelay.client.paths import segment, with_query
from hadelay.client.requests import Requests
from hadelay.client.types import Body, Previewed, ScheduleInfo, ScheduleSettings, Triggered, When
from hadelay.client.wire import own_or_new_key, payload_of, plain, when_of

T = TypeVar("T")

#: Names of the schedule settings whose value is a single time.
_TIMES = ("start", "end")


class ScheduleRequests(Requests):
    """Client methods for schedules."""

    async def put_schedule(
        self,
        name: str,
        topic: str,
        body: Body = b"",
        *,
        version: int | None = None,
        **settings: Unpack[ScheduleSettings],
    ) -> ScheduleInfo:
        """Create a schedule, or replace it as a whole; an identical one is not changed.

        body: payload of each message, as of `put`. version: expected version, 0 for none; raises Conflict if the
        schedule has another one.
        """
        data, kind = payload_of(body, settings.get("content_type"))
        document = _settings(dict(settings)) | {"topic": topic, "body_base64": b64encode(data).decode()}
        if not isinstance(body, bytes) or settings.get("content_type"):
            document["content_type"] = kind
        return await self._send("PUT", with_query(_path(name), {"version": version}), document, ScheduleInfo)

    async def schedule(self, name: str, *, body: bool = False, stale: bool = False) -> ScheduleInfo:
        """A schedule with the times of its next ten occurrences, and its last ten messages with their states."""
        return await self._get(_path(name), ScheduleInfo, body=body, stale=stale)

    async def schedules(
        self, prefix: str = "", *, page: int = 1_000, stale: bool = False
    ) -> AsyncIterator[ScheduleInfo]:
        """Iterate over schedules in the order of their names, each with the time of its next occurrence only. page:
        schedules per request."""
        query: dict[str, Any] = {"prefix": prefix, "limit": page, "stale": stale}
        while True:
            found = await self._get("/v1/schedules", wire.WireSchedules, **query)
            for schedule in found.schedules:
                yield schedule
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule, if there is one. Messages that are not due yet are cancelled."""
        await self._delete(_path(name))

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        """Pause a schedule: no message is published until `resume_schedule`. Messages that are not due yet are
        cancelled."""
        return await self._send("POST", _path(name) + ":pause", {}, ScheduleInfo)

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        """Resume a schedule from now on: occurrences that fell into the pause are not published."""
        return await self._send("POST", _path(name) + ":resume", {}, ScheduleInfo)

    async def trigger(self, name: str, *, idempotency_key: str | None = None) -> Triggered:
        """Publish one message of a schedule, due now. Raises Conflict if `overlap` is skip and the schedule's previous
        message is still pending."""
        return await self._keyed(_path(name) + ":trigger", {}, idempotency_key, Triggered)

    async def backfill(
        self, name: str, start: When, end: When, *, idempotency_key: str | None = None
    ) -> list[Triggered]:
        """Publish the past occurrences of [start, end), at most 1,000, due now, even if published before."""
        document = {"from": when_of(start), "to": when_of(end)}
        return (
            await self._keyed(_path(name) + ":backfill", document, idempotency_key, wire.Results[Triggered])
        ).results

    async def preview_schedule(
        self, *, count: int = 10, after: When | None = None, **settings: Unpack[ScheduleSettings]
    ) -> Previewed:
        """Preview the next times of a schedule that is not stored, with a description in words and effects of
        daylight-saving changes. settings: only the settings that determine times, such as `cron` and `timezone`."""
        document = _settings(dict(settings)) | {"count": count}
        if after is not None:
            document["after"] = when_of(after)
        return await self._send("POST", "/v1/schedules:preview", document, Previewed)

    async def _keyed(self, path: str, value: Any, key: str | None, kind: type[T]) -> T:
        headers = {"Content-Type": "application/json", "Idempotency-Key": own_or_new_key(key)}
        return await self._transport.request(
            "POST", path, wire.read(kind), data=exactjson.encode(value, "body"), headers=headers
        )


def _path(name: str) -> str:
    return f"/v1/schedules/{segment(name)}"


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Convert a schedule's settings from Python values to the API's JSON values."""
    document = {name: plain(value) for name, value in given.items() if value is not None}
    for name in _TIMES:
        if name in document:
            document[name] = when_of(given[name])
    if given.get("at") is not None:
        document["at"] = [when_of(at) for at in given["at"]]
    return document
