"""Tags of queues: labels of the topic."""

from collections.abc import Iterable, Mapping
from typing import Any

from hadelay.aws.door import Ask
from hadelay.aws.sqs.attributes import OWN, find
from hadelay.aws.sqs.protocol import OfQueue, invalid, named, operations

#: Limits of SQS: number of tags of a queue, and characters of a name and of a value.
_MOST, _NAME, _VALUE = 50, 128, 256


class TagQueue(OfQueue):
    Tags: dict[str, str]


class UntagQueue(OfQueue):
    TagKeys: list[str]


def check_tags(tags: Mapping[str, str], before: Iterable[str] = ()) -> dict[str, str]:
    """Raises AwsError. before: names of the tags that the queue has."""
    for name, text in tags.items():
        if not 0 < len(name) <= _NAME or len(text) > _VALUE or name.startswith(OWN):
            raise invalid(
                f"Tags: {name[:80]!r}: 1 to {_NAME} characters, not beginning with {OWN}; a value up to {_VALUE}"
            )
    if (count := len(tags.keys() | set(before))) > _MOST:
        raise invalid(f"Tags: {count}; a queue has at most {_MOST}")
    return dict(tags)


@operations.add("TagQueue", TagQueue)
async def tag_queue(ask: Ask, document: TagQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    labels = check_tags(document.Tags, _tags((await find(ask, name)).labels))
    await ask.call.service.topics.put_topic(name, {"labels": labels}, ask.access.actor)


@operations.add("UntagQueue", UntagQueue)
async def untag_queue(ask: Ask, document: UntagQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    check_tags(dict.fromkeys(document.TagKeys, ""))
    await find(ask, name)
    labels = dict.fromkeys(document.TagKeys)
    await ask.call.service.topics.put_topic(name, {"labels": labels}, ask.access.actor)


@operations.add("ListQueueTags", OfQueue)
async def list_queue_tags(ask: Ask, document: OfQueue) -> Any:
    queue = await find(ask, named(ask, document.QueueUrl))
    return {"Tags": _tags(queue.labels)}


def _tags(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in labels.items() if not name.startswith(OWN)}
