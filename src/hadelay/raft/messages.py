"""Frames on the node link (docs/spec/node-link.md): one kind byte, then a fixed struct or msgpack. Never a pickle."""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from hadelay.platform.hello import LIMIT as LIMIT
from hadelay.platform.hello import BadFrame as BadFrame
from hadelay.platform.hello import decode as decode
from hadelay.platform.hello import encode as encode

GREETING = 2
APPEND = 3
APPEND_REPLY = 4
PRE_VOTE = 5
PRE_VOTE_REPLY = 6
VOTE = 7
VOTE_REPLY = 8
TIMEOUT_NOW = 9
READ = 10
READ_REPLY = 11
SNAPSHOT = 12
CHUNK = 13
CHUNK_REPLY = 14
SNAPSHOT_DONE = 15
SEEN = 16
REWOUND = 17
MEMBERS = 18
#: First frame kind of the node's own traffic; smaller kinds belong to Raft.
FIRST_APP_KIND = 64

#: Header of APPEND: kind, flags, length of info, leader's round trip in ms, term; index and term of the
#: entry before the records; commit index, heartbeat round.
_APPEND = struct.Struct("<BBHIQQQQQ")
#: Frame APPEND_REPLY: kind, then the fields of AppendReply.
_APPEND_REPLY = struct.Struct("<BBQQQQ")

#: Flag of an APPEND frame which says that the follower must not answer the frame.
NO_REPLY = 1
OK, MISMATCH, HIGHER_TERM, INSTALLING = range(4)


class Greeting(NamedTuple):
    feature_level: int
    incarnation: int
    admitted: bool
    boot: int
    #: Term and index of the sender's last log entry when its process started. If they are lower than entries that it
    #: acknowledged before, its disk was rewound.
    term: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name


class Vote(NamedTuple):
    term: int
    last_index: int
    last_term: int
    #: Whether the leader asked the candidate to campaign.
    called: bool


class SnapshotOffer(NamedTuple):
    """The manifest of the last checkpoint of the leader of `term`."""

    term: int
    index: int  # type: ignore[assignment]
    last_term: int
    blob: bytes
    files: list  # type: ignore[type-arg]


class Chunk(NamedTuple):
    """Request of a follower for bytes of a snapshot file."""

    index: int  # type: ignore[assignment]
    name: str
    offset: int
    size: int


class ChunkReply(NamedTuple):
    index: int  # type: ignore[assignment]
    name: str
    offset: int
    crc: int
    data: bytes


#: Shape of a frame's content: types of the fields, a class with such fields, or a function that decodes the frame.
Shape = tuple[type, ...] | type | Callable[[bytes], Any]


def values(shape: Shape, data: bytes) -> list[Any]:
    """Decode a frame into its fields, or into one object if `shape` is a class or function. BadFrame if the content
    does not fit the shape."""
    if isinstance(shape, tuple):
        return decode(data, *shape)
    if isinstance(shape, type):
        return [shape(*decode(data, *shape.__annotations__.values()))]
    return [shape(data)]


class Append(NamedTuple):
    flags: int
    rtt_ms: int
    term: int
    #: Index of the entry before the records; 0: a heartbeat, without a comparison of logs and without records.
    prev_index: int
    prev_term: int
    commit_index: int
    round: int
    info: bytes
    #: Offset at which the records begin in `frame`.
    records: int
    #: Bytes of the whole frame.
    frame: bytes


def encode_append(
    term: int,
    prev_index: int,
    prev_term: int,
    commit_index: int,
    round: int,
    *,
    info: bytes = b"",
    rtt_ms: int = 0,
    flags: int = 0,
) -> bytes:
    """Encode an APPEND frame up to its records; the sender appends records that are encoded already."""
    return _APPEND.pack(APPEND, flags, len(info), rtt_ms, term, prev_index, prev_term, commit_index, round) + info


def decode_append(data: bytes) -> Append:
    try:
        _, flags, info, *numbers = _APPEND.unpack_from(data)
    except struct.error as error:
        raise BadFrame(f"malformed append frame: {error}") from error
    if max(numbers) >= LIMIT:
        raise BadFrame(f"malformed append frame: the number {max(numbers)} is not below {LIMIT}")
    at = _APPEND.size + info
    return Append._make([flags, *numbers, data[_APPEND.size : at], at, data])


class AppendReply(NamedTuple):
    status: int
    #: Term of the answered APPEND frame; with status HIGHER_TERM, the answering node's term.
    term: int
    #: Index of the follower's last entry that is synced and verified against the leader's log.
    match: int
    #: With status MISMATCH: index of the entry that the leader should try next.
    hint: int
    round: int


def encode_append_reply(status: int, term: int, match: int, hint: int, round: int) -> bytes:
    return _APPEND_REPLY.pack(APPEND_REPLY, status, term, match, hint, round)


def decode_append_reply(data: bytes) -> AppendReply:
    try:
        reply = AppendReply(*_APPEND_REPLY.unpack(data)[1:])
    except struct.error as error:
        raise BadFrame(f"malformed append reply: {error}") from error
    if max(reply) >= LIMIT:
        raise BadFrame(f"malformed append reply: the number {max(reply)} is not below {LIMIT}")
    return reply
