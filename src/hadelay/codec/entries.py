"""Entries of the Raft log: commands that are applied together, at one cluster time.

    entry   := {version u1, level u1, count u2, now_ms i8}  count × command                       little-endian

One entry is one step of cluster time: its commands are applied in order, all at `now_ms`, stamped once by the leader.
`level` is the feature level the entry needs: a node that does not have it stops, because skipping the entry would make
the node another replica.
"""

import struct
from collections.abc import Sequence

from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.wire import COMMAND, Malformed, WireReader
from hadelay.members import Members

ENTRY_VERSION = 1
_ENTRY = struct.Struct("<BBHq")


def encode_entry(now_ms: int, commands: Sequence[bytes], level: int = 1) -> bytes:
    """Encode a log entry of at most 65,535 encoded commands."""
    return b"".join((_ENTRY.pack(ENTRY_VERSION, level, len(commands), now_ms), *commands))


def decode_entry(entry: bytes | memoryview) -> tuple[int, int, list[tuple[int, memoryview]]]:
    """Decode a log entry into (feature level, cluster time, [(command number, encoded body)]). Raises Malformed."""
    reader = WireReader(memoryview(entry))
    version, level, count, now_ms = reader.unpack(_ENTRY)
    if version != ENTRY_VERSION:
        raise Malformed(f"log entry of version {version}; this program reads version {ENTRY_VERSION}")
    commands = []
    for _ in range(count):
        kind, size = reader.unpack(COMMAND)
        commands.append((kind, reader.take(size)))
    reader.end()
    return level, now_ms, commands


def is_whole(command: object) -> bool:
    """Whether `command` is one encoded command of the right length; the command's body is not checked."""
    if type(command) is not bytes or len(command) < COMMAND.size:
        return False
    return bool(COMMAND.unpack_from(command)[1] == len(command) - COMMAND.size)


def kind_of(command: bytes) -> int:
    """Number of an encoded command; for an AUDITED command, number of the inner command."""
    if command[0] != Command.AUDITED:
        return command[0]
    try:
        return int(decode(command[0], memoryview(command)[COMMAND.size :]).kind)
    except Malformed:
        return command[0]


def members_in(entry: bytes | memoryview) -> Members | None:
    """The list of members in a log entry, in force once the entry is in the log; None if there is no list."""
    if len(entry) <= _ENTRY.size or entry[_ENTRY.size] != Command.MEMBERS:
        return None
    try:
        _, _, commands = decode_entry(entry)
        if not is_change_of_members(commands):
            return None
        members: Members = decode(*commands[0])
    except Malformed:
        return None
    return members


def is_change_of_members(commands: Sequence[tuple[int, memoryview]]) -> bool:
    return len(commands) == 1 and commands[0][0] == Command.MEMBERS
