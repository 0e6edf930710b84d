"""Queues: create, find, list, delete and purge them. A queue is a topic; its URL names the host the client came by."""

import base64
import binascii
import re
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from hadelay.api.text import check_topic
from hadelay.aws import arns
from hadelay.aws.door import Ask, answered
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Run
from hadelay.aws.sqs import attributes
from hadelay.aws.sqs.protocol import Document, Named, OfQueue, invalid, named, operations
from hadelay.aws.sqs.tags import check_tags
from hadelay.errors import NotFound
from hadelay.model import SEPARATOR

#: Limit of the names in one page of a list.
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


class _Page(msgspec.Struct):
    """The answer of another shard."""

    QueueUrls: list[str] = field(default_factory=list)
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
    topics = ask.call.service.topics
    try:
        queue = await attributes.find(ask, name)
    except NotFound:
        await attributes.check_target(ask, name, settings)
        await topics.put_topic(name, settings | {"labels": labels}, ask.access.actor)
    else:
        if other := attributes.differences(queue, given):
            raise AwsError("QueueNameExists", f"the queue {name} exists, with another {', '.join(other)}")
    return {"QueueUrl": arns.queue_url(ask.origin, name)}


@operations.add("DeleteQueue", OfQueue)
async def delete_queue(ask: Ask, document: OfQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    await attributes.find(ask, name)
    await ask.call.service.topics.delete_topic(name, force=True, by=ask.access.actor)
    with suppress(NotFound):
        await attributes.find(ask, name)  # this node now knows that the queue is gone: a send would create it again


@operations.add("PurgeQueue", OfQueue)
async def purge_queue(ask: Ask, document: OfQueue) -> None:
    name = named(ask, document.QueueUrl, "admin")
    await ask.call.service.messages.purge(name, ["scheduled", "ready", "dead"], ask.access.actor)


@operations.add("GetQueueUrl", Named)
async def get_queue_url(ask: Ask, document: Named) -> Any:
    name = check_topic(document.QueueName)
    ask.need_any(name)
    await attributes.find(ask, name)
    return {"QueueUrl": arns.queue_url(ask.origin, name)}


async def _own_queues(ask: Ask, prefix: str) -> list[str]:
    known = await ask.call.service.topics.all_settings(prefix)
    return [name for name in known if SEPARATOR not in name and ask.may_any(name)]


async def _queues_of_all(run: Run, ask: Ask, document: ListQueues) -> Any:
    """The page of all shards is the first names of a page of each: a token is a name, which means the same in each."""
    names, more = await _own_queues(ask, document.QueueNamePrefix), False
    for answer in answered(await ask.forward_all(ask.call.context.router.others())):
        if answer.status != HTTPStatus.OK:
            return answer
        some = msgspec.json.decode(answer.body, type=_Page)
        names += map(arns.queue_of_url, some.QueueUrls)
        more = more or some.NextToken is not None
    return page(ask, names, "QueueUrls", document.MaxResults, document.NextToken, more=more)


@operations.add("ListQueues", ListQueues, over=_queues_of_all)
async def list_queues(ask: Ask, document: ListQueues) -> Any:
    names = await _own_queues(ask, document.QueueNamePrefix)
    return page(ask, names, "QueueUrls", document.MaxResults, document.NextToken)


def page(
    ask: Ask, names: list[str], member: str, most: int | None, token: str | None, *, more: bool = False
) -> dict[str, object]:
    """A page of queue URLs, by name. Without MaxResults, SQS gives the first 1,000 and no token. more: whether names
    follow behind these."""
    limit = most or PAGE
    after = "" if token is None else _name_of(token)
    left = sorted(name for name in names if name > after)
    some = left[:limit]
    urls = [arns.queue_url(ask.origin, name) for name in some]
    found: dict[str, object] = {member: urls} if urls or member == "queueUrls" else {}
    if most is not None and (more or len(left) > len(some)):
        found["NextToken"] = base64.urlsafe_b64encode(some[-1].encode()).decode()
    return found


def _name_of(token: str) -> str:
    try:
        return base64.b64decode(token.encode(), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"NextToken: {token[:80]!r} is not a token of this list: leave it out to begin anew") from None
