"""Reads the answers on one connection to a node of another shard: finds where an answer ends, and whether the
connection may carry another request.

No I/O happens here: pool.py feeds the bytes that arrive. Bytes of one answer must never reach another client, so this
reader is strict. It accepts what nodes send, an HTTP/1.1 head with one Content-Length, and refuses anything else,
chunked bodies too. After a refusal, or half an answer, the connection has ended for good.
"""

import re
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

#: Size limits, in bytes, of an answer's head and of its body. An answer is kept in memory until all of it has arrived.
_MAX_HEAD, MAX_BODY = 16 << 10, 256 << 20
_BEGIN = b"HTTP/1.1 "
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) [\x20-\x7e\x80-\xff]*\r\n")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)\r\n")
_LOCATION = re.compile(rb"\r\nLocation: ([!-~]*)(?=\r\n)")
_DIGITS = re.compile(rb"\d{1,15}")
_NO_CONTENT, _NOT_MODIFIED = 204, 304


class Odd(Exception):
    """The received bytes are no valid answer to the request. The connection must be closed."""


class TooLong(Odd):
    """The answer is longer than MAX_BODY."""


class WholeAnswer(NamedTuple):
    """An answer of which every byte has arrived. head: status line and header lines without those of the connection,
    each with its line break. fields: header values by name in lower case."""

    status: int
    fields: dict[bytes, bytes]
    head: bytes
    body: bytes


class State(Enum):
    #: No request is under way: the next request may be sent.
    IDLE = 0
    #: A request was sent, and its answer has not arrived completely.
    ASKED = 1
    #: The connection has ended: nothing may be sent any more.
    ENDED = 2


class Exchange:
    """State of one connection, which carries one request at a time."""

    __slots__ = ("_head", "_keep", "_missing", "_pieces", "_seen", "state")

    def __init__(self) -> None:
        self.state = State.IDLE
        #: Bytes of an answer's head that has not arrived completely.
        self._head = b""
        #: Status, header fields and bytes of the answer's head; None until the head has arrived.
        self._seen: tuple[int, dict[bytes, bytes], bytes] | None = None
        #: Pieces of the answer's body that have arrived.
        self._pieces: list[bytes] = []
        #: Number of bytes of the body that have not arrived.
        self._missing = 0
        self._keep = False

    def begin(self) -> None:
        """Note that a request was sent. It must not be a HEAD: the answer's body must be as long as its head says."""
        assert self.state is State.IDLE, "a connection carries one request at a time"
        self.state = State.ASKED
        self._head, self._seen, self._pieces = b"", None, []

    def end(self) -> None:
        """Note that the connection is closed, or that its request was abandoned."""
        self.state = State.ENDED

    def feed(self, data: bytes) -> WholeAnswer | None:
        """Read bytes that arrived; returns the answer once it is whole. Raises Odd."""
        if self.state is not State.ASKED:
            self.state = State.ENDED
            raise Odd("bytes arrived that no request asked for")
        # The state stays ENDED after an exception in `_read`, and after an answer that ends the connection.
        self.state = State.ENDED
        whole = self._read(data)
        if whole is None:
            self.state = State.ASKED
        elif self._keep:
            self.state = State.IDLE
        return whole

    def _read(self, data: bytes) -> WholeAnswer | None:
        if self._seen is None:
            data = self._head + data
            end = data.find(b"\r\n\r\n", max(0, len(self._head) - 3))
            if (end if end >= 0 else len(data)) > _MAX_HEAD:
                raise Odd(f"the head of an answer has more than {_MAX_HEAD} bytes")
            if end < 0:
                if not data.startswith(_BEGIN[: len(data)]):
                    raise Odd("the answer is not HTTP/1.1")
                self._head = data
                return None
            self._seen = self._parse(data[: end + 2])
            data = data[end + 4 :]
        missing = self._missing = self._missing - len(data)
        if missing < 0:
            raise Odd("the answer is longer than its head says")
        self._pieces.append(data)
        if missing:
            return None
        return WholeAnswer(*self._seen, b"".join(self._pieces))

    def _parse(self, head: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        """Parse an answer's head: status, header fields by name in lower case, and header lines to pass on. head: bytes
        up to the end of the last header line."""
        # Parse the head without its Location, the only header in which answers to publishes differ: `_parsed` caches
        # heads, and Location does not concern the connection.
        own = _LOCATION.search(head)
        rest = head if own is None else head[: own.start()] + head[own.end() :]
        parsed = _parsed(rest)
        self._keep, self._missing = parsed.keep, parsed.length
        if own is None:
            return parsed.status, parsed.fields, parsed.kept
        if b"location" in parsed.fields:
            raise Odd("the answer has two headers location")
        return parsed.status, {**parsed.fields, b"location": own[1]}, parsed.kept + own[0][2:] + b"\r\n"


class _Parsed(NamedTuple):
    """A parsed head of an answer. keep: whether the connection may carry another request. length: number of bytes of
    the body."""

    status: int
    fields: dict[bytes, bytes]
    kept: bytes
    keep: bool
    length: int


@lru_cache(maxsize=64)
def _parsed(head: bytes) -> _Parsed:
    """Parse the head of an answer, without its Location. Raises Odd."""
    line = _STATUS.match(head)
    if line is None:
        raise Odd("the status line of the answer is malformed")
    status, at = int(line[1]), line.end()
    fields: dict[bytes, bytes] = {}
    kept = head[:at]
    while at < len(head):
        field = _FIELD.match(head, at)
        if field is None:
            raise Odd("a header line of the answer is malformed")
        name, at = field[1].lower(), field.end()
        if name in fields:
            raise Odd(f"the answer has two headers {name.decode()}")
        fields[name] = field[2].rstrip(b" \t")
        if name not in _CONNECTION:
            kept += field[0]
    keep = fields.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    return _Parsed(status, fields, kept, keep, _length(status, fields))


def _length(status: int, fields: dict[bytes, bytes]) -> int:
    """Number of bytes of an answer's body. Raises Odd."""
    given = fields.get(b"content-length")
    if not fields.keys().isdisjoint(_REFRAMING) or status == _NOT_MODIFIED:
        raise Odd("the answer has another framing than Content-Length")
    if given is None and status == _NO_CONTENT:
        return 0
    if given is None or not _DIGITS.fullmatch(given):
        raise Odd("the answer has no valid Content-Length")
    length = int(given)
    if status == _NO_CONTENT and length:
        raise Odd("an answer without content has a body")
    if length > MAX_BODY:
        raise TooLong(f"the answer has {length} bytes; at most {MAX_BODY} are forwarded")
    return length


#: Headers that concern one connection, and are not passed on.
_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection"))
#: Headers by which a body may end elsewhere than Content-Length says: an answer with such a header is refused.
_REFRAMING = frozenset((b"transfer-encoding", b"upgrade", b"trailer"))
