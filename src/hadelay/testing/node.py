"""A real single node in this process, with a clock that tests move."""

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import structlog
from msgspec.structs import replace

from hadelay.client import Client
from hadelay.http.app import HttpServer
from hadelay.platform.disk import Disk
from hadelay.platform.tcp import AsyncioNetwork
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.node import NodeService
from hadelay.server.webhooks.pool import Webhooks
from hadelay.server.webhooks.sender import Sender
from hadelay.settings.load import load
from hadelay.settings.node import Config
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.testing.clock import Clock, ShiftedLoop, ShiftedRuntime

#: Settings with which a node starts quickly, and stays small.
_SETTINGS = (
    "cluster.init=true", "node.name=test", "http.listen=127.0.0.1:0", "raft.listen=127.0.0.1:0", "http.console=false",
    "raft.election_min_ms=20", "storage.map_bytes=256MiB", "storage.min_free_bytes=0B",
    "webhooks.allow=127.0.0.0/8,::1/128",
)  # fmt: skip
#: Size of a journal segment, in bytes. It is small, as the start fills a segment with zeros, but four times the largest
#: entry, a message of 1 MiB.
_SEGMENT_BYTES = 5 << 20
#: `_START_S`: timeout of the start of a node, in seconds. `_LOOK_S`: interval, in seconds, of checking whether the node
#: serves.
_START_S, _LOOK_S = 30.0, 0.002


class LocalNode:
    """A node of its own for a test, on loopback, in a thread and a temporary directory. A context manager; or call
    `start` and `close`."""

    def __init__(self) -> None:
        #: URL of the node, for clients; set by `start`.
        self.url = ""
        self._loop = ShiftedLoop()
        self.clock = Clock(self._loop, self._settle)
        self._directory = Path(tempfile.mkdtemp(prefix="hadelay-"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="hadelay-node", daemon=True)
        self._ended: asyncio.Event
        self._node: Node

    @cached_property
    def client(self) -> Client:
        """A blocking client of the node. An `AsyncClient(node.url)` does as well."""
        return Client(self.url)

    def start(self) -> "LocalNode":
        """Start the node; returns when it serves."""
        if not structlog.is_configured():
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        config = load(None, {}, (*_SETTINGS, f"node.data_dir={self._directory}"))
        config = replace(config, raft=replace(config.raft, segment_bytes=_SEGMENT_BYTES))
        self._thread.start()
        started = threading.Event()
        self._running = asyncio.run_coroutine_threadsafe(self._run(config, started.set), self._loop)
        self._running.add_done_callback(lambda _: started.set())
        if not started.wait(_START_S):
            raise TimeoutError(f"the node did not start within {_START_S:g} s")
        if self._running.done():
            self._running.result()
        return self

    def close(self) -> None:
        """End the node, and delete its data."""
        if "client" in self.__dict__:
            self.client.close()
        self._loop.call_soon_threadsafe(lambda: self._ended.set())
        self._running.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._directory)

    def __enter__(self) -> "LocalNode":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _run(self, config: Config, started: Callable[[], None]) -> None:
        self._ended = asyncio.Event()
        runtime = ShiftedRuntime(self._loop)
        network = AsyncioNetwork(
            "test",
            config.raft.listen,
            config.members,
            cluster_id=config.cluster.id,
            group=config.cluster.group,
            runtime=runtime,
        )
        backend = partial(LmdbBackend, map_bytes=config.storage.map_bytes)
        self._node = node = open_node(config, Disk(), network, runtime, _fatal, backend=backend)
        sender = Sender(node.guard, config.webhooks.user_agent)
        service = NodeService(node, Webhooks(node, sender.call))
        http = HttpServer(service, config.http, config.limits.max_delay_ms, config.security)
        self.url = f"http://{await http.start()}"
        node.start()
        try:
            while not (node.leadership.serves() and node.leading):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            service.access.knows_tokens = True
            started()
            await self._ended.wait()
        finally:
            await http.stop()
            node.stop()
            await sender.close()
            runtime.close()

    def _settle(self) -> None:
        """Wait until timers that are due have run."""

        async def turn() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(turn(), self._loop).result()


def _fatal(error: BaseException) -> NoReturn:
    raise RuntimeError("the node of this test failed; outside of tests, its process would have ended") from error
