"""Sources of hour files: a directory, a copy in an object store or HDFS, or the nodes.

A store lists how much of each hour is committed, at one applied index, and reads within that. So a moved message's next
entry is listed if its move is.
"""

import http.client
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from hadelay.client.paths import reachable
from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.model import SEPARATOR, hour_from_name, hour_name
from hadelay.pipeline.hourfiles import ROW, WAY_OUT, Bytes, HourFiles, Listing, NameMap, Store, damage, find_damage
from hadelay.pipeline.schema import Options
from hadelay.storage.identity import decode_identity
from hadelay.storage.lmdbtables import read_checkpoint
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import hour_of

#: Number of last rows to check in a file without a checkpoint: a power cut damages only the last pages.
_TAIL = 4096
_CHUNK = 8 << 20
#: Endings of the names of an hour's files.
_SUFFIXES = ("idx", "dsp", "log")
#: Number of attempts to read a checkpoint while the node may write new ones.
_ATTEMPTS = 5


def open_store(options: Options) -> Store:
    if options.endpoint:
        urls = [url.strip().rstrip("/") for url in options.endpoint.split(",") if url.strip()]
        return HttpStore(urls, options.token, options.timeout)
    return FileStore(_group(options.path), options.on_torn == "skip")


def listing(store: Store, options: Options) -> Listing:
    found = Listing.decode(options.listing) if options.listing else store.list()
    found = found._replace(as_of_ms=options.as_of) if options.as_of else found
    if found.hours and not found.as_of_ms and "state" in options.projection():
        raise BadRequest(
            f"{options.path}: a copy without a checkpoint (state.mdb) does not tell its time, and the states of "
            "messages depend on it: set --as-of (the option asOf) to the time at which it was copied, in Unix ms"
        )
    return found


def refuse_empty(options: Options, found: Listing, names: NameMap) -> None:
    """Raise NotFound if the options name a topic that does not exist, or a range without hours."""
    known = set(names.topics) | {name.partition(SEPARATOR)[0] for name in names.topics}
    if missing := sorted({name.strip() for name in options.topics.split(",")} - known - {""}):
        raise NotFound(f"--topics: there is no topic {', '.join(missing)}; `hadelay topic list` shows all topics")
    if (options.hour_from or options.hour_to) and not any(options.takes(files.hour) for files in found.hours):
        hours = [hour_name(files.hour) for files in sorted(found.hours)]
        there = f"the first hour is {hours[0]}, the last {hours[-1]}" if hours else "there are no hours"
        raise NotFound(f"--hour-from, --hour-to: no hour is in this range; {there}")


def _group(path: str) -> Location:
    """Find the directory of a Raft group: this directory, or the only group in it."""
    location = Location(absolute(path.rstrip("/")))
    path = location.where
    if (names := location.list("")) is None:
        raise NotFound(f"{path}: no such directory")
    if location.list("hours") is not None:
        return location
    groups = [location.below(name) for name in names if location.list(f"{name}/hours") is not None]
    if len(groups) > 1:
        raise BadRequest(f"{path} has several groups: name one of {', '.join(groups)}")
    if groups:
        return Location(groups[0])
    raise NotFound(f"{path}: no directory hours/ in it, so it is not the data directory of a node or group")


@dataclass(frozen=True)
class FileStore:
    """Directory of a group, or a copy of one, by path or URI. The node may be running.

    With `state.mdb`, its last checkpoint says what is committed: later bytes are ignored, a shorter file is damaged.
    Without, a file ends at its trailing zeroes, and the CRCs of its last rows must be right.
    """

    location: Location
    skip_torn: bool

    @property
    def _is_local(self) -> bool:
        return "://" not in self.location.where

    def list(self) -> Listing:
        location = self.location
        if location.size("state.mdb") is None:
            parts = [name.rpartition(".") for name in location.list("hours") or ()]
            known = {hour_of(name) for name, _, suffix in parts if suffix in _SUFFIXES}
            whole, size = self._whole_rows, self._size
            # Skip files and directories that are not of an hour.
            hours = sorted(hour for hour in known if hour is not None and self._is_there(hour))
            files = [HourFiles(hour, whole(hour, "idx"), whole(hour, "dsp"), size(hour, "log")) for hour in hours]
            return Listing(files, 0, self._cluster())
        problem: Exception = DamagedFile(
            location.path("state.mdb"),
            0,
            "the node wrote a new checkpoint during each attempt: copy the directory, or use endpoint",
        )
        for attempt in range(_ATTEMPTS):
            time.sleep(0.05 * attempt)
            # Try again if state.mdb changes while it is read: the node does not see readers in other processes, and may
            # overwrite the pages that they read.
            before = location.modified_ms("state.mdb")
            try:
                found = self._at_checkpoint()
            except (DamagedFile, OSError) as error:
                problem = error
                if location.modified_ms("state.mdb") == before:
                    break
            else:
                if location.modified_ms("state.mdb") == before:
                    return found
        raise problem

    def _cluster(self) -> str:
        """Id of the cluster in the file `identity`, which a copy may lack; "" then."""
        try:
            found = decode_identity(self.location.load("identity"), self.location.path("identity"))
        except (FileNotFoundError, PermissionError):
            return ""
        return str(found.get("cluster_id", ""))

    def _at_checkpoint(self) -> Listing:
        """Read the hours in the checkpoint, its time, and the id of its cluster. Raises DamagedFile if the checkpoint
        has no hour although there are hour files."""
        with self._tables() as path:
            found = read_checkpoint(path)
        if found.row is None or not len(found.hours):
            stems = [name for name in self.location.list("hours") or () if name.endswith(".idx")]
            if stems and not (found.row and found.row["index"] == 0):
                what = f"it names no hour, and hours/ has {len(stems)}: start the node once, or use endpoint"
                raise DamagedFile(self.location.path("state.mdb"), 0, what)
        if found.row and not self.skip_torn:
            self._check_names(found.row["names_length"], found.row["names_crc"])
        hours = [self._with_checkpoint(int(hour), row) for hour, row in zip(found.hours, found.rows, strict=True)]
        return Listing(hours, found.time_ms, str(found.row["cluster_id"]) if found.row else "")

    @contextmanager
    def _tables(self) -> Iterator[str]:
        """Provide a local path of state.mdb: of the file itself, or of a temporary copy of a remote file."""
        tables = self.location.path("state.mdb")
        if self._is_local:
            if not os.access(tables, os.R_OK):
                raise BadRequest(
                    f"{tables}: only the node's own user may read it, since it has the secrets of webhooks. Read from "
                    "the nodes (--endpoint), or from a copy of names and hours/ without it"
                )
            yield tables
            return
        with tempfile.TemporaryDirectory() as directory:
            with self.location.open("state.mdb") as source, open(f"{directory}/state.mdb", "wb") as copy:
                shutil.copyfileobj(source, copy, _CHUNK)
            yield copy.name

    def _check_names(self, length: int, crc: int) -> None:
        """Raise DamagedFile unless the first `length` bytes of the file `names` have this checksum."""
        path, data = self.location.path("names"), self._names_bytes()[:length]
        if crc32c(data) == crc and len(data) == length:
            return
        NameMap.decode(data, path)
        if len(data) < length:
            what = f"the file ends here, but has {length} bytes in the checkpoint; {WAY_OUT}"
            raise DamagedFile(path, len(data), what)
        what = "every name verifies, but the checksum of `names` differs from the checkpoint's"
        raise DamagedFile(self.location.path("state.mdb"), 0, f"{what}: state.mdb is from another directory; {WAY_OUT}")

    def _is_there(self, hour: int) -> bool:
        """Whether the hour has a file in the store; a directory with a file's name does not count."""
        return any(self.location.size(f"hours/{hour_name(hour)}.{suffix}") is not None for suffix in _SUFFIXES)

    def _size(self, hour: int, suffix: str) -> int:
        return self.location.size(f"hours/{hour_name(hour)}.{suffix}") or 0

    def _with_checkpoint(self, hour: int, row: np.void) -> HourFiles:
        crcs = (int(row["log_crc"]), int(row["idx_crc"]), int(row["dsp_crc"]))
        files = HourFiles(hour, int(row["entries"]), int(row["events"]), int(row["log_bytes"]), crcs)
        sizes = {suffix: self._size(hour, suffix) for suffix in _SUFFIXES}
        short = [suffix for suffix, size in sizes.items() if size < files.length(suffix)]
        if not short:
            return files
        there = HourFiles(
            hour,
            min(files.entries, sizes["idx"] // INDEX_SIZE),
            min(files.events, sizes["dsp"] // DISPATCH_SIZE),
            min(files.log_bytes, sizes["log"]),
        )
        if self.skip_torn:
            return there
        suffix, have, known = short[0], sizes[short[0]], files.length(short[0])
        if (error := find_damage(self, there, suffix)) is not None:
            raise error
        if suffix == "log":
            what = f"hour {hour_name(hour)}: the file is shorter than the {known} bytes in the checkpoint"
            raise DamagedFile(self.where(files, "log"), have, what)
        row_bytes = ROW[suffix].dtype.itemsize
        what = f"the file ends here, but has {known // row_bytes} rows in the checkpoint"
        raise damage(self, files, suffix, have // row_bytes, what)

    def _whole_rows(self, hour: int, suffix: str) -> int:
        """Number of rows before the zeroes of space allocated ahead; with skip_torn, before damage near the end."""
        dtype, crc, name = ROW[suffix]
        size = self._size(hour, suffix)
        data = self.read(HourFiles(hour, 0, 0, 0), suffix, 0, size)
        used = _used(data)
        n = min(-(-used // dtype.itemsize), size // dtype.itemsize)
        files = HourFiles(hour, n, n, 0)
        if used > n * dtype.itemsize and not self.skip_torn:
            raise find_damage(self, files, suffix) or damage(self, files, suffix, n, f"the {name} is cut off")
        start = max(0, n - _TAIL)
        rows = data[start * dtype.itemsize : n * dtype.itemsize].view(dtype)
        if len(bad := crc.bad(np.ascontiguousarray(rows))):
            n = start + int(bad[0])
            if not self.skip_torn:
                raise damage(self, files, suffix, n, f"the {name}'s CRC is wrong")
        return n

    def names(self) -> NameMap:
        """Read the file `names`. Raises DamagedFile for a damaged name. With a checkpoint, names after the length in
        the checkpoint are not needed, and the last one may be incomplete."""
        tolerant = self.skip_torn or self.location.size("state.mdb") is not None
        return NameMap.decode(self._names_bytes(), self.location.path("names"), tolerant=tolerant)

    def _names_bytes(self) -> bytes:
        try:
            return self.location.load("names")
        except FileNotFoundError:
            return b""  # no name was stored yet, so the file is missing

    def where(self, files: HourFiles, suffix: str) -> str:
        own = suffix in ("names", "state.mdb")
        return self.location.path(suffix if own else f"hours/{hour_name(files.hour)}.{suffix}")

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if start >= stop:
            return np.zeros(0, np.uint8)
        path = self.where(files, suffix)
        try:
            if self._is_local:
                return np.memmap(path, np.uint8, "r", shape=(stop,))[start:].view(np.ndarray)
            with self.location.open(f"hours/{hour_name(files.hour)}.{suffix}") as file:
                file.seek(start)
                data = np.frombuffer(file.read(stop - start), np.uint8)
            if len(data) == stop - start:
                return data
        except (FileNotFoundError, ValueError):
            pass
        raise DamagedFile(path, start, f"hour {hour_name(files.hour)}: fewer than the {stop} listed bytes are left")


@dataclass
class HttpStore:
    """Store that reads the nodes' `/v1/hours`: from followers first, and from the next node if one is behind or does
    not answer. All replicas have the same committed bytes."""

    urls: list[str]
    token: str
    timeout_s: float

    def list(self) -> Listing:
        members = self._ask_json("/v1/cluster")[0]["members"]
        members.sort(key=lambda m: (m["role"] == "leader", m["name"]))
        # Also try the URLs that the user gave, last: the URLs that members advertise may not be reachable from here.
        self.urls = reachable((member["http"] for member in members), self.urls, self.token)
        cluster, answer = self._ask_json("/v1/cluster", "/v1/hours")
        hours = []
        for hour in answer["hours"]:
            log, idx, dsp = (hour[suffix] for suffix in ("log", "idx", "dsp"))
            crcs = (int(log["crc32c"], 16), int(idx["crc32c"], 16), int(dsp["crc32c"], 16))
            number = hour_from_name(hour["hour"])
            hours.append(HourFiles(number, idx["entries"], dsp["entries"], int(log["bytes"]), crcs))
        as_of_ms = int(np.datetime64(cluster["time"].rstrip("Z"), "ms").astype(np.int64))
        return Listing(hours, as_of_ms, cluster.get("cluster_id", ""))

    def names(self) -> NameMap:
        _, answer = self._ask_json("/v1/cluster", "/v1/names")
        return NameMap(*(sorted(answer[kind], key=answer[kind].get) for kind in NameMap._fields))

    def where(self, files: HourFiles, suffix: str) -> str:
        paths = {"names": "/v1/names", "state.mdb": "/v1/hours"}
        return paths.get(suffix, f"/v1/hours/{hour_name(files.hour)}/{suffix}")

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if start >= stop:
            return np.zeros(0, np.uint8)
        asked = {"Range": f"bytes={start}-{stop - 1}"}
        (data,) = self._ask(self.where(files, suffix), size=stop - start, turn=files.hour, headers=asked)
        return np.frombuffer(data, np.uint8)

    def _ask_json(self, *paths: str) -> Sequence[Any]:
        """Send requests as `_ask` does, and decode the JSON answers. Ask for /v1/cluster together with other paths: a
        node that is behind refuses it, and would omit hours in its other answers."""
        return [msgspec.json.decode(data) for data in self._ask(*paths)]

    def _ask(
        self, *paths: str, size: int | None = None, turn: int = 0, headers: dict[str, str] | None = None
    ) -> tuple[bytes, ...]:
        """Get these paths from the first node that has all of them. size: expected number of bytes. turn: number that
        decides which node is asked first, to spread the requests; the last URL is always tried last."""
        sent = dict(headers or {}) | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        first = max(len(self.urls) - 1, 1)
        order = self.urls[turn % first : first] + self.urls[: turn % first] + self.urls[first:]
        problems = []
        for url in order:
            try:
                return tuple(self._get(url, path, sent, size) for path in paths)
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"{url}: {error or type(error).__name__}")
        raise ConnectionError(f"GET {paths[-1]}: no node has it: {'; '.join(problems)}")

    def _get(self, url: str, path: str, headers: dict[str, str], size: int | None) -> bytes:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"option endpoint: {url!r} is not a URL; write for example http://127.0.0.1:8400")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with closing(kind(parts.hostname, parts.port, timeout=self.timeout_s)) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            data: bytes = answer.read()
        if answer.status not in (200, 206) or size not in (None, len(data)):
            raise OSError(f"status {answer.status}, {len(data)} bytes" + (f" of {size}" if size else ""))
        return data


def _used(data: Bytes) -> int:
    """Number of bytes before the trailing zeroes."""
    for end in range(len(data), 0, -_CHUNK):
        start = max(0, end - _CHUNK)
        if len(found := np.flatnonzero(data[start:end])):
            return start + int(found[-1]) + 1
    return 0
