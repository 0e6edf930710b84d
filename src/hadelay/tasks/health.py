"""Health and metrics of a supervisor's workers: `/healthz` and `/metrics`."""

import asyncio
import contextlib
import time
from collections import Counter

from hadelay.tasks.channel import Report

#: Time in seconds without a report after which a worker counts as stuck.
_STUCK_S = 10.0
#: Timeout, in seconds, of reading and answering an HTTP request.
_REQUEST_S = 5.0


class Counts:
    """Numbers for /healthz and /metrics, from the reports of workers."""

    def __init__(self) -> None:
        self.restarts = 0
        #: Attempts by task and outcome, and their durations in seconds by task.
        self._attempts: Counter[tuple[str, str]] = Counter()
        self._seconds: Counter[str] = Counter()
        #: Number of a worker → time of its last report, and its number of unsettled messages.
        self._workers: dict[int, tuple[float, int]] = {}

    def attempt(self, report: Report) -> None:
        self._attempts[report.task, report.outcome] += 1
        self._seconds[report.task] += report.seconds  # type: ignore[assignment]

    def seen(self, worker: int, leases: int) -> None:
        self._workers[worker] = time.monotonic(), leases

    def ended(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def healthy(self, workers: int) -> bool:
        """Whether all workers run, and have reported lately, so that none is stuck."""
        since = time.monotonic() - _STUCK_S
        return sum(seen > since for seen, _ in self._workers.values()) >= workers

    def text(self) -> str:
        """Metrics in Prometheus' text format."""
        lines = [
            "# TYPE hadelay_worker_processes gauge", f"hadelay_worker_processes {len(self._workers)}",
            "# TYPE hadelay_worker_restarts_total counter", f"hadelay_worker_restarts_total {self.restarts}",
            "# TYPE hadelay_worker_running_tasks gauge",
            f"hadelay_worker_running_tasks {sum(leases for _, leases in self._workers.values())}",
            "# TYPE hadelay_task_attempts_total counter",
        ]  # fmt: skip
        lines += [
            f'hadelay_task_attempts_total{{task="{_label(task)}",outcome="{outcome}"}} {count}'
            for (task, outcome), count in sorted(self._attempts.items())
        ]
        lines.append("# TYPE hadelay_task_seconds_total counter")
        seconds = sorted(self._seconds.items())
        lines += [f'hadelay_task_seconds_total{{task="{_label(task)}"}} {spent:.6f}' for task, spent in seconds]
        return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """A label's value, escaped as Prometheus' text format wants it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def serve(address: str, counts: Counts, workers: int) -> asyncio.Server:
    """Serve /healthz and /metrics at host:port. OSError if the address is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].partition(b"?")[0]
                status, text = _page(path.decode("latin-1"), counts, workers)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
                    f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()
                )
                await writer.drain()
        writer.close()

    host, _, port = address.rpartition(":")
    return await asyncio.start_server(answer, host.strip("[]") or "127.0.0.1", int(port))


def _page(path: str, counts: Counts, workers: int) -> tuple[str, str]:
    if path == "/metrics":
        return "200 OK", counts.text()
    if path != "/healthz":
        return "404 Not Found", "look at /healthz or /metrics\n"
    return ("200 OK", "ok\n") if counts.healthy(workers) else ("503 Service Unavailable", "a worker is missing\n")
