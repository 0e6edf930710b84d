"""Sorted keys in blocks, so that an insertion or a removal moves only the keys of one block."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TypeVar

#: Number of keys in a new block; a block with twice as many is split.
_BLOCK = 512

K = TypeVar("K", bytes, tuple[bytes, bytes])


def pieces(keys: Collection[K]) -> Iterator[list[K]]:
    """Sort keys into pieces, in ascending order, mostly of less than some thousand keys. A thread that sorts all keys
    at once holds the interpreter's lock, and with it the event loop, for as long as that takes."""
    bounds = sorted(islice(keys, 0, None, _BLOCK))
    found: list[list[K]] = [[] for _ in range(len(bounds) + 1)]
    for key in keys:
        found[bisect_right(bounds, key)].append(key)
    for piece in found:
        piece.sort()
        yield piece


class SortedKeys:
    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        ordered = sorted(keys)
        self._blocks = [ordered[at : at + _BLOCK] for at in range(0, len(ordered), _BLOCK)]
        #: Last key of each block, for finding the block of a key by bisection.
        self._lasts = [block[-1] for block in self._blocks]

    def add(self, key: bytes) -> None:
        blocks, lasts = self._blocks, self._lasts
        if not blocks:
            blocks.append([key])
            lasts.append(key)
            return
        at = min(bisect_left(lasts, key), len(blocks) - 1)
        block = blocks[at]
        insort(block, key)
        if len(block) > 2 * _BLOCK:
            blocks[at : at + 1] = block[:_BLOCK], block[_BLOCK:]
            lasts[at : at + 1] = block[_BLOCK - 1], block[-1]
        else:
            lasts[at] = block[-1]

    def remove(self, key: bytes) -> None:
        """Remove a key, which must be there."""
        blocks, lasts = self._blocks, self._lasts
        at = bisect_left(lasts, key)
        block = blocks[at]
        del block[bisect_left(block, key)]
        if block:
            lasts[at] = block[-1]
        else:
            del blocks[at], lasts[at]

    def page(self, start: bytes, limit: int) -> list[bytes]:
        at = bisect_left(self._lasts, start)
        if at == len(self._blocks):
            return []
        block = self._blocks[at]
        first = bisect_left(block, start)
        keys = block[first : first + limit]
        while len(keys) < limit and at + 1 < len(self._blocks):
            at += 1
            keys += self._blocks[at][: limit - len(keys)]
        return keys
