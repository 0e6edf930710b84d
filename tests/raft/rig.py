"""Our nodes in a simulated world, small: a machine that remembers, a wire that records, a cluster."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack
from google_crc32c import value as crc32c

from chaos.sim.disk import SimDisk
from chaos.sim.logsafety import LogSafety
from chaos.sim.network import SimNet
from chaos.sim.raftsim import PlainMachine
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.errors import HadelayError
from hadelay.members import Member, Members
from hadelay.raft import messages
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import FOUNDING, Finished, RaftTuning
from hadelay.raft.records import ENTRY, encode_record
from hadelay.storage.identity import Identity
from hadelay.storage.snapshots import Manifest, SnapshotFile

CONFIG = RaftTuning(max_entry_bytes=8000, journal_keep_bytes=0)
JOURNAL = JournalConfig(segment_bytes=1 << 15, tail_bytes=1 << 13)


def founders(*names: str) -> Members:
    return tuple(Member(name, "") for name in names)


class Machine(PlainMachine):
    """Applied commands in order. A checkpoint is one file, named `state`; it is durable at once."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.index, self.term = 1, 0
        self.incarnations: dict[str, int] = {}
        self.leads: list[int] = []
        self.followed = 0
        self.messages: list[tuple[str, int, bytes]] = []
        self.infos: list[bytes] = []
        self.checkpoint: Manifest | None = None
        self.spoil: Callable[[bytes], bytes] = lambda chunk: chunk
        self.raises: Exception | None = None
        self.asked_for = 0

    def apply(self, index: int, term: int, command: bytes) -> Any:
        if self.raises is not None:
            self.asked_for += 1
            raise self.raises
        self.index, self.term = index, term
        if command.startswith(b"inc "):
            name, number = msgpack.unpackb(command[4:])
            self.incarnations[name] = number
        else:
            self.items.append(bytes(command))
        return len(self.items)

    def on_leader(self, term: int) -> None:
        self.leads.append(term)

    def on_follower(self) -> None:
        self.followed += 1

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        return b"inc " + msgpack.packb([node, incarnation])

    def heartbeat_info(self) -> bytes:
        return b"time"

    def on_heartbeat_info(self, info: bytes) -> None:
        self.infos.append(info)

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        self.messages.append((peer, kind, payload))

    # -- snapshots

    def dump(self) -> bytes:
        return msgpack.packb([self.index, self.term, self.items, self.incarnations])

    def load(self, data: bytes) -> None:
        self.index, self.term, self.items, self.incarnations = msgpack.unpackb(data)

    def take_checkpoint(self) -> None:
        data = self.dump()
        files = [SnapshotFile("hours/empty", 0, 0), SnapshotFile("state", len(data), crc32c(data))]
        self.checkpoint = Manifest(self.index, self.term, files, data)

    @property
    def checkpointed(self) -> int:
        return self.checkpoint.index if self.checkpoint is not None else 0

    def manifest(self) -> Manifest | None:
        return self.checkpoint

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes:
        return self.spoil(manifest.blob[offset : offset + size])

    def install(self, manifest: Manifest) -> Installer:
        return Installer(self, manifest)


class Installer:
    def __init__(self, machine: Machine, manifest: Manifest) -> None:
        self.machine, self.manifest = machine, manifest
        self.files: dict[str, bytearray] = {}

    def have(self, name: str) -> int:
        return len(self.files.get(name, b""))

    def write(self, name: str, offset: int, data: bytes) -> None:
        self.files.setdefault(name, bytearray())[offset:] = data

    def finish(self, done: Finished) -> None:
        data = bytes(self.files["state"])
        if crc32c(data) != self.manifest.files[-1].crc:
            done(HadelayError("the snapshot does not verify"))
            return
        self.machine.load(data)
        self.machine.checkpoint = Manifest(self.manifest.index, self.manifest.term, self.manifest.files, data)
        done(None)

    def abort(self) -> None:
        pass


class Wire:
    """A Network that only records what leaves."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.dropped: list[str] = []

    def start(self, receiver: object) -> None: ...

    def send(self, peer: str, frame: Any, urgent: bool = False) -> bool:
        data = bytes(frame) if isinstance(frame, (bytes, bytearray, memoryview)) else b"".join(frame)
        self.sent.append((peer, data))
        return True

    def disconnect(self, peer: str) -> None:
        self.dropped.append(peer)

    def set_members(self, peers: object) -> None: ...

    def close(self) -> None: ...

    def take(self, kind: int) -> list[tuple[str, bytes]]:
        """What left of this kind since the last time."""
        found = [(peer, data) for peer, data in self.sent if data[0] == kind]
        self.sent = [(peer, data) for peer, data in self.sent if data[0] != kind]
        return found

    def replies(self) -> list[messages.AppendReply]:
        return [messages.decode_append_reply(data) for _, data in self.take(messages.APPEND_REPLY)]


class Lone:
    """One node, its peers played by the test."""

    def __init__(self, peers: int = 2, seed: int = 1, config: RaftTuning = CONFIG) -> None:
        self.world = SimWorld(seed)
        self.disk = SimDisk(random.Random(seed))
        self.runtime = SimRuntime(self.world, "n1", self.disk)
        self.wire, self.machine = Wire(), Machine()
        self.fatal: list[BaseException] = []
        self.peers = [f"n{n + 2}" for n in range(peers)]
        journal = Journal.create(self.disk, "/raft", self.runtime, Identity("test", 0, "n1"), JOURNAL)
        self.node = RaftNode(
            journal, self.wire, self.runtime, self.machine, config,
            members=founders("n1", *self.peers), on_fatal=self.fatal.append,
        )  # fmt: skip
        self.node.start()
        for peer in self.peers:
            self.node.link_up(peer)
            self.node.frame(peer, messages.encode(messages.GREETING, 1, FOUNDING, True, 7, 0, 1))

    def run(self, seconds: float) -> None:
        self.world.run_for(seconds)

    def append(
        self,
        entries: list[tuple[int, int, bytes]],
        *,
        term: int,
        prev: tuple[int, int],
        commit: int = 0,
        peer: str = "n2",
    ) -> None:
        """(index, term, command) from `peer`, which leads `term`."""
        frame = messages.encode_append(term, *prev, commit, 0)
        records = b"".join(encode_record(ENTRY, index, at, command) for index, at, command in entries)
        self.node.frame(peer, frame + records)

    def log(self) -> list[tuple[int, int]]:
        journal = self.node.journal
        return [(i, journal.term_at(i)) for i in range(journal.base_index + 1, journal.last_index + 1)]

    def lead(self) -> None:
        """Elected by n2."""
        self.node.event(self.node.elections.campaign)
        self.run(0.05)
        self.node.frame("n2", messages.encode(messages.VOTE_REPLY, self.node.term))
        assert self.node.is_leader
        self.run(0.01)

    def answer(
        self, peer: str, match: int, *, term: int | None = None, status: int = messages.OK, hint: int = 0
    ) -> None:
        term = self.node.term if term is None else term
        self.node.frame(peer, messages.encode_append_reply(status, term, match, hint, 0))


class Cluster:
    def __init__(self, count: int = 3, seed: int = 1, config: RaftTuning = CONFIG, start: bool = True) -> None:
        self.world = SimWorld(seed)
        self.net = SimNet(self.world)
        self.net.profile.hiccup = 0.0
        #: What `look` finds broken makes `run` and `until` fail.
        self.broken: list[str] = []
        self.safety = LogSafety(self.net, self._decide, quiet_s=config.election_min_ms / 1000)
        self.config = config
        self.names = [f"n{n + 1}" for n in range(count)]
        self.disks = {name: SimDisk(random.Random(f"{seed} {name}")) for name in self.names}
        self.nodes: dict[str, RaftNode] = {}
        self.machines: dict[str, Machine] = {}
        self.runtimes: dict[str, SimRuntime] = {}
        self.fatal: dict[str, BaseException] = {}
        #: What survives beside the journal: a machine's durable checkpoint.
        self.checkpoints: dict[str, Manifest | None] = dict.fromkeys(self.names)
        self.world.on_crash = lambda runtime: self.kill(runtime.name)
        if start:
            for name in self.names:
                self.start(name)

    def _decide(self, promise: str, broken: bool, text: str, *, who: str) -> None:
        if broken:
            self.broken.append(text)

    def start(self, name: str, incarnation: int = FOUNDING) -> RaftNode:
        disk = self.disks[name]
        runtime = self.runtimes[name] = SimRuntime(self.world, name, disk)
        machine = self.machines[name] = Machine()
        checkpoint = self.checkpoints[name]
        if checkpoint is not None:
            machine.load(checkpoint.blob)
            machine.checkpoint = checkpoint
        owner = Identity("test", 0, name, incarnation)
        if Journal.exists(disk, "/raft"):
            journal = Journal.open(disk, "/raft", runtime, owner, JOURNAL)
        else:
            journal = Journal.create(disk, "/raft", runtime, owner, JOURNAL)
            if incarnation != FOUNDING:
                self.safety.wiped(name)
        node = self.nodes[name] = RaftNode(
            journal, self.net.network(name, runtime), runtime, machine, self.config,
            members=founders(*self.names), on_fatal=lambda error: self.fatal.update({name: error}),
        )  # fmt: skip
        self.safety.reopened(name, journal)
        node.set_applied(machine.index, machine.term)
        node.start()
        return node

    def kill(self, name: str, *, power: bool = False) -> None:
        self.checkpoints[name] = self.machines[name].checkpoint
        self.runtimes[name].crash()
        network = self.net.nodes.get(name)
        if network is not None:
            network.close()
        del self.nodes[name], self.machines[name]
        if power:
            self.disks[name].power_cut()
        else:
            self.disks[name].kill()

    def run(self, seconds: float) -> None:
        self.world.run_for(seconds)
        self.safety.look(self.nodes)
        assert not self.broken, self.broken

    def until(self, condition: Callable[[], object], seconds: float = 10.0) -> float:
        """Run until it holds; the simulated seconds it took."""
        start = self.world.now
        while not condition():
            assert self.world.now - start < seconds, f"not within {seconds} simulated seconds"
            self.run(0.002)
        return self.world.now - start

    def leader(self) -> RaftNode:
        """One that leads, and has said so."""
        found: list[RaftNode] = []

        def led() -> bool:
            found[:] = [n for n in self.nodes.values() if n.is_leader and n.term in self.machines[n.name].leads]
            return bool(found)

        self.until(led)
        return max(found, key=lambda node: node.term)

    def followers(self) -> list[str]:
        leader = self.leader().name
        return [name for name in self.nodes if name != leader]

    def commit(self, *commands: bytes) -> list[int]:
        """Proposed together, each answered well."""
        results: list[Any] = []
        for command in commands:
            self.leader().propose(command, lambda result, error: results.append(error or result))
        self.until(lambda: len(results) == len(commands))
        assert not [r for r in results if not isinstance(r, int)], results
        return results

    def settle(self) -> None:
        """Until all nodes have applied all there is."""
        self.until(
            lambda: (
                len({(n.applied_index, n.last_index, n.commit_index) for n in self.nodes.values()}) == 1
                and all(n.applied_index == n.last_index for n in self.nodes.values())
            )
        )

    def isolate(self, name: str) -> None:
        for other in self.names:
            if other != name:
                self.net.cut(name, other)
                self.net.cut(other, name)


def one_lags_behind_the_journal(compact: bool = True) -> tuple[Cluster, str]:
    """A follower that was down while the others compacted: 60 commands are in files only, one in the journal."""
    cluster = Cluster()
    lagging = cluster.followers()[0]
    cluster.kill(lagging)
    for n in range(60):
        cluster.commit(b"x" * 1500 + b"%d" % n)
    for name, machine in cluster.machines.items():
        machine.take_checkpoint()
        if compact:
            cluster.nodes[name].compact(machine.index)
    cluster.commit(b"after the checkpoint")
    assert (cluster.leader().journal.base_index > 2) == compact
    cluster.start(lagging)
    return cluster, lagging
