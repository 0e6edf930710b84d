"""Extra load of a chaos run: a schedule whose message and interval are changed, and that is paused, triggered and
resumed, again and again."""

import asyncio
import contextlib
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from chaos.besides import insist
from chaos.history import History, unix_ms
from chaos.planned import EVERY_MS, Planned
from hadelay.client import AsyncClient
from hadelay.client.types import ScheduleInfo
from hadelay.codec.commandtypes import MAX_AHEAD_MS

#: `_PAUSE_S`: shortest and longest pause between two changes, in seconds. `_END_S`: limit, in seconds, of the wait for
#: the last change at the end of a run.
_PAUSE_S, _END_S = (0.3, 2.0), 60.0


class Changing(Planned):
    """Changes a schedule, and consumes its messages. Also records each change ("changed-set"): version of the schedule
    and time since which it is in force; and each trigger ("changed-trigger"): the ids in the answers to a request and
    to its repetition."""

    prefix = "changed-"

    def __init__(self, topic: str, history: History) -> None:
        super().__init__(topic, history)
        self.open = True
        self._ended = asyncio.Event()
        self._every_ms, self._body, self._triggers = EVERY_MS, 0, 0

    async def start(self, client: AsyncClient) -> None:
        await client.put_topic(self.topic, max_attempts=0)
        await self._put(client)

    async def operate(self, client: AsyncClient) -> None:
        """Change the schedule until the end of the load."""
        steps = (self._put, self._put_interval, self._pause, self._trigger, self._resume, self._trigger)
        while self.open:
            for step in steps:
                await step(client)
                await asyncio.sleep(random.uniform(*_PAUSE_S))
        self._ended.set()

    async def _put_interval(self, client: AsyncClient) -> None:
        self._every_ms = 3 * EVERY_MS - self._every_ms
        await self._put(client)

    async def _put(self, client: AsyncClient) -> None:
        """Store the schedule with a new message and the present interval."""
        self._body += 1
        body, every_s = b"%d" % self._body, self._every_ms / 1000
        await self._change(lambda: client.put_schedule(self.schedule, self.topic, body, every=every_s, catch_up="all"))

    async def _pause(self, client: AsyncClient) -> None:
        await self._change(lambda: client.pause_schedule(self.schedule))

    async def _resume(self, client: AsyncClient) -> None:
        await self._change(lambda: client.resume_schedule(self.schedule))

    async def _change(self, change: Callable[[], Awaitable[ScheduleInfo]]) -> None:
        found = await insist(change)
        every_ms = 0 if found.state == "paused" else self._every_ms
        self._record(
            "set", version=found.version, since_ms=unix_ms(found.changed_at), every_ms=every_ms, body=self._body
        )

    async def _trigger(self, client: AsyncClient) -> None:
        self._triggers += 1
        key = f"{self.schedule}-{self._triggers}"
        made = [await insist(lambda: client.trigger(self.schedule, idempotency_key=key)) for _ in range(2)]
        self._record("trigger", ids=[one.id for one in made])

    async def finish(self, client: AsyncClient) -> None:
        self.open = False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _END_S)
        await super().finish(client)


def outdated(history: History) -> Iterator[tuple[str, str]]:
    """S4: between two changes of a schedule, its messages are those of the version in force: each occurrence once, none
    left out, none while the schedule is paused. A trigger publishes one message, also if the request is repeated."""
    triggers = history.of("changed-trigger")
    manual = {message_id for event in triggers for message_id in event["ids"]}
    ids, bodies, given = defaultdict[int, set[str]](set), dict[int, int](), set[str]()
    for event in history.of("changed-occurrence"):
        given.add(event["id"])
        if event["id"] not in manual:
            ids[event["at_ms"]].add(event["id"])
            bodies[event["at_ms"]] = event["body"]
    for at_ms, found in ids.items():
        yield "once", f"occurrence {at_ms} came out as {', '.join(sorted(found))}" if len(found) > 1 else ""
    for event in history.of("changed-unscheduled"):
        yield "ended", f"the schedule or its messages could not be asked for: {event['seen']} messages were seen"
    spare = 0
    for event in history.of("changed-scheduled"):
        yield "ended", ""
        spare = event["missed"] + event["refused"]
        counts, seen = (event["made"], event["manual"]), (len(ids), len(manual))
        text = f"the schedule counts {counts} occurrences and triggered messages, and {seen} came out"
        yield "counts", text if counts != seen else ""
        for trigger in triggers:
            made = sorted(set(trigger["ids"]))
            wrong = len(made) > 1 or made[0] not in given
            yield "triggered", f"a trigger and its repetition made {', '.join(made)}" if wrong else ""
    yield from _in_force(history, bodies, spare)


def _in_force(history: History, bodies: dict[int, int], spare: int) -> Iterator[tuple[str, str]]:
    """Check the messages that a schedule made between two changes: they must be exactly those of the version in force.
    bodies: time of an occurrence → body of its message. spare: number of messages that may be absent, because the
    schedule counts them as missed or refused."""
    ordered = sorted(bodies)
    for one, until_ms in _surely(history.of("changed-set")):
        since_ms, every_ms = one["since_ms"], one["every_ms"]
        found = ordered[bisect_right(ordered, since_ms) : bisect_right(ordered, until_ms)]
        # A change does not cancel a message that is already leased, which may be MAX_AHEAD_MS before its due time.
        late = [at_ms for at_ms in found if at_ms > since_ms + MAX_AHEAD_MS]
        if not every_ms:
            yield "paused", f"occurrences {late} came out, and the schedule was paused at {since_ms}" if late else ""
            continue
        # Check only up to the last occurrence that came out: after an outage, the last ones before a change may be
        # absent.
        first, end = (since_ms // every_ms + 1) * every_ms, found[-1] + 1 if found else 0
        absent = set(range(first, end, every_ms)).difference(found)
        text = f"occurrences {sorted(absent)} never came out, and later ones of version {one['version']} did"
        yield "each", text if len(absent) > spare else ""
        for at_ms in late:
            wrong = at_ms % every_ms or bodies[at_ms] < one["body"]
            text = f"occurrence {at_ms} with message {bodies[at_ms]} came out, of before version {one['version']}"
            yield "replaced", text if wrong else ""


def _surely(changes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (change of the schedule, time of the next change), but leave out changes beside a gap in the schedule's
    version numbers: a change that the history does not have, such as a request that the network repeated, took effect
    there, so nothing is certain about the time beside it."""
    for before, one, after in zip([{"version": 0}, *changes], changes, changes[1:], strict=False):
        if (before["version"] + 1, one["version"] + 1) == (one["version"], after["version"]):
            yield one, after["since_ms"]
