"""RabbitMQ client of the bridge: connects, declares exchanges and queues, and publishes with confirms."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from aiormq import connect
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage
from aiormq.exceptions import (
    AMQPChannelError,
    AMQPError,
    AuthenticationError,
    ChannelNotFoundEntity,
    ConnectionClosed,
    InvalidFrameError,
    ProbableAuthenticationError,
    PublishError,
)
from pamqp.commands import Basic
from yarl import URL

from hadelay.bridge import lenient
from hadelay.bridge.envelope import DELAY, USER
from hadelay.errors import ConfigError

#: Timeouts in seconds: of connecting, of waiting for a confirm, and of closing a connection.
_CONNECT_S, _CONFIRM_S, _CLOSE_S = 10.0, 30.0, 3.0
#: Interval of heartbeats in seconds; a connection counts as lost after three missed ones.
_HEARTBEAT_S = 10
#: Suffix of the name of the queue of refused messages; before it stands the name of the bridge's queue.
_PARKED = ".refused"


class Unroutable(Exception):
    """RabbitMQ returned a message: no queue is bound for its routing key."""


class Malformed(Exception):
    """The message cannot be sent, because its properties are not valid in AMQP."""


lenient.install()


@dataclass(frozen=True, kw_only=True)
class Route:
    """From where the bridge takes messages, and where it publishes them when they are due."""

    url: str
    #: Exchange to which programs publish delayed messages, and to which the bridge binds its queue. None: others have
    #: bound the queue.
    exchange: str | None
    #: Routing keys with which the bridge binds its queue; they matter if the exchange has the type direct or topic.
    bindings: tuple[str, ...] = ("#",)
    queue: str
    queue_type: Literal["classic", "quorum"] | None = None
    #: Exchange that due messages are published to; "" names RabbitMQ's default exchange.
    to: str
    topic: str
    #: Whether RabbitMQ may drop a message for which no queue is bound.
    drop_unroutable: bool = False

    @property
    def parked(self) -> str:
        return self.queue + _PARKED

    @property
    def user(self) -> str:
        return URL(self.url).user or "guest"


@asynccontextmanager
async def connected(route: Route) -> AsyncIterator[AbstractConnection]:
    url = URL(route.url)
    url = url.with_query({"name": f"hadelay bridge {route.queue}", "heartbeat": str(_HEARTBEAT_S), **url.query})
    async with asyncio.timeout(_CONNECT_S):
        connection = await connect(url)
    try:
        yield connection
    finally:
        with suppress(Exception):
            await connection.close(timeout=_CLOSE_S)


async def check(route: Route) -> None:
    """Connect once, and declare the exchange and queues that the bridge needs. Raises ConfigError if RabbitMQ refuses,
    and OSError or TimeoutError if it does not answer."""
    if URL(route.url).scheme not in ("amqp", "amqps"):
        raise ConfigError("the bridge needs a URL such as amqp://USER@HOST/VHOST or amqps://USER@HOST/VHOST")
    try:
        async with connected(route) as connection:
            await declare(connection, route)
    except (AuthenticationError, ProbableAuthenticationError) as error:
        raise ConfigError(f"RabbitMQ refuses the user {route.user!r} of the URL: {error}") from None
    except InvalidFrameError:
        vhost = URL(route.url).path[1:] or "/"
        raise ConfigError(f"RabbitMQ has no vhost {vhost!r}, or refuses it to the user {route.user!r}") from None
    except (AMQPChannelError, ConnectionClosed) as error:
        raise ConfigError(f"RabbitMQ refuses what the bridge needs: {_text(error)}") from None


async def declare(connection: AbstractConnection, route: Route) -> None:
    """Declare the queue of refused messages. Declare the bridge's exchange and queue only if they do not exist: a user
    may have declared these with other arguments."""
    if route.to:
        await _passively(connection, lambda channel: channel.exchange_declare(route.to, passive=True), required=True)
    channel = await connection.channel()
    await channel.queue_declare(route.parked, durable=True)
    if not await _passively(connection, lambda channel: channel.queue_declare(route.queue, passive=True)):
        if route.exchange is None:
            raise ConfigError(f"RabbitMQ has no queue {route.queue!r}; with --exchange, the bridge declares one")
        # Dead-letter to the queue of refused messages, so that a message that expires before the bridge reads it is
        # kept.
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": route.parked}
        if route.queue_type:
            arguments["x-queue-type"] = route.queue_type
        await channel.queue_declare(route.queue, durable=True, arguments=arguments)
    if route.exchange is not None:
        exchange = route.exchange
        if not await _passively(connection, lambda channel: channel.exchange_declare(exchange, passive=True)):
            # Messages without the header `x-delay` are not bound to the bridge's queue: RabbitMQ routes them to the
            # target exchange.
            arguments = {"alternate-exchange": route.to} if route.to else {}
            await channel.exchange_declare(exchange, exchange_type="headers", durable=True, arguments=arguments)
        for key in route.bindings:
            await channel.queue_bind(
                route.queue, exchange, routing_key=key, arguments={"x-match": "all-with-x", DELAY: None}
            )
    await channel.close()


async def _passively(
    connection: AbstractConnection, ask: Callable[[AbstractChannel], Awaitable[object]], required: bool = False
) -> bool:
    """Whether a queue or exchange exists, by a passive declaration. Uses a separate channel, because RabbitMQ closes
    the channel if the queue or exchange does not exist."""
    channel = await connection.channel()
    try:
        await ask(channel)
    except ChannelNotFoundEntity:
        if required:
            raise
        return False
    await channel.close()
    return True


class Publisher:
    """Publishes messages on one channel, and waits for RabbitMQ's confirms."""

    def __init__(self, channel: AbstractChannel, user: str) -> None:
        self._channel, self._user = channel, user
        #: Publishes in flight, by message id. An id is in flight only once, because aiormq finds a returned message by
        #: its id.
        self._in_flight: dict[str, asyncio.Future[None]] = {}

    async def publish(
        self, exchange: str, routing_key: str, properties: Mapping[str, Any], body: bytes, *, mandatory: bool = True
    ) -> None:
        """Publish a message, and wait for the confirm. properties: AMQP properties, which must contain a message_id.

        Unroutable if RabbitMQ returned the message, Malformed if it cannot be sent, aiormq's errors otherwise.
        """
        name = str(properties["message_id"])
        while (before := self._in_flight.get(name)) is not None:
            await asyncio.wait([before])
        done = self._in_flight[name] = asyncio.get_running_loop().create_future()
        try:
            await self._channel.basic_publish(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=self._made(properties),
                mandatory=mandatory,
                timeout=_CONFIRM_S,
                wait=False,
            )
        except PublishError as error:
            raise Unroutable(f"no queue of exchange {exchange!r} takes routing key {routing_key!r}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error
        finally:
            del self._in_flight[name]
            done.set_result(None)

    def _made(self, properties: Mapping[str, Any]) -> Basic.Properties:
        given = dict(properties)
        if given.get("user_id") not in (None, self._user):
            # RabbitMQ closes the channel if user_id is not the connection's user: move the user_id to a header.
            given["headers"] = {**(given.get("headers") or {}), USER: given.pop("user_id")}
        made = Basic.Properties()
        for name, value in given.items():
            if name not in Basic.Properties.flags:
                raise ValueError(f"AMQP has no property {name!r}")
            setattr(made, name, value)
        return made


def properties_of(message: DeliveredMessage) -> dict[str, Any]:
    """AMQP properties that are set in a message, by name."""
    found = message.header.properties
    given = {name: getattr(found, name, None) for name in Basic.Properties.flags}
    return {name: value for name, value in given.items() if value is not None and value != ""}


def _text(error: AMQPError) -> str:
    return " ".join(str(part) for part in error.args if part) or type(error).__name__
