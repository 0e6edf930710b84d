"""Where hour files are read from: a directory, what lies in an object store or HDFS, or the nodes themselves.

A store lists the hours with how much of each is committed, and gives rows and bytes within that. What it lists is of
one applied index, so a moved message's next entry is in the listing if its move is. Stores are pickled into tasks.
"""

from __future__ import annotations

import http.client
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline.damage import Flaw, in_events, in_index
from hadelay.pipeline.hourfiles import (
    ROW,
    WAY_OUT,
    Bytes,
    HourFiles,
    Listing,
    Names,
    Store,
    damage,
    decode_listing,
    flaw_of,
    names_of,
)
from hadelay.pipeline.schema import Options
from hadelay.storage.lmdbtables import Checkpoint, read_checkpoint
from hadelay.storage.locations import Location, absolute

#: Rows at the end of a file without a checkpoint that are checked: a power cut tears pages, not whole hours.
_TAIL = 4096
_CHUNK = 8 << 20


def open_store(options: Options) -> Store:
    if options.endpoint:
        urls = [url.strip().rstrip("/") for url in options.endpoint.split(",") if url.strip()]
        return HttpStore(urls, options.token, options.timeout)
    kind = FileStore if "://" in options.path else LocalStore
    return kind(_group_directory(options.path), skip_torn=options.on_torn == "skip")


def listing(store: Store, options: Options) -> Listing:
    found = decode_listing(options.listing) if options.listing else store.list()
    return found._replace(as_of_ms=options.as_of) if options.as_of else found


def _group_directory(path: str) -> str:
    path = absolute(path.rstrip("/"))
    location = Location(path)
    if (names := location.list("")) is None:
        raise NotFound(f"{path}: no such directory")
    if location.list("hours") is not None:
        return path
    groups = [name for name in names if location.list(f"{name}/hours") is not None]
    if len(groups) == 1:
        return location.below(groups[0])
    if groups:
        raise BadRequest(f"{path} has several groups: name one of {', '.join(map(location.below, groups))}")
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
    def _location(self) -> Location:
        return Location(self.directory)

    def list(self) -> Listing:
        tables = f"{self.directory}/state.mdb"
        if not os.path.exists(tables):
            return self._all_of_them()
        if not os.access(tables, os.R_OK):
            raise BadRequest(
                f"{tables}: only the node's own user may read it, since it has the secrets of webhooks. Read from the "
                "nodes (--endpoint), or from a copy of names and hours/ without it"
            )
        for attempt in range(5):
            # A checkpoint may commit meanwhile: a node keeps no pages for readers that it cannot see.
            before = os.stat(tables)
            try:
                files = self._files(self._checkpoint(tables))
            except (DamagedFile, OSError):
                if attempt == 4 or os.stat(tables).st_mtime_ns == before.st_mtime_ns:
                    raise
            else:
                if os.stat(tables).st_mtime_ns == before.st_mtime_ns:
                    return Listing([*files], before.st_mtime_ns // 1_000_000)
            time.sleep(0.05 * attempt)
        raise DamagedFile(tables, 0, "a checkpoint is taken each time it is read: copy the directory, or use endpoint")

    def _all_of_them(self) -> Listing:
        stems = {name.rpartition(".") for name in self._location.list("hours") or ()}
        hours = sorted({hour_from_name(stem) for stem, _, suffix in stems if suffix in ("idx", "log", "dsp")})
        return Listing([self._unpromised(hour) for hour in hours], _now_ms())

    def _checkpoint(self, tables: str) -> Checkpoint:
        """The hours that the tables in this file name. DamagedFile when they name none, and there are some."""
        found = read_checkpoint(tables)
        if found.row is None or not len(found.hours):
            stems = [name for name in self._location.list("hours") or () if name.endswith(".idx")]
            if stems and not (found.row and found.row["index"] == 0):
                raise DamagedFile(
                    self._location.path("state.mdb"), 0,
                    f"it names no hour, and hours/ has {len(stems)}: start the node once, or use endpoint",
                )  # fmt: skip
        return found

    def _files(self, found: Checkpoint) -> Sequence[HourFiles]:
        if found.row and not self.skip_torn:
            self._check_names(found.row["names_length"], found.row["names_crc"])
        return [self._promised(int(hour), row) for hour, row in zip(found.hours, found.rows, strict=True)]

    def _check_names(self, length: int, crc: int) -> None:
        """DamagedFile unless `names` begins with so many bytes of that checksum."""
        path, data = self._location.path("names"), self._names_bytes()[:length]
        if crc32c(data) == crc and len(data) == length:
            return
        names_of(data, path)
        if len(data) < length:
            what = f"the file ends here; the checkpoint knows {length} bytes; {WAY_OUT}"
            raise DamagedFile(path, len(data), what)
        what = "every name verifies, and their checksum is another one than the checkpoint's"
        raise DamagedFile(self._location.path("state.mdb"), 0, f"{what}: it is of another directory; {WAY_OUT}")

    def where(self, files: HourFiles, suffix: str) -> str:
        return self._location.path(suffix) if suffix in ("names", "state.mdb") else self._path(files.hour, suffix)

    def _path(self, hour: int, suffix: str) -> str:
        return self._location.path(f"hours/{hour_name(hour)}.{suffix}")

    def _size(self, hour: int, suffix: str) -> int:
        return self._location.size(f"hours/{hour_name(hour)}.{suffix}") or 0

    def _promised(self, hour: int, row: np.void) -> HourFiles:
        crcs = (int(row["log_crc"]), int(row["idx_crc"]), int(row["dsp_crc"]))
        files = HourFiles(hour, int(row["entries"]), int(row["events"]), int(row["log_bytes"]), crcs)
        sizes = {suffix: self._size(hour, suffix) for suffix in ("idx", "dsp", "log")}
        if all(size >= files.length(suffix) for suffix, size in sizes.items()):
            return files
        if not self.skip_torn:
            raise self._short(files, sizes)
        return self._there(files, sizes)

    def _short(self, files: HourFiles, sizes: dict[str, int]) -> DamagedFile:
        """The checkpoint says more bytes than there are: name the place where they are missing, or the end."""
        suffix = next(suffix for suffix, size in sizes.items() if size < files.length(suffix))
        there = self._there(files, sizes)
        have, known, name = sizes[suffix], files.length(suffix), hour_name(files.hour)
        if (flaw := flaw_of(self, there, suffix)) is not None:
            return self._flawed(files, flaw)
        if suffix == "log":
            return DamagedFile(self._path(files.hour, "log"), have, f"hour {name}: the checkpoint knows {known} bytes")
        row_bytes = ROW[suffix][0].itemsize
        what = f"the file ends here; the checkpoint knows {known // row_bytes}"
        return damage(self, files, suffix, have // row_bytes, what)

    def _flawed(self, files: HourFiles, flaw: Flaw) -> DamagedFile:
        what = f"hour {hour_name(files.hour)}, {flaw.what}; {WAY_OUT}"
        return DamagedFile(self.where(files, flaw.suffix), flaw.offset, what, size=flaw.size)

    def _there(self, files: HourFiles, sizes: dict[str, int]) -> HourFiles:
        """What there is of what was promised."""
        return HourFiles(
            files.hour, min(files.entries, sizes["idx"] // INDEX_SIZE),
            min(files.events, sizes["dsp"] // DISPATCH_SIZE), min(files.log_bytes, sizes["log"]),
        )  # fmt: skip

    def _unpromised(self, hour: int) -> HourFiles:
        return HourFiles(hour, self._whole(hour, "idx"), self._whole(hour, "dsp"), self._size(hour, "log"))

    def _whole(self, hour: int, suffix: str) -> int:
        """Rows that are there: before the zeroes, and, at the end, with a CRC that holds."""
        dtype, crc, what = ROW[suffix]
        size = self._size(hour, suffix)
        data = self.read(HourFiles(hour, 0, 0, 0), suffix, 0, size)
        used = _used(data)  # zeroes are the end of the file: space that was allocated ahead
        n = min(-(-used // dtype.itemsize), size // dtype.itemsize)
        found = data[: n * dtype.itemsize].view(dtype)
        files = HourFiles(hour, n, n, 0)
        if used > n * dtype.itemsize and not self.skip_torn:
            if (flaw := in_index(found) if suffix == "idx" else in_events(found)) is not None:
                raise self._flawed(files, flaw)
            raise damage(self, files, suffix, n, f"the {what} is cut off")
        start = max(0, n - _TAIL)
        if len(bad := crc.bad(np.ascontiguousarray(found[start:n]))):
            if not self.skip_torn:
                raise damage(self, files, suffix, start + int(bad[0]), f"the {what}'s CRC is wrong")
            n = start + int(bad[0])
        return n

    def names(self) -> Names:
        """DamagedFile for one that cannot be read, unless a checkpoint says how much of the file counts: its end may be
        in the making then."""
        tolerant = self.skip_torn or self._location.size("state.mdb") is not None
        return names_of(self._names_bytes(), self._location.path("names"), tolerant=tolerant)

    def _names_bytes(self) -> bytes:
        try:
            with self._location.open("names") as file:
                data: bytes = file.read()
                return data
        except FileNotFoundError:
            return b""  # nothing was named yet

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
        if self._location.size("state.mdb") is None:
            return self._all_of_them()
        with tempfile.TemporaryDirectory() as directory:
            tables = f"{directory}/state.mdb"
            with self._location.open("state.mdb") as source, open(tables, "wb") as copy:
                while data := source.read(_CHUNK):
                    copy.write(data)
            found = self._checkpoint(tables)
        return Listing([*self._files(found)], self._location.modified_ms("state.mdb"))

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if start >= stop:
            return np.zeros(0, np.uint8)
        path = self.where(files, suffix)
        try:
            with self._location.open(f"hours/{hour_name(files.hour)}.{suffix}") as file:
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
        return {"names": "/v1/names", "state.mdb": "/v1/hours"}.get(
            suffix, f"/v1/hours/{hour_name(files.hour)}/{suffix}"
        )

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


def _used(data: Bytes) -> int:
    """Bytes before the zeroes at the end."""
    for end in range(len(data), 0, -_CHUNK):
        start = max(0, end - _CHUNK)
        if len(found := np.flatnonzero(data[start:end])):
            return start + int(found[-1]) + 1
    return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
