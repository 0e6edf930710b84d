"""Meta of a message: a msgpack map in front of the body in the message's record.

    ct  content type          key  client key            tags  list of tags       meta  the caller's own map
    ttl  as the publish gave it, in ms                    cb  webhook URL of this message alone
    tp   traceparent: the span that published it (W3C Trace Context)

Apply never reads the map. The HTTP layer writes it; the HTTP layer, webhooks and the matching of tags read it.
"""

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
    """The map as bytes; empty for a map without keys."""
    packed = _encode(meta)
    return b"" if packed == _EMPTY else packed


def retried(meta: bytes) -> bytes:
    """The map without `tp`, which differs between two tries of one publish: each try is a span of its own."""
    return pack(msgspec.structs.replace(unpack(meta), tp=None)) if b"\xa2tp" in meta else meta


def unpack(meta: bytes | memoryview) -> Meta:
    """The map as a value, which may be shared: do not change it. Unknown keys, of a later version, are dropped."""
    return _decode(meta) if meta else _NOTHING
