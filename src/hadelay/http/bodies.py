"""Reads request bodies within three limits: bytes of one body, time to arrive, and bytes of all arriving bodies
together (ADR 180). Large requests take turns on the event loop, a slice of work at a time (ADR 190)."""

import asyncio
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from hadelay.errors import BadRequest, Overloaded, RequestTimeout, TooLarge, UnsupportedMediaType

#: Limit of a large request's work per turn (some ms): bytes read, decoded or written, plus ITEM for each item.
SLICE = 256 << 10
ITEM = 256


@dataclass
class ByteBudget:
    """Limit of the memory for request bodies in a node: the bytes of a body count until its request is answered."""

    at_most: int
    taken: int = 0


class Reservation:
    """Part of a ByteBudget that is reserved for one request."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget, self.taken = budget, 0

    def check(self, size: int) -> None:
        """Raises Overloaded if `size` more bytes exceed the budget, unless no other request uses the budget."""
        if self.budget.taken > self.taken and self.budget.taken + size > self.budget.at_most:
            raise Overloaded("this node is receiving too many large bodies; try again later", retry_after_ms=200)

    def take(self, size: int) -> None:
        self.check(size)
        self.budget.taken += size
        self.taken += size

    def give_back(self) -> None:
        self.budget.taken -= self.taken
        self.taken = 0


async def read_body(
    request: web.BaseRequest, limit: int, timeout_ms: int, name: str, reservation: Reservation
) -> bytes:
    """Read a request body. Raises TooLarge and Overloaded as early as possible: before the first byte if Content-Length
    tells the size. name: name of the setting that limits the size, for the error."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:40]!r} is not supported: send the body uncompressed")
    coding = request.headers.get("Transfer-Encoding", "chunked")
    if coding.lower() != "chunked":
        raise UnsupportedMediaType(f"Transfer-Encoding {coding[:40]!r} is not supported: use chunked or Content-Length")
    length = request.content_length
    if length is not None and length > limit:
        raise TooLarge(f"the body has {length} bytes; at most {limit} are allowed ({name})")
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    stream = request.content
    if stream.is_eof():
        data = stream.read_nowait() if stream.total_bytes else b""
        if len(data) > limit:
            raise TooLarge(f"the body has {len(data)} bytes; at most {limit} are allowed ({name})")
        return data
    reservation.check(length or 0)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            async for piece in stream.iter_any():
                size += len(piece)
                if size > limit:
                    raise TooLarge(f"the body has more than {limit} bytes, the limit ({name})")
                reservation.take(len(piece))
                pieces.append(piece)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_ms / 1000:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body is incomplete: {error}") from None
    return b"".join(pieces)


class RequestTurns:
    """Lets large requests take turns: each pass of the event loop does at most one slice of one large request."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        #: Number of turns of large requests so far, and largest work of one slice.
        self.given = self.largest = 0

    def count(self, work: int) -> None:
        self.largest = max(self.largest, work)

    async def next(self) -> None:
        """Let other requests run; return when this large request may do its next slice of work."""
        async with self._lock:  # the lock serves requests in the order of their arrival
            await asyncio.sleep(0)
        self.given += 1
