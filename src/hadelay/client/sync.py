"""The blocking client: AsyncClient's methods, run on a background event loop that all clients share.

Methods are declared once, on AsyncClient; `_blocking` gives them here with the same parameters, types and docstrings.
client/background.py has the loop.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec import UNSET

from hadelay.client import background
from hadelay.client.aio import AsyncClient
from hadelay.client.background import Running, wait
from hadelay.client.consumer import DRAIN_S, Consumer
from hadelay.client.message import AsyncMessage
from hadelay.client.putoptions import Put
from hadelay.client.requests import Topics
from hadelay.client.threads import HandlerThreads
from hadelay.client.types import AckOutcome, Delay, ExtendOutcome, Message, NackOutcome, Order, PutResult
from hadelay.client.wire import batches, own_or_new_key, seconds_of

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

#: Interval, in seconds, at which `work` checks whether its event `stop` is set.
_LOOK_S = 0.1
#: Time, in seconds, in which an interrupted `work` gives its messages back.
_GIVE_BACK_S = 5.0


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], A], result: Callable[[A, Client], R]
) -> Callable[Concatenate[Client, P], R]:
    """Make a blocking method of Client from AsyncClient's `method`. result: function that makes a blocking result from
    the awaitable or iterator that `method` returns."""

    @functools.wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return result(method(client._async(), *args, **kwargs), client)

    return call


def _each(iterator: AsyncIterator[R], client: Client) -> Generator[R, None, None]:
    """Iterate over an async iterator, blocking. The reference to `client` keeps it from being garbage-collected."""
    of = client._async()
    try:
        while True:
            try:
                if of not in background.used:
                    raise RuntimeError("this loop began in another process: begin it again after a fork")
                yield wait(iterator.__anext__())  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
    finally:
        background.finish(background.end(iterator), of)


class SyncMessage(Message, kw_only=True):
    """A message of `Client.receive` or `consume`: AsyncMessage without the await. `with` acks it, or nacks it on an
    exception."""

    _message: AsyncMessage
    # These references keep the client from being garbage-collected while the message may be settled.
    _client: Client
    _of: AsyncClient

    @classmethod
    def _made(cls, message: AsyncMessage, client: Client) -> SyncMessage:
        assert client._client is not None, "it received the message"
        fields = {name: getattr(message, name) for name in Message.__struct_fields__}
        return cls(**fields, _message=message, _client=client, _of=client._client)

    @property
    def lost(self) -> bool:
        """Whether the consumer noticed that the lease was lost: another consumer may have the message."""
        return self._message.lost

    def _settle(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._of not in background.used:
            coroutine.close()
            raise RuntimeError("this message belongs to the parent process; consume again after a fork")
        return wait(coroutine)

    def ack(self, result: Any = UNSET) -> AckOutcome:
        return self._settle(self._message.ack(result))

    def nack(
        self, delay: Delay | None = None, *, reason: str | None = None, count: bool = True, dead: bool = False
    ) -> NackOutcome:
        return self._settle(self._message.nack(delay, reason=reason, count=count, dead=dead))

    def snooze(self, delay: Delay, *, reason: str | None = None) -> NackOutcome:
        return self._settle(self._message.snooze(delay, reason=reason))

    def extend(self, lease: Delay, *, progress: str | None = None) -> ExtendOutcome:
        return self._settle(self._message.extend(lease, progress=progress))

    def __enter__(self) -> SyncMessage:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._of in background.used:  # a forked child leaves the message to the parent process
            wait(self._message.__aexit__(*error))


for _name in ("ack", "nack", "snooze", "extend"):
    getattr(SyncMessage, _name).__doc__ = getattr(AsyncMessage, _name).__doc__


def _received(receive: Coroutine[Any, Any, list[AsyncMessage]], client: Client) -> list[SyncMessage]:
    return [SyncMessage._made(message, client) for message in wait(receive)]


class Consuming(Iterator[SyncMessage]):
    """Result of `Client.consume`: messages as they fall due, their leases extended until they are settled. To iterate
    over, or one at a time with `next`, or with a handler in `work`."""

    def __init__(self, consumer: Consumer, client: Client) -> None:
        assert client._client is not None, "it made the consumer"
        self._client, self._consumer, self._of = client, consumer, client._client
        self._begun = False

    @property
    def stopped(self) -> bool:
        """Whether `stop` or `close` was called: no further message comes."""
        return self._consumer.stopped

    @property
    def concurrency(self) -> int:
        """Limit of unsettled messages; may be set while the consumer runs."""
        return self._consumer.concurrency

    @concurrency.setter
    def concurrency(self, most: int) -> None:
        self._set("concurrency", most)

    @property
    def topics(self) -> list[str]:
        """Topics to receive from; may be set while the consumer runs."""
        return self._consumer.topics

    @topics.setter
    def topics(self, topics: Topics) -> None:
        self._set("topics", topics)

    def _set(self, name: str, value: Any) -> None:
        async def change() -> None:
            setattr(self._consumer, name, value)

        wait(change())

    def __next__(self) -> SyncMessage:
        message = self.next()
        if message is None:
            self.close()
            raise StopIteration
        return message

    def next(self, timeout: float | None = None) -> SyncMessage | None:
        """Get the next message; None if there is none within `timeout` seconds, or the consumer stopped."""
        if self._begun and self._of not in background.used:
            raise RuntimeError("this loop began in another process: begin it again after a fork")
        self._begun = True
        try:
            message = wait(self._consumer.next(timeout))
        except BaseException:
            self.close()
            raise
        return None if message is None else SyncMessage._made(message, self._client)

    def work(
        self,
        handler: Callable[[SyncMessage], object],
        *,
        on_error: OnError | None = None,
        drain: Delay = DRAIN_S,
        stop: threading.Event | None = None,
    ) -> None:
        """Run `handler` in threads for every message, until `stop` is called, or the event `stop` is set.

        An exception nacks its message, with the exception as the reason, and is given to `on_error`, in a thread, too,
        or logged. drain: after a stop or Ctrl-C, time for handlers to finish, their leases extended meanwhile. Then
        their messages go back at once, and that attempt does not count; a thread cannot be ended, and goes on. A second
        Ctrl-C ends the wait. Threads end with the interpreter.
        """
        threads, self._begun = HandlerThreads(), True

        async def run(message: AsyncMessage) -> None:
            await threads.run(handler, SyncMessage._made(message, self._client))

        async def failed(message: AsyncMessage, error: Exception) -> None:
            # Call `on_error` in a thread, like the handler: it may use the client, which waits for this event loop.
            assert on_error is not None
            tell, made = on_error, SyncMessage._made(message, self._client)
            await threads.run(lambda given: tell(*given), (made, error))

        failing = None if on_error is None else failed
        running = Running(self._consumer.work(run, on_error=failing, drain=seconds_of(drain)))
        try:
            if stop is not None:
                while not (running.wait(_LOOK_S) or stop.is_set()):
                    pass
                self.stop()
            running.result()
        except BaseException:  # Ctrl-C: drain; a second Ctrl-C ends the wait
            try:
                self.stop()
                running.wait()
            except BaseException:
                running.cancel()
                running.wait(_GIVE_BACK_S)
                raise
            raise
        finally:
            running.cancel()
            threads.close()

    def stop(self) -> None:
        """Fetch no more, and end the loop after the current message. Other fetched messages go back at once, and their
        attempt does not count. Any thread and any signal handler may call this."""
        background.loop().call_soon_threadsafe(self._consumer.stop)

    def close(self) -> None:
        """Leave the loop; fetched messages that were not handed out go back at once."""
        self._begun = False
        self.stop()
        background.finish(self._consumer.close(), self._of)

    def __del__(self) -> None:
        if self._begun:
            background.finish(self._consumer.close(), self._of)


OnError = Callable[[SyncMessage, Exception], object]


class Client:
    """AsyncClient without the await: same arguments, same answers, same exceptions. Any thread may use it, also in a
    program that has an event loop of its own, and after a fork; a script that ends without `close` ends cleanly.

    with Client("http://127.0.0.1:8400") as client:
        client.put("orders", {"id": 7}, delay="15m")
        for message in client.consume("orders"):
            with message:
                handle(message.json())
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "http://127.0.0.1:8400",
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: str | None = None,
        shard: int | None = None,
    ) -> None:
        self._new = functools.partial(AsyncClient, urls, token, timeout=timeout, ca=ca, shard=shard)
        self._new()  # create a client only to raise an error here if an address is wrong
        self._client: AsyncClient | None = None

    def _async(self) -> AsyncClient:
        """The AsyncClient of this process; a forked child makes its own, because sockets do not survive a fork."""
        with background.lock:
            if self._client is None or self._client not in background.used:
                self._client = self._new()
                background.used.add(self._client)
                weakref.finalize(self, background.dropped, self._client).atexit = False
            return self._client

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    put = _blocking(AsyncClient.put, wait)

    def put_many(
        self, puts: Iterable[Put], *, idempotency_key: str | None = None, timeout: float | None = None
    ) -> list[PutResult]:
        # Read the caller's iterable of puts on the caller's thread, not on the thread that all clients share.
        results: list[PutResult] = []
        key = own_or_new_key(idempotency_key)
        for n, items in enumerate(batches(puts)):
            results += wait(self._async()._put_batch(key, n, items, timeout))
        return results

    put_many.__doc__ = AsyncClient.put_many.__doc__
    get = _blocking(AsyncClient.get, wait)
    wait_for = _blocking(AsyncClient.wait_for, wait)
    cancel = _blocking(AsyncClient.cancel, wait)
    reschedule = _blocking(AsyncClient.reschedule, wait)
    deliver_now = _blocking(AsyncClient.deliver_now, wait)
    receive = _blocking(AsyncClient.receive, _received)
    ack = _blocking(AsyncClient.ack, wait)
    nack = _blocking(AsyncClient.nack, wait)
    extend = _blocking(AsyncClient.extend, wait)
    topics = _blocking(AsyncClient.topics, wait)
    topic = _blocking(AsyncClient.topic, wait)
    messages_page = _blocking(AsyncClient.messages_page, wait)
    group = _blocking(AsyncClient.group, wait)
    put_topic = _blocking(AsyncClient.put_topic, wait)
    delete_topic = _blocking(AsyncClient.delete_topic, wait)
    put_subscription = _blocking(AsyncClient.put_subscription, wait)
    subscriptions = _blocking(AsyncClient.subscriptions, wait)
    delete_subscription = _blocking(AsyncClient.delete_subscription, wait)
    pause = _blocking(AsyncClient.pause, wait)
    resume = _blocking(AsyncClient.resume, wait)
    purge = _blocking(AsyncClient.purge, wait)
    redrive = _blocking(AsyncClient.redrive, wait)
    redrive_all = _blocking(AsyncClient.redrive_all, wait)
    purge_dead = _blocking(AsyncClient.purge_dead, wait)
    begin_job = _blocking(AsyncClient.begin_job, wait)
    count_job = _blocking(AsyncClient.count_job, wait)
    jobs = _blocking(AsyncClient.jobs, wait)
    job = _blocking(AsyncClient.job, wait)
    stop_job = _blocking(AsyncClient.stop_job, wait)
    due = _blocking(AsyncClient.due, wait)
    put_schedule = _blocking(AsyncClient.put_schedule, wait)
    schedule = _blocking(AsyncClient.schedule, wait)
    delete_schedule = _blocking(AsyncClient.delete_schedule, wait)
    pause_schedule = _blocking(AsyncClient.pause_schedule, wait)
    resume_schedule = _blocking(AsyncClient.resume_schedule, wait)
    trigger = _blocking(AsyncClient.trigger, wait)
    backfill = _blocking(AsyncClient.backfill, wait)
    preview_schedule = _blocking(AsyncClient.preview_schedule, wait)
    open_batch = _blocking(AsyncClient.open_batch, wait)
    batch = _blocking(AsyncClient.batch, wait)
    seal_batch = _blocking(AsyncClient.seal_batch, wait)
    cancel_batch = _blocking(AsyncClient.cancel_batch, wait)
    cluster = _blocking(AsyncClient.cluster, wait)
    transfer_leader = _blocking(AsyncClient.transfer_leader, wait)
    add_member = _blocking(AsyncClient.add_member, wait)
    remove_member = _blocking(AsyncClient.remove_member, wait)
    hours = _blocking(AsyncClient.hours, wait)
    names = _blocking(AsyncClient.names, wait)
    ready = _blocking(AsyncClient.ready, wait)
    close = _blocking(AsyncClient.close, wait)
    consume = _blocking(AsyncClient.consume, Consuming)

    def work(
        self,
        topics: Topics,
        handler: Callable[[SyncMessage], object],
        *,
        concurrency: int = 10,
        lease: Delay = 30,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        order: Order = "turns",
        on_error: OnError | None = None,
        stop: threading.Event | None = None,
        drain: Delay = DRAIN_S,
    ) -> None:
        """Run `handler` in threads for every message, `concurrency` at a time, until `stop` is set, or Ctrl-C.

        `Consuming.work` says what happens on exceptions and on a stop; `consume(…).work` does the same, with a consumer
        to stop or to change meanwhile.
        """
        consuming = self.consume(
            topics, concurrency=concurrency, lease=lease, tags=tags, any_tags=any_tags, order=order
        )
        consuming.work(handler, on_error=on_error, drain=drain, stop=stop)

    messages = _blocking(AsyncClient.messages, _each)
    dead = _blocking(AsyncClient.dead, _each)
    schedules = _blocking(AsyncClient.schedules, _each)
    batches = _blocking(AsyncClient.batches, _each)
    batch_failures = _blocking(AsyncClient.batch_failures, _each)
