"""Services for schedules: they create, describe, pause, trigger, backfill and preview schedules."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import Any

from msgspec.structs import replace

from hadelay.api.schedules import (
    CATCH_UPS,
    OVERLAPS,
    Backfilled,
    Occurrence,
    Previewed,
    PreviewTime,
    Schedule,
    Schedules,
    Triggered,
)
from hadelay.api.service import Actor, answered
from hadelay.api.text import format_duration, format_instant
from hadelay.codec import schedules as codec
from hadelay.codec.meta import unpack
from hadelay.codec.publishcommand import GAP, encode_publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.codec.schedules import ANY_VERSION, MAX_RUN, Made, Spec, State, Stored
from hadelay.codec.wire import cut_name
from hadelay.errors import BadRequest, DiskFull, HadelayError, Impossible, LimitReached, NoLeader, NotFound
from hadelay.ledger.hours.lookup import find_entry, state_of
from hadelay.ledger.messages.idempotency import is_known_hash
from hadelay.ledger.schedules import schedules
from hadelay.model import Draft, encode_id
from hadelay.server.service.part import Service, once_begun
from hadelay.timing import cron, plan, zones

#: Number of next occurrences that the description of a schedule shows.
_NEXT = 10
#: Version that no schedule has: apply refuses a command that expects it.
_NO_VERSION = 0
#: Number of schedules of a page that are read before other tasks of the event loop run.
_AT_ONCE = 25


class ScheduleService(Service):
    async def topic_of(self, name: str) -> str | None:
        """Topic to which a schedule publishes; None if there is no such schedule."""
        await self._confirm()
        found = schedules.find(self._node.ledger, name)
        return None if found is None else found.stored.spec.topic

    async def put(
        self, name: str, spec: Spec, draft: Draft, by: Actor, *, version: int | None, paused: bool | None
    ) -> Schedule[str]:
        """Create a schedule, or replace it as a whole. draft: the message, whose meta names the schedule. version:
        version that the schedule must have now; 0: there must be none. Raises BadRequest, Impossible, Conflict,
        LimitReached, NotFound."""
        await self._confirm()
        ledger = self._node.ledger
        topic = ledger.topic(spec.topic)
        if OVERLAPS[spec.overlap] == "wait" and (topic is None or topic.settings.group_concurrency != 1):
            what = f"hadelay topic set {spec.topic} --group-concurrency 1"
            raise Impossible(f"overlap: wait needs a topic with group_concurrency 1: {what}")
        # Leave the draft's group out: the group is in the meta, too, and apply takes it from there.
        template = encode_publish(self._node.name, [replace(draft, group=None)])
        found = schedules.find(ledger, name)
        if found is None or found.stored.spec != spec:
            # Check in a thread: computing the next time of a rare pattern may take some ms.
            await self._in_thread(lambda: plan.check(spec, self._node.now_ms()))
        if found is not None and codec.same_message(found.stored.template, template):
            template = found.stored.template
        command = codec.encode_put(
            name,
            ANY_VERSION if version is None else version,
            codec.KEEP_PAUSE if paused is None else codec.PAUSE if paused else codec.RUN,
            Stored(cut_name(by.token), spec, template),
        )
        await self._administer(by, "schedule.set", f"{name}: {spec.topic}", command)
        with once_begun():
            return await self.get(name, body=False, stale=False, warnings=await self._warnings(spec))

    async def _in_thread(self, search: Callable[[], Any]) -> Any:
        """Run `search`, which computes times of a schedule, in a thread; returns its result."""
        return await answered(self._node.runtime.in_thread, "schedules", search)

    async def _warnings(self, spec: Spec) -> list[str]:
        found: list[str] = await self._in_thread(lambda: _cron_warnings(spec, self._node.now_ms()))
        topic = self._node.ledger.topic(spec.topic)
        if spec.overlap and topic is not None and not topic.settings.max_attempts:
            found.append(f"overlap: a message of {spec.topic} that always fails stops the schedule: set max_attempts")
        return found

    async def get(self, name: str, *, body: bool, stale: bool, warnings: list[str] | None = None) -> Schedule[str]:
        await self._confirm(stale)
        found = self._found(name)
        view = self._document(name, found, body=body, coming=_NEXT, last=True)
        return replace(view, warnings=warnings) if warnings else view

    def _found(self, name: str) -> schedules.Found:
        found = schedules.find(self._node.ledger, name)
        if found is None:
            raise NotFound(f"there is no schedule {name!r}")
        return found

    async def page(
        self,
        prefix: str,
        after: str,
        limit: int,
        *,
        stale: bool,
        may: Callable[[str], bool] = lambda topic: True,
        last: bool = False,
    ) -> Schedules:
        """A page of schedules in the order of their names, from those after the name `after`. Leaves out schedules
        whose topics `may` refuses. last: with the last messages of each schedule."""
        await self._confirm(stale)
        documents = list[Schedule[str]]()
        async for name, found in self._seen(prefix, after, may):
            if len(documents) == limit:
                return Schedules(documents, documents[-1].schedule)
            documents.append(self._document(name, found, body=False, coming=1, last=last))
            if last:
                await asyncio.sleep(0)
        return Schedules(documents, None)

    async def _seen(
        self, prefix: str, after: str, may: Callable[[str], bool]
    ) -> AsyncIterator[tuple[str, schedules.Found]]:
        """Schedules whose names begin with `prefix`, after the name `after`, in the order of their names; only those
        whose topics `may` allows."""
        ledger, start = self._node.ledger, max(prefix.encode(), after.encode() + b"\0" * bool(after))
        while True:
            names = [raw for raw, _ in ledger.tables.range(schedules.STATE, start, None, _AT_ONCE)]
            for raw in names:
                if not raw.startswith(prefix.encode()):
                    return
                found = schedules.find(ledger, raw.decode())
                if found is not None and may(found.stored.spec.topic):
                    yield raw.decode(), found
            if len(names) < _AT_ONCE:
                return
            start = names[-1] + b"\0"
            await asyncio.sleep(0)

    def _document(self, name: str, found: schedules.Found, *, body: bool, coming: int, last: bool) -> Schedule[str]:
        """Describe a schedule. coming: limit of the number of next occurrences to show. last: whether to look up the
        last messages."""
        stored, state = found
        spec, message = stored.spec, codec.decode_template(stored.template)
        row, payload = message.rows[0], bytes(message.blob[len(GAP) :])
        meta, size = unpack(payload[: int(row["meta_size"])]), int(row["body_size"])
        times, problem = self._next(spec, state, coming)
        past = [made for made in state.ring if made.occurrence <= self._node.now_ms()]
        return Schedule(
            schedule=name,
            topic=spec.topic,
            version=state.version,
            state="paused" if state.paused else "finished" if state.finished else "active",
            restored=bool(state.flags & codec.RESTORED),
            times=plan.explain(spec),
            cron=spec.cron,
            every=_duration(spec.every_ms),
            at=None if spec.at is None else [format_instant(at_ms) for at_ms in spec.at],
            timezone=spec.timezone,
            start=_instant(spec.start_ms),
            end=_instant(spec.end_ms),
            max_occurrences=spec.max_occurrences,
            jitter=_duration(spec.jitter_ms or None),
            catch_up=CATCH_UPS[spec.catch_up],
            catch_up_window=format_duration(spec.window_ms),
            overlap=OVERLAPS[spec.overlap],
            next=[format_instant(at_ms) for at_ms in times],
            last=[self._occurrence(made) for made in past[-_NEXT:]] if last else None,
            made=state.made,
            missed=state.missed,
            overlapped=state.overlapped,
            refused=state.refused,
            manual=state.manual,
            changed_at=format_instant(state.put_ms),
            creator=stored.creator or None,
            content_type=meta.ct,
            tags=meta.tags,
            meta=meta.meta,
            ttl=_duration(meta.ttl or None),
            group=spec.group,
            size=size,
            body=payload[len(payload) - size :] if body else None,
            problem=problem,
            shard=self._shard,
        )

    def _next(self, spec: Spec, state: State, count: int) -> tuple[list[int], str | None]:
        """Returns (next occurrences of the schedule, reason why this node cannot compute them, or None)."""
        if state.flags:
            return [], None
        if spec.max_occurrences is not None:
            filed = sum(made.occurrence > self._node.now_ms() for made in state.ring)
            count = min(count, spec.max_occurrences - state.made + filed)
        try:
            return list(islice(plan.occurrences(spec, self._node.now_ms()), max(count, 0))), None
        except BadRequest as error:
            return [], str(error)

    def _occurrence(self, made: Made) -> Occurrence[str]:
        ledger = self._node.ledger
        entry = find_entry(ledger, made.id)
        state = "gone" if entry is None else str(state_of(ledger, entry, self._node.now_ms()))
        return Occurrence(format_instant(made.occurrence), encode_id(made.id), state, bool(made.manual))

    async def delete(self, name: str, by: Actor) -> None:
        """Delete a schedule. It is no error if there is none: the answer to an earlier request may have been lost."""
        with suppress(NotFound):
            await self._administer(by, "schedule.delete", name, codec.encode_delete(name))

    async def pause(self, name: str, paused: bool, by: Actor) -> Schedule[str]:
        await self._administer(
            by, f"schedule.{'pause' if paused else 'resume'}", name, codec.encode_state(name, paused)
        )
        with once_begun():
            return await self.get(name, body=False, stale=False)

    async def trigger(self, name: str, key: bytes | None, by: Actor, *, exists: bool = True) -> Triggered[str]:
        """Make one message of the schedule, due now. exists: whether the caller saw that the schedule exists; if not,
        the answer is that of an earlier request with the same key, or NotFound. Raises DiskFull, and Conflict if the
        schedule's messages must not overlap and the previous one is pending."""
        command = codec.encode_run(name, ANY_VERSION if exists else _NO_VERSION, [(0, 0)], key)
        return self._receipts(name, await self._run(name, command, by, "trigger", 1), (0,))[0]

    async def backfill(
        self, name: str, from_ms: int, to_ms: int, key: bytes | None, by: Actor, *, exists: bool = True
    ) -> Backfilled[str]:
        """Make the messages of all occurrences in [from_ms, to_ms), due now. Raises DiskFull, and Impossible if to_ms
        is in the future or there are too many occurrences. exists: see `trigger`."""
        await self._confirm()
        version, times, refused = _NO_VERSION, [1], None
        try:
            if not exists:
                raise NotFound(f"there is no schedule {name!r}")
            version, times = await self._range(name, from_ms, to_ms)
        except (Impossible, NotFound) as error:
            if key is None:
                raise
            # Propose a command that apply refuses, so that the refusal is remembered under the Idempotency-Key: an
            # earlier try of the request may lie in a stalled node, and arrive when the reason of the refusal is gone.
            refused = error
        if not times:
            if key is None or not is_known_hash(self._node.ledger, codec.hash_run_key(key)):
                return Backfilled([])
            # The range has no occurrences now, but an earlier try of the request made messages, when the schedule was
            # another. Propose any command with this Idempotency-Key: apply answers it with the first try's answer.
            version, times = _NO_VERSION, [1]
        command = codec.encode_run(name, version, [(at_ms, 0) for at_ms in times], key, (from_ms, to_ms))
        try:
            result = await self._run(name, command, by, "backfill", len(times))
        except HadelayError as error:
            raise error if refused is None or error.retryable else refused from None
        return Backfilled(self._receipts(name, result, times))

    async def _range(self, name: str, from_ms: int, to_ms: int) -> tuple[int, list[int]]:
        """The schedule's version, and its occurrences in [from_ms, to_ms)."""
        stored, state = self._found(name)
        if to_ms > self._node.now_ms():
            raise Impossible("to: lies in the future; a backfill makes past occurrences only")
        # Begin at 1 ms at the earliest: in the command, an occurrence of 0 ms means now (Run).
        found = plan.occurrences(stored.spec, max(from_ms - 1, 0))
        times: list[int] = await self._in_thread(lambda: list(_until(found, to_ms)))
        most = schedules.at_once(stored.template)
        if len(times) > most:
            raise Impossible(f"there are more than {most} occurrences: take a shorter range")
        return state.version, times

    async def _run(self, name: str, command: bytes, by: Actor, action: str, count: int) -> PublishResult:
        """Propose the command, which makes messages of `count` occurrences."""
        if full := self._node.peers.no_space():
            raise DiskFull(full, retry_after_ms=5_000)
        result = await self._administer(by, f"schedule.{action}", f"{name}: {count}", command)
        assert isinstance(result, PublishResult)
        return result

    def _receipts(self, name: str, result: PublishResult, times: Sequence[int]) -> list[Triggered[str]]:
        """Receipts of the messages that a trigger or backfill made. times: occurrences that it asked for; a repetition
        gets the result of its first try, which may have asked for others. Raises an error if some were refused."""
        refused = result.codes.nonzero()[0].tolist()
        if refused:
            found = schedules.find(self._node.ledger, name)
            topic, at = "" if found is None else found.stored.spec.topic, refused[0]
            other = 0 if result.others is None else int(result.others[at])
            problem = self._node.group_commit.refusals.problem(RowCode(result.codes[at]), topic, other)
            count = len(result.ids)
            if not problem.retryable or len(refused) == count:
                raise problem
            raise _stopped(problem, count - len(refused), count, times[at] if len(times) == count else None)
        columns = zip(result.ids.tolist(), result.deliver_at_ms.tolist(), result.duplicate.tolist(), strict=True)
        return [Triggered(encode_id(id_), format_instant(at_ms), again) for id_, at_ms, again in columns]

    async def preview(self, spec: Spec, after_ms: int | None, count: int) -> Previewed[str]:
        if after_ms is None and not self._node.clock.ready:
            raise NoLeader("this node does not know the cluster's time yet", retry_after_ms=500)
        start_ms = self._node.now_ms() if after_ms is None else after_ms
        if not 0 <= start_ms < plan.LATEST_MS:
            raise Impossible("after: a time from 1970 to 9899")
        found, changes = await self._in_thread(
            lambda: (list(islice(plan.occurrences(spec, start_ms), count)), _cron_warnings(spec, start_ms))
        )
        tz = zones.zone(spec.timezone)
        times = [
            PreviewTime(format_instant(at_ms), datetime.fromtimestamp(at_ms / 1000, tz).isoformat()) for at_ms in found
        ]
        return Previewed(plan.explain(spec), times, zones.VERSION, changes)


def _stopped(problem: HadelayError, made: int, count: int, next_ms: int | None) -> HadelayError:
    """Error of a backfill that made only `made` of `count` occurrences. next_ms: first one not made; None if the
    schedule has other times now. The cluster remembers this outcome under the Idempotency-Key, so the same request is
    not worth a retry."""
    more: dict[str, Any] = {"made": made}
    then = "The schedule has other times now, or was deleted"
    if next_ms is not None:
        more["go_on"] = format_instant(next_ms)
        then = f"Once there is room, go on with from={more['go_on']} and a new Idempotency-Key"
    what = f"{made} of {count} occurrences are made. The others are refused: {problem.detail}. {then}"
    error = LimitReached(what, **more)
    error.retryable = False  # type: ignore[misc]
    return error


def _cron_warnings(spec: Spec, after_ms: int) -> list[str]:
    return [] if spec.cron is None else cron.warnings(spec.cron, spec.timezone, after_ms)


def _until(times: Iterator[int], end_ms: int) -> Iterator[int]:
    """Those of the ascending `times` that are before end_ms; at most MAX_RUN + 1 of them."""
    for at_ms in islice(times, MAX_RUN + 1):
        if at_ms >= end_ms:
            return
        yield at_ms


def _duration(ms: int | None) -> str | None:
    return None if ms is None else format_duration(ms)


def _instant(ms: int | None) -> str | None:
    return None if ms is None else format_instant(ms)
