"""What stores of hour files have in common: what they list, how rows are taken from them, and how damage is told."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import DISPATCH, DISPATCH_SIZE, INDEX, INDEX_SIZE
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import hour_name
from hadelay.pipeline.damage import Flaw, in_rows, locate
from hadelay.storage.names import KINDS, decode_names

Rows = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]
WAY_OUT = "copy it from another node, or leave it out with onTorn=skip"
ROW = {"idx": (INDEX, INDEX_CRC, "entry"), "dsp": (DISPATCH, DISPATCH_CRC, "event")}


class HourFiles(NamedTuple):
    """What is committed of one hour. crcs: CRC-32C of .log, .idx and .dsp up to there, where they are known."""

    hour: int
    entries: int
    events: int
    log_bytes: int
    crcs: tuple[int, int, int] | None = None
    #: It is read from an archive (archived.py).
    archived: bool = False

    def crc(self, suffix: str) -> int | None:
        return None if self.crcs is None else self.crcs[("log", "idx", "dsp").index(suffix)]

    def length(self, suffix: str) -> int:
        """In bytes."""
        return {"log": self.log_bytes, "idx": self.entries * INDEX_SIZE, "dsp": self.events * DISPATCH_SIZE}[suffix]


class Listing(NamedTuple):
    hours: list[HourFiles]
    #: Unix ms: the listing knows of nothing later.
    as_of_ms: int

    def encode(self) -> str:
        return base64.b64encode(zlib.compress(msgpack.packb((self.hours, self.as_of_ms)))).decode()


def decode_listing(text: str) -> Listing:
    """BadRequest unless `Listing.encode` made it."""
    try:
        hours, as_of_ms = msgpack.unpackb(zlib.decompress(base64.b64decode(text)), use_list=False)
        return Listing([HourFiles(*hour) for hour in hours], as_of_ms)
    except (ValueError, TypeError, zlib.error):
        raise BadRequest("option listing: expected what Listing.encode gives") from None


@dataclass(frozen=True)
class Names:
    """number → name."""

    topics: list[str] = field(default_factory=list)
    consumers: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class Store(Protocol):
    @property
    def max_gap(self) -> int:
        """Bytes that are better read than skipped between two pieces of a .log."""
        ...

    def list(self) -> Listing: ...

    def names(self) -> Names:
        """At least those of the last listing."""
        ...

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        """Those bytes of .log, .idx or .dsp. DamagedFile when they are not there."""
        ...

    def where(self, files: HourFiles, suffix: str) -> str:
        """For messages: the file's name; of `names` and state.mdb too, which are no hour's."""
        ...


def rows(store: Store, files: HourFiles, suffix: str, start: int, stop: int, *, verify: bool = False) -> Rows:
    """INDEX or DISPATCH rows [start, stop). DamagedFile names file, hour and entry: of an entry that says it stands
    elsewhere, and, with verify, of a row whose CRC is wrong."""
    found, bad = _rows_and_bad(store, files, suffix, start, stop, verify=verify)
    if len(bad):
        name = ROW[suffix][2]
        wrong = ROW[suffix][1].bad(np.ascontiguousarray(found[bad[:1]]))
        what = f"the {name}'s CRC is wrong" if len(wrong) else f"{name} {found['index'][bad[0]]} stands here"
        raise damage(store, files, suffix, start + int(bad[0]), what)
    return found


def usable(
    store: Store, files: HourFiles, suffix: str, start: int, stop: int, *, verify: bool, skip: bool
) -> tuple[Rows, npt.NDArray[np.bool_] | None]:  # fmt: skip
    """With skip: (rows, which of them `rows` would take, None if all). Without it they are all there, or it raises."""
    if not skip:
        return rows(store, files, suffix, start, stop, verify=verify), None
    found, bad = _rows_and_bad(store, files, suffix, start, stop, verify=verify)
    if not len(bad):
        return found, None
    good = np.ones(len(found), np.bool_)
    good[bad] = False
    return found, good


def _rows_and_bad(
    store: Store, files: HourFiles, suffix: str, start: int, stop: int, *, verify: bool
) -> tuple[Rows, npt.NDArray[np.intp]]:  # fmt: skip
    dtype = ROW[suffix][0]
    found = store.read(files, suffix, start * dtype.itemsize, stop * dtype.itemsize).view(dtype)
    return found, in_rows(found, suffix, start, crc=verify)


def flaw_of(store: Store, files: HourFiles, suffix: str) -> Flaw | None:
    """The first damage of that file, looked for row by row and record by record; None if there is none to be seen."""
    return locate(
        suffix, partial(store.read, files), files.entries, files.events, files.log_bytes,
        promised=files.crcs is not None,
    )  # fmt: skip


def damage(store: Store, files: HourFiles, suffix: str, number: int, what: str) -> DamagedFile:
    """Of the entry or event of that number."""
    name = ROW[suffix][2]
    size = ROW[suffix][0].itemsize
    return DamagedFile(
        store.where(files, suffix), number * size,
        f"hour {hour_name(files.hour)}, {name} {number}: {what}; {WAY_OUT}", size=size,
    )  # fmt: skip


def names_of(data: bytes, path: str, *, tolerant: bool = False) -> Names:
    """tolerant: up to the first that does not verify."""
    found: dict[int, list[str]] = {kind: [] for kind in KINDS}
    try:
        for name in decode_names(data, path):
            known = found.get(name.kind)
            if known is None or name.number != len(known):
                raise DamagedFile(path, name.offset, f"{name.name!r} has number {name.number}, out of order")
            known.append(name.name)
    except DamagedFile as error:
        if not tolerant:
            raise DamagedFile(path, error.offset, f"{str(error).partition(': ')[2]}; {WAY_OUT}") from None
    return Names(*found.values())
