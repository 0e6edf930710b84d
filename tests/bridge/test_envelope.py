"""The envelope of a RabbitMQ message, and the delays that publishers ask for."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from hadelay.bridge.envelope import Envelope, delay_of, delayed, pack, time_of, unpack


@pytest.mark.parametrize(
    ("value", "delay_ms"),
    [
        (5_000, 5_000),
        ("5000", 5_000),
        (b"5000", 5_000),
        (1.9, 1),
        (Decimal("2.5"), 2),
        (1 << 40, 1 << 40),
        (1 << 70, 1 << 62),
        (0, 0),
        (-5_000, 0),
        ("-1", 0),
        ("soon", 0),
        ("9" * 40, 0),
        ("", 0),
        (float("nan"), 0),
        (float("inf"), 0),
        (True, 0),
        (None, 0),
        ([1], 0),
    ],
)
def test_the_delay_of_a_header(value: Any, delay_ms: int) -> None:
    assert delay_of({"x-delay": value}) == delay_ms


def test_headers_of_a_delivered_message() -> None:
    """The plugin's way: the delay is negated."""
    assert delay_of({}) == 0
    assert delayed({"x-delay": "70", "a": 1}, 70) == {"x-delay": -70, "a": 1}
    assert delayed({"a": 1}, 0) == {"a": 1}
    assert delay_of(delayed({"x-delay": 70}, 70)) == 0


def test_an_envelope_keeps_all_types() -> None:
    headers = {
        "int": 1 << 40, "text": "ü\n", "float": 0.5, "none": None, "yes": True, "bytes": bytearray(b"\xff\x00"),
        "time": datetime(2026, 11, 29, 20, 0, tzinfo=UTC), "decimal": Decimal("1.25"),
        "table": {"list": [1, {"$bytes": "not base64"}], "inner": {"$x": {"$y": 1, "z": 2}}}, "x-delay": 1,
    }  # fmt: skip
    given = Envelope("ex", "key.ü", {"headers": headers, "priority": 3, "message_type": "t"}, b"line\nline\n\xff")
    assert unpack(pack(given)) == given
    head, _, body = pack(given).partition(b"\n")
    assert head.startswith(b'{"exchange":"ex","routing_key":"key.')
    assert body == given.body
    assert unpack(pack(Envelope("", "", {}, b""))).body == b""


@pytest.mark.parametrize(
    "payload",
    [b"", b"{}", b"plain", b'{"exchange":"","routing_key":"","properties":{}}',
     b'{"exchange":"","routing_key":"","properties":{"headers":{"a":{"$bytes":"!"}}}}\n'],
)  # fmt: skip
def test_no_envelope(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no envelope"):
        unpack(payload)


def test_a_list_of_the_plugin_that_was_cut() -> None:
    pytest.importorskip("aiormq", reason="the extra rabbitmq is not installed")
    from hadelay.importers.fromplugin import delayed

    line = b'{"due": 5, "vhost": "/", "exchange": "shop"}\n'
    assert len(list(delayed([line, line, b"2\n", line, b"1\n"], "t", None, "/"))) == 3
    assert list(delayed([b"0\n"], "t", None, "/")) == []
    for cut in ([line, line], [line, line, b"5\n"], [], [line, b"1\n", line]):
        with pytest.raises(ValueError, match="the list is cut"):
            list(delayed(cut, "t", None, "/"))
    with pytest.raises(ValueError, match="not of"):
        list(delayed([b"Error: unable to perform an operation\n"], "t", None, "/"))


def test_headers_that_are_nested_too_deep_are_marked() -> None:
    pytest.importorskip("pamqp", reason="the extra rabbitmq is not installed")
    from pamqp import decode

    from hadelay.bridge import lenient

    lenient.install()
    nested = b""
    for _ in range(1_000):
        nested = b"\x01aF" + len(nested).to_bytes(4) + nested
    encoded = len(nested).to_bytes(4) + nested
    size, headers = decode.by_type(encoded + b"more", "table")
    assert (size, lenient.unreadable({"headers": headers, "priority": 1})) == (len(encoded), ["headers"])
    assert decode.by_type(b"\x02ok", "shortstr") == (3, "ok")


def test_numbers_that_json_lacks_and_times_that_are_no_seconds() -> None:
    numbers = (0, 1_795_197_600, 1_795_197_600_123, 1_795_197_600_123_456, (1 << 64) - 1)
    headers = {"inf": float("inf"), "less": float("-inf"), "nan": float("nan"), "of": {"$float": "x"}}
    times = [time_of(number) for number in numbers]
    given = Envelope("", "", {"headers": {**headers, "times": times}, "timestamp": times[3]}, b"")
    found = unpack(pack(given)).properties
    assert found["headers"]["nan"] != found["headers"]["nan"]
    assert {**found["headers"], "nan": 0, "times": 0} == {**headers, "nan": 0, "times": 0}
    assert [time.timestamp() for time in found["headers"]["times"]] == [*numbers]
    assert found["timestamp"].timestamp() == numbers[3]
    for number in (-1, 1 << 64, float("nan")):
        with pytest.raises(ValueError, match="not an AMQP timestamp"):
            time_of(number)
    with pytest.raises(ValueError, match="no envelope"):
        unpack(b'{"exchange":"","routing_key":"","properties":{"timestamp":{"$time":-5}}}\n')


def test_timestamps_leave_as_they_came() -> None:
    """In ms or µs, as some clients write them, as a property and in a table."""
    pytest.importorskip("pamqp", reason="the extra rabbitmq is not installed")
    from pamqp import decode, encode

    from hadelay.bridge import lenient

    lenient.install()
    for number in (1_795_197_600, 1_795_197_600_123, 1_795_197_600_123_456, (1 << 64) - 1):
        size, at = decode.by_type(number.to_bytes(8, "big"), "timestamp")
        assert (size, encode.timestamp(at)) == (8, number.to_bytes(8, "big"))
        table = b"\0\0\0\x0b\x01tT" + number.to_bytes(8, "big")
        assert encode.field_table(decode.field_table(table)[1]) == table
