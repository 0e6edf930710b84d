"""Attributes of queues: they are settings of the topic, or labels where topics have no such setting."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from hadelay.aws import arns
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.labels import OWN, times
from hadelay.aws.operations import decoded, said
from hadelay.aws.sqs.protocol import OfQueue, invalid, named, need_own_shard, operations
from hadelay.settings import topic as topics
from hadelay.settings.topic import TopicSettings

FIFO = ".fifo"
#: Lease in ms for a visibility timeout of 0 s: long enough for the answer to reach the client. Answers show the timeout
#: as 0 seconds.
SHORTEST_MS = 999
#: Limit of attempts in a FIFO queue without a RedrivePolicy. Without this limit, a message that always fails would stop
#: its group for ever; at the limit it is kept as a dead letter.
_FIFO_ATTEMPTS = 1_000
#: Settings of the topic of each new queue: a message whose visibility timeout has ended is ready at once, and has no
#: limit of attempts.
_NEW = {"backoff": [0], "max_attempts": 0}
_NEW_FIFO = {"backoff": [0], "max_attempts": _FIFO_ATTEMPTS, "group_concurrency": 1}
_REFUSED = {
    "Policy": "rights are scopes of tokens (hadelay token create)",
    "KmsMasterKeyId": "hadelay does not encrypt messages: encrypt the disks",
    "KmsDataKeyReusePeriodSeconds": "hadelay does not encrypt messages: encrypt the disks",
}

Attributes = Mapping[str, str]


class Settable(Struct):
    """Attributes that CreateQueue and SetQueueAttributes can set. SDKs send all values as text."""

    VisibilityTimeout: Annotated[int, Meta(ge=0, le=43_200)] | UnsetType = UNSET
    DelaySeconds: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    MessageRetentionPeriod: Annotated[int, Meta(ge=60)] | UnsetType = UNSET
    MaximumMessageSize: Annotated[int, Meta(ge=1_024)] | UnsetType = UNSET
    ReceiveMessageWaitTimeSeconds: Annotated[int, Meta(ge=0, le=20)] | UnsetType = UNSET
    #: Policies as JSON text; "" removes the policy.
    RedrivePolicy: str | UnsetType = UNSET
    RedriveAllowPolicy: str | UnsetType = UNSET
    SqsManagedSseEnabled: Literal["false"] | UnsetType = UNSET
    FifoQueue: Literal["true"] | UnsetType = UNSET
    ContentBasedDeduplication: Literal["true", "false"] | UnsetType = UNSET
    DeduplicationScope: Literal["queue", "messageGroup"] | UnsetType = UNSET
    FifoThroughputLimit: Literal["perQueue", "perMessageGroupId"] | UnsetType = UNSET


_OF_FIFO = {"FifoQueue", "ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit"}
#: Attribute in seconds → setting of the topic, in ms.
_TIMES = {"VisibilityTimeout": "lease_ms", "DelaySeconds": "delay_ms", "MessageRetentionPeriod": "ttl_ms"}
#: Attributes that are stored as labels of the topic.
_LABELS = {"MaximumMessageSize", "ReceiveMessageWaitTimeSeconds", "RedriveAllowPolicy", *_OF_FIFO} - {"FifoQueue"}


class _Policy(Struct):
    deadLetterTargetArn: str
    maxReceiveCount: Annotated[int, Meta(ge=1, le=1_000)]


class Queue(NamedTuple):
    """A queue: its name, and the settings of its topic."""

    name: str
    settings: TopicSettings

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings.labels)

    @property
    def fifo(self) -> bool:
        return self.name.endswith(FIFO)

    def own(self, name: str, default: str = "") -> str:
        return self.labels.get(OWN + name, default) if self.settings.labels else default


async def find(ask: Ask, name: str, *, stale: bool = False) -> Queue:
    """Find a queue; NotFound if there is none. stale: whether this node's settings are enough, so that operations on
    messages need not wait for the leader."""
    return Queue(name, await ask.service.topics.settings_of(name, stale=stale))


def settings_of(ask: Ask, name: str, given: Attributes, *, new: bool) -> dict[str, Any]:
    """Settings of the topic for attributes of its queue. new: whether the queue is created. Raises AwsError,
    Forbidden."""
    fifo = name.endswith(FIFO)
    settings: dict[str, Any] = dict(_NEW_FIFO if fifo else _NEW) if new else {}
    values = {attribute: value for attribute, value in _values(ask, given, fifo, new).items() if value is not UNSET}
    settings |= {_TIMES[attribute]: 1_000 * value for attribute, value in values.items() if attribute in _TIMES}
    if settings.get("lease_ms") == 0:
        settings["lease_ms"] = SHORTEST_MS
    if policy := values.get("RedrivePolicy"):
        settings |= _redrive(ask, name, _json("RedrivePolicy", policy, _Policy))
    elif policy is not None:
        settings |= {"dead_letter": None, "max_attempts": _FIFO_ATTEMPTS if fifo else 0}
    if policy := values.get("RedriveAllowPolicy"):
        values["RedriveAllowPolicy"] = json.dumps(_json("RedriveAllowPolicy", policy, dict[str, Any]))
    labels = {OWN + attribute: str(value) for attribute, value in values.items() if attribute in _LABELS}
    return settings | {"labels": labels | times(new=new)}


def _values(ask: Ask, given: Attributes, fifo: bool, new: bool) -> dict[str, Any]:
    """Check and convert attributes: values of all attributes by name, UNSET for those not given. Raises AwsError."""
    known = set(Settable.__struct_fields__) - (set() if fifo else _OF_FIFO) - (set() if new else {"FifoQueue"})
    if unknown := sorted(given.keys() - known - _REFUSED.keys()):
        raise AwsError("InvalidAttributeName", f"{unknown[0][:80]!r} is not an attribute to set of this queue")
    for attribute, why in _REFUSED.items():
        if given.get(attribute):
            raise AwsError("InvalidAttributeValue", f"{attribute}: {why}")

    def wrong(attribute: str, text: str) -> AwsError:
        return AwsError("InvalidAttributeValue", said(attribute, text))

    values = msgspec.structs.asdict(decoded(partial(msgspec.convert, given, Settable, strict=False), wrong, ""))
    longest_s = ask.call.context.max_delay_ms // 1_000
    most = {"DelaySeconds": longest_s, "MessageRetentionPeriod": longest_s}
    for attribute, limit in (most | {"MaximumMessageSize": ask.limits.max_body_bytes}).items():
        if values[attribute] is not UNSET and values[attribute] > limit:
            raise AwsError("InvalidAttributeValue", f"{attribute}: {values[attribute]}; at most {limit:,}")
    return values


def _json(attribute: str, text: str, kind: Any) -> Any:
    """The value of an attribute whose text is JSON. Raises AwsError."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.MsgspecError, RecursionError):
        form = '{"deadLetterTargetArn": ARN of a queue, "maxReceiveCount": 1 to 1000}'
        raise invalid(f"{attribute}: {text[:80]!r}; expected {form if kind is _Policy else 'a JSON object'}") from None


def _redrive(ask: Ask, name: str, policy: _Policy) -> dict[str, Any]:
    """Settings of the topic for the RedrivePolicy of its queue. Raises AwsError, Forbidden."""
    target = arns.queue_of_arn(policy.deadLetterTargetArn, "deadLetterTargetArn")
    ask.access.need("publish", target)
    if target.endswith(FIFO) != name.endswith(FIFO):
        kind = "a FIFO queue" if name.endswith(FIFO) else "no FIFO queue"
        raise invalid(f"RedrivePolicy: {target} must be {kind}, as {name} is")
    return {"dead_letter": target, "max_attempts": policy.maxReceiveCount}


def shown(queue: Queue) -> dict[str, str]:
    """Attributes of a queue as answers show them, without the numbers of messages."""
    settings, own = queue.settings, queue.own
    lease_ms = 30_000 if settings.lease_ms is None else settings.lease_ms
    found = {
        "QueueArn": arns.queue_arn(queue.name),
        "VisibilityTimeout": str(lease_ms // 1000),
        "DelaySeconds": str(settings.delay_ms // 1000),
        "MaximumMessageSize": own("MaximumMessageSize", "1048576"),
        "ReceiveMessageWaitTimeSeconds": own("ReceiveMessageWaitTimeSeconds", "0"),
        "SqsManagedSseEnabled": "false",
    }
    if settings.ttl_ms is not None:
        found["MessageRetentionPeriod"] = str(settings.ttl_ms // 1000)
    if settings.dead_letter != "keep":
        policy = {"deadLetterTargetArn": arns.queue_arn(settings.dead_letter), "maxReceiveCount": settings.max_attempts}
        found["RedrivePolicy"] = json.dumps(policy)
    if queue.fifo:
        found |= {"FifoQueue": "true", "ContentBasedDeduplication": own("ContentBasedDeduplication", "false")}
        found |= {"DeduplicationScope": own("DeduplicationScope", "queue")}
        found |= {"FifoThroughputLimit": own("FifoThroughputLimit", "perQueue")}
    for name in ("RedriveAllowPolicy", "CreatedTimestamp", "LastModifiedTimestamp"):
        if text := own(name):
            found[name] = text
    return found


def differences(queue: Queue, settings: dict[str, Any], attributes: Iterable[str]) -> list[str]:
    """Names of those `attributes` whose values would change if the queue got these settings."""
    now, then = shown(queue), shown(Queue(queue.name, topics.settings_of(topics.merged({}, settings))))
    return [name for name in attributes if now.get(name) != then.get(name)]


async def check_target(ask: Ask, name: str, settings: dict[str, Any]) -> None:
    """Raises AwsError if the dead-letter queue named in the settings of the queue `name` is in another shard, or does
    not exist: dead letters would create a topic of a mistyped name."""
    target = settings.get("dead_letter")
    if target is not None:
        need_own_shard(ask, "RedrivePolicy", target, name)
        if target not in await ask.service.topics.all_settings(target):
            raise invalid(f"RedrivePolicy: there is no queue {target!r}: create it first")


class GetQueueAttributes(OfQueue):
    AttributeNames: list[str] = field(default_factory=list)


class SetQueueAttributes(OfQueue):
    Attributes: dict[str, str]


#: Attributes that a GetQueueAttributes may name, whether they are set or not.
_NAMES = {"All", "CreatedTimestamp", *Settable.__struct_fields__, *_REFUSED}
_COUNTS = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible", "ApproximateNumberOfMessagesDelayed")


@operations.add("GetQueueAttributes", GetQueueAttributes)
async def get_queue_attributes(ask: Ask, document: GetQueueAttributes) -> Any:
    queue = await find(ask, named(ask, document.QueueUrl))
    wanted = set(document.AttributeNames)
    found = shown(queue)
    if unknown := sorted(wanted - {*_NAMES, *_COUNTS, *found}):
        raise AwsError("InvalidAttributeName", f"AttributeNames: there is no attribute {unknown[0][:80]!r}")
    if wanted & {"All", *_COUNTS}:
        topic = await ask.service.topics.get_topic(queue.name, stale=False)
        visible = topic.ready + topic.blocked
        later = max(topic.scheduled - topic.blocked, 0)
        found |= dict(zip(_COUNTS, map(str, (visible, topic.leased, later)), strict=True))
    return {"Attributes": found if "All" in wanted else {name: text for name, text in found.items() if name in wanted}}


@operations.add("SetQueueAttributes", SetQueueAttributes)
async def set_queue_attributes(ask: Ask, document: SetQueueAttributes) -> None:
    name = named(ask, document.QueueUrl, "admin")
    await find(ask, name)
    settings = settings_of(ask, name, document.Attributes, new=False)
    await check_target(ask, name, settings)
    await ask.service.topics.put_topic(name, settings, ask.access.actor)
