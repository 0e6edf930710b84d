"""What travels with a message besides its body: a msgpack map in front of the body in its record.

    ct  content type          key  client key            tags  list of tags       meta  the caller's own map
    ttl  as the publish gave it, in ms                    cb  webhook URL of this message alone
    tp   traceparent: the span that published it (W3C Trace Context)

Apply never looks into it. Written by the HTTP layer, read by it, by webhooks, and by whoever matches tags.
"""

from __future__ import annotations

import msgspec

OCTETS = "application/octet-stream"


class Meta(msgspec.Struct, omit_defaults=True):
    ct: str = OCTETS
    key: str | None = None
    tags: list[str] = []
    meta: dict[str, str] = {}
    ttl: int = 0
    cb: str | None = None
    tp: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Meta).decode
_NOTHING = Meta()
_EMPTY = b"\x80"


def pack(meta: Meta) -> bytes:
    """Empty when there is nothing to say."""
    packed = _encode(meta)
    return b"" if packed == _EMPTY else packed


def retried(meta: bytes) -> bytes:
    """Without what differs between two tries of one publish: each is a span of its own."""
    return pack(msgspec.structs.replace(unpack(meta), tp=None)) if b"\xa2tp" in meta else meta


def unpack(meta: bytes | memoryview) -> Meta:
    """Names that are not known here are left out: they are a later version's. Shared: not to be changed."""
    return _decode(meta) if meta else _NOTHING
