"""Transport for kombu: queues are topics, and a task with an ETA is a message that is due at this time.

A queue that ends with its consumer (for control commands, their replies and events) is not a topic of its own: these
queues share topics, in which each message is tagged with its queue.
"""

from __future__ import annotations

import base64
import logging
import os
import queue as queues
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.imports import symbol_by_name
from kombu.utils.json import loads

from hadelay.celery.address import address_of, client_of, masked, url_of
from hadelay.celery.bindings import Binding, Bindings, tag_of
from hadelay.celery.inbox import Inbox, Settlement, Subscription, settle
from hadelay.celery.messages import draft_of, keys_of, received
from hadelay.celery.revoking import revoke
from hadelay.client import AsyncMessage, Put, wire
from hadelay.client.background import Running, wait, wait_for_all
from hadelay.client.paths import with_query
from hadelay.client.queues import topic_of
from hadelay.errors import Conflict, Forbidden, HadelayError, NotFound
from hadelay.outbox.rows import put_columns
from hadelay.version import VERSION

log = logging.getLogger(__name__)

#: Number of topics that temporary queues share: a topic may be asked for 256 different tags at a time, one per queue.
_TEMPORARY_TOPICS = 16
#: Time, in ms, after which a message in a temporary queue expires, unless the queue has `x-message-ttl`.
_TEMPORARY_MS = 3_600_000
#: Timeout of the request that verifies a new connection, in seconds.
_VERIFY_S = 2.0
#: Timeout, in seconds, of giving messages back: when a connection is closed, and before a fetch.
_CLOSE_S = 5.0
#: Timeout of closing the consumer of a temporary queue, in seconds.
_TEMPORARY_CLOSE_S = 2.0
#: Lease of a message fetched by basic_get, in seconds: nothing extends this lease.
_GET_LEASE_S = 300

REQUEUE: Settlement = partial(AsyncMessage.nack, delay=0, reason="requeued")
REJECT: Settlement = partial(AsyncMessage.nack, dead=True, reason="rejected")
FOREIGN: Settlement = partial(AsyncMessage.nack, dead=True, reason="not a message of Celery")
GIVE_BACK: Settlement = partial(AsyncMessage.nack, delay=0, reason="the worker stopped", count=False)


class Temporary(str):
    """Name of a temporary queue that another process has bound."""

    def __new__(cls, name: str, expiry_ms: int) -> Temporary:
        made = super().__new__(cls, name)
        made.expiry_ms = expiry_ms
        return made

    expiry_ms: int


class QoS(virtual.QoS):
    """Settles the delivered messages of a channel. The prefetch limit is kept by the client's consumer, which counts
    unsettled messages."""

    def can_consume(self) -> bool:
        return True

    def ack(self, delivery_tag: str) -> None:
        self._settle(delivery_tag, AsyncMessage.ack)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._settle(delivery_tag, REQUEUE if requeue else REJECT)

    def restore_unacked(self) -> list[Any]:
        for tag in list(self._delivered):
            self._settle(tag, GIVE_BACK)
        return []

    def restore_unacked_once(self, stderr: object = None) -> None:
        self._on_collect.cancel()
        self.restore_unacked()

    def _settle(self, tag: str, settlement: Settlement) -> None:
        self._delivered.pop(tag, None)
        message = self.channel.unsettled.pop(tag, None)
        if message is not None:
            settling = settle(message, settlement)
            if settlement is REQUEUE:
                ended = {one for one in self.channel.requeuing if one.wait(0)}
                self.channel.requeuing = self.channel.requeuing - ended | {settling}


class Channel(virtual.Channel):
    QoS = QoS
    supports_fanout = True
    do_restore = False

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        #: Unsettled messages by delivery tag; the tag is the token of the message's lease.
        self.unsettled: dict[str, AsyncMessage] = {}
        #: Requeues under way: basic_get waits for them, because it has to find the requeued messages.
        self.requeuing: set[Running[None]] = set()
        #: While beat stores a schedule: list of drafts that this channel collects instead of publishing them. Otherwise
        #: None.
        self.drafts: list[Put] | None = None
        self._subscription: Subscription | None = None
        self._temporary: dict[str, Subscription] = {}
        #: Names of consumed queues whose messages are acked on delivery (no_ack).
        self._acked_at_once: set[str] = set()
        self._pid = os.getpid()

    # Methods about queues and exchanges.

    def prepare_queue_arguments(self, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def _new_queue(self, queue: str, **options: Any) -> None:
        arguments = options.get("arguments") or {}
        if options.get("auto_delete") or options.get("exclusive") or "x-expires" in arguments:
            self.connection.temporary.setdefault(queue, arguments.get("x-message-ttl") or _TEMPORARY_MS)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return queue in self.connection.temporary or self._info(queue) is not None

    def _queue_bind(self, exchange: str, routing_key: str, pattern: object, queue: str) -> None:
        temporary_ms = self.connection.temporary.get(queue)
        if temporary_ms is None and exchange == routing_key == queue and self.typeof(exchange).type == "direct":
            return  # no binding is needed: `_lookup` finds this queue by its name
        self.connection.bindings.add(Binding(exchange, routing_key, queue, temporary_ms))

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> Any:
        """Queues that get a message with this exchange and routing key, by the bindings of all processes."""
        if not exchange:
            return [routing_key or default]
        kind = self.typeof(exchange)
        direct = kind.type == "direct"
        table = list(self.state.exchanges.get(exchange, {}).get("table", ()))
        if direct and (found := kind.lookup(table, exchange, routing_key, None)):
            return found
        # Read the bindings of a direct exchange anew: the queue of a reply was bound only a moment ago.
        for binding in self.connection.bindings.of(exchange, fresh=direct):
            queue = binding.queue if binding.temporary_ms is None else Temporary(binding.queue, binding.temporary_ms)
            table.append(kind.prepare_bind(queue, exchange, binding.routing_key, None))
        found = kind.lookup(table, exchange, routing_key, None)
        return found or ([routing_key] if direct and exchange == routing_key else [])

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any) -> None:
        if if_empty and self._size(queue):
            return
        self.state.queue_bindings_delete(queue)
        for exchange in self.state.exchanges.values():
            exchange["table"] = [entry for entry in exchange["table"] if entry[2] != queue]
        self.connection.bindings.remove(queue)
        if self.connection.temporary.pop(queue, None) is None:
            with suppress(NotFound):
                self.connection.cluster.delete_topic(self._topic(queue), force=True)

    def after_reply_message_received(self, queue: str) -> None:
        pass  # nothing to do: `basic_cancel` has deleted the reply queue

    def _size(self, queue: str) -> int:
        if self.connection.outbox is not None and not self._consumers:
            return 0  # with an outbox, a publisher may declare a queue while no node answers: send no request
        info = None if self._expiry_ms(queue) else self._info(queue)
        return info.ready if info is not None else 0

    def _purge(self, queue: str) -> int:
        info = self._info(queue)
        if info is not None:
            self.connection.cluster.purge(self._topic(queue))
        return info.ready + info.scheduled if info is not None else 0

    def _info(self, queue: str) -> Any:
        try:
            return self.connection.cluster.topic(self._topic(queue))
        except NotFound:
            return None

    def _topic(self, queue: str) -> str:
        prefix = self.connection.address.prefix
        if self._expiry_ms(queue):
            return f"{prefix}celery-temporary-{zlib.crc32(queue.encode()) % _TEMPORARY_TOPICS}"
        return topic_of(prefix, queue)

    def _expiry_ms(self, queue: str) -> int | None:
        """Time, in ms, after which a message in a temporary queue expires; None for other queues."""
        return queue.expiry_ms if isinstance(queue, Temporary) else self.connection.temporary.get(queue)

    # Methods that publish.

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        draft = self._draft(queue, message)
        if self.drafts is not None:
            self.drafts.append(draft)
            return
        keys = [] if draft.tags else keys_of(message)
        if keys and self.connection.outbox is not None:
            draft.key, draft.on_conflict = keys[0], "keep"
            self.connection.outbox(put_columns(draft))
            return
        fields, put = msgspec.structs.asdict(draft), self.connection.cluster.put
        try:
            for key in keys:
                with suppress(Conflict):
                    put(**fields | {"key": key, "on_conflict": "reject"})
                    return
            put(**fields)
        except HadelayError as error:
            raise OperationalError(str(error)) from error  # kombu does not retry this error: the client has retried

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **_: Any) -> None:
        if exchange.endswith(".pidbox"):
            transport = self.connection
            revoke(transport.cluster, transport.address.prefix, loads(base64.b64decode(message["body"])))
        drafts = [self._draft(queue, message) for queue in self._lookup(exchange, routing_key)]
        if self.drafts is not None:
            self.drafts += drafts
            return
        for result in self.connection.cluster.put_many(drafts):
            if isinstance(result, HadelayError):
                raise OperationalError(str(result)) from result

    def _draft(self, queue: str, message: dict[str, Any]) -> Put:
        return draft_of(message, self._topic(queue), queue, self._expiry_ms(queue))

    # Methods that receive messages.

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        for subscription in self._subscriptions():
            subscription.limit(prefetch_count)

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        (self._acked_at_once.add if no_ack else self._acked_at_once.discard)(queue)
        if queue in self.connection.temporary:
            subscription = self._temporary[queue] = self._subscribe([tag_of(queue)])
        else:
            subscription = self._subscription = self._subscription or self._subscribe([])
        subscription.add(self._topic(queue), queue)

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None or self._pid != os.getpid():
            return
        if (temporary := self._temporary.pop(queue, None)) is not None:
            temporary.close(_TEMPORARY_CLOSE_S)
            self.queue_delete(queue)
        elif self._subscription is not None and queue not in self._active_queues:
            self._subscription.remove(self._topic(queue))

    def _subscribe(self, tags: list[str]) -> Subscription:
        transport = self.connection
        return Subscription(
            transport.cluster, transport.inbox, self.channel_id, self.qos.prefetch_count, tags, transport.consuming
        )

    def _subscriptions(self) -> Iterable[Subscription]:
        return [*self._temporary.values(), *([self._subscription] if self._subscription else [])]

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message = super().basic_get(queue, no_ack, **kwargs)
        if message is not None and no_ack:
            self.qos.ack(message.delivery_tag)
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        tags = [tag_of(queue)] if queue in self.connection.temporary else []
        client = self.connection.cluster._async()
        wait_for_all(self.requeuing, _CLOSE_S)
        for message in wait(client.receive(self._topic(queue), max=1, tags=tags, lease=_GET_LEASE_S)):
            return self._received(message)
        raise queues.Empty

    def deliver(self, queue: str, message: AsyncMessage) -> None:
        """Pass a received message to the consumer's callback; give the message back if the queue has no consumer any
        more."""
        if queue not in self._active_queues:
            settle(message, GIVE_BACK)
            return
        try:
            raw = self._received(message)
        except (ValueError, LookupError, TypeError, AttributeError):
            log.error(
                "message %s of topic %s is no message of Celery: it is a dead letter now", message.id, message.topic
            )
            settle(message, FOREIGN)
            return
        if queue in self._acked_at_once:
            self.qos.ack(message.lease)
        self.connection._callbacks[queue](raw)

    def _received(self, message: AsyncMessage) -> dict[str, Any]:
        raw = received(message)
        self.unsettled[message.lease] = message
        return raw

    def close(self) -> None:
        if self.closed or self._pid != os.getpid():
            return
        subscription = self._subscription
        super().close()
        if subscription is not None:
            subscription.close()


class Transport(virtual.Transport):
    """Connection of kombu to a cluster. All connections of a process share a client, which opens its sockets when it
    needs them: a connection made before a fork works after it."""

    Channel = Channel
    can_parse_url = True
    driver_type = driver_name = "hadelay"
    connection_errors = (*virtual.Transport.connection_errors, HadelayError, ConnectionError)
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        options = client.transport_options
        self.address = address_of(url_of(client), client.ssl)
        self.cluster = client_of(self.address, float(options.get("timeout", wire.ADAPTER_TIMEOUT_S)))
        self.bindings = Bindings(self.cluster, self.address)
        named = options.get("outbox")
        #: Function that writes a row into the program's outbox, so that tasks are published only if its transaction
        #: commits. None: no outbox.
        self.outbox: Callable[[dict[str, Any]], object] | None = symbol_by_name(named) if named else None
        self.inbox = Inbox()
        #: Name of a temporary queue → time, in ms, after which its messages expire.
        self.temporary: dict[str, int] = {}
        listed = options.get("queue_order_strategy") == "priority"
        self.consuming = {"lease": options.get("lease", 30), "order": "listed" if listed else "turns"}
        self._hub: Any = None
        self._pid = os.getpid()

    def establish_connection(self) -> Transport:
        if self.outbox is not None:
            return super().establish_connection()  # type: ignore[no-any-return]  # no node is needed for a publish
        path = with_query("/v1/topics", {"prefix": f"{self.address.prefix}celery", "stale": True})
        try:
            client = self.cluster._async()
            wait(client._transport.request("GET", path, wire.read(wire.WireTopics), timeout_s=_VERIFY_S))
        except Forbidden:
            pass  # accept the connection: a node answered, though the token lacks the scope `read`
        except HadelayError as error:
            raise ConnectionError(str(error)) from error
        return super().establish_connection()  # type: ignore[no-any-return]

    def close_connection(self, connection: object) -> None:
        if self._pid != os.getpid():
            # A forked child inherits the parent's connection, pipe and epoll: closing these would stop the parent.
            return
        super().close_connection(connection)
        given_back = []
        with suppress(queues.Empty, HadelayError):
            while True:
                given_back.append(settle(self.inbox.get(0)[2], GIVE_BACK))
        wait_for_all(given_back, _CLOSE_S)
        if self._hub is not None:
            self._hub.remove(self.inbox.descriptor())
            self._hub = None
        self.bindings.close()
        self.inbox.close()

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        self._hub = loop
        loop.add_reader(self.inbox.descriptor(), self._on_readable)

    def _on_readable(self) -> None:
        self.inbox.clear_descriptor()
        with suppress(queues.Empty):
            while True:
                self._deliver_next(0)

    def drain_events(self, connection: object, timeout: float | None = None) -> None:
        try:
            self._deliver_next(timeout)
        except queues.Empty:
            raise TimeoutError from None

    def _deliver_next(self, timeout: float | None) -> None:
        number, queue, message = self.inbox.get(timeout)
        for channel in self.channels:
            if channel.channel_id == number:
                channel.deliver(queue, message)
                return
        settle(message, GIVE_BACK)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        return uri if include_password else masked(uri, mask)

    def driver_version(self) -> str:
        return VERSION
