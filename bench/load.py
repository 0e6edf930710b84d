"""Producers and consumers over raw HTTP, and the tally of what became of the messages.

The first eight bytes of a body are its deliver_at in Unix ms: lateness is taken where it counts, when the consumer
has the message in hand, by the wall clock of this machine, which is the one the nodes agree on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from bench.http1 import Connection, Failed, request

PADDING = bytes(192)
TOPIC = "bench"
#: What a client does about these: try the next node with the same key, which makes the retry harmless.
RETRY = (ConnectionError, OSError, asyncio.TimeoutError)


class Tally:
    def __init__(self) -> None:
        self.published = self.acked = self.duplicates = self.early = 0
        self.late_ms: list[float] = []
        self.seen: set[str] = set()
        #: (when it was received, its deliver_at), both Unix ms.
        self.deliveries: list[tuple[float, int]] = []
        #: Times of the answers to publishes, Unix ms.
        self.stored_at: list[float] = []
        self.last_at = 0.0

    def received(self, messages: list[dict[str, Any]]) -> None:
        now = time.time() * 1000
        self.last_at = now
        for message in messages:
            due = int.from_bytes(message["body"][:8], "little")
            # A whole millisecond counts as reached when it begins: the wall clock here has a fraction.
            self.early += now < due
            self.late_ms.append(now - due)
            self.deliveries.append((now, due))
            if message["id"] in self.seen:
                self.duplicates += 1
            self.seen.add(message["id"])

    def late(self, quantile: float) -> float:
        ordered = sorted(self.late_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else float("nan")


class Session:
    """One connection that moves on to the next node when its own fails, and says the same thing again there."""

    def __init__(self, addresses: list[str], first: int = 0) -> None:
        self._addresses = itertools.cycle(addresses[first % len(addresses) :] + addresses[: first % len(addresses)])
        self._address = next(self._addresses)
        self._connection: Connection | None = None

    async def call(self, packed: bytes, timeout_s: float = 10) -> bytes:
        """The body of the first 2xx answer. 5xx and broken connections are tried again; other refusals are raised."""
        while True:
            try:
                if self._connection is None:
                    self._connection = await Connection.open(self._address)
                status, answer = await asyncio.wait_for(self._connection.send(packed), timeout_s)
            except RETRY:
                await self._move_on()
                continue
            if 200 <= status < 300:
                return answer
            if status not in (503, 504):
                raise Failed(status, answer)
            await self._move_on()

    async def _move_on(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._address = next(self._addresses)
        await asyncio.sleep(0.02)


def messages(due_ms: list[int], topic: str = TOPIC, groups: int = 0) -> list[dict[str, Any]]:
    """groups: number of message groups, of which each message is in any one; 0: none has a group."""
    items = [{"topic": topic, "body": due.to_bytes(8, "little") + PADDING, "deliver_at": due} for due in due_ms]
    for item in items if groups else ():
        item["group"] = f"customer-{random.randrange(groups)}"
    return items


async def put(session: Session, tally: Tally, items: list[dict[str, Any]], timeout_s: float = 30) -> None:
    """One batch, of which all have to be taken."""
    key = f"Idempotency-Key: {os.urandom(12).hex()}\r\n"
    packed = request("POST", "/v1/messages:batch", msgpack.packb(items), kind="msgpack", headers=key)
    results = msgpack.unpackb(await session.call(packed, timeout_s))["results"]
    refused = [r for r in results if "error" in r]
    if refused:
        raise Failed(422, json.dumps(refused[0]).encode())
    tally.published += len(results)
    tally.stored_at.append(time.time() * 1000)


async def publish(session: Session, tally: Tally, due_ms: list[int], topic: str = TOPIC, groups: int = 0) -> None:
    await put(session, tally, messages(due_ms, topic, groups))


async def consume(
    session: Session, tally: Tally, stop: asyncio.Event, *, topic: str = TOPIC, tags: Sequence[str] = (),
    most: int = 100, wait: str = "1s", group_max: int = 1,
) -> None:  # fmt: skip
    """Receive and ack until `stop`; what a poll brought is acked even then. tags: only messages that have all of
    them."""
    consumer = f"bench-{os.urandom(4).hex()}"
    for number in itertools.count():
        if stop.is_set():
            return
        query = {"max": most, "wait": wait, "lease": "60s", "consumer": consumer, "request_id": f"{number}"}
        query |= {"group_max": group_max} if group_max > 1 else {}
        packed = json.dumps({**query, "tags": tags} if tags else query).encode()
        poll = request("POST", f"/v1/topics/{topic}/receive?redirect=false", packed, accept="msgpack")
        found = msgpack.unpackb(await session.call(poll))["messages"]
        assert all(set(tags) <= set(message["tags"]) for message in found)
        if found:
            tally.received(found)
            await settle(session, tally, [message["lease"] for message in found])


async def settle(session: Session, tally: Tally, leases: list[str]) -> None:
    answer = await session.call(request("POST", "/v1/leases:ack", json.dumps({"leases": leases}).encode()))
    outcomes = json.loads(answer)["results"]
    tally.acked += sum(result["outcome"] in ("acked", "already_acked") for result in outcomes)


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:  # noqa: ASYNC110 (counters, not events)
        await asyncio.sleep(0.005)
    return condition()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
