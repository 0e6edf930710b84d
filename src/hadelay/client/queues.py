"""Topics and keys for the queues and calls of other frameworks: Celery, Django, taskiq and Dramatiq."""

import contextlib
import hashlib
import re

from msgspec import UNSET

from hadelay.client.requests import Requests
from hadelay.client.types import MessageInfo
from hadelay.errors import NotFound

#: Limit of a topic's name here, in characters. Topics may have 128: the rest is for what a framework appends.
_LONGEST = 110
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def topic_of(prefix: str, queue: str) -> str:
    """The topic of a queue: prefix and name. A name that no topic can have is cut, has "-" for what topics lack, and
    ends in a hash, so that two queues do not share a topic."""
    safe = _UNSAFE.sub("-", queue)
    if safe == queue and 0 < len(prefix + queue) <= _LONGEST:
        return prefix + queue
    mark = "." + hashlib.sha256(queue.encode()).hexdigest()[:12]
    return f"{prefix}{safe}"[: _LONGEST - len(mark)] + mark


def key_of(task_id: str, number: int) -> str:
    """The key of a message of a call. number: of the messages of the call before, because a retry by a framework is a
    message of its own, published while the message before is leased."""
    return task_id if number == 0 else f"{task_id}.{number}"


async def last_of(client: Requests, topic: str, task_id: str) -> MessageInfo:
    """The last message of a call. NotFound if there is none."""
    found = await client.get(topic=topic, key=task_id)
    with contextlib.suppress(NotFound):
        # A message that ended with a result, or that has not ended, has no retry after it.
        number = 1
        while found.state == "acked" and found.result is UNSET:
            found = await client.get(topic=topic, key=key_of(task_id, number))
            number += 1
    return found
