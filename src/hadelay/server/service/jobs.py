"""Service for bulk jobs."""

import asyncio
from hashlib import blake2b

import numpy as np

from hadelay.api.jobs import Job, JobCount, JobFilterOut
from hadelay.api.service import Actor
from hadelay.api.text import format_duration, format_instant, format_shift
from hadelay.codec import commands
from hadelay.codec.formats import Rows
from hadelay.codec.jobcommands import LAST, MAX_TOPICS, REQUEST_BYTES, JobBegin, JobCursor, JobSpec
from hadelay.codec.results import JobBegun
from hadelay.codec.wire import cut_name
from hadelay.errors import BadRequest, NotFound
from hadelay.ledger.hours.hourstate import is_in
from hadelay.ledger.jobs.bulk import problem, queued
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.jobs.bulkscan import EVERY_GENERATION, JobScan, passes, reads_records
from hadelay.model import encode_id
from hadelay.rights import covers
from hadelay.server.reading import LISTS, extents_of, split_record
from hadelay.server.refusals import refusal
from hadelay.server.service.part import Service, once_begun
from hadelay.settings.shardmap import JOBS

#: Number of topics that are compared with a pattern before other tasks of the event loop run.
_TOPICS_AT_ONCE = 2_000
#: Time in seconds after which a count returns what it has found so far; and limit of records that it reads at once.
_COUNT_S, _READ = 1.0, 256


class JobService(Service):
    async def begin(self, spec: JobSpec, request_id: str, by: Actor) -> Job[str]:
        """Begin a bulk job. A request that repeats an earlier request_id begins no second job. Raises BadRequest,
        NotFound, Impossible, LimitReached."""
        await self._confirm()
        topics, refused = list[str](), None
        try:
            topics = [topic for topic, _ in await self._matching(spec)]
        except (NotFound, BadRequest) as error:
            # propose the job without topics all the same: apply refuses it, and remembers the refusal under the
            # request_id
            refused = error
        begin = JobBegin(self._node.name, cut_name(by.token), _digest(request_id), topics, spec)
        try:
            result = await self._administer(by, f"job.{spec.action}", spec.topic, commands.encode_job_begin(begin))
        except NotFound as error:
            raise refused or error from None
        assert isinstance(result, JobBegun)
        with once_begun():
            return await self.get_job(self._shown(result.job), stale=False)

    def _shown(self, number: int) -> int:
        """Number by which users know a job. With several shards, the number shows of which shard the job is."""
        return (self._shard or 0) * JOBS + number

    async def begun(self, request_id: str) -> bool:
        """Whether an earlier request with this request_id began a job, and the job is still remembered."""
        await self._confirm()
        return bool(request_id) and any(job.request == _digest(request_id) for job in self._node.ledger.jobs.values())

    async def _matching(self, spec: JobSpec) -> list[tuple[str, int]]:
        """Returns (name, number) of each topic that the job's filter matches. Raises NotFound, BadRequest."""
        known, found = self._node.ledger.topics.all, list[tuple[str, int]]()
        if "*" not in spec.topic:
            topic = self._topic(spec.topic)
            return [(topic.name, topic.number)]
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = known[first : first + _TOPICS_AT_ONCE]
            found += [(t.name, t.number) for t in few if t.exists and covers(spec.topic, t.name)]
            if len(found) > MAX_TOPICS:
                raise BadRequest(f"filter.topic: {spec.topic!r} matches more than {MAX_TOPICS} topics: narrow it")
            await asyncio.sleep(0)
        if not found:
            raise NotFound(f"no topic matches {spec.topic!r}")
        return found

    async def get_job(self, number: int, *, stale: bool) -> Job[str]:
        """Return a bulk job by its number. Raises NotFound for an unknown job, also for an ended job after which many
        others began."""
        await self._confirm(stale)
        job = self._node.ledger.jobs.get(number % JOBS)
        if job is None or self._shown(job.number) != number:
            raise NotFound(f"there is no job {number}; only the latest jobs are kept")
        return self._document(job)

    async def list_jobs(self, *, stale: bool) -> list[Job[str]]:
        await self._confirm(stale)
        found = []
        for job in list(self._node.ledger.jobs.values()):
            found.append(self._document(job))
            await asyncio.sleep(0)
        return found

    async def stop(self, number: int, by: Actor) -> Job[str]:
        """Stop a job; does nothing if the job has ended. Raises NotFound."""
        await self._administer(by, "job.stop", str(number), commands.encode_job_stop(number % JOBS))
        with once_begun():
            return await self.get_job(number, stale=False)

    async def count(self, spec: JobSpec, after: JobCursor) -> tuple[JobCount[str], JobCursor | None]:
        """Count the messages that a job would change now, from the cursor `after` on, for about a second. Returns the
        counts, and the next cursor; None after the last part. Raises the same errors as `begin`."""
        await self._confirm()
        node, now_ms = self._node, self._node.now_ms()
        if (refused := problem(spec, now_ms, node.ledger.settings.max_delay_ms)) is not None:
            raise refusal(refused)
        topics = {number: EVERY_GENERATION for _, number in await self._matching(spec)}
        scan = JobScan(node.ledger, spec, topics, now_ms, after)
        until = node.runtime.monotonic() + _COUNT_S
        matched = leased = 0
        first: int | None = None
        last: int | None = None
        while scan.cursor != LAST and node.runtime.monotonic() < until:
            hour, rows = await node.reader.repaired(lambda: scan.step(now_ms))
            rows = await self._passing(spec, hour, rows)
            if (hour_state := node.ledger.hours.get(hour)) is not None and len(rows):
                is_leased = is_in(rows["index"], hour_state.leased)
                leased, rows = leased + int(is_leased.sum()), rows[~is_leased]
            if len(rows):
                matched += len(rows)
                due = rows["deliver_at_ms"]
                low, high = int(due.min()), int(due.max())
                first, last = low if first is None else min(first, low), high if last is None else max(last, high)
            await asyncio.sleep(0)
        cursor = None if scan.cursor == LAST else scan.cursor
        progress = 1.0 if cursor is None else round(scan.progress(), 4)
        return JobCount(matched, leased, _at(first), _at(last), progress, None), cursor

    async def _passing(self, spec: JobSpec, hour: int, rows: Rows) -> Rows:
        """Those rows whose records have the tags and the key that the job selects."""
        if not reads_records(spec):
            return rows
        which: list[bool] = []
        for at in range(0, len(rows), _READ):
            some = rows[at : at + _READ]
            records = await self._node.reader.sound(extents_of(np.full(len(some), hour), some), LISTS)
            which += [record is not None and passes(spec, split_record(record)[0]) for record in records]
        return rows[np.array(which, np.bool_)]

    def _document(self, job: BulkJob) -> Job[str]:
        spec, ledger = job.spec, self._node.ledger
        of = JobFilterOut(
            spec.topic,
            list(spec.tags),
            spec.key_prefix,
            spec.group,
            spec.schedule,
            list(map(encode_id, spec.ids)),
            spec.error,
            spec.retrying,
            _at(spec.from_ms),
            _at(spec.to_ms),
        )
        state = "stopped" if job.stopped else "done" if job.ended_ms else "queued" if queued(ledger, job) else "running"
        progress = 1.0
        if not job.ended_ms or job.stopped:
            progress = round(JobScan(ledger, spec, job.topics, job.began_ms, job.cursor).progress(), 4)
        return Job(
            id=self._shown(job.number),
            action=spec.action,
            filter=of,
            shift=None if spec.shift_ms is None else format_shift(spec.shift_ms),
            delay=None if spec.delay_ms is None else format_duration(spec.delay_ms),
            deliver_at=_at(spec.at_ms),
            rate=spec.rate,
            into=spec.into or None,
            subscription=spec.subscription or None,
            state=state,
            began_at=format_instant(job.began_ms),
            ended_at=_at(job.ended_ms or None),
            by=job.by,
            progress=progress,
            done=job.done,
            leased=job.leased,
            settled=job.settled,
            moved=job.moved,
            refused=job.refused,
        )


def _digest(request_id: str) -> bytes:
    return blake2b(request_id.encode(), digest_size=REQUEST_BYTES).digest() if request_id else b""


def _at(ms: int | None) -> str | None:
    return None if ms is None else format_instant(ms)
