"""Tag masks: the 64 bits of an index entry (S2). Each tag sets a few bits, and a message has those of all its tags.

A mask answers "certainly not" or "perhaps"; the record has the tags. Four bits per tag, by measurement (ADR 70): with
up to eight tags per message, as nearly all have, fewer than 3 in 100 messages without the tag pass the mask.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import Mask

BITS = 4


@lru_cache(4096)
def tag_bits(tag: str) -> int:
    """The mask of one tag: BITS different bits, chosen by the tag's hash."""
    mask = 0
    for byte in blake2b(tag.encode(), digest_size=16).digest():
        mask |= 1 << (byte & 63)
        if mask.bit_count() == BITS:
            break
    return mask


def mask_of(tags: Iterable[str]) -> int:
    mask = 0
    for tag in tags:
        mask |= tag_bits(tag)
    return mask


def has_all(masks: NDArray[np.uint64], wanted: int) -> Mask:
    """Mask of messages that may have all tags of `wanted`, a `mask_of` them; other messages certainly have not."""
    return np.asarray(masks & np.uint64(wanted) == np.uint64(wanted))


def has_any(masks: NDArray[np.uint64], wanted: Iterable[str]) -> Mask:
    """Mask of messages that may have one of these tags; other messages certainly have none."""
    found = np.zeros(len(masks), np.bool_)
    for tag in wanted:
        found |= has_all(masks, tag_bits(tag))
    return found
