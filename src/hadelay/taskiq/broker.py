"""Broker for taskiq: publishes calls of tasks, and hands received calls to taskiq's worker."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from hadelay.client import AsyncClient, AsyncMessage, Client, Consumer, Delay
from hadelay.client.anyloop import awaited
from hadelay.client.message import GIVE_BACK
from hadelay.client.queues import cancel_call, copy_of, put_call
from hadelay.client.wire import ADAPTER_TIMEOUT_S, seconds_of, servers
from hadelay.errors import HadelayError
from hadelay.taskiq.delivery import Delivery

log = logging.getLogger(__name__)

#: Labels of a call that count earlier messages with the same task id: retries by a middleware, and requeues.
_COUNTS = ("_retries", "X-Taskiq-requeue")
#: Label of a call that was published while another call with its task id was pending: number of the copy. A retry of
#: the call has the label, too.
_COPY = "hadelay_copy"


class HadelayBroker(AsyncBroker):
    """Keeps the calls of tasks in one topic of a cluster.

        broker = HadelayBroker("http://n1:8400,http://n2:8400,http://n3:8400")
        broker = broker.with_result_backend(HadelayResultBackend(broker))

        await remind.kicker().with_labels(delay=3600).kiq(4711)

    Labels of a call: delay, in seconds; deliver_at, as RFC 3339 text; ttl, in seconds from the due time; group.

    urls, token, ca: as for AsyncClient. Default of urls: the variable HADELAY_SERVERS, or a node on loopback. lease:
    that of messages, extended while their calls run. timeout: time after which `kiq` fails if no node can store the
    call. prefetch: limit of messages that a worker holds beside the running
    ones.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        ca: str | None = None,
        topic: str = "taskiq",
        lease: Delay = 30,
        timeout: Delay = ADAPTER_TIMEOUT_S,
        prefetch: int = 10,
    ) -> None:
        super().__init__()
        self._where: dict[str, Any] = {
            "urls": servers(urls), "token": token, "timeout": seconds_of(timeout), "ca": ca
        }  # fmt: skip
        self.topic, self.prefetch, self._lease_s = topic, prefetch, seconds_of(lease)
        #: The client of publishes and results. Any event loop and any thread may use it.
        self.client = Client(**self._where)
        #: Client of the worker: `listen` makes it.
        self._receiver: AsyncClient | None = None
        self._consumer: Consumer | None = None
        self._running = 0

    async def kick(self, message: BrokerMessage) -> None:
        """Publish the call of a task. A negative delay means now."""
        labels = message.labels
        count, copy = sum(int(labels.get(name, 0)) for name in _COUNTS), int(labels.get(_COPY, 0))
        delay = _number(labels.get("delay"))
        put = {
            "topic": self.topic, "body": message.message, "content_type": "application/json",
            "delay": None if delay is None else max(delay, 0),
            "at": labels.get("deliver_at") if delay is None else None,
            "ttl": _number(labels.get("ttl")), "group": labels.get("group"),
        }  # fmt: skip
        await awaited(self.client, lambda client: put_call(client, message.task_id, count, copy, put))

    async def cancel(self, task_id: str) -> None:
        """Cancel a call that waits for its first run. Raises Conflict if the call runs or has run, and NotFound if
        there is no such call."""
        await awaited(self.client, lambda client: cancel_call(client, self.topic, task_id))

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        self._receiver = AsyncClient(**self._where)
        self._consumer = self._receiver.consume(self.topic, concurrency=self.prefetch, lease=self._lease_s)
        try:
            while (message := await anext(self._consumer, None)) is not None:
                call = await self._call(message)
                if call is not None:
                    self._runs(1)
                    yield AckableMessage(data=call, ack=Delivery(message, lambda: self._runs(-1)).ack)
        finally:
            # Leases are extended until `shutdown`: calls that run may still finish.
            self._consumer.stop()

    def _runs(self, more: int) -> None:
        assert self._consumer is not None
        self._running += more
        self._consumer.concurrency = self._running + self.prefetch

    async def _call(self, message: AsyncMessage) -> bytes | None:
        """Decode the call of a message. Returns None, after a nack, if this worker cannot run the call: taskiq would
        ack the message."""
        try:
            call = self.formatter.loads(message.body)
        except Exception as error:
            log.error("message %s is no call of taskiq: %s", message.id, error)
            await _refuse(message, "not a call of taskiq", dead=True)
            return None
        if self.find_task(call.task_name) is None:
            log.error("message %s comes again: this worker has no task %s", message.id, call.task_name)
            await _refuse(message, f"this worker has no task {call.task_name}"[:100])
            return None
        if copy := copy_of(message.key, call.task_id):
            call.labels[_COPY] = copy
        elif message.schedule is None:
            return message.body
        else:
            call.task_id = message.id  # all occurrences of a schedule have one body, whose task id is thus not unique
        return bytes(self.formatter.dumps(call).message)

    async def shutdown(self) -> None:
        await super().shutdown()
        if self._consumer is not None and self._receiver is not None:
            left = [message for message in self._consumer.unsettled.values() if not message._settled]
            await asyncio.gather(
                *(message.nack(0, reason=GIVE_BACK.reason, count=False) for message in left), return_exceptions=True
            )
            await self._receiver.close()


async def _refuse(message: AsyncMessage, reason: str, *, dead: bool = False) -> None:
    """Nack a message that this worker cannot run. An error is only logged, as an exception would end the worker
    process."""
    try:
        await message.nack(reason=reason, dead=dead)
    except HadelayError as error:
        log.warning("message %s was not given back, and is handed out again when its lease ends: %s", message.id, error)


def _number(label: Any) -> float | None:
    """Value of a label as a number: labels of a received call are text."""
    return None if label is None else float(label)
