"""What an ack of a batch's member costs, apply alone and the whole leader, beside an ack of another message, and beside
acks in a cluster without batches."""

from __future__ import annotations

import gc
import shutil
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from bench.cluster import Cluster, get
from bench.result import Row, Setup
from hadelay.codec import batches as codec
from hadelay.codec.batches import On, Spec
from hadelay.codec.commands import encode_ack, encode_grant, encode_publish
from hadelay.codec.commandtypes import Grant
from hadelay.codec.entries import encode_entry
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.meta import Meta, pack
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, Draft
from hadelay.platform.disk import Disk
from hadelay.storage.hours import DiskHourStore
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.names import NameTable
from hadelay.storage.tables import Tables
from hadelay.version import FEATURE_LEVEL

START_MS = 1_795_197_600_000
#: Messages of one entry: published and leased together, and by default acked together.
_SIZE = 100
#: Messages whose acks are measured in one slice.
_SLICE = 2_000


class Apply:
    """The state machine over real files, without a log."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        disk = Disk()
        self.tables = Tables(LmdbBackend(str(directory / "state.mdb")))
        self.ledger = Ledger(
            0, DiskHourStore(disk, str(directory), 0), self.tables, NameTable(disk, str(directory / "names"))
        )
        self.ledger.level = FEATURE_LEVEL
        self._index = self._seq = self._filed = 0

    def apply(self, command: bytes) -> None:
        self._index += 1
        apply_entry(self.ledger, self._index, 1, encode_entry(START_MS, [command]))

    def leased(self, topic: str, batch: str, size: int) -> list[bytes]:
        """Publish and lease messages; returns the commands that ack them, `size` each."""
        meta = pack(Meta(batch=batch or None, ct="text/plain"))
        draft = Draft(topic, 0, True, 0, 0, meta, b"x" * 200, batched=bool(batch))
        self.apply(encode_publish("n1", [draft] * _SIZE))
        self._seq += 1
        indexes = np.arange(self._filed, self._filed + _SIZE, dtype=np.uint32)
        self._filed += _SIZE
        hours = np.full(_SIZE, START_MS // HOUR_MS, np.uint32)
        self.apply(encode_grant(Grant(1, self._seq, 600_000, "c", b"%d" % self._seq, "n1", hours, indexes)))
        rows = np.zeros(_SIZE, LEASE)
        rows["term"], rows["seq"], rows["pos"] = 1, self._seq, np.arange(_SIZE)
        rows["hour"], rows["index"] = hours, indexes
        return [encode_ack("n1", rows[at : at + size]) for at in range(0, _SIZE, size)]

    def checkpoint(self) -> None:
        layer = self.tables.freeze()
        self.tables.backend.commit(layer.dropped, layer.puts())
        self.tables.committed()

    def slice(self, topic: str, batch: str, size: int, *, stored: bool) -> float:
        """Acks of one slice, `size` per entry, in µs of processor time per ack. stored: the messages are in a
        checkpoint."""
        count = _SLICE if size > 1 else _SLICE // 10
        commands = [command for _ in range(count // _SIZE) for command in self.leased(topic, batch, size)]
        if stored:
            self.checkpoint()
        gc.collect()
        began = time.process_time()
        for command in commands:
            self.apply(command)
        return (time.process_time() - began) / count * 1e6


def _cpu_us(pid: int) -> float:
    """Processor time of a process's event loop, in µs."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def _whole(cluster: Cluster, topic: str, batch: str, rounds: int) -> float:
    """Processor time of the leader in µs per ack, 100 per request."""
    leader, spent, count = cluster.leader(), 0.0, 0
    item = {"topic": topic, "body": "x" * 200} | ({"batch": batch} if batch else {})
    for _ in range(rounds):
        get(f"{leader.http}/v1/messages:batch", body=msgspec.json.encode([item] * 1_000))
        asked = {"max": 1_000, "wait": "5s", "lease": "10m"}
        found = get(f"{leader.http}/v1/topics/{topic}/receive", body=msgspec.json.encode(asked))["messages"]
        before = _cpu_us(leader.pid)
        for at in range(0, len(found), _SIZE):
            leases = [message["lease"] for message in found[at : at + _SIZE]]
            get(f"{leader.http}/v1/leases:ack", body=msgspec.json.encode({"leases": leases}))
        spent, count = spent + _cpu_us(leader.pid) - before, count + len(found)
    return spent / count


def _alone(setup: Setup, row: Row, number: int, size: int) -> None:
    """Acks of members, of other messages beside a batch, and in a ledger without batches, slice by slice in turns."""
    took: dict[str, list[float]] = {"no batch": [], "others": [], "members": []}
    directories = [setup.directory / f"batches-{number}-{size}-{n}" for n in range(2)]
    without, beside = map(Apply, directories)
    beside.apply(codec.encode_open("b", Spec("done", On.COMPLETE, 0, 0, 0, b"", None, 86_400_000)))
    beside.leased("members", "b", size)
    turns = [("no batch", without, ""), ("others", beside, ""), ("members", beside, "b")]
    for turn in range(setup.many(90, 42)):
        for name, apply, batch in (*turns[turn % 3 :], *turns[: turn % 3]):
            took[name].append(apply.slice(name, batch, size, stored=turn % 2 > 0))
    for name, values in took.items():
        row.add(f"apply {size}, {name}", median(values[6:]), "µs/ack")
    for directory in directories:
        shutil.rmtree(directory)


def batches(setup: Setup) -> list[Row]:
    row = Row("batches", "acks, 100 per request: members of a batch and other messages by turns", [])
    for number in setup.each_round("batches"):
        for size in (1, _SIZE):
            _alone(setup, row, number, size)
        with setup.cluster() as cluster:
            opened = {"key": "b", "callback": {"topic": "done"}}
            get(f"{cluster.leader().http}/v1/batches", body=msgspec.json.encode(opened))
            took: dict[str, list[float]] = {"others": [], "members": []}
            for turn in range(setup.many(20, 6)):
                for name, batch in (("others", ""), ("members", "b"))[:: 1 if turn % 2 else -1]:
                    took[name].append(_whole(cluster, name, batch, 3))
            for name, values in took.items():
                row.add(f"leader, {name}", median(values[1:]), "µs/ack")
    for size in (1, _SIZE):
        for name in ("others", "members"):
            row.ratio(f"apply {size}, {name}, ratio", f"apply {size}, {name}", f"apply {size}, no batch")
    row.ratio("leader, ratio", "leader, members", "leader, others")
    return [row]
