"""What aiohttp alone can do: `python -m bench.baseline PORT plain|batch`, one process under uvloop.

plain: a handler that only reads the body. batch: one that only decodes the msgpack it got.
"""

from __future__ import annotations

import sys

import msgpack
import uvloop
from aiohttp import web


async def plain(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(status=201)


async def batch(request: web.Request) -> web.Response:
    items = msgpack.unpackb(await request.read())
    return web.json_response({"results": len(items)})


def main() -> None:
    app = web.Application(client_max_size=1 << 25)
    app.router.add_post("/", {"plain": plain, "batch": batch}[sys.argv[2]])
    loop = uvloop.new_event_loop()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), loop=loop, access_log=None, print=lambda *_: None)


if __name__ == "__main__":
    main()
