"""Tag filter of a selective consumer: all tags of one list, and one tag of another. The 64-bit mask of an index entry
says "certainly not" or "perhaps" (S2); the tags in the record decide before a grant is proposed."""

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.meta import has_all, has_any, mask_of


class Filter:
    """Equal when it asks for the same. A message passes if it has every tag of `all_of`, and one of `any_of` unless
    that is empty."""

    __slots__ = ("_all_mask", "_hash", "all_of", "any_of")

    def __init__(self, all_of: Iterable[str], any_of: Iterable[str]) -> None:
        every, some = set(all_of), set(any_of)
        if len(some) == 1:
            every |= some
        if some & every:  # the mask meets this condition already
            some = set()
        self.all_of, self.any_of = tuple(sorted(every)), tuple(sorted(some))
        self._all_mask = mask_of(self.all_of)
        self._hash = hash((self.all_of, self.any_of))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and (self.all_of, self.any_of) == (other.all_of, other.any_of)

    def may(self, masks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether a message may match, by the index alone: False is certain."""
        found = has_all(masks, self._all_mask)
        return found & has_any(masks, self.any_of) if self.any_of else found

    def matches(self, tags: Collection[str]) -> bool:
        """Whether a message matches, by its record."""
        return all(tag in tags for tag in self.all_of) and (not self.any_of or any(tag in tags for tag in self.any_of))


def filter_of(tags: Iterable[str], any_tags: Iterable[str]) -> Filter | None:
    """Filter for these tags; None: every message matches."""
    wanted = Filter(tags, any_tags)
    return wanted if wanted.all_of or wanted.any_of else None
