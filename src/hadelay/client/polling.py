"""Polls of a consumer: one poll for all its topics, or one poll per shard for the topics of the shard. A poll repeats
its request until an answer arrives, so no message that a node granted to it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

from hadelay.client.message import AsyncMessage
from hadelay.client.wire import each
from hadelay.errors import Conflict, HadelayError

log = logging.getLogger(__name__)

#: Minimum and maximum pause after a poll that failed with all its retries, in seconds.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_POLL = 1_000
#: _ASK_S: first timeout, in seconds, of a poll that only asks whether a node answers. _SAY_S: interval, in seconds, of
#: the log lines that no node answers.
_ASK_S, _SAY_S = 1.5, 30.0
#: Timeout, in seconds, of a poll, in addition to the time for which the poll waits for messages.
_POLL_S = 6.0
#: Timeout, in seconds, of repeating a poll that was cut off, to get the messages granted to it.
_LAST_POLL_S = 2.0

Poll = Callable[..., Awaitable[list[AsyncMessage]]]
#: Topics of each shard, with one poll per shard. None: all topics in one poll, whose answer names the shards if there
#: are several.
Parts = list[list[str] | None]


class Polling:
    def __init__(
        self,
        receive: Poll,
        topics: str | Sequence[str],
        concurrency: int,
        unsettled: Callable[[], int],
        take: Callable[[Sequence[AsyncMessage]], None],
    ) -> None:
        """receive: `client.receive` with the consumer's options. unsettled: number of unsettled messages. take: called
        with the messages of each answer."""
        self._receive, self._unsettled, self._take = receive, unsettled, take
        #: The consumer sets this event when a message is settled: there may be room for another message.
        self.room = asyncio.Event()
        #: Event that is set by the first answer of a node to a poll.
        self.reached = asyncio.Event()
        #: _version: number of changes of the topics so far. _wanted: number of messages for which polls of single
        #: shards have reserved room.
        self._version = self._wanted = 0
        #: Unanswered requests of the polls.
        self._asked: set[asyncio.Future[list[AsyncMessage]]] = set()
        #: _failures: number of failed polls since the last answer. _say_at: monotonic time of the next log line about
        #: failures.
        self._failures, self._say_at = 0, 0.0
        #: Whether the order of the topics is their priority, which several polls, one per shard, cannot respect.
        self._listed = getattr(receive, "keywords", {}).get("order") == "listed"
        self._topics, self.concurrency = each(topics), concurrency

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @concurrency.setter
    def concurrency(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"concurrency: expected at least 1, not {most}")
        self._concurrency = most
        self.room.set()

    @property
    def topics(self) -> list[str]:
        return self._topics

    @topics.setter
    def topics(self, topics: list[str]) -> None:
        self._topics = topics
        self._version += 1
        self.room.set()
        for asked in self._asked:
            asked.cancel()

    async def run(self) -> NoReturn:
        """Poll until cancelled, or until a refusal, which is raised. Before that, all polls end and take the messages
        granted to them."""
        parts: Parts = [None]
        while True:
            polls = [asyncio.create_task(self._poll(part)) for part in parts]
            try:
                ended, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for poll in polls:
                    poll.cancel()
                # A cancelled `gather` cancels the polls once more, and still waits for their end.
                await asyncio.gather(*polls, return_exceptions=True)
            parts = ended.pop().result()

    async def _poll(self, part: list[str] | None) -> Parts:
        """Poll for the topics of one shard, or for all topics (None). Raises a refusal. If the topics have changed, or
        are now in other shards, returns the parts to poll for instead.

        Of several shards, each has a poll that waits for one message, which may exceed the concurrency by one for each
        shard but the first. After a message, polls fetch as many as there is room for, and do not wait.
        """
        request_id, topics, version = "", self._topics if part is None else part, self._version
        answered, eager = False, part is None
        while True:
            if version != self._version:
                if request_id:
                    await self._take_granted(topics, request_id)
                if part is not None:
                    return [None]
                request_id, topics, version = "", self._topics, self._version
                continue  # check again: the topics may have changed once more
            room = self._concurrency - self._unsettled() - self._wanted
            if room <= 0 or not topics:
                self.room.clear()
                await self.room.wait()
                continue
            # Keep a poll's request id until an answer arrives: the node then repeats an answer that was lost.
            request_id = request_id or os.urandom(12).hex()
            most = min(room, _MAX_POLL) if eager else 1
            try:
                messages = await self._ask(topics, request_id, most, answered, eager and part is not None)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and not task.cancelling():
                    continue  # a change of the topics cancelled only the request, not this task
                await self._take_granted(topics, request_id)
                raise
            except HadelayError as error:
                if isinstance(error, Conflict) and (shards := error.extra.get("shards")) and not self._listed:
                    return list(shards.values()) if part is None else [None]
                # Raise for the user after a refusal, and after an answer that no node sent: retries would not help.
                if not error.retryable:
                    raise
                if not answered:
                    await self._pause(error, topics, request_id)
                answered = False  # do not wait for messages: find out whether another node answers
                continue
            request_id, answered = "", True
            eager = part is None or bool(messages)
            self.reached.set()
            if self._failures:
                self._failures = 0
                log.warning("a node answers, and messages are fetched")
            self._take(messages)

    async def _pause(self, error: HadelayError, topics: list[str], request_id: str) -> None:
        """Wait after a poll that no node answered."""
        self._say_waiting(error)
        try:
            await asyncio.sleep(min(max((error.retry_after_ms or 0) / 1000, _PAUSE_S), _LONGEST_PAUSE_S))
        except asyncio.CancelledError:
            if not error.outcome_known:
                await self._take_granted(topics, request_id)
            raise

    def _say_waiting(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1 or time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + _SAY_S
            # The text of a network error begins with the node's address.
            log.warning("waiting for %s%s", "a node at " if str(error).startswith("http") else "the cluster: ", error)

    async def _take_granted(self, topics: list[str], request_id: str) -> None:
        """Take the messages that a poll without an answer may have been granted: repeat its request. A cancellation is
        raised only afterwards: no other consumer would get these messages before the end of their leases."""
        repeated = asyncio.create_task(self._repeat(topics, request_id))
        cancelled: asyncio.CancelledError | None = None
        while not repeated.done():
            try:
                await asyncio.wait([repeated])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _repeat(self, topics: list[str], request_id: str) -> None:
        with contextlib.suppress(Exception):
            self._take(await self._receive(topics, request_id=request_id, max=1, wait=0, timeout=_LAST_POLL_S))

    async def _ask(
        self, topics: list[str], request_id: str, most: int, answered: bool, at_once: bool
    ) -> list[AsyncMessage]:
        """Poll the cluster once. answered: whether a node answered the poll before. If none did, this poll does not
        wait for messages, so that an answer shows at once that a node is there. at_once: do not wait for messages, and
        reserve the room for `most` messages, so that other polls do not ask for them, too."""
        ask_s = min(_ASK_S * 2 ** min(self._failures, 8), _POLL_S)
        times: dict[str, Any] = {"timeout": _POLL_S} if answered else {"wait": 0, "timeout": ask_s}
        if at_once:
            times["wait"] = 0
            self._wanted += most
        asked = asyncio.ensure_future(self._receive(topics, request_id=request_id, max=most, **times))
        self._asked.add(asked)
        try:
            return await asked
        finally:
            self._asked.discard(asked)
            if at_once:
                self._wanted -= most
                self.room.set()
