from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadelay.api.text import (
    check_new_topic,
    check_topic,
    format_instant,
    parse_duration,
    parse_id,
    parse_instant,
    suggest,
)
from hadelay.errors import BadRequest, HadelayError, Impossible
from hadelay.http.receipts import ids_text, instants_text
from hadelay.model import encode_id
from hadelay.settings.node import HttpConfig


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("250ms", 250), ("15m", 900_000), ("2h30m", 9_000_000), ("7d", 604_800_000), ("30", 30_000), (30, 30_000),
        ("1.5", 1_500), (0.25, 250), ("0", 0), ("0.0001", 1), ("1.5h", 5_400_000), ("1d2h3m4s5ms", 93_784_005),
        (" 5s ", 5_000), (1e3, 1_000_000), (1e-7, 1), ("1.001", 1_001),
    ],
)  # fmt: skip
def test_durations(text: object, ms: int) -> None:
    assert parse_duration("delay", text) == ms


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("-5", BadRequest, "negative"), (-0.5, BadRequest, "negative"), ("-1h", BadRequest, "negative"),
        ("soon", BadRequest, "not a duration"), ("", BadRequest, "not a duration"), ("5 m", BadRequest, "not a"),
        ("1h30", BadRequest, "not a"), ("5M", BadRequest, "not a"), ("nan", BadRequest, "not a"),
        (float("nan"), BadRequest, "not a"), (float("inf"), BadRequest, "not a"), (True, BadRequest, "write it"),
        (None, BadRequest, "write it"), ("٣s", BadRequest, "not a"), ("9" * 50 + "d", Impossible, "longest"),
    ],
)  # fmt: skip
def test_wrong_durations(text: object, error: type[HadelayError], words: str) -> None:
    with pytest.raises(error, match=words):
        parse_duration("delay", text)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-11-20T18:00:00Z", "2026-11-20T18:00:00.000Z"),
        ("2026-11-20t18:00:00.5z", "2026-11-20T18:00:00.500Z"),
        ("2026-11-20T18:00:00+08:00", "2026-11-20T10:00:00.000Z"),
        ("2026-11-20T18:00:00-05:30", "2026-11-20T23:30:00.000Z"),
        ("2026-11-20T18:00:00 08:00", "2026-11-20T10:00:00.000Z"),  # a + that a query made a space
        ("2026-11-20 18:00:00Z", "2026-11-20T18:00:00.000Z"),
        ("2028-02-29T23:59:59Z", "2028-02-29T23:59:59.000Z"),
        ("2028-02-29T00:30:00+01:00", "2028-02-28T23:30:00.000Z"),
        ("2026-12-31T23:59:60Z", "2027-01-01T00:00:00.000Z"),
        ("2026-11-20T18:00:00.0001Z", "2026-11-20T18:00:00.001Z"),  # late by less than a ms, never early
        (1_790_000_000_000, "2026-09-21T14:13:20.000Z"),
        ("1790000000000", "2026-09-21T14:13:20.000Z"),
        ("0001-01-01T00:00:00Z", None),
    ],
)
def test_instants(text: object, utc: str | None) -> None:
    ms = parse_instant("deliver_at", text)
    assert ms < 0 if utc is None else format_instant(ms) == utc


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (1_790_000_000, "seconds. use milliseconds"), ("1790000000", "use milliseconds"), (-5, "negative"),
        ("-1790000000000", "negative"), ("2026-11-20T18:00:00", "no time zone"), ("2027-02-29T00:00:00Z", "day"),
        ("2026-13-01T00:00:00Z", "month"), ("2026-11-20T25:00:00Z", "hour"), ("2026-11-20T18:00:61Z", "second"),
        ("2026-11-20", "RFC 3339"), ("tomorrow", "RFC 3339"), ("", "RFC 3339"), (True, "RFC 3339"),
        ("2026-11-20T18:00:00+24:00", "offset"), ("2026W471T180000Z", "RFC 3339"),
    ],
)  # fmt: skip
def test_wrong_instants(text: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse_instant("deliver_at", text)


def test_an_instant_beyond_all_is_understood_but_impossible() -> None:
    with pytest.raises(Impossible):
        parse_instant("deliver_at", 10**18)


@given(st.integers(10**11, 253_402_300_799_999))
def test_instants_there_and_back(ms: int) -> None:
    assert parse_instant("t", format_instant(ms)) == ms


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 253_402_300_799_999)), min_size=1))
def test_many_are_written_like_one(rows: list[tuple[int, int]]) -> None:
    ids, times = [row[0] for row in rows], [row[1] for row in rows]
    assert [bytes(text).decode() for text in ids_text(ids)] == [encode_id(n) for n in ids]
    assert [bytes(text).decode() for text in instants_text(times)] == [format_instant(n) for n in times]


@pytest.mark.parametrize("text", ["", "short", "0" * 14, "G000000000000", "000000000000U", "00000000000é0"])
def test_malformed_ids(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_id(text)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ü", "a:b", "x" * 256, "\n", "a\n"])
def test_wrong_topics(name: str) -> None:
    with pytest.raises(BadRequest):
        check_topic(name)


def test_a_stored_topic_may_have_a_longer_name_than_a_new_one() -> None:
    stored = "x" * 255
    assert check_topic(stored) == stored
    for name in ("x" * 129, ".."):
        check_topic(name)
        with pytest.raises(BadRequest):
            check_new_topic(name, HttpConfig().max_topic_bytes)


def test_suggestions() -> None:
    assert "'delay'" in suggest("dealy", ["delay", "deliver_at"])
    assert suggest("zzz", ["b", "a"]) == "; there is a, b"
    assert suggest("zzz", []) == ""


@pytest.mark.parametrize("name", ["wait", "lease"])
def test_only_a_delay_is_said_to_go_back_in_time(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: '-1' is negative$"):
        parse_duration(name, -1)
    with pytest.raises(BadRequest, match="leave it out for now"):
        parse_duration("delay", -1)
