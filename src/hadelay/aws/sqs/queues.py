"""Creates, finds, lists, deletes and purges queues. A queue is a topic; its URL has the host at which the client
reached the node."""

import re
from contextlib import suppress
from typing import Annotated, Any

from msgspec import Meta, field

from hadelay.api.text import check_topic
from hadelay.aws import arns
from hadelay.aws.door import Ask, whole
from hadelay.aws.errors import AwsError
from hadelay.aws.labels import check_tags
from hadelay.aws.operations import Run
from hadelay.aws.sqs import attributes
from hadelay.aws.sqs.protocol import Document, Named, OfQueue, invalid, named, operations
from hadelay.errors import NotFound
from hadelay.model import SEPARATOR

#: Limit of queues on one page of a list.
PAGE = 1_000
PageSize = Annotated[int, Meta(ge=1, le=PAGE)]
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")


class CreateQueue(Named):
    Attributes: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class ListQueues(Document):
    QueueNamePrefix: str = ""
    MaxResults: PageSize | None = None
    NextToken: str | None = None


@operations.add("CreateQueue", CreateQueue)
async def create_queue(ask: Ask, document: CreateQueue) -> Any:
    name, given = document.QueueName, document.Attributes
    if not _NAME.fullmatch(name):
        raise invalid(f"QueueName: {name[:100]!r}; 1 to 80 of A-Z a-z 0-9 _ -, and .fifo at the end of a FIFO queue's")
    ask.access.need("admin", name)
    if name.endswith(attributes.FIFO) != (given.get("FifoQueue") == "true"):
        raise invalid(
            "FifoQueue: a FIFO queue has this attribute, and a name that ends with .fifo; others have neither"
        )
    settings = attributes.settings_of(ask, name, given, new=True)
    labels = check_tags(document.tags) | settings["labels"]
    topics = ask.service.topics
    try:
        queue = await attributes.find(ask, name)
    except NotFound:
        await attributes.check_target(ask, name, settings)
        await topics.put_topic(name, settings | {"labels": labels}, ask.access.actor)
    else:
        if other := attributes.differences(queue, settings, given):
            raise AwsError("QueueNameExists", f"the queue {name} exists, with another {', '.join(other)}")
    return {"QueueUrl": arns.queue_url(ask.origin, name)}


@operations.add("DeleteQueue", OfQueue)
async def delete_queue(ask: Ask, document: OfQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    await attributes.find(ask, name)
    await ask.service.topics.delete_topic(name, force=True, by=ask.access.actor)
    with suppress(NotFound):
        await attributes.find(ask, name)  # apply the deletion here first: a send would create the queue again


@operations.add("PurgeQueue", OfQueue)
async def purge_queue(ask: Ask, document: OfQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    await ask.service.messages.purge(name, ["scheduled", "ready", "dead"], ask.access.actor)


@operations.add("GetQueueUrl", Named)
async def get_queue_url(ask: Ask, document: Named) -> Any:
    name = check_topic(document.QueueName)
    ask.need_any(name)
    await attributes.find(ask, name)
    return {"QueueUrl": arns.queue_url(ask.origin, name)}


async def _own_queues(ask: Ask, prefix: str) -> list[str]:
    known = await ask.service.topics.all_settings(prefix)
    return [name for name in known if not name.startswith(arns.GROUPS) and SEPARATOR not in name and ask.may_any(name)]


async def _queues_of_all(run: Run, ask: Ask, document: ListQueues) -> Any:
    """A page over all shards: the first queues, by name, of one page of each shard. A token has the name of a queue, so
    it means the same in each shard."""
    names, more = await _own_queues(ask, document.QueueNamePrefix), False
    for answer in whole(await ask.parts(ask.router.others())):
        names += map(arns.queue_of_url, answer.get("QueueUrls", []))
        more = more or "NextToken" in answer
    return page(ask, names, "QueueUrls", document.MaxResults, document.NextToken, more=more)


@operations.add("ListQueues", ListQueues, over=_queues_of_all)
async def list_queues(ask: Ask, document: ListQueues) -> Any:
    names = await _own_queues(ask, document.QueueNamePrefix)
    return page(ask, names, "QueueUrls", document.MaxResults, document.NextToken)


def page(
    ask: Ask, names: list[str], member: str, most: int | None, token: str | None, *, more: bool = False
) -> dict[str, object]:
    """A page of queue URLs, sorted by name. Without MaxResults, the page has the first 1,000 and no token, as in SQS.
    token: ARN of the last queue of the previous page. more: whether further queues follow after all `names`."""
    after = "" if token is None else arns.queue_of_arn(token, "NextToken")
    left = sorted(name for name in names if name > after)
    some = left[: most or PAGE]
    urls = [arns.queue_url(ask.origin, name) for name in some]
    found: dict[str, object] = {member: urls} if urls or member == "queueUrls" else {}
    if most is not None and (more or len(left) > len(some)):
        found["NextToken"] = arns.queue_arn(some[-1])
    return found
