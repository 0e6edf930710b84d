"""Whose data directory this is: a small file that is read before anything else, and refuses in words.

identity := magic "HDID" | size u32 | crc32c u32 (of the map) | msgpack map
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import msgspec

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import FORMAT_VERSION
from hadelay.errors import ConfigError, DamagedFile, Taken
from hadelay.platform.disk import Disk, Lock, read_file, replace_file
from hadelay.version import FEATURE_LEVEL, FIRST_LEVEL

_HEAD = struct.Struct("<4sII")
_MAGIC = b"HDID"
_WAY_OUT = "take the node's directory away and let it start anew"


@dataclass(frozen=True)
class Identity:
    cluster_id: str
    group: int
    node: str
    #: Of this copy of the data: a node that lost or rewound its disk comes back as a new one.
    incarnation: int = 1
    format_version: int = FORMAT_VERSION
    #: Highest level the cluster has switched on; files may hold what belongs to it.
    feature_level: int = FIRST_LEVEL


#: Key in the file → attribute. The keys and their order never change.
_KEYS = {
    "cluster_id": "cluster_id",
    "group": "group",
    "node": "node",
    "incarnation": "incarnation",
    "format_version": "format_version",
    "feature_level": "feature_level",
}


def encode_identity(identity: Identity) -> bytes:
    body: bytes = msgpack.packb({key: getattr(identity, name) for key, name in _KEYS.items()})
    return _HEAD.pack(_MAGIC, len(body), crc32c(body)) + body


def decode_identity(data: bytes, path: str) -> dict[str, Any]:
    """The map. DamagedFile unless every byte verifies."""
    if len(data) < _HEAD.size:
        raise DamagedFile(path, len(data), "the file ends too early")
    magic, size, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + size]
    if magic != _MAGIC or len(body) < size or crc32c(body) != crc:
        raise DamagedFile(path, 0, f"the identity does not verify; {_WAY_OUT}")
    try:
        found = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException):  # of zeroes the checksum is zero
        found = None
    if not isinstance(found, dict):
        raise DamagedFile(path, 0, f"the identity is empty; {_WAY_OUT}")
    return found


def write_identity(disk: Disk, directory: str, identity: Identity) -> None:
    """Durable when it returns."""
    replace_file(disk, f"{directory}/identity", encode_identity(identity))


def read_identity(disk: Disk, directory: str) -> Identity | None:
    """None: nobody lives here. ConfigError for a newer format."""
    path = f"{directory}/identity"
    if not disk.exists(path):
        return None
    found = decode_identity(read_file(disk, path), path)
    for key, known in (("format_version", FORMAT_VERSION), ("feature_level", FEATURE_LEVEL)):
        if isinstance(found.get(key), int) and found[key] > known:
            what = key.replace("_", " ")
            raise ConfigError(f"{directory} has {what} {found[key]}; this program knows {known}: use a newer hadelay")
    try:
        return msgspec.convert({name: found[key] for key, name in _KEYS.items() if key in found}, Identity)
    except msgspec.ValidationError as error:
        raise DamagedFile(path, 0, f"the identity is not one ({error}); {_WAY_OUT}") from None


def check_identity(disk: Disk, directory: str, expected: Identity) -> Identity:
    """What stands in the directory; an empty one becomes `expected`. ConfigError when it is somebody else's."""
    found = read_identity(disk, directory)
    if found is None:
        write_identity(disk, directory, expected)
        return expected
    refuse_strangers(directory, found, expected)
    return replace(found, format_version=FORMAT_VERSION)


def refuse_strangers(directory: str, found: Identity, expected: Identity) -> None:
    """ConfigError unless both are of one node."""
    for key, what in (("cluster_id", "cluster"), ("group", "group"), ("node", "node")):
        theirs, ours = getattr(found, key), getattr(expected, key)
        if theirs != ours:
            raise ConfigError(f"{directory} belongs to {what} {theirs!r}, and this is {what} {ours!r}: check data_dir")


def note_damage(disk: Disk, directory: str, what: str) -> None:
    """A file was found damaged while an entry was applied: this copy of the data can't go on, also not after a restart.
    Durable when it returns."""
    file = disk.open(f"{directory}/damaged", create=True)
    file.pwrite(what.encode(), 0)
    file.sync()
    file.close()
    disk.sync_dir(directory)


def noted_damage(disk: Disk, directory: str) -> str | None:
    path = f"{directory}/damaged"
    return read_file(disk, path).decode(errors="replace") if disk.exists(path) else None


def lock_directory(disk: Disk, directory: str, path: str = "") -> Lock:
    """ConfigError when another process has it. `path`: of the lock, if it is not to be in the directory."""
    try:
        return disk.lock(path or f"{directory}/lock")
    except BlockingIOError as error:
        raise Taken(f"another node runs in {directory}: stop it, or choose another data_dir") from error
