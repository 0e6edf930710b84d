"""Dead letters: lists the source queues of a dead-letter queue, and moves dead letters back, or to another queue, by
bulk jobs (tasks).

A queue for dead letters holds them as messages, which a job `transfer` moves. Of a queue without a RedrivePolicy, whose
topic keeps its dead letters itself, a job `redrive` brings them back.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta

from hadelay.api.jobs import Job
from hadelay.aws import arns
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs.attributes import FIFO
from hadelay.aws.sqs.protocol import Document, OfQueue, invalid, named, need_own_shard, operations
from hadelay.aws.sqs.queues import PageSize, page
from hadelay.codec.jobcommands import JobSpec
from hadelay.errors import NotFound
from hadelay.rules.access import need_begin, need_job

_ACTIONS = ("transfer", "redrive")
_STATES = {"queued": "RUNNING", "running": "RUNNING", "done": "COMPLETED", "stopped": "CANCELLED"}


class ListDeadLetterSourceQueues(OfQueue):
    MaxResults: PageSize | None = None
    NextToken: str | None = None


class _OfSource(Document):
    SourceArn: str

    @property
    def source(self) -> str:
        """Name of the queue in SourceArn, whose dead letters a task moves. Raises AwsError."""
        return arns.queue_of_arn(self.SourceArn, "SourceArn")

    @property
    def names(self) -> Mapping[str, str]:
        return {"topic": self.source}


class StartMessageMoveTask(_OfSource):
    DestinationArn: str | None = None
    MaxNumberOfMessagesPerSecond: Annotated[int, Meta(ge=1, le=500)] | None = None


class ListMessageMoveTasks(_OfSource):
    MaxResults: Annotated[int, Meta(ge=1, le=10)] = 1


class CancelMessageMoveTask(Document):
    TaskHandle: Annotated[str, Meta(pattern=r"^[0-9]{1,15}\Z")]

    @property
    def names(self) -> Mapping[str, str]:
        return {"job": self.TaskHandle}


@operations.add("ListDeadLetterSourceQueues", ListDeadLetterSourceQueues)
async def list_dead_letter_source_queues(ask: Ask, document: ListDeadLetterSourceQueues) -> Any:
    name = named(ask, document.QueueUrl)
    names = [one for one in await _sources(ask, name) if ask.may_any(one)]
    return page(ask, names, "queueUrls", document.MaxResults, document.NextToken)


async def _sources(ask: Ask, name: str) -> list[str]:
    """Names of the queues whose dead letters go to this queue. Raises NotFound if this queue does not exist."""
    known = await ask.service.topics.all_settings()
    if name not in known:
        raise NotFound(f"there is no queue {name!r}")
    return [one for one, settings in known.items() if settings.dead_letter == name]


async def _existing(ask: Ask, name: str, member: str) -> list[str]:
    """Names of the queues whose dead letters go to this queue. Raises AwsError if this queue does not exist. member:
    field of the request that names this queue."""
    try:
        return await _sources(ask, name)
    except NotFound:
        raise AwsError("ResourceNotFoundException", f"{member}: there is no queue {name!r}", 404) from None


@operations.add("StartMessageMoveTask", StartMessageMoveTask)
async def start_message_move_task(ask: Ask, document: StartMessageMoveTask) -> Any:
    name, rate = document.source, document.MaxNumberOfMessagesPerSecond
    need_job(ask.access, "transfer", name)
    sources = await _existing(ask, name, "SourceArn")
    into = await _destination(ask, document.DestinationArn, name)
    topic = await ask.service.topics.get_topic(name, stale=False)
    if not sources and not topic.dead:
        raise invalid(f"SourceArn: {name} is a dead-letter queue of no queue: set the RedrivePolicy of its sources")
    if not sources and into:
        raise invalid(f"DestinationArn: {name} keeps its own dead letters, which go back to it: leave this member out")
    action: Literal["transfer", "redrive"] = "transfer" if sources else "redrive"
    need_begin(ask.access, action, name, into, "DestinationArn")
    spec = JobSpec(action, name, rate=None if rate is None else float(rate), into=into)
    request = "" if ask.retry_key is None else ask.retry_key.decode()
    jobs = ask.service.jobs
    if not await jobs.begun(request) and any(not job.ended_at for job in await _tasks(ask, name)):
        raise invalid(f"SourceArn: a task already runs for {name}: wait for its end, or cancel it")
    job = await jobs.begin(spec, request, ask.access.actor)
    return {"TaskHandle": str(job.id)}


async def _destination(ask: Ask, arn: str | None, source: str) -> str:
    """Name of the queue that gets the messages; "": each goes back to the queue in which it died. Raises AwsError,
    Forbidden."""
    if arn is None:
        return ""
    name = arns.queue_of_arn(arn, "DestinationArn")
    ask.access.need("publish", name)
    need_own_shard(ask, "DestinationArn", name, source)
    await _existing(ask, name, "DestinationArn")
    if name == source:
        raise invalid("DestinationArn: the source and the destination are the same queue")
    if name.endswith(FIFO) != source.endswith(FIFO):
        raise invalid(f"DestinationArn: {name} and {source} must both be FIFO queues, or neither")
    return name


async def _tasks(ask: Ask, name: str) -> list[Job[str]]:
    """Bulk jobs that move dead letters of this queue, the latest first."""
    jobs = await ask.service.jobs.list_jobs(stale=False)
    return [job for job in reversed(jobs) if job.action in _ACTIONS and job.filter.topic == name]


@operations.add("ListMessageMoveTasks", ListMessageMoveTasks)
async def list_message_move_tasks(ask: Ask, document: ListMessageMoveTasks) -> Any:
    name = document.source
    need_job(ask.access, "transfer", name)
    await _existing(ask, name, "SourceArn")
    tasks = (await _tasks(ask, name))[: document.MaxResults]
    topic = await ask.service.topics.get_topic(name, stale=False)
    waiting = topic.ready + topic.blocked + topic.scheduled
    return {"Results": [_shown(name, job, waiting if job.action == "transfer" else topic.dead) for job in tasks]}


def _shown(name: str, job: Job[str], left: int) -> dict[str, Any]:
    """Describe a job as a task of SQS. left: number of messages that the task may still move while it runs."""
    state, met = _STATES[job.state], job.done + job.refused
    if state == "COMPLETED" and job.refused:
        state = "FAILED"
    found: dict[str, Any] = {
        "Status": state,
        "SourceArn": arns.queue_arn(name),
        "ApproximateNumberOfMessagesMoved": job.done,
        "ApproximateNumberOfMessagesToMove": met if job.ended_at else met + left,
        "StartedTimestamp": int(datetime.fromisoformat(job.began_at).timestamp() * 1000),
    }
    if job.into:
        found["DestinationArn"] = arns.queue_arn(job.into)
    if job.rate is not None:
        found["MaxNumberOfMessagesPerSecond"] = int(job.rate)
    if state == "FAILED":
        why = "the destination is missing or full" if job.into else "their source is unknown, missing or full"
        found["FailureReason"] = f"{job.refused} messages stay in the queue: {why}"
    return found | ({"TaskHandle": str(job.id)} if state == "RUNNING" else {})


@operations.add("CancelMessageMoveTask", CancelMessageMoveTask)
async def cancel_message_move_task(ask: Ask, document: CancelMessageMoveTask) -> Any:
    number, jobs = int(document.TaskHandle), ask.service.jobs
    missing = AwsError("ResourceNotFoundException", f"TaskHandle: there is no running task {number}", 404)
    try:
        job = await jobs.get_job(number, stale=False)
    except NotFound:
        raise missing from None
    need_job(ask.access, job.action, job.filter.topic)
    if job.action not in _ACTIONS or _STATES[job.state] != "RUNNING":
        raise missing
    return {"ApproximateNumberOfMessagesMoved": (await jobs.stop(number, ask.access.actor)).done}


@operations.add("AddPermission", OfQueue)
@operations.add("RemovePermission", OfQueue)
async def permission(ask: Ask, document: OfQueue) -> None:
    raise AwsError("UnsupportedOperation", "rights are scopes of tokens, not policies of queues: hadelay token create")
