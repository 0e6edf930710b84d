"""The head of a request that is forwarded: what the client sent, without the headers of its own connection.

The owner sees the client's token, and checks it again. `Hadelay-Shard` names the shard and the version of the map by
which the request was forwarded; a request with this header is never forwarded again.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from hadelay.errors import BadRequest

#: Header of requests that are forwarded, and of all answers of nodes with a shard map.
SHARD = "Hadelay-Shard"
_VALUE = re.compile(r"(\d{1,3}); map=(\d{1,19})")
_TARGET = re.compile(r"/[!\"$-~]*")
_NAME, _TEXT = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
#: Headers of one connection (RFC 9110, 7.6.1), and headers that are written anew for the owner's connection.
_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"content-length", b"via", b"hadelay-shard",
    )
)  # fmt: skip
#: Headers by which a browser names its page's site. They are not forwarded: this node has compared them with its own
#: host name.
_SITE = frozenset((b"origin", b"sec-fetch-site", b"x-forwarded-host"))


class ForwardHead(NamedTuple):
    """Head of a request, in a form that fits each node to which the request may be sent."""

    method: str
    #: Request line; and header lines besides Host, Hadelay-Shard and Content-Length, each with its line break.
    line: bytes
    lines: bytes
    #: Whether the request may be sent again if its outcome is unknown: it changes nothing, or has an Idempotency-Key.
    repeatable: bool
    #: Time for which the request lets the owner wait before it answers, in seconds.
    wait_s: float = 0.0

    @property
    def reads(self) -> bool:
        return self.method == "GET"

    def data(self, host: str, shard: int, version: int, body: bytes) -> bytes:
        """Bytes of the request for a node. host: the node's host and port. shard: the node's shard. version: version of
        the shard map by which the shard was chosen."""
        return b"%bHost: %b\r\n%bHadelay-Shard: %d; map=%d\r\nContent-Length: %d\r\n\r\n%b" % (
            self.line, host.encode(), self.lines, shard, version, len(body), body
        )  # fmt: skip


def forward_head(
    method: str,
    target: str,
    fields: Iterable[tuple[bytes, bytes]],
    node: str,
    *,
    wait_s: float = 0.0,
    keyed: bool = False,
    host: str = "",
) -> ForwardHead:
    """Head to forward. A HEAD is sent as a GET, so that each answer has the body that its head says. target: path and
    query. node: name of this node. keyed: whether the outcome is remembered under an Idempotency-Key. host:
    Host header of the client, for X-Forwarded-Host; "" for none. Raises BadRequest for bytes that a node might read as
    more than one header or request."""
    if not _TARGET.fullmatch(target):
        raise BadRequest("the path and query must be percent-encoded ASCII")
    return forward_lines(fields, node, host).head(method, target, wait_s=wait_s, keyed=keyed)


class ForwardLines(NamedTuple):
    """Header lines to forward, each with its line break. key: whether one of them is an Idempotency-Key."""

    lines: bytes
    key: bool

    def head(self, method: str, target: str, *, wait_s: float = 0.0, keyed: bool = False) -> ForwardHead:
        """Make a head with these header lines; see forward_head. target: without characters that end a line."""
        method = "GET" if method == "HEAD" else method
        line = b"%b %b HTTP/1.1\r\n" % (method.encode(), target.encode())
        return ForwardHead(method, line, self.lines, (keyed and self.key) or method == "GET", wait_s)


def forward_lines(fields: Iterable[tuple[bytes, bytes]], node: str, host: str = "") -> ForwardLines:
    """Select the header lines of a request that are forwarded. For `host` and the errors, see forward_head."""
    fields = list(fields)
    dropped = _HOP | _SITE
    if host:
        fields = [field for field in fields if field[0].lower() != b"x-forwarded-host"]
        fields.append((b"X-Forwarded-Host", host.encode("utf-8", "surrogateescape")))
        dropped -= {b"x-forwarded-host"}
    for name, value in fields:
        if name.lower() == b"connection":
            dropped |= {option.strip().lower() for option in value.split(b",")}
    lines, via, key = b"", b"", False
    for name, value in fields:
        small = name.lower()
        if not _NAME.fullmatch(name) or not _TEXT.fullmatch(value):
            raise BadRequest(f"header {name[:80]!r} has characters that a header must not have")
        if small == b"via":
            via += value + b", "
        if small not in dropped:
            key = key or small == b"idempotency-key"
            lines += b"%b: %b\r\n" % (name, value)
    return ForwardLines(lines + b"Via: %b1.1 %b\r\n" % (via, node.encode()), key)


def shard_of(value: str) -> tuple[int, int]:
    """Shard and version of the map in a `Hadelay-Shard` header of a forwarded request. Raises BadRequest."""
    found = _VALUE.fullmatch(value)
    if found is None:
        raise BadRequest(f"header {SHARD}: {value[:40]!r}: expected a shard and the version of a map, 2; map=17")
    return int(found[1]), int(found[2])
