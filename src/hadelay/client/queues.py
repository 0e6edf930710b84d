"""Topics and keys for the queues and calls of other frameworks: Celery, Django, taskiq and Dramatiq."""

import contextlib
import hashlib
import re
from typing import Any

from msgspec import UNSET

from hadelay.client.aio import AsyncClient
from hadelay.client.requests import Requests
from hadelay.client.types import MessageInfo, Receipt
from hadelay.errors import Conflict, HadelayError, NotFound

#: Limit of the name of a queue's topic, in characters. A name may have 128: frameworks append to the queue's name.
_LONGEST = 110
#: Limit of the part of a key that names a call, in bytes. Keys may have 256 bytes: the rest is for the numbers that
#: `key_of` appends.
_LONGEST_ID = 220
#: Limit of the messages with one task id that are pending at the same time.
COPIES = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def topic_of(prefix: str, queue: str) -> str:
    """The topic of a queue: prefix and name. A name that is invalid for a topic is cut, gets "-" for each invalid
    character, and ends in a hash, so that two queues do not share a topic."""
    safe = _UNSAFE.sub("-", queue)
    if queue and safe == queue and len(prefix + queue) <= _LONGEST:
        return prefix + queue
    mark = "." + hashlib.sha256(queue.encode()).hexdigest()[:12]
    return f"{prefix}{safe}"[: _LONGEST - len(mark)] + mark


def id_of(task_id: str) -> str:
    """The task id as a key. An id that is too long for a key is cut and ends in a hash."""
    encoded = task_id.encode()
    if len(encoded) <= _LONGEST_ID:
        return task_id
    return encoded[: _LONGEST_ID - 33].decode(errors="ignore") + "." + hashlib.sha256(encoded).hexdigest()[:32]


def key_of(task_id: str, number: int = 0, copy: int = 0) -> str:
    """Key of a call's message. number: number of earlier retries, because a framework's retry is a message of its own,
    published while the message before is still leased. copy: number of pending messages with the same task id when the
    call was published."""
    return id_of(task_id) + (f".c{copy}" if copy else "") + (f".{number}" if number else "")


def copy_of(key: str | None, task_id: str) -> int:
    """The number `copy` in a key that `key_of` made."""
    found = re.match(r"\.c([0-9]+)", (key or "").removeprefix(id_of(task_id)))
    return int(found[1]) if found else 0


async def put_call(client: AsyncClient, task_id: str, number: int, copy: int, message: dict[str, Any]) -> Receipt:
    """Publish a message of a call. message: arguments of `put` without the key. A first message (number 0) is published
    also while others with this task id are pending, as the frameworks' own brokers do."""
    if number:
        # Keep a pending message with this key: the message of a killed worker runs again, and publishes its retry a
        # second time.
        return await client.put(**message, key=key_of(task_id, number, copy), on_conflict="keep")
    for copy in range(COPIES - 1):
        with contextlib.suppress(Conflict):
            return await client.put(**message, key=key_of(task_id, 0, copy), on_conflict="reject")
    return await client.put(**message, key=key_of(task_id, 0, COPIES - 1), on_conflict="reject")


async def cancel_call(client: AsyncClient, topic: str, task_id: str) -> None:
    """Cancel the messages of a call that wait for their first run. Raises Conflict or NotFound if there is none."""
    cancelled, refused = False, list[HadelayError]()
    for copy in range(COPIES):
        try:
            await client.cancel(topic=topic, key=key_of(task_id, 0, copy))
            cancelled = True
        except Conflict as error:
            refused.insert(0, error)
        except NotFound as error:
            refused.append(error)
            if copy:  # after copy 0, go on: the cluster may have forgotten that message while copy 1 is pending
                break
    if not cancelled:
        raise refused[0]


async def last_of(client: Requests, topic: str, task_id: str) -> MessageInfo:
    """The message that a call published last. NotFound if there is none."""
    found = await _last(client, topic, task_id, 0)
    with contextlib.suppress(NotFound):
        for copy in range(1, COPIES):
            if not _without_result(found):
                break
            found = await _last(client, topic, task_id, copy)
    return found


async def _last(client: Requests, topic: str, task_id: str, copy: int) -> MessageInfo:
    found, number = await client.get(topic=topic, key=key_of(task_id, 0, copy)), 1
    with contextlib.suppress(NotFound):
        # A message that ended with a result, or that has not ended, has no retry after it.
        while _without_result(found):
            found = await client.get(topic=topic, key=key_of(task_id, number, copy))
            number += 1
    return found


def _without_result(message: MessageInfo) -> bool:
    return message.state == "acked" and message.result is UNSET
