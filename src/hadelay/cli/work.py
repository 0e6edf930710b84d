"""`hadelay work`: run the tasks of an app."""

import os
from typing import Annotated

from cyclopts import Parameter


def work(
    app: str,
    /,
    *,
    concurrency: int = 10,
    processes: int = 1,
    drain: str = "8s",
    lease: str = "30s",
    reload: bool = False,
    health: str | None = None,
    servers: Annotated[str | None, Parameter(name=("--servers", "-s"), show_default=False)] = None,
) -> int:
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
    if servers is not None:
        os.environ["HADELAY_SERVERS"] = servers
    from hadelay.tasks.supervisor import supervise

    return supervise(
        app, concurrency=concurrency, processes=processes, drain=drain, lease=lease, reload=reload, health=health
    )
