"""Connections of the client. A module of its own, because the import of aiohttp takes most of the time in which a
program that imports hadelay starts: client/transport.py imports this module when a client is made."""

import asyncio
import os
import socket
import threading
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

#: Whether the request of the current task got a connection; if not, nothing was sent.
connected = ContextVar("connected", default=False)


class Resolver(AbstractResolver):
    """Looks host names up in a thread per look-up. asyncio's own look-up needs the default executor, which takes no
    work any more once the main thread has ended, while other threads and atexit handlers still use their clients."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[Any]] = loop.create_future()

        def answer(infos: list[Any], error: OSError | UnicodeError | None) -> None:
            if found.done():
                return  # the request was cancelled, so nobody waits for the answer
            if error is None:
                found.set_result(infos)
            else:
                # aiohttp expects an OSError, but a host name that is impossible in DNS raises UnicodeError.
                found.set_exception(error if isinstance(error, OSError) else OSError(None, str(error)))

        def look_up() -> None:
            infos, problem = list[Any](), None
            try:
                infos = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            except (OSError, UnicodeError) as error:
                problem = error
            with suppress(RuntimeError):  # the event loop was closed during the look-up
                loop.call_soon_threadsafe(answer, infos, problem)

        try:
            threading.Thread(target=look_up, daemon=True, name="hadelay-resolver").start()
        except RuntimeError:  # look up in this thread: the interpreter ends (Python 3.12), or there are no threads left
            look_up()
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            # Add the numeric scope (%2): connecting to a link-local IPv6 address needs it.
            ResolveResult(
                hostname=host,
                host=f"{address[0]}%{address[3]}" if address[3:] and address[3] else address[0],
                port=address[1],
                family=kind,
                proto=protocol,
                flags=flags,
            )
            for kind, _, protocol, _, address in await found
        ]

    async def close(self) -> None:
        pass


class Connector(aiohttp.TCPConnector):
    """Connector that only the process that made it closes. After a fork, parent and child share the selector, and
    closing the child's copy would remove the parent's sockets from it."""

    _pid = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(resolver=Resolver(), **options)
        self._pid = os.getpid()

    async def connect(self, *request: Any, **options: Any) -> Any:
        connection = await super().connect(*request, **options)
        connected.set(True)
        return connection

    def __del__(self, *options: Any) -> None:
        if self._pid == os.getpid():
            super().__del__(*options)
