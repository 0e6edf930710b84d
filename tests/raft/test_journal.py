"""The journal: what was synced is there, what was torn is cut, what is damaged is refused.

Crashes between any two steps of it, seeded: tests/sim/test_journal_torture.py.
"""

from __future__ import annotations

import errno
import random
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from chaos.sim.disk import SimDisk
from chaos.sim.file import SimCrash, SimFile
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.errors import ConfigError, DamagedFile, FatalError
from hadelay.raft.journal import FIRST, Journal, JournalConfig
from hadelay.raft.records import END, RECORD_OVERHEAD, SEGMENT_HEADER_BYTES
from hadelay.raft.segment import end_of
from hadelay.storage.identity import Identity

OWNER = Identity("test", 3, "n1")
CONFIG = JournalConfig(segment_bytes=8192, tail_bytes=2000)
DIRECTORY = "/raft"


class Rig:
    def __init__(self, config: JournalConfig = CONFIG) -> None:
        self.config = config
        self.world = SimWorld(1)
        self.disk = SimDisk(random.Random(1))
        self.start()
        self.journal = Journal.create(self.disk, DIRECTORY, self.runtime, OWNER, config)

    def start(self) -> None:
        self.runtime = SimRuntime(self.world, "n1", self.disk)

    def append(self, count: int, term: int = 1, size: int = 100) -> None:
        for _ in range(count):
            index = self.journal.last_index + 1
            self.journal.append((b"%d:" % index * size)[:size], index, term)

    def sync(self) -> None:
        self.journal.kick()
        self.world.run_for(0.01)
        assert self.journal.all_synced

    def reopen(self) -> Journal:
        """After kill -9: nothing was closed."""
        self.runtime.crash()
        self.disk.kill()
        self.start()
        self.journal = Journal.open(self.disk, DIRECTORY, self.runtime, OWNER, self.config)
        return self.journal

    def segments(self) -> list[str]:
        return [f"{DIRECTORY}/{name}" for name in self.disk.listdir(DIRECTORY) if name.endswith(".seg")]

    def contents(self) -> list[tuple[int, int, bytes]]:
        journal, found = self.journal, []
        while journal.base_index + len(found) < journal.last_index:
            found += journal.entries(journal.base_index + len(found) + 1, 700)
        return [(index, term, bytes(command)) for command, index, term, _ in found]


def test_an_empty_journal_stands_on_the_empty_state():
    rig = Rig()
    for journal in (rig.journal, rig.reopen()):
        assert (journal.base_index, journal.base_term) == FIRST == (1, 0)
        assert (journal.last_index, journal.last_term, journal.synced_index) == (1, 0, 1)
        assert (journal.term, journal.voted_for, journal.incarnation, journal.admitted) == (0, None, 1, True)


def test_entries_terms_and_vote_come_back_over_many_segments():
    rig = Rig()
    rig.append(150, term=1)
    rig.append(150, term=4)
    rig.journal.vote(7, "n3")
    rig.sync()
    before = rig.contents()
    assert len(rig.segments()) > 3
    journal = rig.reopen()
    assert rig.contents() == before
    assert [journal.term_at(i) for i in (1, 2, 151, 152, 301)] == [0, 1, 1, 4, 4]
    assert (journal.term, journal.voted_for) == (7, "n3")
    with pytest.raises(FatalError):
        journal.entries(1, 100)


def test_memory_holds_a_bounded_tail_and_the_disk_the_rest():
    rig = Rig()
    for _ in range(40):
        rig.append(10)
        rig.sync()
    assert sum(len(entry[0]) for entry in rig.journal._tail) <= CONFIG.tail_bytes + 1000
    assert [index for index, _, _ in rig.contents()] == list(range(2, 402))
    assert len(rig.journal.entries(2, 1000)) == 10
    assert len(rig.journal.entries(2, 1)) == 1, "one entry is always given, whatever its size"


def test_one_sync_for_all_that_waits():
    rig = Rig()
    order = []
    rig.append(1)
    rig.journal.when_synced(lambda: order.append("first"))
    rig.journal.kick()
    rig.append(50)
    rig.journal.when_synced(lambda: order.append("second"))
    rig.journal.kick()
    syncs = rig.disk.syncs
    rig.journal.on_synced = lambda seconds: order.append(rig.journal.synced_index)
    rig.world.run_for(0.02)
    assert order == ["first", 2, "second", 52]
    assert rig.disk.syncs - syncs <= 4
    rig.journal.when_synced(lambda: order.append("at once"))
    assert order[-1] == "at once"


def test_a_failing_sync_is_final():
    rig = Rig()
    errors, answered = [], []
    rig.journal.on_fatal = errors.append
    rig.disk.fail_syncs = 1
    rig.append(1)
    rig.journal.when_synced(lambda: answered.append(1))
    rig.journal.kick()
    rig.world.run_for(1.0)
    rig.journal.kick()
    rig.world.run_for(1.0)
    assert len(errors) == 1
    assert isinstance(errors[0], OSError)
    assert not answered


def test_the_end_is_cut_and_stays_cut():
    rig = Rig()
    rig.append(20, term=1)
    rig.sync()
    rig.journal.truncate(15)
    assert (rig.journal.last_index, rig.journal.synced_index) == (14, 14)
    rig.append(2, term=5, size=50)
    rig.sync()
    rig.reopen()
    assert [(index, term) for index, term, _ in rig.contents()][-4:] == [(13, 1), (14, 1), (15, 5), (16, 5)]


def test_the_last_entry_is_the_one_that_a_start_would_find():
    """Whatever stands behind it: votes and marks, a segment that has none yet, or entries that a later one cuts off."""
    rig = Rig()
    rig.append(60, term=2)
    rig.journal.vote(7, "n2")
    rig.sync()
    rig.world.run_for(1)  # a mark
    seen = end_of(rig.disk, DIRECTORY)
    assert (seen["node"], seen["last_index"], seen["last_term"], seen["term"]) == ("n1", 61, 2, 7)
    rig.reopen()
    assert {key: end_of(rig.disk, DIRECTORY)[key] for key in seen} == seen
    rig.journal.truncate(40)
    rig.sync()
    assert end_of(rig.disk, DIRECTORY)["last_index"] == 39
    rig.append(1, term=8)
    rig.sync()
    assert (end_of(rig.disk, DIRECTORY)["last_index"], end_of(rig.disk, DIRECTORY)["last_term"]) == (40, 8)


def test_a_sync_that_was_under_way_says_nothing_of_what_replaced_its_entries():
    rig = Rig()
    rig.disk.sync_delay_s = 0.1
    rig.append(5)
    rig.journal.kick()
    rig.world.run_for(0.01)
    rig.journal.truncate(4)
    rig.append(2, term=2)
    rig.journal.on_synced = lambda seconds: seen.append(rig.journal.synced_index)
    seen: list[int] = []
    rig.world.run_for(1.0)
    assert seen == [3, 5]


def test_whole_segments_go_from_the_front():
    rig = Rig()
    rig.append(300)
    rig.sync()
    many = len(rig.segments())
    rig.journal.compact(200, 0)
    rig.world.run_for(0.1)
    assert len(rig.segments()) < many
    assert 150 < rig.journal.base_index <= 200
    assert rig.journal.base_term == 1
    base = rig.journal.base_index
    rig.journal.compact(301, 5000)
    assert rig.journal.size_bytes >= 5000
    journal = rig.reopen()
    assert journal.base_index >= base
    assert journal.last_index == 301


def test_nothing_before_a_cut_goes_until_the_cut_is_durable():
    """A power cut undoes the cut, and the entries behind it would stand on nothing."""
    rig = Rig()
    rig.append(150)
    rig.sync()
    rig.journal.truncate(40)
    rig.journal.compact(39, 0)
    rig.world.run_for(0.1)
    before = rig.reopen().base_index
    assert (before, rig.contents()[0][0], rig.journal.last_index) == (1, 2, 151)
    rig.journal.truncate(40)
    rig.append(90, term=2)
    rig.sync()
    rig.journal.compact(39, 0)
    rig.world.run_for(0.1)
    assert rig.reopen().base_index == 39


def test_segments_that_were_to_be_deleted_do_not_count_behind_a_crash():
    """The newest segment stands on none of them, and their deletion had not begun."""
    rig = Rig()
    rig.append(100)
    rig.sync()
    rig.journal.become(76)
    last = rig.journal.last_index
    rig.journal.compact(last, 0)
    rig.journal.become(77)
    journal = rig.reopen()
    assert (journal.base_index, journal.last_index, journal.incarnation) == (last, last, 77)
    assert rig.segments() == [segment.file.path for segment in journal._segments]


def test_a_journal_begins_anew_behind_a_snapshot():
    rig = Rig()
    rig.append(30)
    rig.journal.vote(3, "n2")
    rig.journal.note_install(1000, 3)
    rig.sync()
    assert rig.reopen().installing == 1000
    rig.journal.reset(1000, 3)
    rig.append(2, term=4)
    rig.sync()
    journal = rig.reopen()
    assert (journal.base_index, journal.base_term, journal.last_index, journal.installing) == (1000, 3, 1002, 0)
    assert (journal.term, journal.voted_for) == (3, "n2"), "a promise outlives the log"
    assert len(rig.segments()) <= 2


def test_a_new_incarnation_keeps_the_log_and_has_to_be_admitted():
    rig = Rig()
    rig.append(5)
    rig.journal.become(77)
    journal = rig.reopen()
    assert (journal.incarnation, journal.admitted, journal.last_index) == (77, False, 6)
    journal.note_admitted()
    assert not journal.admitted
    rig.sync()
    assert journal.admitted
    assert rig.reopen().admitted


@pytest.mark.parametrize("cut", [False, True])
def test_an_admission_outlives_a_segment_that_is_begun_before_its_sync_ends(cut: bool):
    """If voters forgot theirs, and a majority needed them, nobody could be elected."""
    rig = Rig()
    rig.append(5)
    rig.journal.become(77)
    rig.sync()
    rig.disk.sync_delay_s = 0.1
    rig.append(1)
    rig.journal.kick()
    rig.append(60)
    rig.journal.note_admitted()
    if cut:  # the record is in a segment that the cut voids
        rig.journal.truncate(9)
    segments = len(rig.journal._segments)
    rig.append(80)
    assert len(rig.journal._segments) > segments
    assert not rig.journal.admitted
    rig.world.run_for(1.0)
    assert rig.journal.admitted
    journal = rig.reopen()
    assert (journal.admitted, journal.incarnation) == (True, 77)
    journal.become(78)
    assert not rig.reopen().admitted


def test_callers_that_wait_behind_a_new_incarnation_are_called_too():
    """What came while the sync before it was under way is synced with it, and no other sync follows."""
    rig = Rig()
    rig.disk.sync_delay_s = 0.1
    rig.append(5)
    rig.journal.when_synced(lambda: rig.journal.become(77))
    rig.journal.kick()
    rig.world.run_for(0.01)
    rig.journal.note_install(1000, 3)
    called: list[int] = []
    rig.journal.when_synced(lambda: called.append(rig.journal.incarnation))
    rig.world.run_for(1.0)
    assert called == [77]


def test_idle_it_grows_by_one_mark_and_no_more():
    rig = Rig()
    rig.append(1)
    rig.sync()
    rig.world.run_for(1.0)
    size, syncs = rig.journal.size_bytes, rig.disk.syncs
    rig.world.run_for(3600.0)
    assert (rig.journal.size_bytes, rig.disk.syncs) == (size, syncs)


def test_no_space_for_a_further_segment_is_known_before_it_is_needed():
    rig = Rig()
    rig.journal.want_spare()
    rig.world.run_for(0.1)
    assert rig.journal.has_space
    assert rig.journal.room > CONFIG.segment_bytes
    rig.disk.capacity = rig.disk.used
    rig.append(90)
    rig.world.run_for(0.1)
    assert not rig.journal.has_space
    rig.sync()


@pytest.mark.parametrize("space", [1 << 20, 4096], ids=["killed before the write", "on a full disk"])
def test_no_segment_stays_that_a_process_has_begun_and_not_written(space: int):
    """Each would take a segment's space for good; a node on a full disk begins one each time it starts again."""
    rig = Rig()
    for _ in range(3):
        rig.append(1)
        rig.sync()
        rig.disk.capacity = rig.disk.used + space
        with suppress(OSError):
            rig.append(90)  # as many as need another segment
        rig.disk.capacity = 1 << 30
        rig.reopen()
        assert rig.segments() == [segment.file.path for segment in rig.journal._segments]
    assert rig.contents()[-1][0] == rig.journal.last_index


def test_a_spare_segment_for_which_there_is_no_room_takes_none(monkeypatch: pytest.MonkeyPatch):
    """The kernel may allocate a part of the space and then find that there is no more."""
    rig = Rig()
    allocate = SimFile.allocate

    def partly(file: SimFile, size: int) -> None:
        allocate(file, size // 2)
        raise OSError(errno.ENOSPC, "No space left on device", file.path)

    used = rig.disk.used
    monkeypatch.setattr(SimFile, "allocate", partly)
    rig.journal.want_spare()
    rig.world.run_for(0.1)
    assert not rig.journal.has_space
    assert rig.disk.used == used


# -- torn ends and damage


def torn_rig() -> tuple[Rig, str, int, int]:
    """Entries 2..6 synced and known to be, then 7 and 8 written, as one write: (rig, path, its begin, its end)."""
    rig = Rig()
    rig.append(5)
    rig.sync()
    rig.append(2)
    segment = rig.journal._segments[-1]
    start = segment.written
    rig.journal.kick()
    return rig, segment.file.path, start, segment.written


def tear(rig: Rig, path: str, offset: int, end: int) -> None:
    file = rig.disk.open(path)
    file.pwrite(bytes(end - offset), offset)
    file.sync()


def test_a_torn_end_is_cut_at_every_byte():
    _, _, start, end = torn_rig()
    for offset in range(start, end):
        rig, path, _, _ = torn_rig()
        tear(rig, path, offset, end)
        journal = rig.reopen()
        assert journal.last_index in (6, 7), f"torn at {offset}"
        assert (journal.last_index == 7) == (offset >= start + 2 * RECORD_OVERHEAD + 100)
        rig.append(1)
        rig.sync()
        rig.reopen()
        assert len(rig.contents()) == journal.last_index - 1


def test_lost_sectors_of_an_unsynced_write_are_cut():
    rig = Rig()
    rig.append(2)
    rig.sync()
    rig.append(3, size=2400)
    segment = rig.journal._segments[-1]
    start = segment.written
    rig.journal.kick()
    for sector in range(start // 512 + 1, segment.written // 512):
        again = Rig()
        again.append(2)
        again.sync()
        again.append(3, size=2400)
        again.journal.kick()
        tear(again, again.journal._segments[-1].file.path, sector * 512, sector * 512 + 512)
        assert 3 <= again.reopen().last_index < 6


def test_every_flipped_byte_of_what_was_synced_is_refused():
    rig = Rig()
    rig.append(3, size=40)
    rig.journal.vote(2, "n2")
    rig.sync()
    rig.world.run_for(0.2)  # the mark that says so
    path = rig.segments()[-1]
    end = rig.journal._segments[-1].position
    marked = end - RECORD_OVERHEAD
    before = rig.contents()
    for offset in range(marked):
        again = Rig()
        again.append(3, size=40)
        again.journal.vote(2, "n2")
        again.sync()
        again.world.run_for(0.2)
        again.disk.flip_bit(path, offset, bit=offset % 8)
        with pytest.raises(DamagedFile) as refused:
            again.reopen()
        assert refused.value.path == path
        assert refused.value.offset <= offset
    rig.reopen()
    assert rig.contents() == before


def test_a_flipped_byte_in_the_last_record_is_refused_without_a_mark():
    """Killed right after the answer: nothing was written behind it, but it has all its bytes."""
    _, _, start, end = torn_rig()
    for offset in range(start, end):
        rig, path, _, _ = torn_rig()
        rig.disk.sync_everything()
        rig.disk.flip_bit(path, offset, bit=3)
        file = rig.disk.open(path)
        if file.pread(1, end - 1) == END and offset != end - 1:
            with pytest.raises(DamagedFile):
                pytest.fail(f"flipped at {offset - start}: {rig.reopen().last_index}")


@pytest.mark.parametrize("queued", [0, 1])
def test_a_power_cut_while_it_closes_is_no_damage(queued: int):
    """The mark that is left when nothing more comes is not synced itself: no later one may speak of it (seed 61530)."""
    for seed, step in product(range(30), (1, 2, 3, 4)):
        rig = Rig()
        rig.disk.random.seed(seed)
        rig.append(3)
        rig.sync()
        rig.world.run_for(0.2)
        before = rig.contents()
        rig.append(queued)
        rig.disk.crash_in = step
        with suppress(SimCrash):
            rig.journal.close()
        rig.disk.power_cut()
        rig.reopen()
        assert rig.contents()[:3] == before


@pytest.mark.parametrize("how", ["close", "become"])
def test_a_power_cut_takes_no_names_of_segments_that_count_as_synced(how: str):
    """Their names were never synced on their own: the journal ends, or begins a new incarnation, before."""
    for step in range(1, 40):
        rig = Rig()
        rig.disk.random.seed(step)
        rig.append(3)
        rig.sync()
        rig.append(150)
        assert len(rig.journal._segments) > 2
        rig.disk.crash_in = step
        with suppress(SimCrash):
            rig.journal.close() if how == "close" else rig.journal.become(77)
        rig.disk.crash_in = 0
        rig.runtime.crash()
        rig.disk.power_cut()
        rig.start()
        rig.journal = Journal.open(rig.disk, DIRECTORY, rig.runtime, OWNER, rig.config)
        assert [entry[0] for entry in rig.contents()[:3]] == [2, 3, 4]


def test_a_missing_segment_is_damage():
    rig = Rig()
    rig.append(300)
    rig.sync()
    rig.world.run_for(0.2)
    rig.disk.unlink(rig.segments()[1])
    with pytest.raises(DamagedFile):
        rig.reopen()


def test_a_power_cut_may_take_the_name_of_the_first_segment_behind_a_cut_and_leave_the_next():
    """Neither was ever synced, so nothing is missing; what was cut is there again."""
    rig = Rig()
    rig.append(80)
    rig.sync()
    rig.world.run_for(0.2)
    before = rig.contents()
    assert len(rig.segments()) == 2
    rig.journal.truncate(30)
    rig.append(8, term=2, size=1500)
    rig.journal.vote(9, "n2")
    cut, *more = rig.journal._dirty
    assert more
    for segment in (cut, *more):
        segment.write()
    rig.disk.unlink(cut.file.path)
    rig.disk.sync_everything()
    journal = rig.reopen()
    assert rig.contents() == before
    assert (journal.term, journal.voted_for) == (0, None)
    rig.append(1, term=9)
    rig.sync()
    assert rig.reopen().last_index == before[-1][0] + 1


def test_old_segments_are_read_when_they_are_needed():
    rig = Rig()
    for _ in range(30):
        rig.append(10)
        rig.sync()
    before = rig.contents()
    reads = []
    path = rig.segments()[1]
    rig.reopen()
    assert [segment.scanned for segment in rig.journal._segments][:2] == [False, False]
    assert rig.contents() == before
    rig.disk.flip_bit(path, SEGMENT_HEADER_BYTES + 900)
    rig.reopen()
    with pytest.raises(DamagedFile, match=path):
        reads += rig.contents()
    assert not reads


def test_a_newer_format_is_refused():
    rig = Rig()
    file = rig.disk.open(rig.segments()[0])
    file.pwrite(b"\x09", 8)
    with pytest.raises(DamagedFile):
        rig.reopen()


def test_records_that_may_not_have_been_synced_are_written_again_before_anything_leaves():
    rig = Rig()
    rig.append(5)
    rig.sync()
    rig.append(5)
    rig.journal._segments[-1].write()  # in the page cache only
    rig.reopen()
    rig.disk.power_cut()
    rig.start()
    journal = Journal.open(rig.disk, DIRECTORY, rig.runtime, OWNER, CONFIG)
    assert journal.last_index == 11


@pytest.mark.parametrize("other", [{"cluster_id": "prod"}, {"group": 4}, {"node": "n2"}])
def test_a_journal_of_others_is_refused(other):
    rig = Rig()
    with pytest.raises(ConfigError, match=f"belongs to .*, and this is .* {next(iter(other.values()))!r}"):
        Journal.open(rig.disk, DIRECTORY, rig.runtime, replace(OWNER, **other), CONFIG)


def test_reading_back_finds_damage_too():
    rig = Rig()
    for _ in range(20):
        rig.append(10)
        rig.sync()
    path = rig.segments()[0]
    rig.disk.flip_bit(path, SEGMENT_HEADER_BYTES + 500)
    with pytest.raises(DamagedFile):
        rig.journal.entries(2, 1 << 20)
