"""All hour files of one Raft group: message log, linked index and dispatch log of every hour (S1, S2 in
docs/explanation/architecture.md).

The previous, the current and the next two hours are *near*: mapped, linked and written as messages arrive. All others
are *far*: a bounded buffer collects their messages, and the checkpoint links and writes many hours in one vectorised
pass. A read writes the buffered messages of its hour first. The bytes of a file depend only on the order of appends,
never on the time of writing, so replicas stay byte-identical.

All methods are called on the loop; apply calls the ones that change something.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC, chain, group, link, place
from hadelay.model import hour_name
from hadelay.platform.disk import Disk
from hadelay.storage.appends import Records
from hadelay.storage.far import Sample
from hadelay.storage.hourreader import HourReader, Rows
from hadelay.storage.hourtable import DSP, FILES, IDX, LOG
from hadelay.storage.near import NearHour

#: Maximum size, in bytes, of the records and rows of one append. A journal entry has at most 4 MiB.
_LARGEST_APPEND = 16 << 20
_ROW = f"V{INDEX_SIZE}"


class DiskHourStore(HourReader):
    def __init__(self, disk: Disk, directory: str, group_number: int, *, far_buffer_bytes: int = 32 << 20) -> None:
        capacity = far_buffer_bytes + far_buffer_bytes // 4 + _LARGEST_APPEND
        super().__init__(disk, directory, far_buffer_bytes, capacity)
        self._group, self.far_buffer_bytes = group_number, far_buffer_bytes
        self._window = range(0)
        self._retired: list[int] = []
        self._doomed: list[int] = []
        #: Number of backups and peers that are copying hour files; hour files are removed only while this number is 0.
        self.pins = 0

    @property
    def far_bytes(self) -> int:
        """Bytes of far hours (not mapped into memory) that wait in memory for the next checkpoint; at
        `far_buffer_bytes`, a checkpoint begins."""
        return self._far.waiting_bytes

    def append(
        self,
        hours: int | npt.NDArray[np.int64],
        rows: Rows,
        blob: bytearray,
        headers: Rows | None = None,
        copies: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.uint32]:
        """Append messages with their records; returns each message's number in its hour (globalIndex), in the order of
        `rows`.

        hours: filing hour of all rows, or of each row. rows: INDEX rows with deliver_at_ms, tag_mask, size, topic,
        attempt, flags and second (first_id 0: a new message); `append` fills offset, index and first_id in place.
        blob: the records in the order of rows, each rows.size long. headers: RECORD rows with meta_size, body_size,
        topic, published_at_ms, deliver_at_ms, payload_crc and flags, completed here and written over the first 48
        bytes of each record; None for complete records. copies: which rows share the record of the row before them,
        which has the same hour and size; `blob` and `headers` leave such rows out. The store owns rows and blob
        afterwards.
        """
        records = Records(blob, headers, copies)
        for start, end, part in records.parts(rows):
            self._append(hours if isinstance(hours, int) else hours[start:end], rows[start:end], part)
        return rows["index"]

    def _append(self, hours: int | npt.NDArray[np.int64], rows: Rows, records: Records) -> None:
        if not isinstance(hours, int):
            first, last = int(hours.min()), int(hours.max())
            if first != last:
                self._append_mixed(hours, first, last, rows, records)
                return
            hours = first
        slot = self._slot(hours)
        if hours in self._window:
            self._append_near(hours, slot, rows, records)
        else:
            self._append_far(np.full(len(rows), slot, np.uint32), np.full(len(rows), hours), rows, records)

    def append_again(self, hour: int, rows: Rows) -> int:
        """Append index entries for messages that are deferred within their hour: their records are already in its .log
        (offset, size and first_id are filled). Returns the first entry's number in the hour (globalIndex)."""
        slot = self._slot(hour)
        if hour in self._window:
            self._append_near(hour, slot, rows, None)
        else:
            self._append_far(np.full(len(rows), slot, np.uint32), np.full(len(rows), hour), rows, None)
        return int(rows["index"][0])

    def _append_near(self, hour: int, slot: int, rows: Rows, records: Records | None) -> None:
        near, table, n = self._near.get(hour) or self._open_near(hour), self._table, len(rows)
        first, size = near.entries, 0
        rows["index"] = np.arange(first, first + n, dtype=np.uint32)
        if records is not None:
            size = len(records.blob)
            sizes = records.sizes(rows)
            ends = sizes.cumsum()
            assert ends[-1] == size, "records stand one after another"
            starts = ends - sizes
            rows["offset"] = starts + int(table.log_bytes[slot])
            records.share(rows)
            self._name(hour, rows)
            records.write_headers(rows, starts)
            table.log_crc[slot] = crc32c(records.blob, int(table.log_crc[slot]))
        derived = self._heads.get(hour, first)
        link(rows, derived.heads)
        INDEX_CRC.seal(rows)
        near.append(rows, None if records is None else records.blob)
        derived.entries = first + n
        table.idx_crc[slot] = crc32c(rows.view(np.uint8).data, int(table.idx_crc[slot]))
        table.log_bytes[slot] += size
        table.log_written[slot] = table.log_bytes[slot]
        table.entries[slot] = table.written[slot] = first + n
        table.changed[slot] = True
        table.unsynced[slot] |= LOG | IDX

    def _append_far(
        self, slots: npt.NDArray[np.uint32], hours: npt.NDArray[np.int64], rows: Rows, records: Records | None
    ) -> None:
        table, size = self._table, 0 if records is None else len(records.blob)
        self._far.keep_up(len(rows), size)
        # `keep_up` wrote a part of the buffer to disk. Write all of it if these index entries still do not fit into it.
        if not self._far.fresh.fits(len(rows), size):
            self._far.spill()
        fresh = self._far.fresh
        assert (table.written[slots] <= table.entries[slots]).all(), "nothing is filed in a retired hour"
        groups = group(slots.astype(np.uint16) if table.size < 1 << 16 else slots) if len(rows) > 1 else None
        rows["index"], previous = chain(slots, fresh.numbers(len(rows)), fresh.tail, table.entries, groups)
        if records is not None:
            sizes = records.sizes(rows)
            rows["offset"] = place(slots, sizes, table.log_bytes, groups)
            records.share(rows)
            self._name(hours, rows)
            records.write_headers(rows, sizes.cumsum() - sizes)
        fresh.add(slots, previous, rows, records)
        table.changed[slots] = True

    def _append_mixed(self, hours: npt.NDArray[np.int64], first: int, last: int, rows: Rows, records: Records) -> None:
        if not self._table.covers(first, last):
            self._cover(hours)
        window = self._window
        near = (hours >= window.start) & (hours < window.stop)
        if not near.any():
            slots = self._table.slots(hours).astype(np.uint32)
            self._append_far(slots, hours, rows, records)
            return
        sizes = records.sizes(rows)
        ends = sizes.cumsum()
        for hour in (None, *sorted(set(hours[near].tolist()))):
            chosen = np.flatnonzero(~near if hour is None else hours == hour)
            if not len(chosen):
                continue
            part, some = rows.take(chosen), records.part(ends, sizes, chosen)
            if hour is None:
                far = hours[chosen]
                self._append_far(self._table.slots(far).astype(np.uint32), far, part, some)
            else:
                self._append_near(hour, self._slot(hour), part, some)
            # View rows as plain bytes, so that numpy copies whole rows, not field by field.
            rows.view(_ROW)[chosen] = part.view(_ROW)

    def _name(self, hours: int | npt.NDArray[np.int64], rows: Rows) -> None:
        """Give an id to each new message, made of Raft group, hour and number in the hour (model.pack_id)."""
        ids = rows["first_id"]
        new = ids == 0
        if not new.any():
            return
        prefix = np.uint64(self._group << 56) | (np.asarray(hours, np.uint64) << np.uint64(32))
        rows["first_id"] = np.where(new, prefix | rows["index"], ids)

    def append_events(self, hour: int, rows: Rows) -> int:
        """Append DISPATCH rows to an hour, and fill their CRCs in place; returns the first row's number."""
        slot, table = self._slot(hour), self._table
        first = int(table.events[slot])
        DISPATCH_CRC.seal(rows)
        data = rows.tobytes()
        self._handles.get(self.path(hour) + ".dsp", create=True).pwrite(data, first * DISPATCH_SIZE)
        table.dsp_crc[slot] = crc32c(data, int(table.dsp_crc[slot]))
        table.events[slot] = first + len(rows)
        table.changed[slot] = True
        table.unsynced[slot] |= DSP
        return first

    def set_clock(self, now_hour: int) -> None:
        """Map the previous, current and next two hours into memory, unmap others; called when the hour changes."""
        window = range(now_hour - 1, now_hour + 3)
        if window == self._window:
            return
        if not self._table.covers(window[0], window[-1]):
            self._cover(np.array(window, np.int64))
        for hour in [hour for hour in self._near if hour not in window]:
            self._close_near(hour)
        self._window = window
        for hour in window:
            if hour not in self._near and self.count(hour):
                self._open_near(hour)

    def _open_near(self, hour: int) -> NearHour:
        self._write_out(hour)
        path, entries = self.path(hour), self.count(hour)
        self._handles.forget(path + ".idx")
        self._handles.forget(path + ".log")
        self._heads.hold(hour, entries)
        near = self._near[hour] = NearHour(self._disk, path, entries, self.lengths(hour)[0])
        return near

    def _close_near(self, hour: int) -> None:
        self._near.pop(hour).close()
        self._heads.release(hour)

    def retire(self, hour: int) -> None:
        """Forget an hour. The next durable checkpoint removes its files, unless backups or peers copy files then."""
        slot = self._table.find(hour)
        if slot < 0 or not self._table.entries[slot]:
            return
        self._far.write_out(slot)  # write the hour's buffered rows first: a running checkpoint may include them
        if hour in self._near:
            self._close_near(hour)
        self._heads.forget(hour)
        self._table.clear(slot)
        self._retired.append(hour)

    def _slot(self, hour: int) -> int:
        slot = self._table.find(hour)
        if slot < 0:
            self._cover(np.array([hour], np.int64))
            slot = self._table.find(hour)
        return slot

    def _cover(self, hours: npt.NDArray[np.int64]) -> None:
        table = self._table
        if table.moves(hours):
            self._far.spill()
        table.cover(hours)
        self._far.fresh.cover(table.size)

    def sample(self) -> Sample:
        """Make a checkpoint's list of the hours that changed since the last one, with lengths and CRCs. The CRCs are
        complete once `write_some` returned True."""
        table = self._table
        slots = np.flatnonzero(table.changed)
        sample = Sample(table.hours(slots), table.rows(slots), self._retired)
        self._retired = []
        table.changed[:] = False
        self._far.freeze(sample)
        return sample

    def write_some(self) -> bool:
        """Write the frozen (no longer growing) buffer's messages of a few dozen far hours (not mapped into memory);
        True when none are left."""
        return self._far.write_some()

    def unsynced(self) -> list[str]:
        """Paths of hour files with unsynced bytes, to sync before the checkpoint commits; marks them as synced."""
        table, paths = self._table, []
        for slot in np.flatnonzero(table.unsynced).tolist():
            path, bits = self.path(table.hour(slot)), int(table.unsynced[slot])
            paths += [path + suffix for suffix, bit in FILES.items() if bits & bit]
        table.unsynced[:] = 0
        return paths

    def freeze(self) -> None:
        """Freeze the buffered messages, so that `write_some` writes them; without a checkpoint."""
        self._far.freeze(None)

    def committed(self, sample: Sample) -> list[str]:
        """Note that this sample's checkpoint is durable; returns the files of retired hours that may be unlinked."""
        self._doomed += sample.gone
        self._heads.save(limit=8)
        if self.pins:
            return []
        doomed, self._doomed = self._doomed, []
        paths = [self.path(hour) + suffix for hour in doomed for suffix in (*FILES, ".heads")]
        for path in paths:
            self._handles.forget(path)
        return [path for path in paths if self._disk.exists(path)]

    def load(self, hours: npt.NDArray[np.int64], rows: Rows) -> None:
        self._table.load(hours, rows)
        self._far.fresh.cover(self._table.size)

    def checksums(self) -> dict[str, tuple[int, int]]:
        """Name of each hour file → (length, CRC-32C) at the applied index. Writes buffered messages first."""
        return dict(file_checksums(*self.rows()))

    def rows(self) -> tuple[npt.NDArray[np.int64], Rows]:
        """All hours that have entries and are not retired, at the applied index: (hours, HOUR_ROW of each), ascending,
        hours of dead letters last. Writes buffered messages first."""
        self._far.spill()
        table = self._table
        slots = np.flatnonzero(table.entries)
        hours = table.hours(slots)
        order = hours.argsort()
        return hours[order], table.rows(slots[order])

    def repair(self, hour: int, suffix: str, offset: int, data: bytes) -> None:
        """Overwrite damaged bytes of an hour's ".log", ".idx" or ".dsp" file with bytes of another node. Raises
        BadRequest if these do not verify."""
        self.check_repair(hour, suffix, offset, data)
        near = self._near.get(hour)
        if near is not None and suffix != ".dsp":
            near.overwrite(suffix, data, offset)
        else:
            self._handles.get(self.path(hour) + suffix).pwrite(data, offset)
        self._table.unsynced[self._slot(hour)] |= FILES[suffix]

    def close(self) -> None:
        for hour in list(self._near):
            self._close_near(hour)
        self._heads.close()
        self._handles.close()


def file_checksums(hours: npt.NDArray[np.int64], rows: Rows) -> Iterator[tuple[str, tuple[int, int]]]:
    """List the files that HOUR_ROW rows describe: (file name, (length, CRC-32C))."""
    for hour, row in zip(hours.tolist(), rows.tolist(), strict=True):
        log_bytes, entries, events, log_crc, idx_crc, dsp_crc, _ = row
        name = hour_name(hour)
        yield name + ".log", (log_bytes, log_crc)
        yield name + ".idx", (entries * INDEX_SIZE, idx_crc)
        if events:
            yield name + ".dsp", (events * DISPATCH_SIZE, dsp_crc)
