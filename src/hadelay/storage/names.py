"""Table of names in one append-only file. Hour files have only numbers of topics, consumers, nodes and reasons."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import CONSUMER, NAME, NAME_SIZE, NODE, REASON, TOPIC
from hadelay.errors import DamagedFile
from hadelay.platform.disk import Disk, read_file

KINDS = {TOPIC: "topic", CONSUMER: "consumer", NODE: "node", REASON: "reason"}


class Name(NamedTuple):
    offset: int
    kind: int
    number: int
    name: str


def encode_name(kind: int, number: int, name: str) -> bytes:
    text = name.encode()
    head = np.zeros(1, NAME)
    head[0] = (kind, 0, len(text), number, 0)
    head["crc"] = crc32c(text, crc32c(head.tobytes()[:-4]))
    return head.tobytes() + text


def decode_names(data: bytes, path: str) -> Iterator[Name]:
    """Decode all records of the file `names`. Raises DamagedFile at the first wrong CRC."""
    at = 0
    while at < len(data):
        head = np.frombuffer(data[at : at + NAME_SIZE].ljust(NAME_SIZE, b"\0"), NAME)[0]
        text = data[at + NAME_SIZE : at + NAME_SIZE + int(head["size"])]
        if crc32c(text, crc32c(data[at : at + NAME_SIZE - 4])) != head["crc"] or len(text) != head["size"]:
            raise DamagedFile(path, at, "the name's CRC is wrong")
        yield Name(at, int(head["kind"]), int(head["number"]), text.decode())
        at += NAME_SIZE + len(text)


class NameTable:
    """Names and their numbers, in memory. Each kind of name has numbers of its own, from 0 on."""

    def __init__(self, disk: Disk, path: str, length: int = 0, crc: int = 0) -> None:
        """Load the first `length` bytes, whose checksum must be `crc`. Recovery has cut the file to this length."""
        self.path, self.length, self.crc = path, length, crc
        self.unsynced = False
        self._disk = disk
        self._numbers: dict[int, dict[str, int]] = {kind: {} for kind in KINDS}
        self._names: dict[int, list[str]] = {kind: [] for kind in KINDS}
        if not length:
            return
        data = read_file(disk, path, length)
        for name in decode_names(data, path):
            if name.number != self._add(name.kind, name.name):
                raise DamagedFile(path, name.offset, "the name's number does not match its position")
        if len(data) < length or crc32c(data) != crc:
            raise DamagedFile(path, len(data), "the file's CRC differs from the checkpoint's")

    def number(self, kind: int, name: str) -> int:
        """Number of a registered name. Raises KeyError for an unknown name."""
        return self._numbers[kind][name]

    def name(self, kind: int, number: int) -> str:
        """Name with this number. Raises KeyError for an unknown number."""
        names = self._names[kind]
        if not 0 <= number < len(names):
            raise KeyError(number)
        return names[number]

    def all(self) -> list[dict[str, int]]:
        """Four dicts, name → number: topics, consumers, nodes and reasons."""
        return [self._numbers[kind].copy() for kind in KINDS]

    def register(self, kind: int, name: str) -> int:
        """The number of `name`; a new name gets the next number. Called from apply only."""
        found = self._numbers[kind].get(name)
        if found is not None:
            return found
        data = encode_name(kind, len(self._names[kind]), name)
        file = self._disk.open(self.path, create=True)
        file.pwrite(data, self.length)
        file.close()
        self.length += len(data)
        self.crc = crc32c(data, self.crc)
        self.unsynced = True
        return self._add(kind, name)

    def _add(self, kind: int, name: str) -> int:
        number = self._numbers[kind][name] = len(self._names[kind])
        self._names[kind].append(name)
        return number
