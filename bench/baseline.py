"""What aiohttp alone can do: `python -m bench.baseline PORT plain|batch|bare`, one process under uvloop.

plain: a handler that only reads the body. batch: one that only decodes the msgpack it got. bare: no aiohttp, a protocol
that answers whatever arrives with the same bytes: the least that a Python process can do per request.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgpack
import uvloop
from aiohttp import web


async def plain(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(status=201)


async def batch(request: web.Request) -> web.Response:
    items = msgpack.unpackb(await request.read())
    return web.json_response({"results": len(items)})


class Bare(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}")


async def bare(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    if sys.argv[2] == "bare":
        uvloop.run(bare(int(sys.argv[1])))
        return
    app = web.Application(client_max_size=1 << 25)
    app.router.add_post("/", {"plain": plain, "batch": batch}[sys.argv[2]])
    loop = uvloop.new_event_loop()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), loop=loop, access_log=None, print=lambda *_: None)


if __name__ == "__main__":
    main()
