"""Tags of queues: labels of the topic."""

from typing import Any

from hadelay.aws.door import Ask
from hadelay.aws.labels import check_tags, tags_of
from hadelay.aws.sqs.attributes import find
from hadelay.aws.sqs.protocol import OfQueue, named, operations


class TagQueue(OfQueue):
    Tags: dict[str, str]


class UntagQueue(OfQueue):
    TagKeys: list[str]


@operations.add("TagQueue", TagQueue)
async def tag_queue(ask: Ask, document: TagQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    labels = check_tags(document.Tags, tags_of((await find(ask, name)).labels))
    await ask.service.topics.put_topic(name, {"labels": labels}, ask.access.actor)


@operations.add("UntagQueue", UntagQueue)
async def untag_queue(ask: Ask, document: UntagQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    check_tags(dict.fromkeys(document.TagKeys, ""))
    await find(ask, name)
    labels = dict.fromkeys(document.TagKeys)
    await ask.service.topics.put_topic(name, {"labels": labels}, ask.access.actor)


@operations.add("ListQueueTags", OfQueue)
async def list_queue_tags(ask: Ask, document: OfQueue) -> Any:
    queue = await find(ask, named(ask, document.QueueUrl))
    return {"Tags": tags_of(queue.labels)}
