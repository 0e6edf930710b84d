"""`hadelay dev`: a cluster of real processes on this machine, for a first look, for tests and for the demo.

Node i = 0…N−1 is called n<i+1>, serves HTTP on port base + i and its peers on base + N + i. The directory has a TOML
file, a log and a data directory per node, and `cluster.json`, to start a killed node again by name.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from hadelay.cli.output import Printing, emit_json, note
from hadelay.cli.serve import Settings, run_node
from hadelay.errors import Conflict, HadelayError, NotFound
from hadelay.platform.disk import Disk, private, replace_file
from hadelay.settings.load import load

#: Timeout of a node's own shutdown, in seconds: leaders hand over, and all nodes make a checkpoint.
END_S = 20.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Layout(msgspec.Struct, kw_only=True):
    """Content of cluster.json. founded: all nodes were ready once; an empty data directory is now a data loss."""

    id: str
    nodes: int
    port_base: int
    sync: Literal["commit", "interval"] = "commit"
    settings: list[str] = []
    founded: bool = False

    def names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    def http(self, i: int) -> str:
        return f"127.0.0.1:{self.port_base + i}"

    def raft(self, i: int) -> str:
        return f"127.0.0.1:{self.port_base + self.nodes + i}"

    def toml(self, i: int, directory: Path) -> str:
        name = self.names()[i]
        peers = "".join(f'{peer} = "{self.raft(j)}"\n' for j, peer in enumerate(self.names()))
        return (
            f"# Written by `hadelay dev`.\n"
            f'[node]\nname = "{name}"\ndata_dir = "{directory / name}"\n\n'
            f'[cluster]\nid = "{self.id}"\n\n'
            f'[http]\nlisten = "{self.http(i)}"\n\n'
            f'[dispatch]\nsync = "{self.sync}"\n\n'
            f'[raft]\nlisten = "{self.raft(i)}"\n\n'
            f'[webhooks]\nallow = ["127.0.0.0/8", "::1/128"]\n\n'
            f"[raft.peers]\n{peers}"
        )

    def save(self, directory: Path) -> None:
        replace_file(Disk(), str(directory / "cluster.json"), msgspec.json.encode(self) + b"\n")


def dev(
    *, nodes: int | None = None, data_dir: Path = Path("hadelay-dev"), port_base: int | None = None,
    dispatch_sync: Literal["commit", "interval"] | None = None, settings: Settings = (),
    start: Annotated[str | None, Parameter(name="--start")] = None, printing: Printing = Printing(),
) -> int:  # fmt: skip
    """Run a cluster of real processes in the foreground, until SIGINT or SIGTERM ends all of them.

    Args:
        nodes: Number of nodes. Default: 3, or those of the directory's cluster.
        data_dir: Directory of the cluster.
        port_base: First port: an HTTP port per node, then a link port per node. Default: 8400, or the directory's.
        dispatch_sync: commit: a hand-out waits for its replication. interval: a hand-out does not wait.
        settings: KEY=VALUE for every node, such as limits.max_delay_ms=30d. May be repeated.
        start: Start only this node of an existing cluster, for example after a kill.
    """
    directory = data_dir.absolute()
    if start is not None:
        return _start_one(directory, start, settings, printing)
    layout = _prepare(directory, nodes, port_base, dispatch_sync, settings)
    return asyncio.run(_Cluster(layout, directory, printing).run())


def _read_layout(directory: Path) -> Layout | None:
    try:
        return msgspec.json.decode((directory / "cluster.json").read_bytes(), type=Layout)
    except FileNotFoundError:
        return None


def _prepare(directory: Path, nodes: int | None, port_base: int | None, sync: Any, settings: tuple[str, ...]) -> Layout:
    layout = _read_layout(directory)
    if layout is None:
        layout = Layout(id=f"dev-{secrets.token_hex(4)}", nodes=nodes or 3, port_base=port_base or 8400)
    elif nodes not in (None, layout.nodes):
        raise Conflict(f"{directory} holds a cluster of {layout.nodes} nodes, not {nodes}: use another --data-dir")
    layout.port_base = port_base or layout.port_base
    layout.sync = sync or layout.sync
    layout.settings = list(settings) or layout.settings
    for i in range(layout.nodes):
        for address in (layout.http(i), layout.raft(i)):
            _must_be_free(address)
    Disk().makedirs(str(directory))
    for i, name in enumerate(layout.names()):
        replace_file(Disk(), str(directory / f"{name}.toml"), layout.toml(i, directory).encode())
    layout.save(directory)
    return layout


def _must_be_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise Conflict(
                f"{address}: {error.strerror}; stop the process that listens there, or choose another --port-base"
            ) from error


def _start_one(directory: Path, name: str, settings: tuple[str, ...], printing: Printing) -> int:
    layout = _read_layout(directory)
    if layout is None:
        raise NotFound(f"{directory} holds no cluster: `hadelay dev --data-dir {directory}` creates one")
    if name not in layout.names():
        raise NotFound(f"no node {name} in {directory}; choose one of {', '.join(layout.names())}")
    founding = () if layout.founded else ("cluster.init=true",)
    overrides = (*founding, *layout.settings, *settings)
    return run_node(load(str(directory / f"{name}.toml"), os.environ, overrides), printing)


class _Cluster:
    """Supervisor: starts, watches and ends the node processes."""

    def __init__(self, layout: Layout, directory: Path, printing: Printing) -> None:
        self.layout, self.directory, self.json = layout, directory, printing.output == "json"
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        for name in self.layout.names():
            self.processes[name] = await self._spawn(name)
        stop = asyncio.create_task(stopping.wait())
        supervision = asyncio.create_task(self._supervise())
        try:
            await asyncio.wait([stop, supervision], return_when=asyncio.FIRST_COMPLETED)
            if supervision.done():
                supervision.result()
            await stop
            return 0
        finally:
            supervision.cancel()
            await self._end()

    async def _supervise(self) -> None:
        await asyncio.gather(*map(self._until_ready, self.processes))
        self._greet()
        await asyncio.gather(*map(self._watch, self.processes))

    async def _spawn(self, name: str) -> asyncio.subprocess.Process:
        arguments = [str(self.directory / f"{name}.toml"), "--output", "json"]
        arguments += [] if self.layout.founded else ["--init"]
        for setting in self.layout.settings:
            arguments += ["--set", setting]
        with open(self.directory / f"{name}.log", "ab", opener=private) as log:
            # Each node gets its own session: Ctrl-C must reach nodes through the supervisor, in order. PDEATHSIG: the
            # kernel ends the nodes of a killed supervisor, which would otherwise keep their ports.
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "hadelay", "serve", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    async def _until_ready(self, name: str) -> None:
        """Wait for the node's ready line; HadelayError if its process ends before."""
        output = self.processes[name].stdout
        assert output is not None
        while line := await output.readline():
            with contextlib.suppress(msgspec.DecodeError):
                said = msgspec.json.decode(line)
                if isinstance(said, dict) and said.get("ready"):
                    return
        raise HadelayError(f"{name} ended before it was ready; {self._log_tail(name)}")

    def _greet(self) -> None:
        self.layout.founded = True
        self.layout.save(self.directory)
        nodes = [
            {"name": name, "pid": process.pid, "http": f"http://{self.layout.http(i)}", "raft": self.layout.raft(i)}
            for i, (name, process) in enumerate(self.processes.items())
        ]
        if self.json:
            emit_json({"ready": True, "nodes": nodes})
            return
        for node in nodes:
            print(f"{node['name']}  {node['http']}  pid {node['pid']}")
        url = nodes[0]["http"]
        note(f"\nTry, in another terminal (data and logs are in {self.directory}; Ctrl-C ends all):")
        note(f"  curl -H 'Content-Type: text/plain' -d 'hello' '{url}/v1/topics/greetings/messages?delay=5s'")
        note(f'  curl -L -d \'{{"wait": "10s"}}\' {url}/v1/topics/greetings/receive')

    async def _watch(self, name: str) -> None:
        code = await self.processes[name].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = "" if code == -signal.SIGKILL else f"; {self._log_tail(name)}"
        note(
            f"hadelay: {name} (pid {self.processes[name].pid}) {how}; the other nodes keep running{tail}\n"
            f"  Start it again: hadelay dev --data-dir {self.directory} --start {name}"
        )
        if self.json:
            emit_json({"died": {"name": name, "pid": self.processes[name].pid, "exit_code": code}})

    def _log_tail(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()[-5:] if path.exists() else []
        return f"the end of {path}:\n" + "\n".join(f"  {line}" for line in lines)

    async def _end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in self.processes.values()]
        await asyncio.wait(waits, timeout=END_S)
        for name, process in self.processes.items():
            if process.returncode is None:
                note(f"hadelay: {name} (pid {process.pid}) did not end within {END_S:.0f} s: killing it")
                process.kill()
        await asyncio.wait(waits)
