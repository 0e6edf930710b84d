"""`hadelay bridge`: delays for RabbitMQ (docs/howto/from-rabbitmq.md)."""

import asyncio
import logging
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from hadelay.cli.output import Remote, note
from hadelay.client import AsyncClient
from hadelay.client.wire import ADAPTER_TIMEOUT_S
from hadelay.errors import ConfigError

Url = Annotated[
    str,
    Parameter(
        help="Broker: amqp://USER:PASSWORD@HOST/VHOST, or amqps://… for TLS. With the variable, other users of this "
        "machine cannot see the password.",
        env_var="HADELAY_RABBITMQ",
    ),
]


def rabbitmq(
    url: Url,
    /,
    *,
    to: str,
    exchange: str | None = None,
    queue: str | None = None,
    topic: str | None = None,
    binding: Annotated[tuple[str, ...], Parameter(show_default=False)] = ("#",),
    queue_type: Literal["classic", "quorum"] | None = None,
    unroutable: Literal["keep", "drop"] = "keep",
    health: str | None = None,
    remote: Remote = Remote(),
) -> int:
    """Keep RabbitMQ's delayed messages in the cluster, and publish them back when they are due, until SIGTERM or
    SIGINT. Several bridges may serve the same queue.

    Args:
        to: Exchange that due messages are published to. It must exist.
        exchange: Exchange that publishers of delayed messages use; declared unless it exists.
        queue: Queue that the bridge consumes; declared and bound with --exchange. Default: hadelay.EXCHANGE.
        topic: Topic that keeps the messages. Default: the name of the queue.
        binding: Routing key of the queue's binding, for an existing exchange of type direct or topic. Default: #.
        queue_type: Type of the declared queue. Default: RabbitMQ's own.
        unroutable: Due messages for which no queue is bound: keep tries again and then makes a dead letter, drop lets
            RabbitMQ drop them.
        health: Serve /healthz and /metrics at HOST:PORT.
    """
    if exchange is None and queue is None:
        raise ConfigError("name --exchange, which publishers will use, or a --queue that gets their messages")
    if exchange == to:
        raise ConfigError(f"--to {to}: the bridge would take its own messages again; name another exchange")
    try:
        from hadelay.bridge.rabbitmq import Route
        from hadelay.bridge.run import Bridge, run_until_signal
    except ModuleNotFoundError as error:
        raise ConfigError(f"the bridge needs the package {error.name}: pip install 'hadelay[rabbitmq]'") from None

    queue = queue or f"hadelay.{exchange}"
    route = Route(
        url=url,
        to=to,
        exchange=exchange,
        bindings=binding,
        queue=queue,
        queue_type=queue_type,
        topic=topic or queue,
        drop_unroutable=unroutable == "drop",
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)

    async def main() -> None:
        async with AsyncClient(remote.addresses(), remote.token, timeout=ADAPTER_TIMEOUT_S) as client:
            note(f"bridging queue {queue!r} to {', '.join(remote.addresses())}, and back to exchange {to!r}")
            await run_until_signal(Bridge(route, client), health)

    asyncio.run(main())
    return 0
