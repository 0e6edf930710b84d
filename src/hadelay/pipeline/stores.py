"""Where hour files are read from: a directory, what lies in an object store or HDFS, or the nodes themselves.

A store lists the hours with how much of each is committed, and gives rows and bytes within that. What it lists is of
one applied index, so a moved message's next entry is in the listing if its move is. Stores are pickled into tasks.
"""

from __future__ import annotations

import base64
import http.client
import os
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgpack
import msgspec
import numpy as np
import numpy.typing as npt

from hadelay.core.formats import DISPATCH, DISPATCH_SIZE, INDEX, INDEX_SIZE
from hadelay.core.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline.places import Place, absolute
from hadelay.pipeline.schema import Options
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.names import KINDS, decode_names
from hadelay.storage.tables import CHECKPOINT, ROW, hour_rows

Rows = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]
#: Rows at the end of a file without a checkpoint that are checked: a power cut tears pages, not whole hours.
_TAIL = 4096
_CHUNK = 8 << 20
_ROW = {"idx": (INDEX, INDEX_CRC, "entry"), "dsp": (DISPATCH, DISPATCH_CRC, "event")}


class HourFiles(NamedTuple):
    """What is committed of one hour. crcs: CRC-32C of .log, .idx and .dsp up to there, where they are known."""

    hour: int
    entries: int
    events: int
    log_bytes: int
    crcs: tuple[int, int, int] | None = None
    #: It is read from an archive (archived.py).
    archived: bool = False

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
        """The file's name for messages."""
        ...


def open_store(options: Options) -> Store:
    if options.endpoint:
        urls = [url.strip().rstrip("/") for url in options.endpoint.split(",") if url.strip()]
        return HttpStore(urls, options.token, options.timeout)
    kind = FileStore if "://" in options.path else LocalStore
    return kind(_group_directory(options.path), skip_torn=options.on_torn == "skip")


def listing(store: Store, options: Options) -> Listing:
    found = decode_listing(options.listing) if options.listing else store.list()
    return found._replace(as_of_ms=options.as_of) if options.as_of else found


def rows(store: Store, files: HourFiles, suffix: str, start: int, stop: int, *, verify: bool = False) -> Rows:
    """INDEX or DISPATCH rows [start, stop), not verified unless asked for. DamagedFile names file, hour and entry."""
    dtype, crc, what = _ROW[suffix]
    size = dtype.itemsize
    found = store.read(files, suffix, start * size, stop * size).view(dtype)
    if verify and len(bad := crc.bad(np.ascontiguousarray(found))):
        raise damage(store, files, suffix, start + int(bad[0]), f"the {what}'s CRC does not hold")
    return found


def damage(store: Store, files: HourFiles, suffix: str, number: int, what: str) -> DamagedFile:
    """Of the entry or event of that number."""
    name = _ROW[suffix][2]
    size = _ROW[suffix][0].itemsize
    return DamagedFile(
        store.where(files, suffix), number * size,
        f"hour {hour_name(files.hour)}, {name} {number}: {what}; onTorn=skip leaves it out", size=size,
    )  # fmt: skip


def _group_directory(path: str) -> str:
    path = absolute(path.rstrip("/"))
    place = Place(path)
    if (names := place.list("")) is None:
        raise NotFound(f"{path}: no such directory")
    if place.list("hours") is not None:
        return path
    groups = [name for name in names if place.list(f"{name}/hours") is not None]
    if len(groups) == 1:
        return place.below(groups[0])
    if groups:
        raise BadRequest(f"{path} has several groups: name one of {', '.join(map(place.below, groups))}")
    raise NotFound(f"{path}: no directory hours/ in it, so it is not the data directory of a node or group")


@dataclass(frozen=True)
class LocalStore:
    """A group's directory, of a node that runs or not, or a copy of one; never written to.

    With `state.mdb`, what the last checkpoint names is committed: bytes behind it are left alone, a file that is
    shorter is damaged. Without, a file counts up to its zeroes, and its end has to verify.
    """

    directory: str
    skip_torn: bool = False
    max_gap: int = 1 << 62  # nothing is read that is not touched: files are mapped

    @property
    def _place(self) -> Place:
        return Place(self.directory)

    def list(self) -> Listing:
        tables = f"{self.directory}/state.mdb"
        if not os.path.exists(tables):
            return self._all_of_them()
        for attempt in range(5):
            try:
                as_of_ms = self._place.modified_ms("state.mdb")
                before, hours, found = self._checkpoint(tables)
                files = [self._promised(int(hour), row) for hour, row in zip(hours, found, strict=True)]
            except (DamagedFile, OSError):
                # A checkpoint may have committed meanwhile: a node keeps no pages for readers that it cannot see.
                if attempt == 4:
                    raise
            else:
                if self._checkpoint(tables)[0] == before:
                    return Listing(files, as_of_ms)
            time.sleep(0.05 * attempt)
        raise DamagedFile(tables, 0, "a checkpoint is taken each time it is read: copy the directory, or use endpoint")

    def _all_of_them(self) -> Listing:
        stems = [name[:-4] for name in self._place.list("hours") or () if name.endswith(".idx")]
        return Listing([self._unpromised(hour_from_name(stem)) for stem in stems], _now_ms())

    def _checkpoint(self, tables: str) -> tuple[Any, npt.NDArray[np.int64], Rows]:
        backend = LmdbBackend(tables, readonly=True)
        try:
            row = backend.get(CHECKPOINT, ROW)
            return (msgpack.unpackb(row) if row else None), *hour_rows(backend)
        finally:
            backend.close()

    def where(self, files: HourFiles, suffix: str) -> str:
        return self._path(files.hour, suffix)

    def _path(self, hour: int, suffix: str) -> str:
        return self._place.path(f"hours/{hour_name(hour)}.{suffix}")

    def _size(self, hour: int, suffix: str) -> int:
        return self._place.size(f"hours/{hour_name(hour)}.{suffix}") or 0

    def _promised(self, hour: int, row: np.void) -> HourFiles:
        crcs = (int(row["log_crc"]), int(row["idx_crc"]), int(row["dsp_crc"]))
        files = HourFiles(hour, int(row["entries"]), int(row["events"]), int(row["log_bytes"]), crcs)
        sizes = {suffix: self._size(hour, suffix) for suffix in ("idx", "dsp", "log")}
        if all(size >= files.length(suffix) for suffix, size in sizes.items()):
            return files
        if not self.skip_torn:
            suffix = next(suffix for suffix, size in sizes.items() if size < files.length(suffix))
            have, known = sizes[suffix], files.length(suffix)
            if suffix == "log":
                raise DamagedFile(
                    self._path(hour, "log"), have, f"hour {hour_name(hour)}: the checkpoint knows {known} bytes"
                )
            row_bytes = _ROW[suffix][0].itemsize
            cut = have // row_bytes
            raise damage(self, files, suffix, cut, f"the file ends here; the checkpoint knows {known // row_bytes}")
        return HourFiles(
            hour, min(files.entries, sizes["idx"] // INDEX_SIZE), min(files.events, sizes["dsp"] // DISPATCH_SIZE),
            min(files.log_bytes, sizes["log"]),
        )  # fmt: skip

    def _unpromised(self, hour: int) -> HourFiles:
        return HourFiles(hour, self._whole(hour, "idx"), self._whole(hour, "dsp"), self._size(hour, "log"))

    def _whole(self, hour: int, suffix: str) -> int:
        """Rows that are there: before the zeroes, and, at the end, with a CRC that holds."""
        dtype, crc, what = _ROW[suffix]
        size = self._size(hour, suffix)
        n = size // dtype.itemsize
        files = HourFiles(hour, n, n, 0)
        used = self.read(files, suffix, 0, n * dtype.itemsize).view(dtype)["size" if suffix == "idx" else "event"]
        if n and not used[-1]:  # zeroes are the end of the file: look for where they begin
            low, high = 0, n
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if used[middle] else (low, middle)
            n = low
        elif size % dtype.itemsize and not self.skip_torn:
            raise damage(self, files, suffix, n, f"the {what} is cut off")
        start = max(0, n - _TAIL)
        tail = self.read(files, suffix, start * dtype.itemsize, n * dtype.itemsize).view(dtype)
        if len(bad := crc.bad(np.ascontiguousarray(tail))):
            if not self.skip_torn:
                raise damage(self, files, suffix, start + int(bad[0]), f"the {what}'s CRC does not hold")
            n = start + int(bad[0])
        return n

    def names(self) -> Names:
        path = self._place.path("names")
        try:
            with self._place.open("names") as file:
                data = file.read()
        except FileNotFoundError:
            data = b""  # nothing was named yet
        found: dict[int, list[str]] = {kind: [] for kind in KINDS}
        try:
            for name in decode_names(data, path):
                found[name.kind].append(name.name)
        except DamagedFile:
            pass  # its end may be in the making; a number without a name shows as null
        return Names(*found.values())

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if start >= stop:
            return np.zeros(0, np.uint8)
        path = self.where(files, suffix)
        try:
            return np.memmap(path, np.uint8, "r", shape=(stop,))[start:].view(np.ndarray)
        except (FileNotFoundError, ValueError):
            raise DamagedFile(path, start, f"hour {hour_name(files.hour)}: {stop} bytes were there") from None


@dataclass(frozen=True)
class FileStore(LocalStore):
    """A copy of a group's directory where pyarrow.fs reaches it: s3://bucket/n1, gs://…, hdfs://…, file:///…."""

    max_gap: int = 1 << 20

    def list(self) -> Listing:
        if self._place.size("state.mdb") is None:
            return self._all_of_them()
        with tempfile.TemporaryDirectory() as directory:
            tables = f"{directory}/state.mdb"
            with self._place.open("state.mdb") as source, open(tables, "wb") as copy:
                while data := source.read(_CHUNK):
                    copy.write(data)
            _, hours, found = self._checkpoint(tables)
        files = [self._promised(int(hour), row) for hour, row in zip(hours, found, strict=True)]
        return Listing(files, self._place.modified_ms("state.mdb"))

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if start >= stop:
            return np.zeros(0, np.uint8)
        path = self.where(files, suffix)
        try:
            with self._place.open(f"hours/{hour_name(files.hour)}.{suffix}") as file:
                file.seek(start)
                data = file.read(stop - start)
        except FileNotFoundError:
            data = b""
        if len(data) < stop - start:
            raise DamagedFile(path, start, f"hour {hour_name(files.hour)}: {stop} bytes were there")
        return np.frombuffer(data, np.uint8)


@dataclass
class HttpStore:
    """The nodes' own `/v1/hours`, committed bytes only. Followers come first; what one does not have, or not yet, or
    does not answer, is asked of the next. Any replica will do: committed bytes are the same everywhere."""

    urls: list[str]
    token: str = ""
    timeout_s: float = 30.0
    max_gap: int = 1 << 16

    def list(self) -> Listing:
        cluster = msgspec.json.decode(self._ask("/v1/cluster")[0])
        members = sorted(cluster["members"], key=lambda m: (m["role"] == "leader", m["name"]))
        # Who was named stays, last: the addresses that members advertise may not be reachable from here.
        advertised = [member["http"].rstrip("/") for member in members if member["http"]]
        self.urls = list(dict.fromkeys([*advertised, *self.urls]))
        cluster, answer = self._caught_up("/v1/hours")
        hours = []
        for hour in answer["hours"]:
            log, idx, dsp = hour["log"], hour["idx"], hour["dsp"]
            crcs = tuple(int(part["crc32c"], 16) for part in (log, idx, dsp))
            number = hour_from_name(hour["hour"])
            hours.append(HourFiles(number, idx["entries"], dsp["entries"], int(log["bytes"]), crcs))  # type: ignore[arg-type]
        time_ms = np.datetime64(cluster["time"].rstrip("Z"), "ms").astype(np.int64)
        return Listing(hours, int(time_ms))

    def names(self) -> Names:
        _, answer = self._caught_up("/v1/names")
        kinds = ("topics", "consumers", "nodes", "reasons")
        return Names(*(sorted(answer[kind], key=answer[kind].get) for kind in kinds))

    def where(self, files: HourFiles, suffix: str) -> str:
        return f"/v1/hours/{hour_name(files.hour)}/{suffix}"

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if start >= stop:
            return np.zeros(0, np.uint8)
        (data,) = self._ask(
            self.where(files, suffix), size=stop - start, turn=files.hour,
            headers={"Range": f"bytes={start}-{stop - 1}"},
        )  # fmt: skip
        return np.frombuffer(data, np.uint8)

    def _caught_up(self, path: str) -> tuple[Any, Any]:
        """(cluster, answer) of one node. It answers the first when it has all that is committed; others miss hours."""
        cluster, answer = map(msgspec.json.decode, self._ask("/v1/cluster", path))
        return cluster, answer

    def _ask(
        self, *paths: str, size: int | None = None, turn: int = 0, headers: dict[str, str] | None = None
    ) -> tuple[bytes, ...]:
        """From the first node that answers all of them as it should. turn: spreads hours over the followers; who is
        last in the list stays last."""
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        first = max(len(self.urls) - 1, 1)
        order = self.urls[turn % first : first] + self.urls[: turn % first] + self.urls[first:]
        problems = []
        for url in order:
            try:
                answers = []
                for path in paths:
                    status, data = self._get(url, path, sent)
                    if status not in (200, 206) or size not in (None, len(data)):
                        raise OSError(f"status {status}, {len(data)} bytes" + (f" of {size}" if size else ""))
                    answers.append(data)
                return tuple(answers)
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"{url}: {error or type(error).__name__}")
        raise ConnectionError(f"GET {paths[-1]}: no node has it: {'; '.join(problems)}")

    def _get(self, url: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"option endpoint: {url!r} is no URL such as http://127.0.0.1:8400")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
