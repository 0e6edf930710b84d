"""Filing and reading: the same answers and the same bytes as a model in plain lists, whenever things are written."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import NOW, Loop, checkpoint, events, messages, open_storage

from chaos.sim.disk import SimDisk
from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE
from hadelay.codec.records import check_record, decode_record
from hadelay.errors import BadRequest
from hadelay.model import DEAD_HOURS, NONE32, hour_from_name, hour_name, pack_id
from hadelay.platform.disk import Disk
from hadelay.server.service.files import hours_of
from hadelay.storage.hours import DiskHourStore
from tests.memory import MemoryHours

HOURS = [NOW - 1, NOW, NOW + 2, NOW + 3, NOW + 40, NOW + 41, NOW + 17_000, DEAD_HOURS + NOW, DEAD_HOURS + NOW + 720]


@pytest.fixture
def store(tmp_path: Path) -> DiskHourStore:
    found = DiskHourStore(Disk(), str(tmp_path), 3, far_buffer_bytes=1 << 20)
    found.set_clock(NOW)
    return found


def write_all(store: DiskHourStore) -> None:
    store.sample()
    while not store.write_some():
        pass


action = st.one_of(
    st.tuples(st.just("file"), st.lists(st.sampled_from(HOURS), min_size=1, max_size=40)),
    st.tuples(st.just("copy"), st.lists(st.sampled_from(HOURS), min_size=1, max_size=40)),
    st.tuples(st.just("again"), st.sampled_from(HOURS)),
    st.tuples(st.just("write"), st.none()),
    st.tuples(st.just("sample"), st.none()),
    st.tuples(st.just("some"), st.none()),
    st.tuples(st.just("read"), st.sampled_from(HOURS)),
    st.tuples(st.just("read on a full disk"), st.sampled_from(HOURS)),
    st.tuples(st.just("clock"), st.integers(NOW, NOW + 3)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(action, max_size=14), st.integers(0, 99))
def test_files_are_those_of_the_model_whatever_the_timing(actions: list[tuple], seed: int) -> None:
    disk = SimDisk(random.Random(1))
    disk.makedirs("/hours")
    store, model = DiskHourStore(disk, "/hours", 3, far_buffer_bytes=1 << 9), MemoryHours(3)
    store.set_clock(NOW)
    for step, (what, arg) in enumerate(actions):
        if what in ("file", "copy"):
            hours = np.array(arg, np.int64)
            sizes = [(seed + i * 7) % 90 for i in range(len(arg))]
            copies = None if what == "file" else [(seed + i) % 4 for i in range(len(arg))]
            mine, theirs = (messages(hours, sizes=sizes, seed=seed + step, copies=copies) for _ in range(2))
            assert store.append(*mine).tolist() == model.append(*theirs).tolist()
            assert (mine[1]["first_id"] == theirs[1]["first_id"]).all()
        elif what == "again" and model.count(arg):
            again = model.entries(arg, slice(0, 3))
            again["attempt"], again["second"] = 1, 1800
            assert store.append_again(arg, again.copy()) == model.append_again(arg, again.copy())
        elif what == "write":
            write_all(store)
        elif what == "sample":
            store.sample()
        elif what == "some":
            store.write_some()
        elif what == "read" and model.count(arg):
            assert store.entries(arg, slice(None)).tobytes() == model.entries(arg, slice(None)).tobytes()
        elif what == "read on a full disk":
            disk.capacity = disk.used
            with suppress(OSError):  # what was buffered could not be written; the node goes on
                store.entries(arg, slice(None))
                store.heads(arg)
            disk.capacity = 1 << 30
        elif what == "clock":
            store.set_clock(arg)
    sums = store.checksums()
    assert store.hours() == model.hours()
    for hour in model.hours():
        path = f"/hours/{hour_name(hour)}"
        log_bytes, idx_bytes, _ = store.lengths(hour)
        assert disk.open(path + ".log").pread(log_bytes, 0) == bytes(model.files[hour].log)
        assert disk.open(path + ".idx").pread(idx_bytes, 0) == model.files[hour].idx.all.tobytes()
        assert (store.heads(hour).last == model.heads(hour).last).all()
        assert (store.heads(hour).count == model.heads(hour).count).all()
        assert sums[hour_name(hour) + ".log"][0] == log_bytes


@pytest.mark.parametrize("hour", [NOW, NOW + 30])
def test_ids_name_the_place_and_records_verify(store: DiskHourStore, hour: int) -> None:
    _, rows, blob, headers = messages(hour, sizes=[0, 10, 300])
    indexes = store.append(hour, rows, blob, headers)
    assert indexes.tolist() == [0, 1, 2]
    assert rows["first_id"].tolist() == [pack_id(3, hour, i) for i in range(3)]
    for row in store.entries(hour, indexes):
        assert check_record(store.record(hour, int(row["offset"]), int(row["size"]), verify=True)) is None
    assert store.count(hour) == 3
    assert store.counts(np.array([hour, hour + 1, 5])).tolist() == [3, 0, 0]


def test_a_record_copied_to_another_hour_keeps_its_bytes(store: DiskHourStore) -> None:
    store.append(*messages(NOW, sizes=[50]))
    row = store.entries(NOW, slice(0, 1))
    record = store.record(NOW, 0, int(row["size"][0]))
    row["attempt"] = 1
    store.append(NOW + 9, row, bytearray(record))
    moved = store.entries(NOW + 9, slice(0, 1))[0]
    assert store.record(NOW + 9, int(moved["offset"]), int(moved["size"]), verify=True) == record
    assert moved["first_id"] == pack_id(3, NOW, 0)


@pytest.mark.parametrize("hour", [NOW, NOW + 30])
def test_entries_that_share_a_record_have_ids_of_their_own_and_one_record(store: DiskHourStore, hour: int) -> None:
    store.append(*messages(hour, sizes=[5, 60, 7], copies=[0, 2, 1]))
    rows = store.entries(hour, slice(None))
    assert rows["first_id"].tolist() == [pack_id(3, hour, i) for i in range(6)]
    assert rows["offset"].tolist() == [0, 53, 53, 53, 161, 161]
    assert store.lengths(hour)[0] == 161 + 55
    records = [store.record(hour, int(row["offset"]), int(row["size"]), verify=True) for row in rows]
    assert [decode_record(record).first_id for record in records] == [pack_id(3, hour, i) for i in (0, 1, 1, 1, 4, 4)]


def test_a_batch_with_more_copies_than_the_buffer_has_room_for_is_appended_in_parts(store: DiskHourStore) -> None:
    """A log entry of 4 MiB holds 30,000 small messages. With sixteen subscriptions, they are half a million entries."""
    n, shared = 26_000, 17
    records = bytearray().join([bytes(RECORD_SIZE) + b"%05d" % i for i in range(n)])
    rows, headers, copies = np.zeros(n * shared, INDEX), np.zeros(n, RECORD), np.ones(n * shared, bool)
    copies[::shared] = False
    rows["size"], headers["body_size"] = RECORD_SIZE + 5, 5
    headers["payload_crc"] = [crc32c(b"%05d" % i) for i in range(n)]
    store.append(NOW + 30, rows, records, headers, copies)
    assert rows["first_id"].tolist() == [pack_id(3, NOW + 30, i) for i in range(n * shared)]
    last = store.entries(NOW + 30, slice(n * shared - shared, None))
    assert set(last["offset"].tolist()) == {(n - 1) * (RECORD_SIZE + 5)}
    record = decode_record(store.record(NOW + 30, int(last["offset"][0]), RECORD_SIZE + 5, verify=True))
    assert (record.first_id, record.body) == (pack_id(3, NOW + 30, (n - 1) * shared), b"25999")


@pytest.mark.parametrize("hour", [NOW, NOW + 30])
def test_a_shared_record_is_repaired_also_where_only_a_copy_moved_to(store: DiskHourStore, hour: int) -> None:
    store.append(*messages(hour, sizes=[60], copies=[2]))
    record = store.record(hour, 0, 108)
    store.repair(hour, ".log", 0, record)
    moved = store.entries(hour, slice(2, 3)).copy()
    store.append(hour + 1, moved, bytearray(record))
    store.repair(hour + 1, ".log", 0, record)
    store.append(*messages(hour + 2, sizes=[60]))
    with pytest.raises(BadRequest, match="no index entry"):
        store.repair(hour + 2, ".log", 0, record)


@pytest.mark.parametrize("hour", [NOW, NOW + 30])
def test_reading_beyond_the_end_is_refused(store: DiskHourStore, hour: int) -> None:
    store.append(*messages(hour, sizes=[5] * 4))
    with pytest.raises(IndexError):
        store.entries(hour, np.array([4]))
    assert len(store.entries(hour, np.array([], np.int64))) == 0
    assert len(store.entries(NOW + 99, slice(None))) == 0
    with pytest.raises(IndexError):
        store.events(hour, np.array([0]))


def test_scattered_reads_of_a_long_far_hour(store: DiskHourStore) -> None:
    store.append(*messages(NOW + 30, sizes=[3] * 5000))
    indexes = np.array([4999, 0, 17, 2500])
    assert store.entries(NOW + 30, indexes)["index"].tolist() == indexes.tolist()
    assert store.entries(NOW + 30, slice(10, 40, 10))["index"].tolist() == [10, 20, 30]


def test_dead_hours_are_hours_with_a_name_of_their_own_and_cost_no_memory(store: DiskHourStore, tmp_path: Path) -> None:
    dead = DEAD_HOURS + NOW + 720
    assert hour_name(dead) == "dead-" + hour_name(NOW + 720)
    assert hour_from_name(hour_name(dead)) == dead
    store.append(*messages(NOW, sizes=[20]))
    store.append(*messages(dead, sizes=[20, 30]))
    write_all(store)
    assert store.hours() == [NOW, dead]
    assert (tmp_path / f"dead-{hour_name(NOW + 720)}.log").exists()
    assert store.entries(dead, slice(None))["index"].tolist() == [0, 1]
    assert store._table.size < 4_000
    store.retire(dead)
    assert store.hours() == [NOW]


def test_only_four_hours_are_mapped_and_the_kernel_agrees(store: DiskHourStore, tmp_path: Path) -> None:
    for hour in range(NOW - 1, NOW + 6):
        store.append(*messages(hour, sizes=[20]))
    store.set_clock(NOW + 1)
    maps = Path("/proc/self/maps").read_text()
    for hour in range(NOW - 1, NOW + 6):
        assert store.mapped(hour) == (f"{hour_name(hour)}.idx" in maps) == (NOW <= hour <= NOW + 3)
        assert store.entries(hour, slice(0, 1))["index"] == 0
    store.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_view_outlives_growth_and_unmapping(store: DiskHourStore) -> None:
    store.append(*messages(NOW, sizes=[20] * 10))
    view, words = store.index_view(NOW), store.pre_view(NOW)
    before = view.tobytes()
    for seed in range(8):
        store.append(*messages(NOW, sizes=[200] * 1000, seed=seed))
    store.set_clock(NOW + 10)
    assert view.tobytes() == before
    assert words[11] == NONE32
    assert store.entries(NOW, slice(0, 10)).tobytes() == before


def test_pre_view_walks_the_chain_of_a_second(store: DiskHourStore) -> None:
    _, rows, blob, headers = messages(NOW, sizes=[8] * 500)
    rows["second"] %= 7
    store.append(NOW, rows, blob, headers)
    words, at, found = store.pre_view(NOW), int(store.heads(NOW).last[3]), []
    while at != NONE32:
        found.append(at)
        at = words[at * 16 + 11]
    assert found[::-1] == np.flatnonzero(rows["second"] == 3).tolist()


def test_events_are_numbered_and_read_back(store: DiskHourStore) -> None:
    store.append(*messages(NOW + 30, sizes=[8] * 5))
    assert store.append_events(NOW + 30, events([0, 1])) == 0
    assert store.append_events(NOW + 30, events([4], 6)) == 2
    assert store.event_count(NOW + 30) == 3
    assert store.events(NOW + 30)["index"].tolist() == [0, 1, 4]
    assert store.events(NOW + 30, np.array([2, 0]))["event"].tolist() == [6, 1]
    assert store.lengths(NOW + 30)[2] == 96


@pytest.mark.parametrize("hour", [NOW, NOW + 30])
def test_topic_minutes_count_what_is_filed(store: DiskHourStore, hour: int) -> None:
    total = 0
    for topic in (2, 1, 2):
        _, rows, blob, headers = messages(hour, sizes=[8] * 100, topic=topic, seed=total)
        store.append(hour, rows, blob, headers)
        total += 100
        store.heads(hour)  # which writes out what waits
        counted = store.written_minutes(hour)
        assert counted["count"].sum() == total
    rows = store.entries(hour, slice(None))
    for topic, minute, count in counted.tolist():
        assert count == ((rows["topic"] == topic) & (rows["second"] // 60 == minute)).sum()
    assert counted.tolist() == sorted(counted.tolist())


def test_waiting_hours_are_reported_once(store: DiskHourStore) -> None:
    def filed() -> int:
        hours, _, topics = store.waiting()
        written = sum(int(store.written_seconds(hour).sum()) for hour in (NOW, NOW + 30, NOW + 40))
        assert set(topics.tolist()) <= {1, 2}
        assert NOW not in hours.tolist()
        return written + len(hours)

    for n, hour in enumerate((NOW, NOW + 30, NOW + 40, NOW + 30)):
        store.append(*messages(hour, sizes=[8] * 50, topic=1 + n % 2, seed=n))
        assert filed() == 50 * (n + 1)
    store.heads(NOW + 30)
    assert set(store.waiting()[0].tolist()) == {NOW + 40}
    assert filed() == 200
    store.append(*messages(NOW + 30, sizes=[8] * 10))
    store.freeze()
    store.append(*messages(NOW + 40, sizes=[8] * 10))
    assert filed() == 220
    while not store.write_some():
        assert filed() == 220
    assert set(store.waiting()[0].tolist()) == {NOW + 40}
    assert filed() == 220


def test_reading_written_messages_writes_no_waiting_ones(store: DiskHourStore) -> None:
    far = np.full(8, NOW + 40, np.int64)
    store.append(*messages(far, sizes=[50] * 8))
    write_all(store)
    _, rows, *rest = messages(far, sizes=[60] * 8)
    store.append(far, rows, *rest)
    first, last = (store.entries(NOW + 40, np.array([n]))[0] for n in (0, 7))
    assert not check_record(store.record(NOW + 40, int(last["offset"]), int(last["size"])), int(last["size"]))
    assert store.entries(NOW + 40, slice(2, 8))["index"].tolist() == list(range(2, 8))
    assert len(store.waiting()[0]) == 8
    assert int(first["index"]) == 0
    new = rows[0]
    assert not check_record(store.record(NOW + 40, int(new["offset"]), int(new["size"])), int(new["size"]))
    assert not len(store.waiting()[0])


def test_a_full_buffer_writes_itself_out(tmp_path: Path) -> None:
    store = DiskHourStore(Disk(), str(tmp_path), 3, far_buffer_bytes=1 << 16)
    store.set_clock(NOW)
    for seed in range(30):
        store.append(*messages(NOW + 50, sizes=[100_000] * 10, seed=seed))
        assert store.far_bytes < 20 << 20
    assert store.count(NOW + 50) == 300
    assert store.entries(NOW + 50, slice(None))["index"].tolist() == list(range(300))


def test_no_append_writes_much_more_than_itself_although_checkpoints_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by filling a cluster with messages over 30 days: a full buffer was written by one append, for two seconds,
    each few seconds, on every node, and leadership changed as often."""
    store = DiskHourStore(Disk(), str(tmp_path), 3, far_buffer_bytes=1 << 20)
    store.set_clock(NOW)
    monkeypatch.setattr(store._far, "spill", lambda: pytest.fail("an append wrote the whole buffer"))
    rng, written = np.random.default_rng(1), [0]
    for seed in range(200):
        store.append(*messages(rng.integers(NOW + 5, NOW + 300, 500), sizes=[20] * 500, seed=seed))
        written.append(int(store._table.written.sum()))
        if seed % 80 == 20:  # a checkpoint begins, and writes when there is time, which is seldom
            store.sample()
        if seed % 30 == 0:
            store.write_some()
    assert max(np.diff(written)) <= 2 * 500 + 2 * 1024
    assert store.far_bytes < 3 << 20
    monkeypatch.undo()
    write_all(store)
    assert sum(store.count(hour) for hour in range(NOW + 5, NOW + 300)) == 200 * 500
    for hour in (NOW + 5, NOW + 150, NOW + 299):
        assert store.entries(hour, slice(None))["index"].tolist() == list(range(store.count(hour)))


def test_bytes_that_an_append_froze_count_as_buffered_until_a_checkpoint_begins(tmp_path: Path) -> None:
    """An entry with several appends may pass the limit at one of them, and freeze the buffer at the next: the limit
    still begins a checkpoint after the entry."""
    store = DiskHourStore(Disk(), str(tmp_path), 3, far_buffer_bytes=1 << 16)
    store.set_clock(NOW)
    rng = np.random.default_rng(1)
    for seed in range(7):
        store.append(*messages(rng.integers(NOW + 5, NOW + 300, 100), sizes=[20] * 100, seed=seed))
    assert len(store._far._generations()) == 2
    assert store.far_bytes >= 1 << 16
    store.sample()
    assert store.far_bytes == 0


@pytest.mark.parametrize("phase", ["before", "writing", "syncing"])
def test_a_reader_of_all_hours_leaves_no_message_to_be_written_at_once(tmp_path: Path, phase: str) -> None:
    """While a checkpoint wrote or synced its files, nothing was written in slices: the checksums then wrote all that
    had come since, a second or two of the loop."""
    loop = Loop()
    storage = open_storage(Disk(), str(tmp_path), loop)
    far, ended = NOW + 10 + np.arange(400) % 200, list[BaseException | None]()
    storage.hours.append(*messages(far, sizes=[20] * 400))
    if phase != "before":
        storage.checkpoint(1, 1, b"", {}, ended.append)
    while phase == "syncing" and not storage.hours.write_some():
        pass
    storage.hours.append(*messages(far, sizes=[20] * 400, seed=1))
    storage.write_out(ended.append)
    loop.run()
    assert ended == [None] * (1 if phase == "before" else 2)
    assert all(storage.hours.sums(hour) is not None for hour in storage.hours.hours())
    before = {hour: storage.hours.sums(hour) for hour in storage.hours.hours()}
    checkpoint(storage, loop, 2)
    storage.close()
    storage = open_storage(Disk(), str(tmp_path), loop)
    assert {hour: storage.hours.sums(hour) for hour in storage.hours.hours()} == before
    storage.close()


def test_memory_of_far_hours_is_given_back(store: DiskHourStore) -> None:
    rng = np.random.default_rng(1)
    store.append(*messages(rng.integers(NOW + 5, NOW + 9000, 3000), sizes=[40] * 3000))
    assert store.far_bytes > 3000 * 40
    write_all(store)
    assert store.far_bytes == 0
    assert len(store._handles._open) <= 128


def test_heads_files_are_used_and_survive_being_wrong(store: DiskHourStore, tmp_path: Path) -> None:
    hour = NOW + 30
    store.append(*messages(hour, sizes=[1] * 20_000))
    expected = [column.copy() for column in store.heads(hour)]
    store._heads.save(1)
    path = tmp_path / f"{hour_name(hour)}.heads"
    for damage in (False, True):
        store._heads.forget(hour)
        if damage:
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)
        assert store._heads.get(hour, 20_000).on_disk == (0 if damage else 20_000)
        assert (store.heads(hour).last == expected[0]).all()
        assert (store.heads(hour).count == expected[1]).all()


def test_a_retired_hour_leaves_no_heads_in_memory(store: DiskHourStore) -> None:
    for hour in (NOW + 1, NOW + 30):  # one is mapped into memory, one is not
        store.append(*messages(hour, sizes=[1] * 10))
        assert int(store.heads(hour).count.sum()) == 10
        store.retire(hour)
        assert not store._heads.cached(hour)


def test_a_nodes_report_of_its_hours_is_of_one_moment(store: DiskHourStore) -> None:
    """However much is filed while the answer is put together."""
    hours = np.array(HOURS, np.int64)
    store.append(*messages(hours, sizes=[10] * len(hours)))
    before = list(hours_of(store, NOW))
    later = hours_of(store, NOW)
    found = [next(later)]
    store.append(*messages(hours, sizes=[20] * len(hours)))
    found += later
    assert found == before
    assert [hour.hour for hour in found] == [hour_name(hour) for hour in HOURS]
    assert [hour.hour for hour in found if hour.sealed] == [hour_name(NOW - 1)]
    assert [hour.hour for hour in found if hour.mapped] == [hour_name(hour) for hour in HOURS if store.mapped(hour)]
    sums = store.checksums()
    for hour in hours_of(store, NOW):
        for file, suffix in ((hour.log, "log"), (hour.idx, "idx")):
            size, crc = sums[f"{hour.hour}.{suffix}"]
            assert (file.entries, file.bytes, file.crc32c) == (2, str(size), f"{crc:08x}")
        assert (hour.dsp.entries, hour.dsp.bytes, hour.dsp.crc32c) == (0, "0", "00000000")
