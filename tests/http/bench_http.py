"""How much of a bare aiohttp server is left when ours does the whole of HTTP, but no storage.

    python -m tests.http.bench_http            needs wrk; runs bare and ours alternately and prints the ratio

The stub answers at once, so the figures are the cost of HTTP alone: a ceiling for what a node can reach.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from itertools import count
from statistics import median
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from hadelay.api.consuming import Received
from hadelay.api.service import Handed, Leader, Receipts
from hadelay.api.text import format_instant
from hadelay.codec.meta import Meta
from hadelay.http.app import HttpServer
from hadelay.model import encode_id
from hadelay.settings.node import HttpConfig

PORTS = {"bare": 18471, "ours": 18472}
ROUNDS, SECONDS = 3, 4
BODY = b"x" * 200


class Stub:
    """Commits once per pass of the loop, for all publishes that came in it: as a batcher does, without the disk."""

    node = leader_name = "n1"

    def __init__(self) -> None:
        self.consume = self.cluster = self
        self._index = count()
        self.queue: list[tuple[list[Any], Any]] = []
        self.columns: list[Any] = []

    def publish(self, drafts: list[Any], request_key: bytes | None, done: Any, by: str = "") -> None:
        if not self.queue:
            asyncio.get_running_loop().call_soon(self.commit)
        self.queue.append((drafts, done))

    def commit(self) -> None:
        queue, self.queue = self.queue, []
        now = time.time_ns() // 1_000_000
        for drafts, done in queue:
            done(Receipts([next(self._index) for _ in drafts], [now + d.when_ms for d in drafts]), None)

    async def find_leader(self) -> Leader:
        return Leader("n1", "", True)

    async def receive(self, ask: Any) -> Handed:
        """As a node makes them, of columns."""
        meta = Meta()
        return Handed([
            Received(
                id=encode_id(number), lease="0" * 29, topic="orders", body=BODY, content_type=meta.ct, key=meta.key,
                tags=meta.tags, meta=meta.meta, deliver_at=format_instant(at), late_ms=3, attempt=1,
                traceparent=meta.tp, redelivered=False, lease_until="2027-01-15T08:00:30.000Z", lease_left_ms=30_000,
            ) for number, at in self.columns
        ])  # fmt: skip


async def serve(which: str) -> None:
    if which == "bare":

        async def bare(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(status=201)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{tail:.*}", bare)
        runner: Any = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", PORTS[which], backlog=4096).start()
    else:
        config = HttpConfig(listen=f"127.0.0.1:{PORTS[which]}")
        await HttpServer(Stub(), config, 1 << 40).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


LUA = 'wrk.method="POST" wrk.body=string.rep("x",200) wrk.headers["Content-Type"]="application/octet-stream"\n'
LUA_KEYS = LUA + (
    'local n=0\nfunction request() n=n+1 wrk.headers["Idempotency-Key"]="k"..n return wrk.format(nil, nil) end\n'
)


def wrk(port: int, script: str, connections: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        out = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{SECONDS}s", "-s", file.name,
             f"http://127.0.0.1:{port}/v1/topics/orders/messages?delay=1h"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    if "Non-2xx" in out:
        raise SystemExit(out)
    return float(next(line.split()[1] for line in out.splitlines() if "Requests/sec" in line))


def single() -> None:
    servers = [
        subprocess.Popen([sys.executable, "-m", "tests.http.bench_http", which], stdout=subprocess.PIPE)
        for which in PORTS
    ]
    try:
        for server in servers:
            assert server.stdout
            server.stdout.readline()
        rates: dict[str, list[float]] = {"bare": [], "ours": [], "ours, every head new": []}
        for _ in range(ROUNDS):
            rates["bare"].append(wrk(PORTS["bare"], LUA, 256))
            rates["ours"].append(wrk(PORTS["ours"], LUA, 256))
            rates["ours, every head new"].append(wrk(PORTS["ours"], LUA_KEYS, 256))
        bare = median(rates["bare"])
        for name, values in rates.items():
            print(f"{name:24} {median(values):9,.0f}/s   {median(values) / bare:.2f} × bare")
    finally:
        for server in servers:
            server.terminate()
            server.wait()


async def many() -> None:
    """µs per message of batches and receives, over a real connection, client not counted."""
    import aiohttp

    stub = Stub()
    server = HttpServer(stub, HttpConfig(listen="127.0.0.1:0"), 1 << 40)
    url = "http://" + await server.start()
    items = [{"topic": "orders", "body": BODY, "deliver_at": 1_800_000_000_000 + n * 37} for n in range(1000)]
    batch = msgspec.msgpack.encode(items)
    ids = count(1 << 40)
    stub.columns = [(next(ids), 1_800_000_000_000 + n) for n in range(100)]
    async with aiohttp.ClientSession() as session:

        async def cpu(rounds: int, path: str, data: bytes, headers: dict[str, str]) -> float:
            best = 1e9
            for _ in range(3):
                before = time.process_time()
                for _ in range(rounds):
                    async with session.post(url + path, data=data, headers=headers) as answer:
                        await answer.read()
                        assert answer.status == 200, await answer.text()
                best = min(best, time.process_time() - before)
            return best / rounds * 1e6

        msgpack = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        empty = await cpu(200, "/v1/messages:batch", b"\x90", msgpack)
        cost = await cpu(50, "/v1/messages:batch", batch, msgpack) - empty
        print(f"batch of 1,000 msgpack    {cost / 1000:6.2f} µs per message")
        print(f"  (left out: per request  {empty:6.0f} µs, client included)")
        cost = await cpu(50, "/v1/messages:batch", batch, {"Content-Type": "application/msgpack"}) - empty
        print(f"  answered in JSON        {cost / 1000:6.2f} µs per message")
        as_json = msgspec.json.encode([{"topic": "orders", "body": "x" * 200, "delay": "1h"}] * 1000)
        cost = await cpu(50, "/v1/messages:batch", as_json, {"Content-Type": "application/json"}) - empty
        print(f"batch of 1,000 JSON       {cost / 1000:6.2f} µs per message")
        for accept in ("application/msgpack", "application/json"):
            cost = await cpu(200, "/v1/topics/orders/receive", b"", {"Accept": accept}) - empty
            print(f"receive of 100, {accept:20} {cost / 100:6.2f} µs per message")
    decode = msgspec.msgpack.Decoder(list[dict[str, Any]]).decode
    start = time.process_time()
    for _ in range(50):
        decode(batch)
    print(f"only decoding that batch  {(time.process_time() - start) / 50 * 1e3:6.2f} µs per message")
    await server.stop(0.1)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in PORTS:
        uvloop.run(serve(sys.argv[1]))
    else:
        single()
        uvloop.run(many())
