"""Manifests of archived hours and the catalogue of all archived hours (docs/spec/archive.md).

`pipeline archive` writes both, jobs and the audit read both, and a leader checks both before it deletes an hour. This
module does not import pyarrow, because nodes run without it.
"""

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NotRequired, TypeAlias, TypedDict

import msgspec

from hadelay.codec.checksums import crc32c
from hadelay.errors import DamagedFile, NotFound
from hadelay.model import hour_from_name, hour_name

if TYPE_CHECKING:
    from hadelay.storage.locations import Location

VERSION = 2
_CATALOGUE_VERSION = 1
_CRC = r"^[0-9a-f]{8}$"
_IS_CATALOGUE = re.compile(r"\d+-[0-9a-f]{8}\.json")


class SourceFiles(NamedTuple):
    """Committed lengths, and CRC-32C, of an hour's files, from which its archive was made."""

    entries: int
    events: int
    log_bytes: int
    #: CRCs of the hour's .log, .idx and .dsp files; None (unknown) only in a manifest of version 1.
    crcs: tuple[int, int, int] | None

    def encode(self) -> dict[str, Any]:
        crcs = [f"{crc:08x}" for crc in self.crcs] if self.crcs else None
        return {
            "entries": self.entries, "events": self.events, "log_bytes": self.log_bytes, "crc32c_log_idx_dsp": crcs,
        }  # fmt: skip


class PartFile(TypedDict):
    """A Parquet file of an archived hour."""

    #: Path of the file in the archive. The pattern keeps it inside the archive: no part is "..", and there is no other
    #: "/".
    path: Annotated[str, msgspec.Meta(pattern=r"^(messages|events)/hour=[a-z0-9-]+/[A-Za-z0-9_=-][A-Za-z0-9_.=-]*\Z")]
    rows: Annotated[int, msgspec.Meta(ge=0)]
    bytes: int
    crc32c: str


class HourManifest(TypedDict):
    version: int
    hour: int
    #: Id of the cluster whose hour this is; missing in older manifests, "" if the hour was archived from a copy of the
    #: data that does not name its cluster.
    cluster: NotRequired[str]
    source: dict[str, Any]
    files: list[PartFile]


class Listed(TypedDict):
    """Entry of an archived hour in the catalogue."""

    crc32c: Annotated[str, msgspec.Meta(pattern=_CRC)]
    messages: int
    events: int
    revision: int


class _Body(TypedDict):
    version: int
    revision: Annotated[int, msgspec.Meta(ge=0)]
    previous: list[str]
    #: Id of the cluster whose hours these are; missing in older catalogues, "" as long as no run of the archiver knew
    #: the id.
    cluster: NotRequired[str]
    hours: dict[Annotated[str, msgspec.Meta(pattern=r"^\d{10}$")], Listed]


class Directory:
    """An archive in a local directory, for nodes without pyarrow; Location reads archives anywhere."""

    def __init__(self, where: str) -> None:
        self._where = where

    def path(self, name: str) -> str:
        return f"{self._where}/{name}"

    def load(self, name: str) -> bytes:
        """Read all bytes of a file. FileNotFoundError if the file does not exist."""
        with open(self.path(name), "rb") as file:
            return file.read()

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if the file does not exist."""
        try:
            return os.stat(self.path(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, directory: str) -> list[str] | None:
        """Names of the entries of a directory, ascending; None if the directory does not exist."""
        try:
            return sorted(os.listdir(self.path(directory)))
        except (FileNotFoundError, NotADirectoryError):
            return None


#: Files of an archive that can be read, by relative names. Reading raises OSError when the store does not answer.
Files: TypeAlias = "Directory | Location"


def open_archive(where: str) -> Files:
    """Open the archive in a directory or at a URI. Raises BadRequest for an unknown kind of URI."""
    where = where.removeprefix("file://")
    if "://" not in where:
        return Directory(where)
    from hadelay.storage.locations import Location

    return Location(where)


def manifest_name(hour: int) -> str:
    return f"_manifest/{hour_name(hour)}.json"


def manifest_hours(files: Files) -> set[int]:
    """Hours that have a manifest in the archive. Raises NotFound if the directory is not an archive."""
    names = files.list("_manifest")
    if names is None:
        raise NotFound(f"{files.path('')} is not an archive: it has no directory _manifest/")
    return {hour for name in names if name.endswith(".json") and (hour := hour_of(name[:-5])) is not None}


def hour_of(name: str) -> int | None:
    """Number of the hour with this name; None for other names, such as those of foreign files."""
    try:
        return hour_from_name(name) if re.fullmatch(r"(dead-)?\d{10}", name, re.ASCII) else None
    except ValueError:
        return None


def encode_manifest(hour: int, source: SourceFiles, parts: list[PartFile], cluster: str = "") -> bytes:
    body = {
        "version": VERSION, "hour": int(hour_name(hour)), "cluster": cluster, "source": source.encode(),
        "files": parts,
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def decode_manifest(data: bytes, hour: int) -> HourManifest:
    """Decode the manifest of an hour. Raises ValueError, with a text for users, if the bytes are not a manifest, or are
    that of another hour."""
    try:
        found = msgspec.json.decode(data, type=HourManifest)
    except RecursionError:
        raise ValueError("the file is not a manifest") from None
    if not 1 <= found["version"] <= VERSION:
        raise ValueError(f"the manifest has version {found['version']}; this hadelay reads versions 1 to {VERSION}")
    name = hour_name(hour)
    foreign = [part["path"] for part in found["files"] if part["path"].split("/")[1] != f"hour={name}"]
    if found["hour"] != int(name) or foreign:
        of = f"names {foreign[0]}" if foreign else f"is of hour {found['hour']}"
        raise ValueError(f"the manifest {of}, and its file is named after hour {name}")
    return found


def source_of(manifest: HourManifest) -> SourceFiles | None:
    """The source files that a manifest describes; None when the manifest lacks a part of them, as version 1 may."""
    said = manifest["source"]
    try:
        crcs = said["crc32c_log_idx_dsp"]
        log, idx, dsp = (int(crc, 16) for crc in crcs)
        return SourceFiles(int(said["entries"]), int(said["events"]), int(said["log_bytes"]), (log, idx, dsp))
    except (KeyError, TypeError, ValueError):
        return None


def of_kind(manifest: HourManifest, kind: str) -> list[PartFile]:
    """Parquet files in a manifest that have this kind of rows ("messages" or "events"), in the order of the rows."""
    return [part for part in manifest["files"] if part["path"].startswith(f"{kind}/")]


def rows(manifest: HourManifest, kind: str) -> int:
    return sum(part["rows"] for part in of_kind(manifest, kind))


class Catalogue:
    """Catalogue of an archive: all archived hours, by hour number."""

    def __init__(self, names: list[str], revision: int, hours: dict[int, Listed], clusters: Iterable[str] = ()) -> None:
        #: Names of the catalogue's files; empty if the archive has no catalogue.
        self.names, self.revision, self.hours = names, revision, hours
        #: Ids of the clusters whose hours these are: at most one id, unless two clusters archived for the first time at
        #: once.
        self.clusters = set(clusters)

    def foreign(self, cluster: str) -> str:
        """Id of a cluster other than `cluster` that the archive belongs to; "" if there is none."""
        return min(self.clusters - {cluster}, default="")

    def row(self, hour: int, manifest: bytes) -> Listed:
        """Make the catalogue's entry for the manifest of an hour. Raises ValueError if the bytes are not a manifest."""
        found = decode_manifest(manifest, hour)
        return {
            "crc32c": f"{crc32c(manifest):08x}", "messages": rows(found, "messages"), "events": rows(found, "events"),
            "revision": self.revision + 1,
        }  # fmt: skip

    def lists(self, hour: int, manifest: bytes) -> bool:
        return hour in self.hours and self.hours[hour]["crc32c"] == f"{crc32c(manifest):08x}"

    def encode(self, added: dict[int, Listed], cluster: str = "") -> tuple[str, bytes]:
        """Encode the next revision of the catalogue, with added hours; returns (file name, bytes). cluster: id of the
        cluster; "" keeps the known one."""
        hours = {hour_name(hour): row for hour, row in sorted((self.hours | added).items())}
        body = {
            "version": _CATALOGUE_VERSION, "revision": self.revision + 1,
            "previous": [name.rpartition("/")[2] for name in self.names],
            "cluster": cluster or min(self.clusters, default=""), "hours": hours,
        }  # fmt: skip
        data = msgspec.json.format(msgspec.json.encode(body), indent=1)
        return f"_catalogue/{self.revision + 1:010}-{crc32c(data):08x}.json", data


def load_catalogue(files: Files, known: Catalogue | None = None, attempts: int = 5) -> Catalogue:
    """Read and merge all catalogue files of an archive. Raises DamagedFile if a file does not match the CRC in its
    name. known: earlier result, which is returned if the file names are unchanged."""
    names = [f"_catalogue/{name}" for name in files.list("_catalogue") or () if _IS_CATALOGUE.fullmatch(name)]
    if known is not None and known.names == names:
        return known
    revision, hours, clusters = 0, dict[int, Listed](), set[str]()
    for name in names:
        try:
            data = files.load(name)
        except FileNotFoundError:
            if attempts > 1:  # start again with a new listing: another run replaced this file
                return load_catalogue(files, known, attempts - 1)
            raise
        try:
            if name[-13:-5] != f"{crc32c(data):08x}":
                raise ValueError("the file's CRC differs from the CRC in the file's name")
            body = msgspec.json.decode(data, type=_Body)
            if body["version"] != _CATALOGUE_VERSION:
                raise ValueError(
                    f"the catalogue has version {body['version']}; this hadelay reads version {_CATALOGUE_VERSION}"
                )
        except (ValueError, RecursionError) as error:
            raise DamagedFile(files.path(name), 0, f"the catalogue cannot be read: {error}") from None
        revision = max(revision, body["revision"])
        clusters |= {body.get("cluster", "")} - {""}
        for shown, row in body["hours"].items():
            hour = hour_from_name(shown)
            if hour not in hours or hours[hour]["revision"] < row["revision"]:
                hours[hour] = row
    return Catalogue(names, revision, hours, clusters)


def unproven(
    files: Files, catalogue: Catalogue, wanted: Iterable[tuple[int, SourceFiles]], limit: int
) -> dict[int, str]:
    """Check, before hours are deleted, that the archive has them: returns hour → reason why the hour must be kept, or
    "" if it may be deleted. Stops once `limit` hours may be deleted. Reads only manifests and file sizes. Raises
    OSError if the archive does not answer."""
    found, proven = dict[int, str](), 0
    for hour, source in wanted:
        found[hour] = _problem(files, catalogue, hour, source)
        proven += not found[hour]
        if proven >= limit:
            break
    return found


def _problem(files: Files, catalogue: Catalogue, hour: int, source: SourceFiles) -> str:
    if hour not in catalogue.hours:
        return "the archive's catalogue does not list the hour"
    name = manifest_name(hour)
    try:
        data = files.load(name)
        if not catalogue.lists(hour, data):
            return f"{name} does not match the CRC in the catalogue"
        manifest = decode_manifest(data, hour)
    except FileNotFoundError:
        return f"{name} is missing"
    except ValueError as error:
        return f"{name}: {error}"
    if manifest["version"] < VERSION:
        return f"{name} has version {manifest['version']}, which proves too little: archive the hour again"
    if source_of(manifest) != source:
        return f"{name} describes another source: {manifest['source']}; this node has {source.encode()}"
    if (rows(manifest, "messages"), rows(manifest, "events")) != (source.entries, source.events):
        return f"{name} lists files whose row counts differ from the source's"
    for part in manifest["files"]:
        size = files.size(part["path"])
        if size is None:
            return f"{part['path']} is missing"
        if size != part["bytes"]:
            return f"{part['path']} has {size} bytes; the manifest says {part['bytes']}"
    return ""
