"""Runs both halves of the bridge, each with connections of its own, until SIGTERM or SIGINT."""

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from threading import Lock

from hadelay.bridge.intake import Intake
from hadelay.bridge.outflow import Outflow
from hadelay.bridge.rabbitmq import Route, check
from hadelay.client import AsyncClient
from hadelay.healthpage import served

log = logging.getLogger("hadelay.bridge")

#: Time, in seconds, without a connection to RabbitMQ after which /healthz reports a half of the bridge as stuck.
STUCK_S = 120.0
#: First and longest wait, in seconds, before a reconnect; the wait doubles after each failure. After a connection that
#: lasted for `_LASTED_S`, the wait is the first one again.
_FIRST_S, _LONGEST_S, _LASTED_S = 0.5, 30.0, 60.0
#: Outcomes of messages: values of the label `outcome` of hadelay_bridge_messages_total.
OUTCOMES = ("stored", "repeated", "passed", "parked", "published", "unroutable", "dead")


class Bridge:
    """Runs the intake and the outflow of one route, in one event loop."""

    def __init__(self, route: Route, client: AsyncClient) -> None:
        self.counts = Counter[str]()
        self._route = route
        self._intake, self._outflow = Intake(route, client, self.counts), Outflow(route, client, self.counts)
        self._lock = Lock()
        now = time.monotonic()
        #: Name of a half (intake, outflow) → last monotonic time at which it was seen connected.
        self._seen = {"intake": now, "outflow": now}
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Let `run` end after the messages under way."""
        self._stop.set()
        self._intake.stop()

    async def run(self) -> None:
        """Relay messages until `stop` is called. Raises ConfigError at the start if RabbitMQ refuses what the bridge
        needs. Other errors are logged, and the bridge reconnects after a wait."""
        try:
            await check(self._route)
        except (OSError, TimeoutError) as error:
            # Go on: RabbitMQ may come back.
            log.warning("RabbitMQ does not answer: %s", error or type(error).__name__)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat("intake", self._intake.session))
            tasks.create_task(self._repeat("outflow", self._outflow.session))

    async def _repeat(self, half: str, session: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        failures = 0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                await session(self._stop)
            except Exception as error:
                self.counts[f"failed {half}"] += 1
                if time.monotonic() > began + _LASTED_S:
                    failures = 0
                wait_s = min(_LONGEST_S, _FIRST_S * float(1 << min(failures, 10))) * random.uniform(0.75, 1.25)
                name = type(error).__name__
                log.warning("the %s rests: %s: %s; next try in %.1f s", half, name, error, wait_s)
                failures += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait_s)

    def page(self, path: str) -> tuple[int, str]:
        """Answer a request for /healthz or /metrics: (HTTP status, text). Called by threads of the health server."""
        connections = {"intake": self._intake.connected, "outflow": self._outflow.connected}
        with self._lock:
            now = time.monotonic()
            for half, here in connections.items():
                if here:
                    self._seen[half] = now
            stuck = [half for half, seen in self._seen.items() if now - seen > STUCK_S]
        if path == "/healthz":
            return (503, f"no connection for two minutes: {', '.join(stuck)}\n") if stuck else (200, "ok\n")
        if path != "/metrics":
            return 404, "look at /healthz or /metrics\n"
        lines = ["# TYPE hadelay_bridge_messages_total counter"]
        lines += [f'hadelay_bridge_messages_total{{outcome="{name}"}} {self.counts[name]}' for name in OUTCOMES]
        lines += ["# TYPE hadelay_bridge_failed_sessions_total counter"]
        lines += [
            f'hadelay_bridge_failed_sessions_total{{half="{h}"}} {self.counts[f"failed {h}"]}' for h in connections
        ]
        lines += ["# TYPE hadelay_bridge_connected gauge"]
        lines += [f'hadelay_bridge_connected{{half="{half}"}} {int(here)}' for half, here in connections.items()]
        return 200, "\n".join(lines) + "\n"


async def run_until_signal(bridge: Bridge, health: str | None) -> None:
    """Run the bridge until SIGTERM or SIGINT. health: HOST:PORT at which to serve /healthz and /metrics; None: not
    served."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, bridge.stop)
    with served(bridge.page, health) if health else contextlib.nullcontext():
        await bridge.run()
