"""State of a bulk job.

At its beginning a job gives each of its topics a new generation (ledger/topics/topics.py), without raising the floor:
all messages go on. The job means the waiting entries of *older* generations. An entry that the job files anew gets the
job's generation, so that this job never meets the message again, in whatever order hours are visited; and a job that
began later still means it, and waits until this job has ended (ADR 227). Publishes, retries and reschedules by others
have the present generation: no job that began before means them.

The leader looks through the hour files, one slice after another (ledger/jobs/bulkscan.py), and proposes ids; apply
judges each id by its present entry (ledger/jobs/bulk.py). CARRY keeps the generation and moves a message to a later
hour, so a message is met before or after its move, and a message that was looked at is not met again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hadelay.codec.formats import U32
from hadelay.codec.jobcommands import ON_DEAD, JobCursor, JobSpec
from hadelay.ledger.changedrows import Watched

#: Names of the counts of messages in a BulkJob.
JOB_COUNTS = ("done", "leased", "settled", "moved", "refused")


@dataclass(slots=True)
class BulkJob(Watched):
    """One bulk job. Only apply changes it. The fields are a row of a checkpoint, in this order
    (ledger/rowformats.py)."""

    number: int
    spec: JobSpec
    #: Node that took the request to begin the job.
    node: str
    #: Name of the token of this request; "" without tokens.
    by: str
    #: Hash of the Idempotency-Key of this request; empty if the request had none.
    request: bytes
    began_ms: int
    #: Topic number → generation given to the topic when the job began; the job changes only older messages.
    topics: dict[int, int]
    cursor: JobCursor = (0, 0)
    #: Time at which the job ended; 0 while it runs.
    ended_ms: int = 0
    stopped: bool = False
    #: Counts of the messages that the job reached. done: changed. leased: left alone because leased. settled: ended
    #: since the job began. moved: rescheduled or retried since the job began. refused: the change is forbidden (due
    #: beyond max_delay, or another message has the client key by now). For a fill, done counts the copied messages,
    #: settled those that were cancelled or expired before, and refused those not copied because an hour or the
    #: subscription (with on_full "drop") is full.
    done: int = 0
    leased: int = 0
    settled: int = 0
    moved: int = 0
    refused: int = 0

    def generations(self, topics: int) -> U32:
        return generations(self.topics, topics)

    def waits_for(self, earlier: BulkJob) -> bool:
        """Whether this job must wait until the earlier job has ended: both change a topic, and one of the two moves due
        times, so that the other could miss messages."""
        actions = {self.spec.action, earlier.spec.action}
        if earlier.ended_ms or actions & {*ON_DEAD, "fill"} or actions == {"cancel"}:
            return False
        return not self.topics.keys().isdisjoint(earlier.topics)


def generations(of: Mapping[int, int], topics: int) -> U32:
    """Array by topic number: the generation below which a job may change entries; 0 for topics that are not in `of`,
    and in an additional last element, which is for unknown topic numbers."""
    found = np.zeros(topics + 1, np.uint32)
    if of:
        found[list(of)] = list(of.values())
    return found
