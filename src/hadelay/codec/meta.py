"""Meta of a message: a msgpack map in front of the body in the message's record. Also bit masks of a message's tags.

    ct  content type          key  client key            tags  list of tags       meta  the caller's own map
    ttl  as the publish gave it, in ms                    cb  webhook URL of this message alone
    fw  header fields of this message's webhook calls: names in lower case
    os, of  topics of this message's callbacks, of a success and of a failure
    re  the message is a callback: of a success, or of a failure
    tp   traceparent: the span that published it (W3C Trace Context)
    group  message group: the name whose hash the log has
    batch  key of the batch that the message joined
    sch  name of the schedule that made the message     oc  its occurrence, in Unix ms: the last key, as a u64

The HTTP layer writes the map; the HTTP layer, webhooks and the matching of tags read it. Apply writes `oc`
(codec/schedules.py) and the maps of callbacks, and reads `tags`, for subscriptions with a filter, `CallbackMeta` and
`CopiedMeta`.

Tag masks are the 64 bits of an index entry (S2). Each tag sets a few bits, and a message has those of all its tags. A
mask answers "certainly not" or "perhaps"; the record has the tags. Four bits per tag, by measurement (ADR 70): with up
to eight tags per message, as nearly all have, fewer than 3 in 100 messages without the tag pass the mask.
"""

from collections.abc import Collection, Iterable
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
    fw: dict[str, str] = {}
    os: str | None = None
    of: str | None = None
    re: str | None = None
    batch: str | None = None
    sch: str | None = None
    oc: int = 0


class _Tags(msgspec.Struct):
    tags: list[str] = []


class _Batch(msgspec.Struct):
    batch: str | None = None


class CallbackMeta(msgspec.Struct):
    """The fields of a message's meta that callbacks use."""

    key: str | None = None
    tp: str | None = None
    os: str | None = None
    of: str | None = None
    re: str | None = None
    sch: str | None = None
    oc: int = 0


class CopiedMeta(msgspec.Struct):
    """Parts of a message's meta that a fill needs: it copies pending messages for a new subscription (ADR 229)."""

    tags: list[str] = []
    ttl: int = 0
    group: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Meta).decode
_decode_tags = msgspec.msgpack.Decoder(_Tags).decode
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_callback = msgspec.msgpack.Decoder(CallbackMeta).decode
_decode_copied = msgspec.msgpack.Decoder(CopiedMeta).decode
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


def tags_in(meta: bytes | memoryview) -> list[str]:
    """The tags in a meta map; none if the map is malformed, because apply, which calls this, never raises."""
    try:
        return _decode_tags(meta).tags if meta else []
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []


def batch_in(meta: bytes | memoryview) -> str:
    """The key of the batch in a meta map; "" if there is none or the map is malformed, because apply, which calls this,
    never raises."""
    try:
        return (_decode_batch(meta).batch or "") if meta else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def callback_meta(meta: bytes) -> CallbackMeta:
    """Decode the fields of a meta map that callbacks use. A malformed map counts as empty, because apply calls this and
    never raises."""
    try:
        return _decode_callback(meta) if meta else CallbackMeta()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return CallbackMeta()


def copied_meta(meta: bytes) -> CopiedMeta:
    """Decode the fields of a meta map that a fill needs (see CopiedMeta). A malformed map counts as empty, because
    apply calls this and never raises."""
    try:
        return _decode_copied(meta) if meta else CopiedMeta()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return CopiedMeta()


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


class Filter:
    """Tag filter of a consumer or a subscription: a message passes if it has all tags of `all_of` and, unless `any_of`
    is empty, one of its tags. The 64-bit tag mask in the index says "certainly not" or "perhaps"; the tags in the
    record decide before a grant is proposed. Filters that accept the same messages are equal."""

    __slots__ = ("_all_mask", "_hash", "all_of", "any_of")

    def __init__(self, all_of: Iterable[str], any_of: Iterable[str]) -> None:
        every, some = set(all_of), set(any_of)
        if len(some) == 1:
            every |= some
        if some & every:  # `any_of` adds nothing: `all_of` has one of its tags
            some = set()
        self.all_of, self.any_of = tuple(sorted(every)), tuple(sorted(some))
        self._all_mask = mask_of(self.all_of)
        self._hash = hash((self.all_of, self.any_of))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and (self.all_of, self.any_of) == (other.all_of, other.any_of)

    def may(self, masks: NDArray[np.uint64]) -> Mask:
        """Mask of messages that may match, by their tag masks in the index; other messages certainly do not match."""
        found = has_all(masks, self._all_mask)
        return found & has_any(masks, self.any_of) if self.any_of else found

    def matches(self, tags: Collection[str]) -> bool:
        """Whether the filter matches a message that has these tags, as read from its record."""
        return all(tag in tags for tag in self.all_of) and (not self.any_of or any(tag in tags for tag in self.any_of))


def filter_of(tags: Iterable[str], any_tags: Iterable[str]) -> Filter | None:
    """Filter for these tags; None if no tags are given, because then every message matches."""
    wanted = Filter(tags, any_tags)
    return wanted if wanted.all_of or wanted.any_of else None
