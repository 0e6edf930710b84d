"""Identity of a data directory: the file that names its cluster, group and node, read before all other files.

identity := magic "HDL1" | size u32 | crc32c u32 (of the map) | msgpack map
"""

import struct
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import msgspec

from hadelay import version
from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import FORMAT_VERSION
from hadelay.errors import WAY_OUT, ConfigError, DamagedFile, Taken
from hadelay.platform.disk import Disk, Lock, read_file, replace_file
from hadelay.version import FIRST_LEVEL, LAST_DEVELOPMENT

_HEAD = struct.Struct("<4sII")
_MAGIC = b"HDL1"
#: Magic of the identities that development versions wrote, from before the first release.
_DEVELOPMENT = b"HDID"


@dataclass(frozen=True)
class Identity:
    cluster_id: str
    group: int
    node: str
    #: Incarnation of this copy of the data; a node that lost or rewound its disk gets a new one.
    incarnation: int = 1
    format_version: int = FORMAT_VERSION
    #: Highest feature level that the cluster has activated; files may use the formats of this level.
    feature_level: int = FIRST_LEVEL


#: Keys in the identity file, in a fixed order that never changes.
_KEYS = ("cluster_id", "group", "node", "incarnation", "format_version", "feature_level")


def encode_identity(identity: Identity) -> bytes:
    body: bytes = msgpack.packb({key: getattr(identity, key) for key in _KEYS})
    return _HEAD.pack(_MAGIC, len(body), crc32c(body)) + body


def decode_identity(data: bytes, path: str) -> dict[str, Any]:
    """Decode an identity file to a dict. Raises DamagedFile unless every byte verifies, and ConfigError for the
    identity of a development version."""
    if len(data) < _HEAD.size:
        raise DamagedFile(path, len(data), "the file ends too early")
    magic, size, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + size]
    if magic == _DEVELOPMENT:
        raise ConfigError(
            f"{path}: a development version of hadelay, from before the first release, wrote this data directory. The "
            f"last version that reads it is commit {LAST_DEVELOPMENT} of hadelay's repository; start this version "
            "with an empty data_dir, and publish pending messages there anew"
        )
    if magic != _MAGIC or len(body) < size or crc32c(body) != crc:
        raise DamagedFile(path, 0, f"the identity does not verify; {WAY_OUT}")
    try:
        found = msgpack.unpackb(body)
    # Raised for an empty body: a zeroed header passes the check, as the CRC of an empty body is 0
    except (ValueError, msgpack.UnpackException):
        found = None
    if not isinstance(found, dict):
        raise DamagedFile(path, 0, f"the identity is empty; {WAY_OUT}")
    return found


def write_identity(disk: Disk, directory: str, identity: Identity) -> None:
    """Write the identity file; the file is durable on return."""
    replace_file(disk, f"{directory}/identity", encode_identity(identity))


def read_identity(disk: Disk, directory: str) -> Identity | None:
    """Read the directory's identity; None for a new directory. Raises ConfigError for a newer format."""
    path = f"{directory}/identity"
    if not disk.exists(path):
        return None
    found = decode_identity(read_file(disk, path), path)
    for key, known in (("format_version", FORMAT_VERSION), ("feature_level", version.FEATURE_LEVEL)):
        if isinstance(found.get(key), int) and found[key] > known:
            what = key.replace("_", " ")
            raise ConfigError(f"{directory} has {what} {found[key]}; this hadelay reads up to {known}: use a newer one")
    try:
        return msgspec.convert({key: found[key] for key in _KEYS if key in found}, Identity)
    except msgspec.ValidationError as error:
        raise DamagedFile(path, 0, f"the identity is not valid ({error}); {WAY_OUT}") from None


def check_identity(disk: Disk, directory: str, expected: Identity) -> Identity:
    """Read the directory's identity; write `expected` to a new directory. ConfigError when another node owns the
    directory."""
    found = read_identity(disk, directory)
    if found is None:
        write_identity(disk, directory, expected)
        return expected
    refuse_strangers(directory, found, expected)
    return replace(found, format_version=FORMAT_VERSION)


def refuse_strangers(directory: str, found: Identity, expected: Identity) -> None:
    """Raise ConfigError unless both identities are of one cluster, group and node."""
    for key, what in (("cluster_id", "cluster"), ("group", "group"), ("node", "node")):
        theirs, ours = getattr(found, key), getattr(expected, key)
        if theirs != ours:
            raise ConfigError(
                f"{directory} belongs to {what} {theirs!r}, and this is {what} {ours!r}: check data_dir and journal_dir"
            )


def note_damage(disk: Disk, directory: str, what: str) -> None:
    """Note that apply found a damaged file: this copy of the data must not be used, also after a restart. The note is
    durable on return."""
    with closing(disk.open(f"{directory}/damaged", create=True)) as file:
        disk.sync_dir(directory)  # the file's existence is the note; the text comes later, as a full disk may refuse it
        file.pwrite(what.encode(), 0)
        file.sync()


def noted_damage(disk: Disk, directory: str) -> str | None:
    path = f"{directory}/damaged"
    return read_file(disk, path).decode(errors="replace") if disk.exists(path) else None


def lock_directory(disk: Disk, directory: str, path: str = "") -> Lock:
    """Lock a data directory. ConfigError when another process has the lock. path: path of the lock file, if it is not
    in the directory."""
    try:
        return disk.lock(path or f"{directory}/lock")
    except BlockingIOError as error:
        raise Taken(f"another node runs in {directory}: stop it, or choose another data_dir") from error
