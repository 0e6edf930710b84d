"""Extra load of a chaos run: a schedule that publishes a message each second, and a consumer that acks all of them."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from chaos.besides import insist
from chaos.history import History, unix_ms
from hadelay.client import AsyncClient, AsyncMessage
from hadelay.errors import HadelayError

#: Interval of the schedule, in ms.
EVERY_MS = 1_000
#: `_REQUEST_S`: timeout of a request, in seconds. `_END_S`: limit, in seconds, of the wait for messages that the
#: schedule made, at the end of a run.
_REQUEST_S, _END_S = 10.0, 60.0
_PAUSE_S = 0.1


class Planned:
    """Creates a schedule, and consumes its messages. Records each hand-out ("occurrence"), and in the end the
    schedule's own counts ("scheduled"). Chaos neither deletes nor changes this schedule, so no occurrence may be left
    out."""

    #: Prefix of the names of the recorded events.
    prefix = ""

    def __init__(self, topic: str, history: History) -> None:
        self.topic = self.schedule = topic
        self._history = history
        self._seen: set[str] = set()
        self._acked: set[str] = set()

    async def start(self, client: AsyncClient) -> None:
        await client.put_topic(self.topic, max_attempts=0)
        await client.put_schedule(self.schedule, self.topic, b"0", every=EVERY_MS / 1000, catch_up="all")

    async def consume(self, client: AsyncClient) -> None:
        while True:
            try:
                messages = await client.receive(
                    [self.topic], max=20, wait=1.0, lease=3.0, consumer=self.topic, timeout=_REQUEST_S
                )
            except (HadelayError, OSError):
                await asyncio.sleep(_PAUSE_S)
                continue
            for m in messages:
                assert m.occurrence is not None
                self._record("occurrence", id=m.id, at_ms=unix_ms(m.occurrence), body=int(m.body))
                self._seen.add(m.id)
            await self._ack(client, messages)

    async def _ack(self, client: AsyncClient, messages: list[AsyncMessage]) -> None:
        outcomes = await insist(lambda: client.ack(messages)) if messages else []
        acked = (m.id for m, outcome in zip(messages, outcomes, strict=True) if outcome in ("acked", "already_acked"))
        self._acked.update(acked)

    async def finish(self, client: AsyncClient) -> None:
        """Pause the schedule, wait for the messages that it made, and record its counts."""
        end = self._history.clock() + _END_S
        while self._history.clock() < end:
            with contextlib.suppress(HadelayError, OSError):
                found = await client.pause_schedule(self.schedule)
                cancelled = {m.id async for m in client.messages(self.topic, state="cancelled")}
                # Leave out cancelled messages: in interval mode, a message may be cancelled that was handed out a
                # moment before.
                seen, made = self._seen - cancelled, found.made + found.manual
                if self._acked >= seen and len(seen) >= made:
                    break
            await asyncio.sleep(_PAUSE_S)
        else:
            self._record("unscheduled", seen=len(self._seen))
            return
        self._record("scheduled", made=found.made, missed=found.missed, refused=found.refused, manual=found.manual)
        self._history.record("aside", t=self._history.clock(), published=made + len(cancelled), acked=len(self._acked))

    def _record(self, event: str, **fields: Any) -> None:
        self._history.record(self.prefix + event, t=self._history.clock(), **fields)


def unplanned(history: History) -> Iterator[tuple[str, str]]:
    """S1: each occurrence of the schedule was made once, none between the first and the last was left out unless it was
    counted as missed or refused, and the counts of the schedule are those of its messages."""
    ids = defaultdict[int, set[str]](set)
    for event in history.of("occurrence"):
        ids[event["at_ms"]].add(event["id"])
    for at_ms, found in ids.items():
        yield "once", f"occurrence {at_ms} came out as {', '.join(sorted(found))}" if len(found) > 1 else ""
    for event in history.of("unscheduled"):
        yield "counts", f"the schedule or its messages could not be asked for: {event['seen']} messages were seen"
    for event in history.of("scheduled"):
        counted = event["made"]
        text = f"the schedule counts {counted} messages, and {len(ids)} occurrences came out"
        yield "counts", text if counted != len(ids) else ""
        least, most = min(ids, default=0), max(ids, default=0)
        absent = (most - least) // EVERY_MS + 1 - len(ids) if ids else 0
        text = f"{absent} occurrences between {least} and {most} never came out, and {event['missed']} were missed"
        yield "each", text if absent > event["missed"] + event["refused"] else ""
