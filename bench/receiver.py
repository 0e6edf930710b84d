"""A webhook receiver that costs next to nothing: `python -m bench.receiver PORT`, one process under uvloop.

POST /hang…: is never answered. Any other POST: 204; its webhook-id is counted, and its lateness taken: the body begins
with its deliver_at (bench/load.py). GET /: what came since the last GET, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop


class Tally:
    def __init__(self) -> None:
        self.calls = 0
        self.hanging = 0
        self.ids: set[bytes] = set()
        self.late_ms: list[float] = []
        self.first = self.last = 0.0

    def take(self, head: bytes, body: bytes) -> None:
        now = time.time()
        self.first, self.last = self.first or now, now
        self.calls += 1
        at = head.find(b"webhook-id: ")
        self.ids.add(head[at + 12 : at + 25])
        self.late_ms.append(now * 1000 - int.from_bytes(body[:8], "little"))

    def report(self) -> bytes:
        late = sorted(self.late_ms)

        def quantile(part: float) -> float:
            return late[min(len(late) - 1, int(len(late) * part))] if late else 0.0

        said = {
            "calls": self.calls, "ids": len(self.ids), "hanging": self.hanging, "first": self.first, "last": self.last,
            "p50": quantile(0.5), "p99": quantile(0.99), "max": quantile(1.0), "early": sum(one < 0 for one in late),
        }  # fmt: skip
        return json.dumps(said).encode()


class Receiver(asyncio.Protocol):
    tally = Tally()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        cls = type(self)
        if head.startswith(b"get"):
            said, cls.tally = cls.tally.report(), Tally()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))  # type: ignore[attr-defined]
        elif head.startswith(b"post /hang"):
            cls.tally.hanging += 1
        else:
            cls.tally.take(head, body)
            self.transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")  # type: ignore[attr-defined]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", int(sys.argv[1]))
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
