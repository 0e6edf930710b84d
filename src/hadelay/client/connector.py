"""Connections of the client. Apart, because aiohttp takes most of the time in which a program that imports hadelay
starts: client/transport.py imports this module when a client is made."""

import os
from contextvars import ContextVar
from typing import Any

import aiohttp

#: Whether the request of the current task got a connection; if not, nothing was sent.
connected = ContextVar("connected", default=False)


class Connector(aiohttp.TCPConnector):
    """Connector that only the process that made it closes. After a fork, parent and child share the selector, and
    closing the child's copy would remove the parent's sockets from it."""

    _pid = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pid = os.getpid()

    async def connect(self, *request: Any, **options: Any) -> Any:
        connection = await super().connect(*request, **options)
        connected.set(True)
        return connection

    def __del__(self, *options: Any) -> None:
        if self._pid == os.getpid():
            super().__del__(*options)
