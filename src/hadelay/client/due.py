"""For tests: leases the due messages of a node, one after the other. The `testing` modules of the adapters for
frameworks run these messages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from hadelay.client.aio import AsyncClient
from hadelay.client.background import wait
from hadelay.client.message import AsyncMessage
from hadelay.client.sync import Client
from hadelay.errors import NotFound

#: _MOST: limit of the messages that one call of `due` yields. _WAIT_S: timeout of one receive, and of `settled`.
_MOST, _WAIT_S = 10_000, 2.0
#: Interval, in seconds, at which `settled` checks whether messages are still leased.
_LOOK_S = 0.005


class MovedClock(Protocol):
    def now(self) -> float: ...


class MovedNode(Protocol):
    """The part of `hadelay.testing.LocalNode` that these helpers use."""

    url: str

    @property
    def clock(self) -> MovedClock: ...


def ready(client: Client, topics: Sequence[str]) -> list[str]:
    """Topics with messages that are due and not leased."""
    return [topic for topic in topics if _counts(client, topic)[0]]


def settled(client: Client, topics: Sequence[str]) -> None:
    """Wait until no message of the topics is leased."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until and any(_counts(client, topic)[1] for topic in topics):
        time.sleep(_LOOK_S)


def due(client: Client, topics: Sequence[str]) -> Iterator[AsyncMessage]:
    """Lease and yield due messages until none is left, also those that become due meanwhile. RuntimeError after _MOST
    receives. The messages belong to the event loop of blocking clients."""
    receiving: AsyncClient = client._async()
    for _ in range(_MOST):
        if not (found := ready(client, topics)):
            return
        messages = wait(receiving.receive(found, max=1, wait=_WAIT_S, order="listed"))
        if not messages:
            return  # no due message: the topic is paused, or the message is blocked by its group
        yield from messages
    raise endless()


def endless() -> RuntimeError:
    return RuntimeError(f"{_MOST} messages ran, and there are more: does a task publish itself again without a delay?")


def _counts(client: Client, topic: str) -> tuple[int, int]:
    with suppress(NotFound):
        info = client.topic(topic)
        return info.ready, info.leased
    return 0, 0
