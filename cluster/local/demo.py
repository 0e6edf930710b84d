"""`make demo`: three nodes, producers and consumers as processes of their own, and a leader killed in the middle.

Everything goes over real HTTP, through the client that users have. What counts is written down by those it happened
to: a producer writes an id when its publish was answered, a consumer when it has the message in hand, each with the
clock of this machine. The table is made of their notes alone: a message is early or late by the time that its producer
asked for, whatever the cluster says of it. Ends non-zero if anything was lost, early, delivered without having been
published, or (in commit mode) delivered twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The repository's own packages, from whatever directory this is started.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos.freeports import free_ports

TOPIC = "demo"
PRODUCERS, CONSUMERS = 3, 3
#: After the start: when the first message is due, when the leader is killed, when it comes back; and how long
#: messages fall due for.
FIRST_DUE_S, KILL_S, RESTART_S, SPAN_S = 3.0, 13.0, 17.0, 20.0
#: Whoever is not done by then has lost something.
GIVE_UP_S = 60.0
#: Each message is published this long before it is due, at least: half of them while there is no leader, perhaps.
LEAD_S = 1.5


def now_ms() -> float:
    return time.time() * 1000


# --- the processes ---------------------------------------------------------------------------------------------------


async def produce(urls: str, number: int, count: int, start_ms: float, notes: Path) -> None:
    """Publish `count` messages, evenly over the span, each a while before it is due."""
    from hadelay import AsyncClient

    due = sorted(start_ms + FIRST_DUE_S * 1000 + random.random() * SPAN_S * 1000 for _ in range(count))
    with open(notes, "w", buffering=1) as file:
        async with AsyncClient(urls, timeout=GIVE_UP_S) as client:
            limit = asyncio.Semaphore(32)

            async def publish(i: int, due_ms: int) -> None:
                async with limit:
                    said = {"producer": number, "n": i}
                    receipt = await client.put(TOPIC, said, at=due_ms)
                file.write(json.dumps({"id": receipt.id, "due": due_ms} | said) + "\n")

            async with asyncio.TaskGroup() as tasks:
                for i, at in enumerate(due):
                    await asyncio.sleep(max(0.0, (at - now_ms()) / 1000 - LEAD_S - random.random()))
                    tasks.create_task(publish(i, int(at)))


async def consume(urls: str, notes: Path) -> None:
    """Take messages, write them down, ack them, until SIGTERM."""
    from hadelay import AsyncClient

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def work(file: Any) -> None:
        async def handle(message: Any) -> None:
            file.write(json.dumps({"id": message.id, "at": now_ms()} | message.json()) + "\n")

        async with AsyncClient(urls, timeout=GIVE_UP_S) as client:
            await client.work(TOPIC, handle, concurrency=100)

    with open(notes, "w", buffering=1) as file:
        working = asyncio.create_task(work(file))
        await asyncio.wait({working, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


# --- the conductor ---------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    published: int
    delivered: int
    lost: int
    duplicated: int
    #: Deliveries that no producer published, or with the body of another message.
    phantom: int
    early: int
    late_ms: list[float]
    gap_ms: float | None

    def failed(self, sync: str) -> bool:
        twice = self.duplicated if sync == "commit" else 0
        return bool(self.lost or self.phantom or self.early or twice or self.gap_ms is None)


def run(sync: str, messages: int) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="hadelay-demo-"))
    children: list[subprocess.Popen[bytes]] = []
    kept = True
    try:
        outcome = _conduct(console, directory, children, sync, messages)
        kept = outcome.failed(sync)
        _table(console, outcome, sync)
        return int(kept)
    finally:
        _end(children)
        if kept:
            console.print(f"Data, logs and notes are kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _conduct(
    console: Any, directory: Path, children: list[subprocess.Popen[bytes]], sync: str, messages: int
) -> Outcome:
    console.print(f"Three nodes, each a process of its own ({sync} mode) …")
    data = ["--data-dir", str(directory / "cluster"), "-o", "json"]
    base = str(free_ports(6))
    command = _hadelay("dev", "--nodes", "3", "--port-base", base, "--dispatch-sync", sync, *data)
    cluster = _spawn(children, *command, output=True)
    nodes = _ready(cluster)
    for node in nodes:
        console.print(f"  {node['name']}  {node['http']}  pid {node['pid']}")
    urls = ",".join(node["http"] for node in nodes)

    start_ms = now_ms() + 1000
    share = -(-messages // PRODUCERS)
    console.print(
        f"{PRODUCERS} producers, {CONSUMERS} consumers; {share * PRODUCERS:,} messages, due over {SPAN_S:.0f} s …"
    )
    consumers = [_spawn(children, *_self("consume", urls, directory / f"consumed{i}")) for i in range(CONSUMERS)]
    producers = [
        _spawn(children, *_self("produce", urls, i, share, start_ms, directory / f"published{i}"))
        for i in range(PRODUCERS)
    ]

    _sleep_until(start_ms + KILL_S * 1000)
    leader = _leader(nodes)
    killed_ms = now_ms()
    os.kill(leader["pid"], signal.SIGKILL)
    console.print(f"[bold red]kill -9[/] {leader['name']}, the leader, while {_unsettled(directory)} …")
    _sleep_until(start_ms + RESTART_S * 1000)
    again = _hadelay("dev", "--start", leader["name"], *data)
    with open(directory / "cluster" / f"{leader['name']}.log", "ab") as log:
        _ready(_spawn(children, *again, output=True, errors=log))
    console.print(f"{leader['name']} is back, and catches up …")

    end = start_ms / 1000 + FIRST_DUE_S + SPAN_S
    for producer in producers:
        producer.wait(max(1.0, end + GIVE_UP_S - time.time()))
    _drain(directory, end + GIVE_UP_S / 2)
    for consumer in consumers:
        consumer.terminate()
        consumer.wait(20)
    if failed := [process.args for process in (*producers, *consumers) if process.returncode]:
        console.print(f"[bold red]these ended with an error[/]: {failed}")
    return _judge(directory, killed_ms)


def _judge(directory: Path, killed_ms: float) -> Outcome:
    published = {note["id"]: note for note in _notes(directory, "published")}
    consumed = list(_notes(directory, "consumed"))
    known = [note for note in consumed if _said(note) == _said(published.get(note["id"], {}))]
    times = Counter(note["id"] for note in known)
    # By the producer's due time. The cluster's deliver_at would agree with a cluster that files a message early.
    late_ms = sorted(note["at"] - published[note["id"]]["due"] for note in known)
    # The first delivery that proves a new leader: of a message that fell due after the old one was dead.
    after = [note["at"] for note in known if published[note["id"]]["due"] >= killed_ms]
    return Outcome(
        published=len(published),
        delivered=len(times),
        lost=len(published.keys() - times.keys()),
        duplicated=sum(count - 1 for count in times.values()),
        phantom=len(consumed) - len(known),
        early=sum(late < 0 for late in late_ms),
        late_ms=late_ms,
        gap_ms=min(after) - killed_ms if after else None,
    )


def _said(note: dict[str, Any]) -> tuple[Any, Any]:
    """What a producer wrote into a body."""
    return note.get("producer"), note.get("n")


def _table(console: Any, outcome: Outcome, sync: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    late = outcome.late_ms or [float("nan")]
    zero = {
        "lost": outcome.lost, "duplicated": outcome.duplicated, "phantom": outcome.phantom, "early": outcome.early
    }  # fmt: skip
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("published", f"{outcome.published:,}")
    table.add_row("delivered", f"{outcome.delivered:,}")
    for name, count in zero.items():
        allowed = name == "duplicated" and sync == "interval"
        table.add_row(name, f"{count:,}", style=None if not count or allowed else "bold red")
    table.add_row("lateness p50", f"{late[len(late) // 2]:,.1f} ms")
    table.add_row("lateness p99", f"{late[int(len(late) * 0.99)]:,.1f} ms")
    table.add_row("lateness max", f"{late[-1]:,.1f} ms")
    gap = "never" if outcome.gap_ms is None else f"{outcome.gap_ms:,.0f} ms"
    table.add_row("kill to next delivery", gap)
    console.print(table)
    verdict = "[bold red]a promise was broken" if outcome.failed(sync) else "[bold green]every promise was kept"
    console.print(verdict)


# --- small things ----------------------------------------------------------------------------------------------------


def _hadelay(*words: str) -> list[str]:
    return [sys.executable, "-m", "hadelay", *words]


def _self(*words: object) -> list[str]:
    return [sys.executable, __file__, *map(str, words)]


def _spawn(
    children: list[subprocess.Popen[bytes]], *command: str, output: bool = False, errors: Any = None
) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches this process, which ends the others in order.
    stdout = subprocess.PIPE if output else None
    process = subprocess.Popen(command, stdout=stdout, stderr=errors, start_new_session=True)
    children.append(process)
    return process


def _ready(process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("the cluster did not start; what it said is above")
    nodes: list[dict[str, Any]] = json.loads(line)["nodes"]
    return nodes


def _leader(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    from hadelay import Client

    with Client([node["http"] for node in nodes]) as client:
        name = client.cluster().leader
    return next(node for node in nodes if node["name"] == name)


def _notes(directory: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob(f"{kind}[0-9]")):
        for line in path.read_text().splitlines():
            # A process may be writing its last line.
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _unsettled(directory: Path) -> str:
    published = sum(1 for _ in _notes(directory, "published"))
    delivered = sum(1 for _ in _notes(directory, "consumed"))
    return f"{published:,} are published and {delivered:,} delivered"


def _drain(directory: Path, until: float) -> None:
    """Wait until every published id was seen by a consumer, and a little longer: for what might come twice."""
    while time.time() < until:
        missing = {n["id"] for n in _notes(directory, "published")} - {n["id"] for n in _notes(directory, "consumed")}
        if not missing:
            time.sleep(2)
            return
        time.sleep(0.2)


def _sleep_until(at_ms: float) -> None:
    time.sleep(max(0.0, at_ms / 1000 - time.time()))


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(children):
        if process.poll() is None:
            process.terminate()
    for process in children:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(argv: list[str]) -> int:
    if argv[:1] == ["produce"]:
        urls, number, count, start_ms, notes = argv[1:]
        asyncio.run(produce(urls, int(number), int(count), float(start_ms), Path(notes)))
        return 0
    if argv[:1] == ["consume"]:
        asyncio.run(consume(argv[1], Path(argv[2])))
        return 0
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sync", choices=("commit", "interval"), default="commit", help="how hand-outs are replicated")
    parser.add_argument("--messages", type=int, default=6000, help="published in all")
    chosen = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(chosen.sync, chosen.messages)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
