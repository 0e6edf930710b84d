"""Optional parts of a SETTLE that acks: results of handlers, and answers of webhook receivers for success callbacks,
each by the position of its lease in the command (docs/spec/commands.md)."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from google_crc32c import value as crc32c
from msgspec import Meta

from hadelay.codec.packed import U16, U32, decoder
from hadelay.codec.wire import Malformed
from hadelay.model import MAX_REPLY, MAX_RESULT

#: Limit of the content type of a webhook's answer, in characters; a longer one is cut.
_MAX_TYPE = 255


class AckResult(NamedTuple):
    """Result of a handler: its JSON, and the CRC-32C of the JSON, which apply writes into the header of the stored
    result."""

    crc: U32
    json: Annotated[bytes, Meta(max_length=MAX_RESULT)]


class CallReply(NamedTuple):
    """Answer of a receiver: its HTTP status, and at most MAX_REPLY bytes of its body. truncated: whether the body had
    more bytes."""

    status: U16
    content_type: Annotated[str, Meta(max_length=_MAX_TYPE)]
    body: Annotated[bytes, Meta(max_length=MAX_REPLY)]
    truncated: bool


_encode = msgspec.msgpack.Encoder().encode


def encode_results(results: Sequence[bytes | None]) -> bytes:
    """Encode the part with handlers' results; b"" if there is no result. results: JSON per lease, or None."""
    given = {lease: AckResult(crc32c(one), one) for lease, one in enumerate(results) if one is not None}
    return _encode(given) if given else b""


def encode_replies(replies: Sequence[CallReply | None]) -> bytes:
    """Encode the part with webhooks' answers; b"" if there is no answer. replies: an answer per lease, or None."""
    given = {}
    for lease, reply in enumerate(replies):
        if reply is not None:
            content_type = reply.content_type.encode("ascii", "replace").decode()[:_MAX_TYPE]
            given[lease] = reply._replace(content_type=content_type)
    return _encode(given) if given else b""


def decode_results(data: memoryview, leases: int) -> dict[int, AckResult]:
    """Decode the part of an ack with handlers' results. leases: number of leases that the ack has. Raises Malformed."""
    return _of_leases(decoder(dict[int, AckResult])(data), leases)


def decode_replies(data: memoryview, leases: int) -> dict[int, CallReply]:
    """Decode the part of an ack with webhooks' answers. leases: number of leases that the ack has. Raises Malformed."""
    return _of_leases(decoder(dict[int, CallReply])(data), leases)


def _of_leases(found: dict[int, Any], leases: int) -> dict[int, Any]:
    if not found or min(found) < 0 or max(found) >= leases:
        raise Malformed("each result and each answer must belong to a lease of the ack")
    return found
