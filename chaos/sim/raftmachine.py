"""The machine of the simulator of Raft alone: it remembers the numbers that it applied, in one file."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from chaos.sim.disk import SimDisk
from hadelay.errors import FatalError
from hadelay.members import Members
from hadelay.storage import snapshots
from hadelay.storage.snapshots import Manifest, SnapshotFile

if TYPE_CHECKING:
    from chaos.sim.machines import Process
    from chaos.sim.raftsim import RaftSim


class PlainMachine:
    """A machine whose members never change, whose checkpoints stay, and which ignores what Raft tells it."""

    incarnations: dict[str, int]

    def incarnation(self, node: str) -> int | None:
        return self.incarnations.get(node)

    def members(self) -> tuple[int, Members]:
        return 0, ()

    def members_in(self, command: bytes) -> Members | None:
        return None

    def members_command(self, members: Members) -> bytes:
        raise NotImplementedError

    def _ignore(self, *_: Any) -> None:
        pass

    on_incarnation = on_members = on_link = on_leader = on_follower = on_heartbeat_info = on_message = release = _ignore


class RaftMachine(PlainMachine):
    """State: all numbers that were applied. A checkpoint is one file."""

    def __init__(self, sim: RaftSim, process: Process, disk: SimDisk) -> None:
        self.sim, self.process, self.disk, self.runtime = sim, process, disk, process.runtime
        self.index, self.term = 1, 0
        self.items: list[int] = []
        self.incarnations = {}
        disk.makedirs("/data")
        if disk.exists("/data/state"):
            f = disk.open("/data/state")
            self._load(f.pread(f.size(), 0))
        self.durable = self._dump()
        self.busy = False

    def _dump(self) -> bytes:
        body = json.dumps([self.index, self.term, self.items, self.incarnations]).encode()
        return b"%08x" % zlib.crc32(body) + body

    def _load(self, data: bytes) -> None:
        body = data[8:]
        assert int(data[:8], 16) == zlib.crc32(body), "torn checkpoint"
        self.index, self.term, self.items, self.incarnations = json.loads(body)

    def apply(self, index: int, term: int, command: bytes) -> Any:
        assert index > self.index, f"{self.process.name}: {index} after {self.index}"
        self.index, self.term = index, term
        kind, *values = json.loads(command)
        if kind == "inc":
            self.incarnations[values[0]] = values[1]
        else:
            self.items.append(values[0])
        self.sim.applied(self.process.name, index, term, command)
        if index % 40 == 0:
            self.runtime.call_soon(self.checkpoint)
        return values[0]

    def checkpoint(self) -> None:
        if self.busy:
            return
        self.busy = True
        data, index = self._dump(), self.index

        def done(result: Any, error: BaseException | None) -> None:
            self.busy = False
            if error is not None:
                self.sim._fatal(self.process, error)
                return
            self.durable = data
            if self.process.raft is not None:
                self.process.raft.compact(index)

        self.runtime.in_thread("disk", lambda: self.write(data), done)

    def write(self, data: bytes) -> None:
        f = self.disk.open("/data/state.new", create=True)
        f.truncate(0)
        f.pwrite(data, 0)
        f.sync()
        self.disk.rename("/data/state.new", "/data/state")
        self.disk.sync_dir("/data")

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        return json.dumps(["inc", node, incarnation]).encode()

    def heartbeat_info(self) -> bytes:
        return b"t"

    def manifest(self) -> Manifest | None:
        index, term, *_ = json.loads(self.durable[8:])
        if index <= 1:
            return None
        return Manifest(index, term, [SnapshotFile("state", len(self.durable), zlib.crc32(self.durable))], self.durable)

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes:
        return manifest.blob[offset : offset + size]

    def install(self, manifest: Manifest) -> Installer:
        return Installer(self, manifest)


class Installer(snapshots.Installer):
    """One file, `state`, kept in memory until `finish`."""

    def __init__(self, machine: RaftMachine, manifest: Manifest) -> None:
        self.machine, self.manifest, self.data = machine, manifest, bytearray()

    def have(self, name: str) -> int:
        return len(self.data)

    def write(self, name: str, offset: int, data: bytes) -> None:
        assert offset == len(self.data)
        self.data += data

    def finish(self, done: Any) -> None:
        machine, data = self.machine, bytes(self.data)

        def written(result: Any, error: BaseException | None) -> None:
            if error is not None:
                fatal = FatalError(str(error))
                fatal.__cause__ = error
                done(fatal)
                return
            machine._load(data)
            machine.durable = data
            done(None)

        machine.runtime.in_thread("disk", lambda: machine.write(data), written)

    def abort(self) -> None:
        pass
