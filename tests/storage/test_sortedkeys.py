"""Sorting in pieces: a thread that sorts all keys of a checkpoint at once would hold the event loop."""

import random
from itertools import chain

import pytest

from hadelay.storage.sortedkeys import pieces

KEYS = [n.to_bytes(8, "big") for n in range(100_000)]


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_all_keys_come_in_order_in_small_pieces(order: str) -> None:
    keys = {"ascending": KEYS, "descending": KEYS[::-1], "random": random.Random(1).sample(KEYS, len(KEYS))}[order]
    found = list(pieces(dict.fromkeys(keys)))
    assert list(chain.from_iterable(found)) == KEYS
    assert max(map(len, found)) < 8_192


def test_few_keys_and_keys_of_two_parts_come_in_order() -> None:
    assert list(chain.from_iterable(pieces({}))) == []
    pairs = [(table, key) for table in (b"a", b"b") for key in KEYS[:700]]
    assert list(chain.from_iterable(pieces(pairs[::-1]))) == pairs
