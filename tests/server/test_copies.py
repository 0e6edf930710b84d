"""Snapshots held for backups: how long, how many, and what becomes of them when the node changes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.sim.disk import SimDisk
from chaos.sim.tables import SimBackend
from hadelay.api.cluster import Snapshot
from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE
from hadelay.errors import NotFound, Overloaded
from hadelay.server.logbook import Logbook
from hadelay.server.service.files import Files
from hadelay.storage.identity import Identity
from hadelay.storage.store import Storage

HOUR = 490_000


class Now:
    """A runtime whose threads run at once, and whose timers when the test says so."""

    def __init__(self) -> None:
        self.random, self.now = random.Random(1), 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        fn(*args)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Any:
        self.timers.append((self.now + delay_s, lambda: fn(*args)))

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Callable[..., None], *, brief: bool = False) -> None:
        try:
            result = fn()
        except OSError as error:
            done(None, error)
        else:
            done(result, None)

    def join(self, lane: str) -> None:
        pass

    def pass_s(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            timer = min(due, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()
        self.now = end


class Fake:
    """A node and its checkpoints, over real storage."""

    def __init__(self) -> None:
        self.runtime, self.disk = Now(), SimDisk(random.Random(1))
        self.disk.makedirs("/")
        self.raft: Any = SimpleNamespace(applied_index=0, stopped=False, read_index=lambda done: done(None))
        self.checkpoints = self
        #: Time of the last entry, and cluster time: in an idle cluster, the first one stands still.
        self.ledger, self.time_ms = SimpleNamespace(level=1, now_ms=0), 0
        raft: Any = SimpleNamespace(name="n1", peers=("n2",))
        #: Notes about backups that this node sent.
        self.reported: list[Any] = []
        link: Any = SimpleNamespace(handlers={}, note=lambda peer, op, note: self.reported.append(note[1]))
        self.logbook = Logbook(self.runtime, raft, link, SimpleNamespace())  # type: ignore[arg-type]
        self.bytes_since = 0
        self.storage = self.opened()

    def opened(self) -> Storage:
        backend: Any = lambda path: SimBackend(self.disk, path)  # noqa: E731
        return Storage(self.disk, "/data", self.runtime, Identity("c", 0, "n1"), backend=backend)  # type: ignore[arg-type]

    def now_ms(self) -> int:
        return self.time_ms

    def publish(self) -> None:
        rows, headers = np.zeros(1, INDEX), np.zeros(1, RECORD)
        rows["deliver_at_ms"], rows["size"] = HOUR * 3_600_000, RECORD_SIZE + 4
        headers["body_size"] = 4
        self.storage.hours.append(HOUR, rows, bytearray(RECORD_SIZE + 4), headers)
        self.raft.applied_index += 1
        self.bytes_since += 1

    def begin(self) -> None:
        self.bytes_since = 0
        self.storage.checkpoint(self.raft.applied_index, 1, b"core", {}, lambda error: None)

    def files(self) -> list[str]:
        return [path for path in self.disk.copy() if "/hours/" in path]


@pytest.fixture
def node() -> Fake:
    node = Fake()
    node.publish()
    return node


def copies_of(node: Fake) -> Files:
    whole: Any = node
    return Files(whole)


@pytest.fixture
def copies(node: Fake) -> Files:
    return copies_of(node)


async def test_a_copy_has_everything_that_was_applied(node: Fake, copies: Files) -> None:
    node.publish()
    view = await copies.open_snapshot()
    assert (view.index, view.cluster_id) == ("2", "c")
    (log,) = [file for file in view.files if file.name.endswith(".log")]
    assert int(log.bytes) == 2 * (RECORD_SIZE + 4)
    assert len(await copies.read_snapshot(view.id, log.name, 10, 50)) == 50
    assert await copies.snapshot_file_length(view.id, log.name) == int(log.bytes)
    for name in ("identity", "../g1/names", "hours/1999010100.log"):
        with pytest.raises(NotFound):
            await copies.snapshot_file_length(view.id, name)


async def test_a_cluster_that_nobody_published_to_can_be_copied() -> None:
    empty = Fake()
    empty.raft.applied_index = 2
    view = await copies_of(empty).open_snapshot()  # type: ignore[arg-type]
    assert (view.index, [file.name for file in view.files]) == ("2", ["state-2"])


@pytest.mark.parametrize("released", [True, False])
async def test_a_retired_hour_goes_when_it_is_released_or_left_alone(node: Fake, copies: Files, released: bool) -> None:
    view = await copies.open_snapshot()
    log = next(file.name for file in view.files if file.name.endswith(".log"))
    node.storage.hours.retire(HOUR)
    node.raft.applied_index += 1
    node.begin()
    for _ in range(5):  # read now and then, it stays
        node.runtime.pass_s(50)
        assert len(await copies.read_snapshot(view.id, log, 0, 10)) == 10
    if released:
        await copies.release_snapshot(view.id)
    else:
        node.runtime.pass_s(80)
    with pytest.raises(NotFound, match="snapshot was closed"):
        await copies.read_snapshot(view.id, log, 0, 10)
    node.raft.applied_index += 1
    node.begin()
    assert node.files() == []


async def test_not_too_many_at_once(node: Fake, copies: Files) -> None:
    leased = [await copies.open_snapshot() for _ in range(4)]
    with pytest.raises(Overloaded):
        await copies.open_snapshot()
    await copies.release_snapshot(leased[0].id)
    await copies.open_snapshot()


async def test_no_more_are_opened_when_many_are_asked_for_at_once(node: Fake, copies: Files) -> None:
    asked = await asyncio.gather(*(copies.open_snapshot() for _ in range(20)), return_exceptions=True)
    leased = [one for one in asked if isinstance(one, Snapshot)]
    assert (len(leased), Counter(map(type, asked))) == (4, {Snapshot: 4, Overloaded: 16})
    await copies.release_snapshot(leased[0].id)
    await copies.open_snapshot()


async def test_a_snapshot_that_cannot_be_opened_takes_no_place(
    node: Fake, copies: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(node.storage, "manifest", lambda: None)
        node.raft.stopped = True
        for _ in range(5):
            with pytest.raises(Overloaded, match="files are closed"):
                await copies.open_snapshot()
    node.raft.stopped = False
    await copies.open_snapshot()


async def test_a_node_that_installed_another_snapshot_has_none_of_its_files(node: Fake, copies: Files) -> None:
    view = await copies.open_snapshot()
    node.storage.close()
    node.storage = node.opened()
    with pytest.raises(NotFound, match="snapshot was closed"):
        await copies.snapshot_file_length(view.id, view.files[0].name)
    await copies.release_snapshot(view.id)
    await copies.release_snapshot("7-unheard0")
    for _ in range(3):
        await copies.open_snapshot()
    await copies.open_snapshot()  # what nobody can read any more is none of those that are held


async def test_a_snapshot_that_is_installed_meanwhile_is_copied_and_no_checkpoint_asked_for_for_ever(
    node: Fake, copies: Files
) -> None:
    asked, begin = 0, node.begin

    def never_done() -> None:
        nonlocal asked
        asked += 1

    node.begin = never_done  # type: ignore[method-assign]
    opening = asyncio.create_task(copies.open_snapshot())
    await asyncio.sleep(0.05)
    node.storage.close()
    node.storage = node.opened()
    begin()  # what the snapshot holds
    node.bytes_since = 1
    view = await asyncio.wait_for(opening, 5)
    assert view.index == "1"
    assert await copies.snapshot_file_length(view.id, "state-1") > 0
    before = asked
    await asyncio.sleep(0.05)
    assert asked == before


async def test_a_caller_that_waits_for_a_copy_of_a_node_that_stops_is_answered(node: Fake, copies: Files) -> None:
    node.begin = lambda: None  # type: ignore[method-assign]
    opening = asyncio.create_task(copies.open_snapshot())
    await asyncio.sleep(0)
    node.raft.stopped = True
    with pytest.raises(Overloaded, match="stops"):
        await asyncio.wait_for(opening, 5)


async def test_a_node_remembers_how_copies_ended_and_tells_the_others(node: Fake, copies: Files) -> None:
    for now_ms, how in enumerate(("complete", "broken off", "left alone", "late")):
        node.time_ms = now_ms
        view = await copies.open_snapshot()
        size, (row, *_) = sum(int(file.bytes) for file in view.files), node.logbook.backups()
        assert (row.outcome, row.bytes, row.at_ms, row.read_bytes) == ("running", size, now_ms, 0)
        assert view.id not in str(node.reported), "others hear of the end alone"
        log = next(file.name for file in view.files if file.name.endswith(".log"))
        await copies.read_snapshot(view.id, log, 0, 10)
        if how in ("left alone", "late"):
            node.runtime.pass_s(80)
            assert row.outcome == "incomplete"
        if how != "left alone":
            await copies.release_snapshot(view.id, complete=how != "broken off")
        outcome = "complete" if how in ("complete", "late") else "incomplete"
        assert ["n1", view.id, now_ms, size, 10, outcome] in [list(row) for row in node.reported[-1]]
        await copies.release_snapshot(view.id)
        assert (row.outcome, row.read_bytes) == (outcome, 10), "a complete backup stays complete"
    for _ in range(5):
        await copies.release_snapshot((await copies.open_snapshot()).id)
    assert len(node.logbook.backups()) == 5


async def test_a_disk_without_room_for_the_export_is_said_once(node: Fake, copies: Files) -> None:
    node.begin()
    node.disk.capacity = node.disk.used
    for _ in range(3):
        with pytest.raises(Overloaded, match="full disk"):
            await asyncio.wait_for(copies.open_snapshot(), 5)
    assert node.disk.was_full == 1
    node.disk.capacity = 1 << 30
    node.runtime.pass_s(15)
    assert (await asyncio.wait_for(copies.open_snapshot(), 5)).index == "1"


async def test_copies_that_come_and_go_are_looked_at_by_one_timer(node: Fake, copies: Files) -> None:
    for _ in range(9):
        view = await copies.open_snapshot()
        await copies.release_snapshot(view.id)
    await copies.open_snapshot()
    assert len(node.runtime.timers) == 1
    node.runtime.pass_s(200)
    assert node.runtime.timers == []
    assert copies._open == {}
