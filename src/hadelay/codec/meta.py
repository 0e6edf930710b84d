"""Meta of a message: a msgpack map in front of the body in the message's record. Also bit masks of a message's tags.

    ct  content type          key  client key            tags  list of tags       meta  the caller's own map
    ttl  as the publish gave it, in ms                    cb  webhook URL of this message alone
    tp   traceparent: the span that published it (W3C Trace Context)
    group  message group: the name whose hash the log has
    sch  name of the schedule that made the message     oc  its occurrence, in Unix ms: the last key, as a u64

Apply never reads the map, and writes only `oc` (codec/schedules.py). The HTTP layer writes the map; the HTTP layer,
webhooks and the matching of tags read it.

Tag masks are the 64 bits of an index entry (S2). Each tag sets a few bits, and a message has those of all its tags. A
mask answers "certainly not" or "perhaps"; the record has the tags. Four bits per tag, by measurement (ADR 70): with up
to eight tags per message, as nearly all have, fewer than 3 in 100 messages without the tag pass the mask.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import Mask

OCTETS = "application/octet-stream"
#: Number of bits that one tag sets in a message's 64-bit tag mask.
_TAG_BITS = 4


class Meta(msgspec.Struct, omit_defaults=True):
    ct: str = OCTETS
    key: str | None = None
    tags: list[str] = []
    meta: dict[str, str] = {}
    ttl: int = 0
    cb: str | None = None
    tp: str | None = None
    group: str | None = None
    sch: str | None = None
    oc: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Meta).decode
_NOTHING = Meta()
_EMPTY = b"\x80"


def pack(meta: Meta) -> bytes:
    """Encode the meta map; empty bytes for a map without keys."""
    packed = _encode(meta)
    return b"" if packed == _EMPTY else packed


def retried(meta: bytes) -> bytes:
    """The meta map without `tp`, the publisher's span: the map is then the same in all tries of the same publish."""
    return pack(msgspec.structs.replace(unpack(meta), tp=None)) if b"\xa2tp" in meta else meta


def unpack(meta: bytes | memoryview) -> Meta:
    """Decode the meta map. The result may be shared: do not change it. Keys of newer versions are dropped."""
    return _decode(meta) if meta else _NOTHING


@lru_cache(4096)
def tag_bits(tag: str) -> int:
    """The mask of one tag: _TAG_BITS different bits, chosen by the tag's hash."""
    mask = 0
    for byte in blake2b(tag.encode(), digest_size=16).digest():
        mask |= 1 << (byte & 63)
        if mask.bit_count() == _TAG_BITS:
            break
    return mask


def mask_of(tags: Iterable[str]) -> int:
    mask = 0
    for tag in tags:
        mask |= tag_bits(tag)
    return mask


def has_all(masks: NDArray[np.uint64], wanted: int) -> Mask:
    """Per message: whether it may have all wanted tags; False is certain. wanted: `mask_of` these tags."""
    return np.asarray(masks & np.uint64(wanted) == np.uint64(wanted))


def has_any(masks: NDArray[np.uint64], wanted: Iterable[str]) -> Mask:
    """Per message: whether it may have at least one of the wanted tags; False is certain."""
    found = np.zeros(len(masks), np.bool_)
    for tag in wanted:
        found |= has_all(masks, tag_bits(tag))
    return found
