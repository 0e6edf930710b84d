"""`hadelay work`: run the tasks of an app."""

import asyncio
import logging
import os
import re
from typing import Annotated

from cyclopts import Parameter

from hadelay.errors import BadRequest
from hadelay.tasks.channel import Start


def work(
    app: str, /, *, concurrency: int = 10, processes: int = 1, drain: str = "8s", lease: str = "30s",
    reload: bool = False, health: str | None = None,
    servers: Annotated[str | None, Parameter(name=("--servers", "-s"), show_default=False)] = None,
) -> int:  # fmt: skip
    """Run the tasks of an app, until SIGTERM or SIGINT.

    The first signal fetches no more and lets running tasks finish for --drain. A second one gives them back now.

    Args:
        app: MODULE:NAME of the App, such as shop.tasks:app. NAME is app where it is left out.
        concurrency: Limit of tasks that one process runs at a time.
        processes: Number of worker processes. One that crashes is replaced, and its messages go back at once.
        drain: Time for running tasks to finish after a signal. Less than the supervisor's patience (docker: 10s).
        lease: Lease of the messages, extended while their tasks run: after a loss of the machine, they come again
            when it is over.
        reload: Start the processes again when a Python file below this directory changes. For development.
        health: Serve /healthz and /metrics at HOST:PORT.
        servers: Addresses of nodes, for an app that names none. Default: HADELAY_SERVERS.
    """
    if concurrency < 1 or processes < 1:
        raise BadRequest("--concurrency and --processes are at least 1")
    if health is not None and not re.fullmatch(r"(.+:)?\d{1,5}", health):
        raise BadRequest(f"--health {health}: expected HOST:PORT, such as 127.0.0.1:8081")
    from hadelay.client.wire import seconds_of

    try:
        start = Start(app, concurrency, seconds_of(drain), seconds_of(lease))
    except ValueError as error:
        raise BadRequest(f"--drain, --lease: {error}") from None
    if servers is not None:
        os.environ["HADELAY_SERVERS"] = servers
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_run(start, processes, reload, health))


async def _run(start: Start, processes: int, reload: bool, health: str | None) -> int:
    from hadelay.tasks.health import serve
    from hadelay.tasks.supervisor import Supervisor

    supervisor = Supervisor(start, processes=processes, reload=reload)
    server = None if health is None else await serve(health, supervisor.counts, processes)
    try:
        return await supervisor.run()
    finally:
        if server is not None:
            server.close()
