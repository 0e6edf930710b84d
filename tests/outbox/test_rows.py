"""Rows: every option of a publish passes through a row unchanged, and what no row can have is refused in words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from hadelay.api.publishoptions import OPTIONS
from hadelay.client.putoptions import Put
from hadelay.client.wire import options_of, payload_of
from hadelay.outbox.rows import Row, cancel_columns, put_columns, put_of, reschedule_columns

#: A value of each option.
VALUES: dict[str, Any] = {
    "at": datetime(2030, 1, 2, tzinfo=UTC), "key": "k", "group": "g", "batch": "b", "on_conflict": "replace",
    "max_wait": "1h", "unique_for": "2h", "tags": ["a", "b"], "ttl": "1d",
    "callback": "https://shop.example/hook", "on_success": "s",
    "on_failure": "f", "forward": {"X-A": "1"}, "meta": {"a": "ü"}, "content_type": "text/x",
    "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "idempotency_key": "mine",
}  # fmt: skip


def row_of(columns: dict[str, Any]) -> Row:
    found = {name: columns.get(name) for name in Row._fields}
    return Row(**(found | {"id": 1, "tries": 0, "size": 0}))  # type: ignore[arg-type]


def test_every_option_passes() -> None:
    assert {row.put or name for name, row in OPTIONS.items()} - {"delay"} == set(VALUES)
    put = put_of(row_of(put_columns("orders", {"n": 2**60}, **VALUES)))
    want = Put(topic="orders", body={"n": 2**60}, **VALUES)
    assert payload_of(put.body, put.content_type) == payload_of(want.body, want.content_type)
    assert options_of(put) == options_of(want) | {"deliver_at": 1_893_542_400_000}


def test_a_delay_counts_from_the_insert_and_is_never_short() -> None:
    columns = put_columns("orders", delay="1h")
    assert columns["due_ms"] >= columns["created_ms"] + 3_600_000 - 1


@pytest.mark.parametrize(
    ("body", "kind"),
    [("text", "text/plain; charset=utf-8"), (["j"], "application/json"), ("\0", "text/plain; charset=utf-8")],
)
def test_payloads(body: Any, kind: str) -> None:
    columns = put_columns("orders", body)
    put = put_of(row_of(columns))
    assert (put.body, put.content_type) == payload_of(body, None)
    assert put.content_type == kind
    assert ("\0" in str(columns.get("body"))) is False


@pytest.mark.parametrize(
    "columns",
    [
        lambda: put_columns("", b""),
        lambda: put_columns("orders", delay="1h", at=5),
        lambda: put_columns("orders", at="yesterday"),
        lambda: put_columns("orders", at=datetime(2030, 1, 1)),
        lambda: put_columns("orders", {"n": float("nan")}),
        lambda: cancel_columns("orders", ""),
        lambda: reschedule_columns("orders", "k"),
    ],
)
def test_values_that_no_row_can_have(columns: Any) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        columns()
