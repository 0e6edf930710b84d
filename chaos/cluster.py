"""The cluster under test: processes that chaos starts itself, or one that an admin runs, given by a cluster file."""

import contextlib
import mmap
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import msgspec

from chaos import tools
from chaos.disks import Disk
from chaos.freeports import free_ports
from chaos.namespaces import Network
from chaos.scenario import KINDS, TARGETS, Mistake, Scenario, read_struct, unknown
from chaos.sim.failpoints import arm, passed
from chaos.tools import authorization
from hadelay.settings.load import line_of

_PR_SET_PDEATHSIG = 1
_CLEAN_END_S = 20.0
_COMMAND_S = 120.0
#: Layout of the page of memory that preload.c shares with chaos: switches for one node, number of completed journal
#: syncs, then inode and synced length of each journal file.
_ORDERS, _SYNCS, _FILE, _FILES = struct.Struct("<iiq"), struct.Struct("<Q"), struct.Struct("<QQ"), 16
_FILES_AT = _ORDERS.size + _SYNCS.size
CONTROL_BYTES = _FILES_AT + _FILES * _FILE.size
#: Number of journal segments, newest first, that are searched for a message that was just stored.
_SEGMENTS = 3
#: Number of files in which the fault `rot` flips a bit, and limit of tries per file to find a byte in use.
_ROTTEN_FILES, _TRIES = 3, 200


class Cluster:
    """A cluster under test, and the operations that faults consist of. An operation blocks until it is done; an
    operation that heals a fault may be repeated."""

    #: HTTP URL of each node, by node name.
    urls: dict[str, str]
    network: Network | None = None
    disks: Mapping[str, Disk] = {}
    #: True: operations on nodes take seconds, so they must run in a thread.
    slow = False

    @property
    def names(self) -> list[str]:
        return list(self.urls)

    def others(self, name: str) -> list[str]:
        return [other for other in self.urls if other != name]

    def do(self, what: str, name: str) -> None:
        """Do an operation on a node: kill, stop, start, pause, resume, cut or uncut (from all other nodes); or, while
        the node does not run, empty, rot, copy or restore its data."""
        raise NotImplementedError

    def arm(self, name: str, point: str) -> None:
        """Make the node end when its process reaches this crash point; "": at no point."""
        raise NotImplementedError

    def passed(self) -> set[str]:
        """Crash points that any node has reached; empty if unknown."""
        return set()

    def syncs(self) -> tuple[int, ...]:
        """Number of journal syncs that each node has completed; empty where syncs are not counted."""
        return ()

    def synced(self) -> list[dict[int, int]]:
        """For each node, synced length of each journal file, by inode; empty where lengths are unknown."""
        return []

    def unsynced(self, marker: bytes, synced: list[dict[int, int]]) -> tuple[bool, list[str]]:
        """Find `marker` in the journals. Returns whether a majority of nodes has it, and the nodes that had it only in
        unsynced bytes. synced: a result of the method `synced`. Blocks."""
        raise NotImplementedError

    def control(self, name: str, *, sync_delay_ms: int = 0, sync_errno: int = 0, clock_offset_ms: int = 0) -> None:
        """Set the faults that preload.c injects into a node: delay and errno of syncs, offset of the wall clock."""
        raise NotImplementedError

    def ended(self, name: str) -> int | None:
        """Exit code of a node that does not run; None if the node runs or the code is unknown."""
        return None

    def pid(self, name: str) -> int | None:
        """Process id of a running node on this machine, or None."""
        return None

    def used_bytes(self) -> int:
        """Bytes used on the fullest node's disk, which a node with an empty disk has to fetch; 0 if unknown."""
        return 0

    def founded(self) -> None:
        """Note that every node was ready once: from now on, nodes start without --init."""

    def up(self) -> None:
        """Start the nodes, or check that they answer."""

    def close(self) -> None:
        """Stop the nodes, whatever their state; only files remain."""


class LocalCluster(Cluster):
    """Nodes n1 … nN on this machine, in `directory`; they have own networks and disks if the faults need these."""

    def __init__(self, scenario: Scenario, directory: Path, kinds: set[str], port_base: int | None = None) -> None:
        needs = {need for kind in kinds for need in KINDS[kind].needs}
        self.directory = directory
        self._scenario = scenario
        self._names = [f"n{i + 1}" for i in range(scenario.cluster.nodes)]
        self.network = Network(self._names) if "ip" in needs else None
        mib = scenario.cluster.disk_mib
        self.disks = {name: Disk(directory, name, mib) for name in self._names} if "mkfs" in needs else {}
        self._preload = None if tools.missing("cc") else tools.build_preload(directory)
        self._faulty = bool(scenario.cluster.mutation) or "crash" in kinds
        self._draw = random.Random(scenario.seed)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._pages: list[mmap.mmap] = []
        #: Names of the nodes whose processes got SIGTERM and may still run.
        self._ending: set[str] = set()
        self._founded = False
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("HADELAY_")}
        # Make chaos.sim.faulty importable in nodes, whatever their working directory.
        self._environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        first = port_base or free_ports(2 * len(self._names))
        self._ports = range(first, first + 2 * len(self._names))
        self.urls = {name: f"http://{self._http(i)}" for i, name in enumerate(self._names)}

    def _http(self, i: int) -> str:
        return f"{self.network.address(self._names[i])}:8400" if self.network else f"127.0.0.1:{self._ports[i]}"

    def _raft(self, i: int) -> str:
        port = self._ports[len(self._names) + i]
        return f"{self.network.address(self._names[i])}:8500" if self.network else f"127.0.0.1:{port}"

    def _data(self, name: str) -> Path:
        return (self.disks[name].mount if self.disks else self.directory) / name

    def used_bytes(self) -> int:
        return max((shutil.disk_usage(disk.mount).used for disk in self.disks.values()), default=0)

    def up(self) -> None:
        if self.network:
            self.network.up()
        for disk in self.disks.values():
            disk.make()
        peers = "".join(f'{name} = "{self._raft(i)}"\n' for i, name in enumerate(self._names))
        for i, name in enumerate(self._names):
            (self.directory / f"{name}.toml").write_text(
                f'[node]\nname = "{name}"\ndata_dir = "{self._data(name)}"\n[cluster]\nid = "chaos-{os.getpid()}"\n'
                f'[http]\nlisten = "{self._http(i)}"\n[raft]\nlisten = "{self._raft(i)}"\n'
                f'[dispatch]\nsync = "{self._scenario.cluster.sync}"\n'
                f"[security]\ninsecure = {'true' if self.network else 'false'}\n[raft.peers]\n{peers}"
            )
            self._control_file(name).write_bytes(bytes(CONTROL_BYTES))
            if self._preload:
                with open(self._control_file(name), "rb") as file:
                    self._pages.append(mmap.mmap(file.fileno(), CONTROL_BYTES, prot=mmap.PROT_READ))
            self.arm(name, "")
        for name in self._names:
            self._start(name)

    def do(self, what: str, name: str) -> None:
        getattr(self, f"_{what}")(name)

    def founded(self) -> None:
        self._founded = True  # from now on, nodes start without --init, as an empty directory then means lost data

    def _start(self, name: str) -> None:
        if name in self._ending:
            self._ending.discard(name)
            try:
                self._processes[name].wait(_CLEAN_END_S)
            except subprocess.TimeoutExpired:
                self._kill(name)
        if name in self._processes and self._processes[name].poll() is None:
            return
        mutation = self._scenario.cluster.mutation
        words = ["hadelay"]
        if self._faulty:
            words = ["chaos.sim.faulty", "--points", str(self._points_file(name))]
            words += ["--mutation", mutation] if mutation else []
        words += ["serve", str(self.directory / f"{name}.toml"), "--output", "json"]
        words += [] if self._founded else ["--init"]
        # Use a short checkpoint interval, small journal segments and a small free-space reserve: then even a short run
        # has checkpoints and new segments, and reaches the reserve.
        settings = ["storage.checkpoint_interval_ms=5s", "raft.segment_bytes=8MiB"]
        settings += ["storage.min_free_bytes=48MiB"] if self.disks else []
        for setting in (*settings, *self._scenario.cluster.settings):
            words += ["--set", setting]
        environment = dict(self._environment)
        if self._preload:
            environment |= {"LD_PRELOAD": str(self._preload), "CHAOS_CONTROL": str(self._control_file(name))}
        space = self.network.space(name) if self.network else None

        def before() -> None:  # runs in the child process: the kernel kills the node when chaos ends
            tools.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if space:
                tools.enter_namespace(space)

        with open(self.directory / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=before,
            )

    def _kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def _stop(self, name: str) -> None:
        self._processes[name].terminate()
        self._ending.add(name)

    def _pause(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGSTOP)

    def _resume(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def _limit(self, name: str) -> None:
        self._may_open(name, 0)

    def _unlimit(self, name: str) -> None:
        self._may_open(name, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._start(name)

    def _may_open(self, name: str, files: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if self._processes[name].poll() is None:
            resource.prlimit(self._processes[name].pid, resource.RLIMIT_NOFILE, (files, hard))

    def _empty(self, name: str) -> None:
        shutil.rmtree(self._data(name), ignore_errors=True)
        self._sync(name)

    def _sync(self, name: str) -> None:
        if self.disks:
            self.disks[name].sync()

    def _rot(self, name: str) -> None:
        """Flip one bit of a byte in use, in some of the node's files."""
        kept = [path for path in self._data(name).rglob("*") if path.is_file() and ".lost-" not in str(path)]
        paths = sorted(path for path in kept if path.stat().st_size)
        for path in self._draw.sample(paths, min(_ROTTEN_FILES, len(paths))):
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                for _ in range(_TRIES):  # a zero byte may be unused space: try another byte
                    at = self._draw.randrange(len(data))
                    if data[at]:
                        data[at] ^= 1 << self._draw.randrange(8)
                        break

    def _copy(self, name: str) -> None:
        shutil.rmtree(self._copy_of(name), ignore_errors=True)
        shutil.copytree(self._data(name), self._copy_of(name))

    def _restore(self, name: str) -> None:
        if self._copy_of(name).exists():
            self._empty(name)
            shutil.copytree(self._copy_of(name), self._data(name))
            shutil.rmtree(self._copy_of(name))
            self._sync(name)

    def _copy_of(self, name: str) -> Path:
        return self.directory / f"{name}.copy"

    def _cut(self, name: str) -> None:
        assert self.network
        self.network.cut(name)

    def _uncut(self, name: str) -> None:
        assert self.network
        self.network.uncut(name)

    def _control_file(self, name: str) -> Path:
        return self.directory / f"{name}.control"

    def control(self, name: str, *, sync_delay_ms: int = 0, sync_errno: int = 0, clock_offset_ms: int = 0) -> None:
        with open(self._control_file(name), "r+b", buffering=0) as file:
            file.write(_ORDERS.pack(sync_delay_ms, sync_errno, clock_offset_ms))

    def _points_file(self, name: str) -> Path:
        return self.directory / f"{name}.point"

    def arm(self, name: str, point: str) -> None:
        arm(self._points_file(name), point)

    def passed(self) -> set[str]:
        return set().union(*(passed(self._points_file(name)) for name in self._names)) if self._faulty else set()

    def syncs(self) -> tuple[int, ...]:
        return tuple([_SYNCS.unpack_from(page, _ORDERS.size)[0] for page in self._pages])

    def synced(self) -> list[dict[int, int]]:
        return [dict(_FILE.iter_unpack(page[_FILES_AT:])) for page in self._pages]

    def unsynced(self, marker: bytes, synced: list[dict[int, int]]) -> tuple[bool, list[str]]:
        found, lacking = 0, []
        for name, files in zip(self._names, synced, strict=True):
            places = list(_places(self._data(name) / "raft", marker))
            found += bool(places)
            if places and not any(end <= files.get(inode, 0) for inode, end in places):
                lacking.append(name)
        return 2 * found > len(self._names), lacking

    def ended(self, name: str) -> int | None:
        return self._processes[name].poll()

    def pid(self, name: str) -> int | None:
        return self._processes[name].pid if self.ended(name) is None else None

    def close(self) -> None:
        for disk in self.disks.values():
            with contextlib.suppress(OSError):
                disk.thaw()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
        for disk in self.disks.values():
            disk.remove()
        if self.network:
            self.network.down()


def _places(journal: Path, marker: bytes) -> Iterator[tuple[int, int]]:
    """Find `marker` in the newest journal segments: (inode, offset of its end)."""
    for path in sorted(journal.glob("g*/*.seg"), reverse=True)[:_SEGMENTS]:
        with contextlib.suppress(OSError):  # ignore a segment that the node removed meanwhile
            inode, data = path.stat().st_ino, path.read_bytes()
            at = data.find(marker)
            if at >= 0:
                yield inode, at + len(marker)


class _NodePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    http: str
    kill: str = ""
    stop: str = ""
    start: str = ""
    pause: str = ""
    resume: str = ""
    empty: str = ""
    cut: str = ""
    uncut: str = ""


#: Operations for which a node's table in the cluster file may have a command.
COMMANDS = tuple(field for field in _NodePart.__struct_fields__ if field != "http")


class _ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: dict[str, _NodePart]


class _Member(msgspec.Struct, frozen=True):
    name: str
    http: str


class _Members(msgspec.Struct, frozen=True):
    members: list[_Member]


#: Kind of fault → operations that this kind consists of. In the cluster file, every table [nodes.NAME] must give a
#: command for each of them; else no fault of this kind can happen.
_NEEDS = {
    "kill": ("kill", "start"), "stop": ("stop", "start"), "pause": ("pause", "resume"),
    "wipe": ("kill", "empty", "start"), "transfer": (), "cut": ("cut", "uncut"),
}  # fmt: skip


class GivenCluster(Cluster):
    """A cluster that an admin runs. Each operation is a command of the node's table in the cluster file, and runs on
    this machine. {node} in a command is the node's name; {peers} are the hosts of the other nodes."""

    slow = True

    def __init__(self, path: Path) -> None:
        file, self._lines = read_struct(path, _ClusterFile)
        self._path, self._nodes = path, file.nodes
        self.urls = {name: node.http.rstrip("/") for name, node in file.nodes.items()}
        if not self._nodes:
            raise Mistake(f"{path}: the file names no nodes: add a table [nodes.NAME] for each node")
        for name, node in self._nodes.items():
            if not re.fullmatch(r"https?://[^/\s]+", self.urls[name]):
                raise Mistake(f"{self._at(name, 'http')}: {node.http!r}: expected a URL such as http://10.0.0.1:8400")
            for what in COMMANDS:
                try:
                    shlex.split(getattr(node, what))
                except ValueError as error:
                    raise Mistake(f"{self._at(name, what)}: {error}") from error

    def _at(self, name: str, what: str) -> str:
        key = f"nodes.{name}.{what}"
        return f"{self._path}:{line_of(self._lines, key)}: {key}"

    def kinds(self, asked: set[str]) -> set[str]:
        """Kinds of faults in `asked` that the cluster file has all commands for. Raises Mistake if a kind asked for by
        name lacks a command."""
        lacking = {}
        for kind, needs in _NEEDS.items():
            for name, node in self._nodes.items():
                if absent := [what for what in needs if not getattr(node, what)]:
                    where = f"{self._path}:{line_of(self._lines, f'nodes.{name}')}: nodes.{name}"
                    lacking[kind] = f"{where}: {kind} needs {', '.join(absent)}"
        for kind in sorted(asked - {"any"}):
            if kind not in _NEEDS:
                raise Mistake(
                    f"fault kind {kind} works only on a cluster that chaos starts; with a cluster file, choose from "
                    f"{', '.join(_NEEDS)}"
                )
            if kind in lacking:
                raise Mistake(lacking[kind])
        return (asked - {"any"}) | (_NEEDS.keys() - lacking.keys() if "any" in asked else set())

    def up(self) -> None:
        """Check that the cluster file names every member: clients follow redirects and faults hit members by name, and
        both must stay on nodes of the file."""
        for name, url in self.urls.items():
            request = urllib.request.Request(f"{url}/v1/cluster?stale=true", headers=authorization())
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    members = msgspec.json.decode(answer.read(), type=_Members).members
            except HTTPError as error:
                wanted = ": set HADELAY_TOKEN to a valid token" if error.code == HTTPStatus.UNAUTHORIZED else ""
                raise Mistake(f"{name}: {url} answers {error.code} {error.reason}{wanted}") from error
            except (OSError, HTTPException) as error:
                raise Mistake(f"{name}: {url} does not answer: {error}") from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Mistake(f"{name}: {url} is not a hadelay node: {error}") from error
            for member in members:
                if self.urls.get(member.name) != member.http.rstrip("/"):
                    raise Mistake(
                        f"{self._path}: the cluster has the member {member.name} at {member.http}, which this file "
                        "does not name: add it, because chaos uses only addresses in the file"
                    )

    def do(self, what: str, name: str) -> None:
        peers = " ".join(str(urlsplit(self.urls[other]).hostname) for other in self.others(name))
        words = shlex.split(getattr(self._nodes[name], what).replace("{node}", name).replace("{peers}", peers))
        try:
            # Run the command in its own session: Ctrl-C is for chaos and must not end a command that heals a fault.
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_COMMAND_S,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Mistake(f"{name}: {shlex.join(words)}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise Mistake(f"{name}: {shlex.join(words)}: the command did not end within {_COMMAND_S:.0f} s") from error
        if done.returncode:
            raise Mistake(f"{name}: {shlex.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def check_targets(scenario: Scenario, cluster: Cluster) -> None:
    """Raise Mistake if the scenario names a node that this cluster does not have."""
    for i, fault in enumerate(scenario.faults):
        if fault.target not in (*TARGETS, *cluster.names):
            raise Mistake(f"faults[{i}].target: {unknown(fault.target, (*TARGETS, *cluster.names))}")
