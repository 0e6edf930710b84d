"""Segment files as a whole: made, recovered at start-up, deleted (docs/spec/raft-journal.md, "Reading it")."""

from __future__ import annotations

from dataclasses import replace

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.platform.disk import Disk, File
from hadelay.raft import records
from hadelay.raft.segment import Entry, Segment
from hadelay.storage.identity import Identity, refuse_strangers

SUFFIX = ".seg"
#: The next segment, zeroed and waiting; and one that is being written and has no name yet.
SPARE = "spare"
NEW = "new"


def zeroed(disk: Disk, path: str, size: int) -> File:
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        file.allocate(size)
        zeroes = bytes(1 << 20)
        for offset in range(0, size, len(zeroes)):
            file.pwrite(zeroes[: size - offset], offset)
        file.sync()
    except BaseException:
        file.close()
        raise
    return file


def delete(disk: Disk, segment: Segment) -> None:
    segment.file.close()
    if disk.exists(segment.file.path):
        disk.unlink(segment.file.path)


def build(disk: Disk, directory: str, header: records.SegmentHeader, entries: list[Entry], size: int) -> Segment:
    """A segment that is durable, contents and name, when this returns."""
    room = records.SEGMENT_HEADER_BYTES + sum(len(entry[0]) + records.RECORD_OVERHEAD for entry in entries) + size
    file = zeroed(disk, f"{directory}/{NEW}", room if entries else size)
    segment = Segment(file, header)
    for command, index, term, record in entries:
        segment.note(index, term, segment.position)
        segment.append(record or records.encode_record(records.ENTRY, index, term, command))
    segment.write()
    file.sync()
    path = f"{directory}/{header.seq:016d}{SUFFIX}"
    disk.rename(file.path, path)
    file.path = path
    disk.sync_dir(directory)
    return segment


def _superseded(found: list[Segment]) -> tuple[list[Segment], list[Segment]]:
    """(those that count, those that a later one begins before). A power cut may have kept any of the latter's names,
    so they are put aside before anything looks for gaps."""
    counting: list[Segment] = []
    dropped: list[Segment] = []
    for segment in reversed(found):
        if counting and (counting[-1].header.reset or counting[-1].first_index <= segment.first_index):
            dropped.append(segment)
        else:
            counting.append(segment)
    return counting[::-1], dropped


def end_of(disk: Disk, directory: str) -> dict[str, object]:
    """Owner and last entry of a journal, as the node itself would find them. `disk` may ignore unlinks."""
    segments, state, _ = recover(disk, directory, None)
    last = segments[-1]
    term = last.term_at(last.last_index) if last.last_index >= last.first_index else last.header.prev_term
    for segment in segments:
        segment.file.close()
    return {
        "cluster": state.cluster_id, "group": state.group, "node": state.node, "incarnation": state.incarnation,
        "admitted": state.admitted, "term": state.term, "last_term": term, "last_index": last.last_index,
    }  # fmt: skip


def _find(disk: Disk, directory: str, owner: Identity | None) -> tuple[list[Segment], int]:
    """All segments with a whole header, and the number of the last segment file."""
    found: list[Segment] = []
    number = 0
    for name in disk.listdir(directory):  # segments come first: nothing is deleted before their owner is known
        if name in (SPARE, NEW):
            disk.unlink(f"{directory}/{name}")
        if not name.endswith(SUFFIX):
            continue
        number = int(name.removesuffix(SUFFIX))
        file = disk.open(f"{directory}/{name}")
        header = records.decode_segment_header(file.pread(records.SEGMENT_HEADER_BYTES, 0), file.path)
        if header is not None:
            if owner is not None:
                refuse_strangers(directory, Identity(header.cluster_id, header.group, header.node), owner)
            found.append(Segment(file, header))
    return found, number


def recover(disk: Disk, directory: str, owner: Identity | None) -> tuple[list[Segment], records.SegmentHeader, int]:
    """(segments that count, the newest header with term, vote and `durable` brought up to date, number of the last
    segment file). ConfigError for the journal of another than `owner`; None: any owner."""
    found, number = _find(disk, directory, owner)
    if not found:
        raise DamagedFile(directory, 0, f"no segment has a whole header; {WAY_OUT}")
    found, dropped = _superseded(found)
    kept: list[Segment] = []
    state, durable = found[0].header, (0, 0)
    for at, segment in enumerate(found):
        header = segment.header
        if kept:
            if kept[-1].header.seq != header.previous or kept[-1].last_index < header.first_index - 1:
                # Something is missing in between: damage, unless nothing from there on was ever synced.
                later = [s.header.durable for s in found[at:]]
                later += [(r.term, r.index) for s in found[at:] for r in s.scan() if r.kind == records.MARK]
                kept[-1].refuse_damage(max(later))
                dropped += found[at:]
                break
            kept[-1].cap(header.first_index - 1)
        state, durable = header, max(durable, header.durable)
        kept.append(segment)
        if any(s.header.durable[0] > header.seq for s in found[at + 1 :]):
            segment.leave_unread(found[at + 1].first_index - 1)
            continue
        for record in segment.scan():
            if record.kind == records.VOTE:
                state = replace(state, term=record.term, vote=record.payload.decode())
            elif record.kind == records.INSTALL:
                state = replace(state, installing=record.index)
            elif record.kind == records.ADMITTED:
                state = replace(state, admitted=True)
            elif record.kind == records.MARK:
                durable = max(durable, (record.term, record.index))
    kept[-1].refuse_damage(durable)
    for segment in kept:
        segment.data = b""
    for segment in dropped:
        delete(disk, segment)
    return kept, replace(state, durable=durable), number
