"""Broker for Dramatiq: publishes messages, and hands received messages to Dramatiq's worker."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from dramatiq import Broker, Consumer, Message, MessageProxy
from dramatiq.errors import ActorNotFound, ConnectionClosed, DecodeError, QueueJoinTimeout

from hadelay.client import Client, Delay, SyncMessage
from hadelay.client.background import wait
from hadelay.client.message import GIVE_BACK, reason_of
from hadelay.client.queues import cancel_call, copy_of, put_call, topic_of
from hadelay.client.wire import ADAPTER_TIMEOUT_S, seconds_of, servers
from hadelay.errors import HadelayError, NotFound

log = logging.getLogger(__name__)

#: Limit, in seconds, of one snooze of a message with an ETA: clusters refuse times that are too far ahead.
_LONGEST_SNOOZE_S = 30 * 86_400


class HadelayBroker(Broker):
    """Broker that keeps each queue in a topic of a cluster.

        dramatiq.set_broker(HadelayBroker("http://n1:8400,http://n2:8400,http://n3:8400"))

    urls, token, ca: as for Client. Default of urls: the variable HADELAY_SERVERS, or a node on loopback. prefix:
    beginning of the topics' names. lease: that of messages, extended while their actors run. timeout: time after which
    `enqueue` fails if no node can store the message.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        ca: str | None = None,
        prefix: str = "dramatiq.",
        lease: Delay = 30,
        timeout: Delay = ADAPTER_TIMEOUT_S,
        middleware: list[Any] | None = None,
    ) -> None:
        super().__init__(middleware=middleware)
        self.client = Client(servers(urls), token, timeout=seconds_of(timeout), ca=ca)
        self._prefix, self._lease = prefix, lease

    def topic(self, queue_name: str) -> str:
        return topic_of(self._prefix, queue_name)

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = self.topic(queue_name)
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        """Publish a message. delay: in milliseconds; a negative one means now."""
        self.emit_before("enqueue", message, delay)
        number, copy, delay_s = 0, 0, max(delay or 0, 0) / 1000
        if isinstance(message, Leased) and (retries := _retries(message)) > message.retries:
            number, copy = retries, copy_of(message.leased.key, message.message_id)
        put = {
            "topic": self.topic(message.queue_name), "body": message.encode(), "delay": delay_s,
            "content_type": "application/json",
        }  # fmt: skip
        try:
            wait(put_call(self.client._async(), message.message_id, number, copy, put))
        except Exception:
            # Note that the retry was not published: Dramatiq logs the error and acks the message, and this ack becomes
            # a nack.
            if number and isinstance(message, Leased):
                message.unsent_s = delay_s
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        return _Consumer(self.client, self.topic(queue_name), prefetch, timeout / 1000, self._lease)

    def cancel(self, message: Any) -> None:
        """Cancel a message that waits for its first run. Raises Conflict if the message runs or has run, and NotFound
        if there is no such message."""
        wait(cancel_call(self.client._async(), self.topic(message.queue_name), message.message_id))

    def flush(self, queue_name: str) -> None:
        """Cancel all messages of a queue that are not leased by a worker."""
        self.client.purge(self.topic(queue_name))

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(
        self, queue_name: str, *, interval: int = 100, timeout: int | None = None, fail_fast: bool = False
    ) -> None:
        """Wait until a queue has no messages, delayed ones included: for tests, as with Dramatiq's Redis. Times are in
        milliseconds. Raises QueueJoinTimeout. fail_fast: an option for Dramatiq's in-memory broker, without effect
        here."""
        until = None if timeout is None else time.monotonic() + timeout / 1000
        while self._size(queue_name):
            if until is not None and time.monotonic() >= until:
                raise QueueJoinTimeout(
                    f"the queue {queue_name} has {self._size(queue_name)} messages after {timeout} ms"
                )
            time.sleep(interval / 1000)

    def _size(self, queue_name: str) -> int:
        with suppress(NotFound):
            info = self.client.topic(self.topic(queue_name))
            return info.scheduled + info.ready + info.leased
        return 0

    def close(self) -> None:
        self.client.close()


class Leased(MessageProxy):
    """Dramatiq's message in a worker, together with the leased message of the cluster."""

    def __init__(self, message: Message[Any], leased: SyncMessage) -> None:
        super().__init__(message)
        self.leased = leased
        #: Number of retries before this attempt; during the attempt, middleware raises the count in the message's
        #: options.
        self.retries = _retries(message)
        #: Result of the actor, as JSON, which the ack carries; None: there is no result.
        self.result: bytes | None = None
        #: Delay, in seconds, of a retry that could not be published; None: there is no such retry.
        self.unsent_s: float | None = None


def _retries(message: Any) -> int:
    return int(message.options.get("retries", 0))


class _Consumer(Consumer):
    def __init__(self, client: Client, topic: str, prefetch: int, timeout_s: float, lease: Delay) -> None:
        self._consuming = client.consume(topic, concurrency=prefetch, lease=lease)
        self._timeout_s = timeout_s

    def __next__(self) -> Leased | None:
        message = self._consuming.next(self._timeout_s)
        if message is None:
            return None
        try:
            decoded = Message.decode(message.body)
            eta_ms = decoded.options.pop("eta", None)
        except (DecodeError, AttributeError, TypeError):
            log.error("message %s is no message of Dramatiq: it is a dead letter now", message.id)
            _given_back(partial(message.nack, reason="not a message of Dramatiq", dead=True))
            return None
        # Snooze a message with an ETA: Dramatiq would keep it in memory, and then publish it again under this message's
        # key.
        if isinstance(eta_ms, int | float) and (wait_s := eta_ms / 1000 - time.time()) > 0:
            _given_back(partial(message.snooze, min(wait_s, _LONGEST_SNOOZE_S), reason="the eta of the message"))
            return None
        return Leased(decoded, message)

    def ack(self, message: Leased) -> None:
        leased = message.leased
        if message.unsent_s is not None:
            _settled(partial(leased.nack, message.unsent_s, reason="the retry was not published"))
        elif message.result is None:
            _settled(leased.ack)
        else:
            _settled(partial(leased.ack, msgspec.Raw(message.result)))

    def nack(self, message: Leased) -> None:
        """Make the message a dead letter. If this worker does not have the actor, the message is nacked and comes again
        instead: a worker of another version may have the actor."""
        error = message._exception
        reason = "rejected" if error is None else reason_of(error)
        _settled(partial(message.leased.nack, reason=reason, dead=not isinstance(error, ActorNotFound)))

    def requeue(self, messages: Iterable[Leased]) -> None:
        for message in messages:
            _settled(partial(message.leased.nack, 0, reason=GIVE_BACK.reason, count=False))

    def close(self) -> None:
        self._consuming.close()


def _given_back(settle: Callable[[], str]) -> None:
    """Settle a message that is not run. An error is only logged: after an exception, Dramatiq would close the consumer,
    and no lease of the queue would be extended any more."""
    try:
        settle()
    except HadelayError as error:
        log.warning("a message was not given back, and is handed out again when its lease ends: %s", error)


def _settled(settle: Callable[[], str]) -> None:
    """Settle a message. Raises ConnectionClosed for a temporary error: then Dramatiq settles the message again."""
    try:
        outcome = settle()
    except HadelayError as error:
        if error.retryable:
            raise ConnectionClosed(error) from error
        raise
    if outcome == "lease_lost":
        log.warning("a lease was lost: the message is handed out again")
