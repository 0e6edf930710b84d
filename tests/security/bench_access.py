"""What TLS and tokens cost: processor time of a node per publish, without either, with tokens, with both.

    python -m tests.security.bench_access [publishes]       prints µs per publish, and what is left of the plain rate

One node on one disk, publishes of 200 bytes, one per request over 32 connections that stay. Processor time (user and
system, of the node alone) is compared and not the rate, because the load has to be made on the same machine.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import statistics
import sys
import tempfile
from pathlib import Path

import uvloop

from hadelay.cli.certs import make_authority, make_certificate
from hadelay.http.access import PREFIX, hash_token
from hadelay.testing.ports import free_ports
from tests.system.cluster import end, ready_line, spawn

CONNECTIONS, ROUNDS = 32, 3
BOOTSTRAP = PREFIX + "b" * 43
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> bytes:
    writer.write(b"%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
    answer = await reader.readuntil(b"\r\n\r\n")
    size = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(size)
    assert answer.startswith(b"HTTP/1.1 201"), answer + body
    return body


async def load(port: int, context: ssl.SSLContext | None, tokens: bool, count: int, pid: int) -> float:
    """Processor seconds of the node per publish."""

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, ssl=context)

    head = b"POST /v1/topics/bench/messages?delay=1h HTTP/1.1"
    if tokens:
        first = b"POST /v1/tokens HTTP/1.1\r\nAuthorization: Bearer " + BOOTSTRAP.encode()
        made = await ask(*await connect(), first, b'{"name": "bench", "scopes": ["publish:bench"]}')
        head += b"\r\nAuthorization: Bearer " + made.partition(b'"token":"')[2].partition(b'"')[0]
    connections = [await connect() for _ in range(CONNECTIONS)]

    async def publish(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], times: int) -> None:
        for _ in range(times):
            await ask(*connection, head, b"x" * 200)

    async def all_of(times: int) -> None:
        await asyncio.gather(*(publish(connection, times) for connection in connections))

    await all_of(20)
    before = cpu_s(pid)
    await all_of(count // CONNECTIONS)
    took = cpu_s(pid) - before
    for _, writer in connections:
        writer.close()
    return took / (count // CONNECTIONS * CONNECTIONS)


def measure(directory: Path, tls: bool, tokens: bool, count: int) -> float:
    port = free_ports(2)
    settings = {
        "node.data_dir": directory / "data", "cluster.init": "true", "http.listen": f"127.0.0.1:{port}",
        "raft.listen": f"127.0.0.1:{port + 1}", "security.tokens": str(tokens).lower(),
        "security.bootstrap_token_hash": hash_token(BOOTSTRAP).hex(),
    }  # fmt: skip
    context = None
    if tls:
        make_authority(directory)
        made = make_certificate(directory, "n1", ("127.0.0.1",))
        settings |= {"http.tls_cert": made, "http.tls_key": made.with_suffix(".key")}
        context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    process = spawn("serve", "-o", "json", *words, errors=directory / "log")
    try:
        ready_line(process, directory / "log")
        return uvloop.run(load(port, context, tokens, count, process.pid))
    finally:
        end(process)


def main(count: int = 20_000) -> None:
    kinds = {"plain": (False, False), "tokens": (False, True), "TLS and tokens": (True, True)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, (tls, tokens) in kinds.items():
            with tempfile.TemporaryDirectory() as directory:
                found[name].append(measure(Path(directory), tls, tokens, count) * 1e6)
    plain = statistics.median(found["plain"])
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:<15} {middle:6.1f} µs of processor time per publish, {plain / middle:.2f} of plain   {values}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
