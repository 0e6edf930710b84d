"""What administrators ask of a cluster: topics, dead letters, what is due, members and files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, TypeVar, Unpack
from urllib.parse import urlencode

import msgspec

from hadelay.api import cluster as api
from hadelay.api import messages
from hadelay.client import wire
from hadelay.client.encoding import BATCH_ITEMS, delay_of, each, finite, plain, query_of, when_of
from hadelay.client.transport import Transport
from hadelay.client.types import (
    Bucket,
    ClusterInfo,
    DeadLetter,
    Delay,
    HoursInfo,
    Names,
    Redriven,
    TopicInfo,
    TopicSettings,
    When,
)
from hadelay.errors import HadelayError
from hadelay.paths import segment

T = TypeVar("T")


class Administration:
    """The part of AsyncClient that neither publishes nor consumes."""

    _transport: Transport

    # ---- topics

    async def topics(self, *, stale: bool = False) -> list[TopicInfo]:
        return (await self._get(f"/v1/topics{query_of(stale=stale)}", wire.Topics)).topics

    async def topic(self, name: str, *, stale: bool = False) -> TopicInfo:
        return await self._get(f"/v1/topics/{segment(name)}{query_of(stale=stale)}", TopicInfo)

    async def put_topic(self, name: str, **settings: Unpack[TopicSettings]) -> TopicInfo:
        """Make a topic, or change the settings named (`TopicSettings`); None takes one back."""
        return await self._send_json("PUT", f"/v1/topics/{segment(name)}", plain(settings), TopicInfo)

    async def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Raises Conflict while messages are pending, unless `force`: then they are cancelled."""
        await self._transport.request("DELETE", f"/v1/topics/{segment(name)}{query_of(force=force)}", wire.read_nothing)

    async def pause(self, name: str, *, reason: str | None = None) -> TopicInfo:
        """Hand out nothing more; publishing goes on, and so do running leases. `reason` is shown with the topic."""
        wish = {} if reason is None else {"reason": reason}
        return await self._send_json("POST", f"/v1/topics/{segment(name)}:pause", wish, TopicInfo)

    async def resume(self, name: str) -> TopicInfo:
        """Hand out again."""
        return await self._send_json("POST", f"/v1/topics/{segment(name)}:resume", {}, TopicInfo)

    async def purge(
        self, name: str, states: Sequence[Literal["scheduled", "ready", "dead"]] = ("scheduled", "ready")
    ) -> None:
        """Cancel what is in these states now, without looking at each message; dead letters are forgotten."""
        await self._send_json("POST", f"/v1/topics/{segment(name)}:purge", {"states": each(states)}, messages.Purged)

    # ---- dead letters

    async def dead(
        self, topic: str, *, body: bool = False, page: int = 1_000, stale: bool = False
    ) -> AsyncIterator[DeadLetter]:
        """Messages that were tried in vain, in the order of their deaths, with their errors."""
        query: dict[str, Any] = {"limit": page} | {
            name: "true" for name, asked in (("body", body), ("stale", stale)) if asked
        }
        async for letter in self._pages(f"/v1/topics/{segment(topic)}/dead", query, wire.Page[DeadLetter]):
            yield letter

    async def redrive(self, topic: str, ids: Sequence[str]) -> list[Redriven]:
        """Make these dead letters due now, as if they had never been tried; an outcome each."""
        results: list[Redriven] = []
        given = each(ids)
        for at in range(0, len(given), BATCH_ITEMS):
            wish = {"ids": given[at : at + BATCH_ITEMS]}
            path = f"/v1/topics/{segment(topic)}/dead:redrive"
            results += (await self._send_json("POST", path, wish, wire.Results[Redriven])).results
        return results

    async def redrive_all(self, topic: str, *, rate: float | None = None) -> int:
        """Begin to redrive all dead letters there are now, `rate` per second; returns how many they are."""
        wish: dict[str, Any] = {"all": True} | ({} if rate is None else {"rate": finite(rate)})
        answer = await self._send_json("POST", f"/v1/topics/{segment(topic)}/dead:redrive", wish, wire.Redriving)
        return answer.redriving

    async def purge_dead(self, topic: str) -> None:
        """Forget the dead letters that a topic has now."""
        await self._transport.request("DELETE", f"/v1/topics/{segment(topic)}/dead", wire.read_nothing)

    # ---- what is due

    async def due(
        self, start: When, end: When, step: Delay, *, topic: str | None = None, stale: bool = False
    ) -> list[Bucket]:
        """How many messages are due when, over all topics or in one; empty buckets are left out."""
        path = "/v1/due" if topic is None else f"/v1/topics/{segment(topic)}/due"
        query = {"from": str(when_of(start)), "to": str(when_of(end)), "step": str(delay_of(step))}
        if stale:
            query["stale"] = "true"
        return (await self._get(f"{path}?{urlencode(query)}", wire.Buckets)).buckets

    # ---- the cluster

    async def cluster(self, *, stale: bool = False) -> ClusterInfo:
        return await self._get(f"/v1/cluster{query_of(stale=stale)}", ClusterInfo)

    async def transfer_leader(self, to: str | None = None) -> str:
        """Hand leadership to the node named, or to the one that has most; returns its name."""
        return (
            await self._send_json("POST", "/v1/cluster:transfer-leader", {"to": to}, api.Transferred, retry=False)
        ).leader

    async def add_member(self, name: str, raft: str) -> None:
        """A node whose link is reached at `raft`, host:port. It votes, by itself, once it has caught up."""
        await self._send_json("POST", "/v1/cluster/members", {"name": name, "raft": raft}, api.AddedMember, retry=False)

    async def remove_member(self, name: str) -> None:
        await self._transport.request("DELETE", f"/v1/cluster/members/{segment(name)}", wire.read_nothing)

    async def hours(self) -> HoursInfo:
        """Files of the node that answers: give the client one address to know which."""
        return await self._get("/v1/hours", HoursInfo)

    async def names(self) -> Names:
        return await self._get("/v1/names", Names)

    async def ready(self) -> api.Health:
        """Whether the node that answers can serve. Not ready is an answer, not an exception."""
        try:
            return await self._transport.request("GET", "/readyz?verbose", wire.read(api.Health), retry=False)
        except HadelayError as error:
            if "checks" not in error.extra:
                raise
            return msgspec.convert({"status": "failing", "checks": error.extra["checks"]}, api.Health)

    # ---- plumbing

    async def _pages(self, path: str, query: dict[str, Any], kind: type[Any]) -> AsyncIterator[Any]:
        while True:
            found = await self._get(f"{path}?{urlencode(query)}", kind)
            for item in found.messages:
                yield item
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def _get(self, path: str, kind: type[T]) -> T:
        return await self._transport.request("GET", path, wire.read(kind))

    async def _send_json(self, method: str, path: str, value: Any, kind: type[T], *, retry: bool = True) -> T:
        data, headers = msgspec.json.encode(value), {"Content-Type": "application/json"}
        return await self._transport.request(method, path, wire.read(kind), data=data, headers=headers, retry=retry)
