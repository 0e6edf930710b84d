"""`hadelay dev`: a cluster of real processes on this machine, for a first look, for tests and for the demo.

Node i = 0…N−1 is called n<i+1>, serves HTTP on port base + i and its peers on base + N + i. The directory has a TOML
file, a log and a data directory per node, and `cluster.json`, to start a killed node again by name.

With S shards, each node has S processes of `hadelay serve FILE --shard`, on the ports base + S·i + shard and base +
S·(N + i) + shard. The process of node n1 and shard 2 is called n1-s2.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from cyclopts import Parameter

from hadelay.cli import shards as shard_commands
from hadelay.cli.output import Printing, Remote, emit_json, note, say
from hadelay.cli.serve import Settings, run_node
from hadelay.errors import BadRequest, Conflict, Forbidden, HadelayError, NotFound, Unauthorized
from hadelay.platform.disk import Disk, private, replace_file
from hadelay.settings.load import load
from hadelay.settings.shardmap import MAX_SHARDS

#: Timeout of a node's own shutdown, in seconds: leaders hand over, and all nodes make a checkpoint.
END_S = 20.0
#: Timeout, in seconds, of giving all shards their common map once all nodes are ready.
_MAP_S = 30.0
#: Pause between two attempts to give the shards their map, in seconds.
_PAUSE_S = 0.2
#: Port of the first node, unless --port-base names another.
DEFAULT_PORT = 8400
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Replica(NamedTuple):
    """A process of the cluster. node: index of its node; shard: index of the shard that it serves."""

    node: int
    shard: int

    @property
    def name(self) -> str:
        return f"n{self.node + 1}-s{self.shard}" if self.shard else f"n{self.node + 1}"


class Layout(msgspec.Struct, kw_only=True):
    """Content of cluster.json. founded: number of shards whose nodes have all been ready at some time. If a node of
    such a shard has an empty data directory, data was lost."""

    id: str
    nodes: int
    port_base: int
    shards: int = 1
    sync: Literal["commit", "interval"] = "commit"
    settings: list[str] = []
    founded: int = 0

    def names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    def replicas(self) -> list[Replica]:
        return [Replica(i, shard) for shard in range(self.shards) for i in range(self.nodes)]

    def http(self, i: int, shard: int = 0) -> str:
        return f"127.0.0.1:{self.port_base + i * self.shards + shard}"

    def raft(self, i: int, shard: int = 0) -> str:
        return f"127.0.0.1:{self.port_base + (self.nodes + i) * self.shards + shard}"

    def urls(self, shard: int) -> dict[str, str]:
        return {name: f"http://{self.http(i, shard)}" for i, name in enumerate(self.names())}

    def toml(self, i: int, directory: Path) -> str:
        name = self.names()[i]
        peers = "".join(f'{peer} = "{self.raft(j)}"\n' for j, peer in enumerate(self.names()))
        return (
            f"# Written by `hadelay dev`.\n"
            f'[node]\nname = "{name}"\ndata_dir = "{directory / name}"\n\n'
            f'[cluster]\nid = "{self.id}"\n\n'
            f'[http]\nlisten = "{self.http(i)}"\naws = true\n\n'
            f'[dispatch]\nsync = "{self.sync}"\n\n'
            f'[raft]\nlisten = "{self.raft(i)}"\n\n'
            f'[webhooks]\nallow = ["127.0.0.0/8", "::1/128"]\n\n'
            f"[raft.peers]\n{peers}"
        )

    def save(self, directory: Path) -> None:
        replace_file(Disk(), str(directory / "cluster.json"), msgspec.json.encode(self) + b"\n")


def dev(
    *,
    nodes: int | None = None,
    shards: int | None = None,
    data_dir: Path = Path("hadelay-dev"),
    port_base: int | None = None,
    dispatch_sync: Literal["commit", "interval"] | None = None,
    settings: Settings = (),
    start: Annotated[str | None, Parameter(name="--start")] = None,
    printing: Printing = Printing(),
) -> int:
    """Run a cluster of real processes in the foreground, until SIGINT or SIGTERM ends all of them.

    Args:
        nodes: Number of nodes. Default: 3, or those of the directory's cluster.
        shards: Number of shards, clusters of as many nodes each that share all topics. A directory's number may grow.
            Default: 1, or those of the directory.
        data_dir: Directory of the cluster.
        port_base: First port: an HTTP port per process, then a link port per process. Default: 8400, or the
            directory's.
        dispatch_sync: commit: a hand-out waits for its replication. interval: a hand-out does not wait.
        settings: KEY=VALUE for every node, such as limits.max_delay_ms=30d. May be repeated.
        start: Start only this node of an existing cluster, for example after a kill; n1-s2 is that of shard 2.
    """
    import_module("lmdb")  # fail here if only the client is installed, and not in the logs of three nodes
    directory = data_dir.absolute()
    if start is not None:
        return _start_one(directory, start, settings, printing)
    layout = _layout(directory, nodes, shards, port_base)
    layout.sync = dispatch_sync or layout.sync
    layout.settings = list(settings) or layout.settings
    _prepare(layout, directory)
    return asyncio.run(_Cluster(layout, directory, printing).run())


def _read_layout(directory: Path) -> Layout | None:
    try:
        return msgspec.json.decode((directory / "cluster.json").read_bytes(), type=Layout)
    except FileNotFoundError:
        return None


def _layout(directory: Path, nodes: int | None, shards: int | None, port_base: int | None) -> Layout:
    layout = _read_layout(directory)
    if layout is None:
        layout = Layout(id=f"dev-{secrets.token_hex(4)}", nodes=nodes or 3, port_base=port_base or DEFAULT_PORT)
    elif nodes not in (None, layout.nodes):
        raise Conflict(f"{directory} holds a cluster of {layout.nodes} nodes, not {nodes}: use another --data-dir")
    if shards is not None and not 1 <= shards <= MAX_SHARDS:
        raise BadRequest(f"--shards {shards}: expected 1 to {MAX_SHARDS}")
    if shards is not None and shards < layout.founded:
        raise Conflict(
            f"{directory} holds {layout.founded} shards, and no shard can be removed: use another --data-dir"
        )
    layout.shards = shards or layout.shards
    layout.port_base = port_base or layout.port_base
    return layout


def _prepare(layout: Layout, directory: Path) -> None:
    """Check the ports, and write the files of the nodes."""
    for i, shard in layout.replicas():
        for address in (layout.http(i, shard), layout.raft(i, shard)):
            _must_be_free(address)
    Disk().makedirs(str(directory))
    for i, name in enumerate(layout.names()):
        replace_file(Disk(), str(directory / f"{name}.toml"), layout.toml(i, directory).encode())
    layout.save(directory)


def _must_be_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OverflowError:
            raise BadRequest(f"{address}: the last port is 65535; choose a lower --port-base") from None
        except OSError as error:
            raise Conflict(
                f"{address}: {error.strerror}; stop the process that listens there, or choose another --port-base"
            ) from error


def _start_one(directory: Path, name: str, settings: tuple[str, ...], printing: Printing) -> int:
    layout = _read_layout(directory)
    if layout is None:
        raise NotFound(f"{directory} holds no cluster: `hadelay dev --data-dir {directory}` creates one")
    replicas = {replica.name: replica for replica in layout.replicas()}
    if name not in replicas:
        raise NotFound(f"no node {name} in {directory}; choose one of {', '.join(replicas)}")
    i, shard = replicas[name]
    founding = () if shard < layout.founded else ("cluster.init=true",)
    overrides = (*founding, *layout.settings, *settings)
    file = directory / f"{layout.names()[i]}.toml"
    return run_node(load(str(file), os.environ, overrides, shard=shard), printing)


class _Cluster:
    """Supervisor: starts, watches and ends the node processes."""

    def __init__(self, layout: Layout, directory: Path, printing: Printing) -> None:
        self.layout, self.directory, self.json = layout, directory, printing.output == "json"
        self.replicas = {replica.name: replica for replica in layout.replicas()}
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> int:
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        for name in self.replicas:
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
        self.layout.founded = self.layout.shards
        self.layout.save(self.directory)
        if self.layout.shards > 1:
            await self._share_topics()
        self._greet()
        await asyncio.gather(*map(self._watch, self.processes))

    async def _spawn(self, name: str) -> asyncio.subprocess.Process:
        i, shard = self.replicas[name]
        arguments = [str(self.directory / f"{self.layout.names()[i]}.toml"), "--output", "json"]
        arguments += ["--shard", str(shard)] if shard else []
        arguments += [] if shard < self.layout.founded else ["--init"]
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

    async def _share_topics(self) -> None:
        """Give all shards their common map. If the shards require tokens, print the command to do so by hand: only the
        admin of each shard has a token for it."""
        token = os.environ.get("HADELAY_TOKEN", "")
        nodes = {shard: self.layout.urls(shard) for shard in range(self.layout.shards)}
        at = {shard: Remote(servers=",".join(urls.values()), token=token) for shard, urls in nodes.items()}
        end = time.monotonic() + _MAP_S
        while True:
            try:
                await asyncio.to_thread(shard_commands.share, at, nodes)
                return
            except (Unauthorized, Forbidden) as error:
                note(f"The shards have no common map yet: {error}. With a token of each shard: hadelay shards add 1 …")
                return
            except (HadelayError, OSError) as error:
                known = isinstance(error, HadelayError) and not error.retryable
                if known or time.monotonic() > end:
                    raise HadelayError(f"the shards got no common map: {error}") from error
            await asyncio.sleep(_PAUSE_S)

    def _greet(self) -> None:
        nodes: list[dict[str, Any]] = [
            {
                "name": name, "shard": shard, "pid": self.processes[name].pid,
                "http": f"http://{self.layout.http(i, shard)}", "raft": self.layout.raft(i, shard),
            }
            for name, (i, shard) in self.replicas.items()
        ]  # fmt: skip
        if self.json:
            emit_json({"ready": True, "nodes": nodes})
            return
        for node in nodes:
            say(f"{node['name']}  {node['http']}  pid {node['pid']}")
        url = nodes[0]["http"]
        note(f"\nData and logs: {self.directory}, now {self._megabytes()} MB per node; Ctrl-C ends all.")
        note("Try, in another terminal:")
        note(f"  curl -H 'Content-Type: text/plain' -d 'hello' '{url}/v1/topics/greetings/messages?delay=5s'")
        note(f"  curl -L -H 'Accept-Body: text' -d '{{\"wait\": \"10s\"}}' {url}/v1/topics/greetings/receive")
        note(f"The console: {url}/")
        if self.layout.shards > 1:
            note(
                f"\n{self.layout.shards} shards share the topics; any node takes requests for all: hadelay shards list"
            )
        if self.layout.port_base != DEFAULT_PORT or self.layout.shards > 1:
            servers = ",".join(node["http"] for node in nodes)
            note(f"Other commands and programs find the cluster by:\n  export HADELAY_SERVERS={servers}")

    def _megabytes(self) -> int:
        """Disk space that each process takes, on average, in MB."""
        size = 0
        for name in self.layout.names():
            with contextlib.suppress(FileNotFoundError):  # a node may delete a file after rglob listed it
                for path in (self.directory / name).rglob("*"):
                    size += path.stat().st_blocks * 512
        return size // len(self.processes) // 1_000_000

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
        for name, (i, shard) in self.replicas.items():
            try:
                _must_be_free(self.layout.http(i, shard))
            except Conflict:
                note(
                    f"hadelay: {name} still runs at {self.layout.http(i, shard)}: press Ctrl-C where "
                    f"--start {name} runs"
                )
