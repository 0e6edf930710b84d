"""A filter by mask and by record: the mask may say perhaps too often, never no to what matches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hadelay.codec.meta import Filter, filter_of, mask_of

TAGS = st.lists(st.text(min_size=1, max_size=8), max_size=16, unique=True)
FEW = st.lists(st.sampled_from("abcdef"), max_size=6, unique=True)


def naive(tags: list[str], all_of: list[str], any_of: list[str]) -> bool:
    return set(all_of) <= set(tags) and (not any_of or bool(set(any_of) & set(tags)))


@given(tags=FEW, all_of=FEW, any_of=FEW)
def test_a_filter_agrees_with_a_naive_one(tags: list[str], all_of: list[str], any_of: list[str]) -> None:
    assert Filter(all_of, any_of).matches(tags) == naive(tags, all_of, any_of)


@given(messages=st.lists(TAGS, min_size=1, max_size=8), data=st.data())
def test_the_mask_never_rejects_what_matches(messages: list[list[str]], data: st.DataObject) -> None:
    known = sorted({tag for tags in messages for tag in tags}) or ["x"]
    some = st.lists(st.sampled_from(known), max_size=4, unique=True)
    wanted = Filter(data.draw(some), data.draw(some))
    perhaps = wanted.may(np.array([mask_of(tags) for tags in messages], np.uint64))
    for tags, maybe in zip(messages, perhaps.tolist(), strict=True):
        assert maybe or not wanted.matches(tags)


def test_equal_filters_are_one_filter() -> None:
    assert Filter(["b", "a"], []) == Filter(["a", "b", "a"], [])
    assert Filter(["a"], ["b"]) == Filter(["a", "b"], []), "one of one is all of one"
    assert Filter(["a"], ["a", "b"]) == Filter(["a"], []), "it is met already"
    assert Filter([], ["a", "b"]) != Filter(["a", "b"], [])
    assert len({Filter(["a"], ["c", "b"]), Filter(["a"], ["b", "c"])}) == 1
    assert filter_of([], []) is None


def test_messages_without_tags_match_no_selective_filter() -> None:
    assert not filter_of(["a"], []).may(np.zeros(1, np.uint64))[0]  # type: ignore[union-attr]
    assert not filter_of([], ["a", "b"]).may(np.zeros(1, np.uint64))[0]  # type: ignore[union-attr]
