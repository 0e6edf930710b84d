"""Revoking of tasks: a task that no worker has yet is cancelled in the cluster."""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from celery import current_app

from hadelay.celery.messages import further_keys_of
from hadelay.client import AsyncClient, Client
from hadelay.client.background import wait
from hadelay.client.queues import id_of
from hadelay.errors import Conflict, Forbidden, NotFound

log = logging.getLogger(__name__)

#: Limit of concurrent cancel requests of one revoke.
_CANCELS = 20


def revoke(cluster: Client, prefix: str, command: Mapping[str, Any]) -> None:
    """For a control command `revoke`, cancel the tasks that are not handed out yet; workers drop the others. Other
    commands are ignored. prefix: prefix of the application's topics."""
    if command.get("method") != "revoke":
        return
    ids = command["arguments"]["task_id"]
    try:
        cancelled, refused = wait(_cancelled(cluster._async(), prefix, [ids] if isinstance(ids, str) else list(ids)))
    except Forbidden as error:
        cancelled, refused = [], error
    if refused is not None:
        log.warning("the token may not cancel every revoked task; workers drop the others: %s", refused)
    for task in cancelled:
        current_app.backend.mark_as_revoked(task, "revoked")


async def _cancelled(client: AsyncClient, prefix: str, tasks: Iterable[str]) -> tuple[list[str], Forbidden | None]:
    """Cancel those of the tasks that no worker has, in all queues. Returns the ids of the cancelled tasks, and the last
    refusal because of the token's rights. Raises Forbidden if the token may not list the topics."""
    turn = asyncio.Semaphore(_CANCELS)
    cancelled, refused = list[str](), None

    async def cancel(topic: str, task: str, keys: Iterable[str]) -> None:
        """Cancel the messages with these keys, one by one, up to the first key that no message has."""
        nonlocal refused
        for key in keys:
            try:
                async with turn:
                    await client.cancel(topic=topic, key=key)
                cancelled.append(task)
            except Forbidden as error:
                refused = error
            except Conflict:
                pass
            except NotFound:
                return

    topics = [
        topic.topic
        for topic in await client.topics(prefix=prefix)
        if topic.scheduled + topic.ready and not topic.topic.startswith(f"{prefix}celery-")
    ]
    await asyncio.gather(
        *(
            cancel(topic, task, keys)
            for topic, task in itertools.product(topics, tasks)
            for keys in ([id_of(task)], [id_of(task) + ".r"], further_keys_of(task))
        )
    )
    return list(dict.fromkeys(cancelled)), refused
