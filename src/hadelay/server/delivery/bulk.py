"""Bulk jobs on the leader: finds the messages that a job selects, and proposes the job's changes step by step.

One step at a time is under way, with a pause after it, so that a job leaves the log and the loop to consumers and
publishers. Nothing but the job's cursor is kept, in the ledger: the next leader goes on there. Without a running job
nothing happens.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from hadelay.codec.commands import encode_job_step
from hadelay.codec.formats import Rows
from hadelay.codec.jobcommands import LAST, MAX_STEP, JobCursor
from hadelay.codec.results import Done
from hadelay.errors import DamagedFile, HadelayError
from hadelay.ledger.hours.transitions import fitting
from hadelay.ledger.jobs.bulk import queued
from hadelay.ledger.jobs.bulkjob import JOB_COUNTS, BulkJob
from hadelay.ledger.jobs.bulkscan import JobScan, passes, reads_records
from hadelay.ledger.messages.changes import MAX_MOVED_BYTES
from hadelay.model import pack_id
from hadelay.server.delivery.term import Term
from hadelay.server.reading import LISTS, VerifiedReader, extents_of, split_record

#: Pauses after a step of a job, in seconds: usually; while commits take more than twice as long as before the job; and
#: after a step that failed.
_PAUSE_S, _SLOW_S, _RETRY_S = 0.02, 0.1, 0.5
#: Pause, in seconds, after which jobs are examined again if all of them wait for their rates, or for disk space.
_LOOK_S = 0.1
#: Actions that copy no records, so that they need no disk space; jobs with other actions wait while a node has too
#: little disk space.
_FREES = ("cancel", "delete_dead")
#: Shortest duration, in ms, of a commit that counts as slow.
_SLOW_MS = 20.0
#: Usual time between two steps of a job with a rate, in seconds: a step has at most rate × this number of messages.
_RATE_S = 0.25
#: Limits of records that are read at once: number, and bytes. The event loop verifies their checksums, which takes
#: time.
_READ, _READ_BYTES = 256, 1 << 20


class Work:
    """Messages that the leader found for one bulk job and has not proposed yet."""

    def __init__(self, job: BulkJob, scan: JobScan, most: int) -> None:
        """most: limit of messages in a step."""
        self.job, self.scan, self._most = job, scan, most
        #: Scan position after the last proposed step: the job's cursor once that step is applied.
        self.expected: JobCursor = job.cursor
        #: Messages to propose, in the order of the scan: (hour, INDEX rows).
        self.found: list[tuple[int, Rows]] = []
        self.count = self.bytes = 0
        #: Monotonic time before which the job's rate allows no further step.
        self.rests_until = 0.0

    def add(self, hour: int, rows: Rows) -> None:
        if len(rows):
            self.found.append((hour, rows))
            self.count += len(rows)
            self.bytes += int(rows["size"].sum(dtype=np.int64))

    @property
    def limit(self) -> int:
        """Limit of messages in a step: lower for a job with a rate."""
        rate = self.job.spec.rate
        return self._most if rate is None else min(self._most, max(1, int(rate * _RATE_S)))

    @property
    def ready(self) -> bool:
        """Whether enough messages were found for a full step, or all that are left of the job."""
        return self.count >= self.limit or self.bytes >= MAX_MOVED_BYTES or self.scan.cursor == LAST

    def take(self) -> tuple[JobCursor, list[int]]:
        """Take the messages of the job's next step. Returns (scan position after the last of them, their ids)."""
        ids: list[int] = []
        room = MAX_MOVED_BYTES
        while self.found and len(ids) < self.limit and room > 0:
            hour, rows = self.found.pop(0)
            fits = min(self.limit - len(ids), fitting(rows["size"], room, at_least=not ids))
            some, rest = rows[:fits], rows[fits:]
            ids += self._named(hour, some)
            taken = int(some["size"].sum(dtype=np.int64))
            room, self.count, self.bytes = room - taken, self.count - fits, self.bytes - taken
            if len(rest):
                self.found.insert(0, (hour, rest))
                break
        if self.found:
            hour, rows = self.found[0]
            return (hour, int(rows["index"][0])), ids
        return self.scan.cursor, ids

    def _named(self, hour: int, rows: Rows) -> list[int]:
        """Ids that a step names: of messages; or, if the job fills a new subscription with copies of index entries,
        ids made from these entries (jobcommands.JobStep)."""
        if self.job.spec.action == "fill":
            return [pack_id(0, hour, index) for index in rows["index"].tolist()]
        ids: list[int] = rows["first_id"].tolist()
        return ids


class BulkRunner:
    """Runs bulk jobs; running jobs take turns. One object per term."""

    def __init__(
        self,
        term: Term,
        reader: VerifiedReader | None,
        commit_ms: Callable[[], float],
        has_space: Callable[[], bool],
        counts: Counter[str],
        most: int = MAX_STEP,
    ) -> None:
        """commit_ms: returns the usual duration of a grant's commit at present. has_space: whether every node has room
        for more messages. counts: number of messages by outcome (JOB_COUNTS), of all jobs. most: limit of messages in a
        step."""
        self._term, self._ledger, self._reader, self._has_space = term, term.ledger, reader, has_space
        self._commit_ms, self._counts, self._most = commit_ms, counts, min(max(most, 1), MAX_STEP)
        self._works: dict[int, Work] = {}
        #: Number of the job that had the last turn, even if it found nothing: so a job with a long search does not stop
        #: the others.
        self._last = 0
        #: Number of bulk jobs that were ever begun, as noted when no job was running. A higher number in the ledger
        #: shows a new job. -1 while jobs run.
        self._seen = -1
        #: True while a proposed step is undecided, or records are being read.
        self._busy = False
        self._before_ms = 0.0
        self._alarm = term.alarm(self._look)
        self._rest(0.0)

    def watch(self) -> None:
        """Wake the runner if the entries just applied have begun a job. It may be called after every entry, because it
        costs little."""
        if 0 <= self._seen < self._ledger.jobs_begun:
            self._before_ms = self._commit_ms()
            self._rest(0.0)

    def _rest(self, seconds: float) -> None:
        self._seen = -1
        self._alarm.at(self._term.runtime.monotonic() + seconds)

    def _look(self) -> None:
        """Do one slice of work for the job whose turn it is."""
        if self._busy:
            return
        jobs = [job for job in self._ledger.jobs.values() if not job.ended_ms and not queued(self._ledger, job)]
        if not jobs:
            self._seen, self._works = self._ledger.jobs_begun, {}
            return
        now, has_space = self._term.runtime.monotonic(), self._has_space()
        works = [self._work(job) for job in jobs if has_space or job.spec.action in _FREES]
        works = [work for work in works if work.rests_until <= now]
        if not works:
            self._rest(_LOOK_S)
            return
        work = next((work for work in works if work.job.number > self._last), works[0])
        self._last = work.job.number
        if work.ready:
            self._propose(work)
        else:
            self._scan(work)

    def _work(self, job: BulkJob) -> Work:
        work = self._works.get(job.number)
        if work is None or work.expected != job.cursor:
            scan = JobScan(self._ledger, job.spec, job.topics, job.began_ms, job.cursor)
            # With subscriptions, deleting a dead letter costs reads of the index for its client key: take fewer
            # messages per step.
            costly = job.spec.action == "delete_dead" and self._ledger.topics.subscriptions
            work = self._works[job.number] = Work(job, scan, max(self._most // 4, 1) if costly else self._most)
        return work

    def _scan(self, work: Work) -> None:
        try:
            hour, rows = work.scan.step(self._term.now())
        except DamagedFile as damage:
            self._mend(damage)
            return
        if len(rows) and reads_records(work.job.spec):
            self._filter(work, hour, rows)
        else:
            work.add(hour, rows)
            self._rest(0.0)

    def _mend(self, damage: DamagedFile) -> None:
        if self._reader is None:
            self._rest(_RETRY_S)
            return
        self._busy = True

        def mended(data: bytes | None) -> None:
            self._busy = False
            if not self._term.over:
                self._rest(0.0 if data is not None else _RETRY_S)

        self._reader.repair(damage, mended)

    def _filter(self, work: Work, hour: int, rows: Rows) -> None:
        """Add to `work` those rows whose records match the job's filter; reads some hundred records at a time."""
        fits = min(_READ, fitting(rows["size"], _READ_BYTES))
        some, rest = rows[:fits], rows[fits:]
        self._busy = True

        def read(records: list[bytes | None]) -> None:
            self._busy = False
            if self._term.over:
                return
            spec = work.job.spec
            # If no node has a good copy of a record, it cannot be compared with the filter: its message stays as it is.
            which = [record is not None and passes(spec, split_record(record)[0]) for record in records]
            work.add(hour, some[np.array(which, np.bool_)])
            if len(rest):
                self._filter(work, hour, rest)
            else:
                self._rest(0.0)

        assert self._reader is not None
        self._reader.verified(extents_of(np.full(len(some), hour), some), LISTS, read)

    def _propose(self, work: Work) -> None:
        expected = work.expected
        work.expected, ids = work.take()
        self._busy = True
        command = encode_job_step(work.job.number, expected, work.expected, ids)
        before = {name: getattr(work.job, name) for name in JOB_COUNTS}

        def decided(result: Any, error: HadelayError | None) -> None:
            self._busy = False
            if isinstance(result, Done):
                self._counts.update({name: getattr(work.job, name) - count for name, count in before.items()})
                if (rate := work.job.spec.rate) is not None:
                    work.rests_until = self._term.runtime.monotonic() + len(ids) / rate
                slow = self._commit_ms() > max(2 * self._before_ms, _SLOW_MS)
                self._rest(_SLOW_S if slow else _PAUSE_S)
            else:
                # The step failed. Search again from the job's cursor in the ledger: the step may have been applied
                # after all, or the job was stopped.
                self._works.pop(work.job.number, None)
                self._rest(_PAUSE_S if error is None else _RETRY_S)

        self._term.propose_behind(command, decided)
