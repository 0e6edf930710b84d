"""Attributes of queues: settings of the topic, and labels for what topics have no setting for.

Labels of SQS begin with `aws:`, as no tag of a user may.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from hadelay.aws import arns
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs.protocol import OfQueue, invalid, named, need_own_shard, operations
from hadelay.settings.topic import TopicSettings

OWN = "aws:"
FIFO = ".fifo"
#: Lease of a visibility timeout of 0, which must be long enough for the answer to arrive. Shown as 0 seconds.
SHORTEST_MS = 999
#: Attempts of messages of a FIFO queue without a redrive policy, after which a message is kept as a dead letter: a
#: message that always fails would stop its group for ever.
_FIFO_ATTEMPTS = 1_000
#: Settings of every queue that SQS creates: a message whose visibility timeout ends is visible at once, and is tried
#: without a limit.
_NEW = {"backoff": [0], "max_attempts": 0}
_NEW_FIFO = {"backoff": [0], "max_attempts": _FIFO_ATTEMPTS, "group_concurrency": 1}
_REFUSED = {
    "Policy": "rights are scopes of tokens (hadelay token create)",
    "KmsMasterKeyId": "hadelay does not encrypt messages: encrypt the disks",
    "KmsDataKeyReusePeriodSeconds": "hadelay does not encrypt messages: encrypt the disks",
}

Attributes = Mapping[str, str]


class Queue(NamedTuple):
    """A queue as its attributes show it."""

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
    """Raises NotFound. stale: for messages, which wait for no confirmation by the leader."""
    return Queue(name, await ask.call.service.topics.settings_of(name, stale=stale))


def _wrong(name: str, value: str, expected: str) -> AwsError:
    return AwsError("InvalidAttributeValue", f"{name}: {value[:80]!r}; expected {expected}")


def _number(name: str, value: str, least: int, most: int) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 15 or not least <= int(value) <= most:
        raise _wrong(name, value, f"a whole number, {least:,} to {most:,}")
    return int(value)


def _choice(name: str, value: str, *words: str) -> str:
    if value not in words:
        raise _wrong(name, value, " or ".join(words))
    return value


def _seconds(setting: str, least: int, most: int | None) -> Callable[[Ask, str, str], dict[str, Any]]:
    """most: None for the longest delay that the cluster allows."""

    def read(ask: Ask, name: str, value: str) -> dict[str, Any]:
        longest = ask.call.context.max_delay_ms // 1000 if most is None else most
        ms = 1000 * _number(name, value, least, longest)
        return {setting: ms or (SHORTEST_MS if setting == "lease_ms" else 0)}

    return read


def _label(check: Callable[[Ask, str, str], object]) -> Callable[[Ask, str, str], dict[str, Any]]:
    def read(ask: Ask, name: str, value: str) -> dict[str, Any]:
        check(ask, name, value)
        return {"labels": {OWN + name: value}}

    return read


class _Policy(Struct):
    deadLetterTargetArn: str
    maxReceiveCount: Annotated[int, Meta(ge=1, le=1_000)]


def _redrive_policy(ask: Ask, name: str, value: str) -> dict[str, Any]:
    if not value:
        return {"dead_letter": None, "max_attempts": 0}
    try:
        policy = msgspec.json.decode(value, type=_Policy, strict=False)
    except (msgspec.MsgspecError, RecursionError):
        form = '{"deadLetterTargetArn": ARN of a queue, "maxReceiveCount": 1 to 1000}'
        raise invalid(f"{name}: {value[:80]!r}; expected {form}") from None
    queue = arns.queue_of_arn(policy.deadLetterTargetArn, "deadLetterTargetArn")
    ask.access.need("publish", queue)
    return {"dead_letter": queue, "max_attempts": policy.maxReceiveCount}


def _object(name: str, value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid(f"{name}: {value[:80]!r} is not a JSON object")
    return found


def _only(word: str) -> Callable[[Ask, str, str], dict[str, Any]]:
    """An attribute with a single value, which needs no setting."""

    def read(ask: Ask, name: str, value: str) -> dict[str, Any]:
        _choice(name, value, word)
        return {}

    return read


_READ: dict[str, Callable[[Ask, str, str], dict[str, Any]]] = {
    "VisibilityTimeout": _seconds("lease_ms", 0, 43_200),
    "DelaySeconds": _seconds("delay_ms", 0, None),
    "MessageRetentionPeriod": _seconds("ttl_ms", 60, None),
    "MaximumMessageSize": _label(lambda ask, n, v: _number(n, v, 1_024, ask.call.context.config.max_body_bytes)),
    "ReceiveMessageWaitTimeSeconds": _label(lambda ask, n, v: _number(n, v, 0, 20)),
    "RedrivePolicy": _redrive_policy,
    "RedriveAllowPolicy": _label(lambda ask, n, v: _object(n, v) if v else None),
    "FifoQueue": _only("true"),
    "ContentBasedDeduplication": _label(lambda ask, n, v: _choice(n, v, "true", "false")),
    "DeduplicationScope": _label(lambda ask, n, v: _choice(n, v, "queue", "messageGroup")),
    "FifoThroughputLimit": _label(lambda ask, n, v: _choice(n, v, "perQueue", "perMessageGroupId")),
    "SqsManagedSseEnabled": _only("false"),
}
_OF_FIFO = frozenset(("FifoQueue", "ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit"))


def settings_of(ask: Ask, name: str, given: Attributes, *, new: bool) -> dict[str, Any]:
    """Settings of a topic for attributes of its queue. new: whether it is created. Raises AwsError, Forbidden."""
    fifo = name.endswith(FIFO)
    found: dict[str, Any] = dict(_NEW_FIFO if fifo else _NEW) if new else {}
    labels: dict[str, str] = {}
    for attribute, value in given.items():
        if (why := _REFUSED.get(attribute)) is not None:
            if value:
                raise AwsError("InvalidAttributeValue", f"{attribute}: {why}")
            continue
        read = _READ.get(attribute)
        if read is None or (attribute in _OF_FIFO and not fifo) or (attribute == "FifoQueue" and not new):
            raise AwsError("InvalidAttributeName", f"{attribute[:80]!r} is not an attribute to set of this queue")
        part = read(ask, attribute, value)
        labels |= part.pop("labels", {})
        found |= part
    target = found.get("dead_letter")
    if target is not None and target.endswith(FIFO) != fifo:
        kind = "a FIFO queue" if fifo else "no FIFO queue"
        raise AwsError("InvalidParameterValueException", f"RedrivePolicy: {target} must be {kind}, as {name} is")
    if fifo and found.get("max_attempts") == 0:
        found["max_attempts"] = _FIFO_ATTEMPTS
    now = str(int(time.time()))
    labels |= {f"{OWN}LastModifiedTimestamp": now} | ({f"{OWN}CreatedTimestamp": now} if new else {})
    return found | {"labels": labels}


def shown(queue: Queue) -> dict[str, str]:
    """Attributes of a queue, besides its counts."""
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


def differences(queue: Queue, given: Attributes) -> list[str]:
    """Names of the attributes whose given values differ from those of the queue."""
    now = shown(queue)
    return [name for name, value in given.items() if _plain(name, now.get(name, "")) != _plain(name, value)]


def _plain(name: str, value: str) -> Any:
    if name not in ("RedrivePolicy", "RedriveAllowPolicy") or not value:
        return value
    policy = _object(name, value)
    if "deadLetterTargetArn" in policy:
        policy["deadLetterTargetArn"] = arns.queue_of_arn(str(policy["deadLetterTargetArn"]), "deadLetterTargetArn")
    return {key: str(one) for key, one in policy.items()}


async def check_target(ask: Ask, name: str, settings: dict[str, Any]) -> None:
    """Raises AwsError if the dead-letter queue named in the settings of the queue `name` is in another shard, or does
    not exist: dead letters would create a topic of a mistyped name."""
    target = settings.get("dead_letter")
    if target is not None:
        need_own_shard(ask, "RedrivePolicy", target, name)
    if target is not None and target not in await ask.call.service.topics.all_settings(target):
        raise AwsError(
            "InvalidParameterValueException", f"RedrivePolicy: there is no queue {target!r}: create it first"
        )


class GetQueueAttributes(OfQueue):
    AttributeNames: list[str] = field(default_factory=list)


class SetQueueAttributes(OfQueue):
    Attributes: dict[str, str]


_COUNTS = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible", "ApproximateNumberOfMessagesDelayed")


@operations.add("GetQueueAttributes", GetQueueAttributes)
async def get_queue_attributes(ask: Ask, document: GetQueueAttributes) -> Any:
    queue = await find(ask, named(ask, document.QueueUrl))
    wanted = set(document.AttributeNames)
    found = shown(queue)
    if unknown := sorted(wanted - {"All", *_COUNTS, *_READ, *_REFUSED, *found, "CreatedTimestamp"}):
        raise AwsError("InvalidAttributeName", f"AttributeNames: there is no attribute {unknown[0][:80]!r}")
    if wanted & {"All", *_COUNTS}:
        topic = await ask.call.service.topics.get_topic(queue.name, stale=False)
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
    await ask.call.service.topics.put_topic(name, settings, ask.access.actor)
