"""SETTLE: an encoded ACK or NACK, with sections of more facts about its leases (docs/spec/commands.md)."""

import numpy as np

from hadelay.codec.commandtypes import Command
from hadelay.codec.formats import U32
from hadelay.codec.wire import COMMAND, frame

#: Section numbers: hand-out delays; results of an ACK, and answers to the calls about its leases.
DELAYS, RESULTS, REPLIES = 1, 2, 3
_U32 = np.dtype("<u4")


def encode_settle(command: bytes, delays: U32 | None, results: bytes = b"", replies: bytes = b"") -> bytes:
    """Encode a SETTLE: an encoded ACK or NACK with the hand-out delay in ms of each lease (NONE32: unknown), and with
    an ACK's results and answers as encoded (`encode_results`, `encode_replies`)."""
    known = b"" if delays is None else np.asarray(delays, _U32).tobytes()
    given = (DELAYS, known), (RESULTS, results), (REPLIES, replies)
    sections = [COMMAND.pack(section, len(data)) + data for section, data in given if data]
    return frame(Command.SETTLE, command, *sections)


def take_apart(command: bytes) -> tuple[bytes, bytes, bytes]:
    """The ACK or NACK in a SETTLE without delays, its encoded results, and its encoded answers; (command, b"", b"") for
    every other command."""
    if command[0] != Command.SETTLE:
        return command, b"", b""
    at = end = 2 * COMMAND.size + COMMAND.unpack_from(command, COMMAND.size)[1]
    found: dict[int, bytes] = {}
    while at < len(command):
        section, size = COMMAND.unpack_from(command, at)
        found[section] = command[at + COMMAND.size : at + COMMAND.size + size]
        at += COMMAND.size + size
    return command[COMMAND.size : end], found.get(RESULTS, b""), found.get(REPLIES, b"")
