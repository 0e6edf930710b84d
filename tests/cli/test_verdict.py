"""The verdict of `hadelay trace` about a due message that nobody has taken."""

import pytest

from hadelay.api.verdict import waits_for

_ASKED = "2026-11-30T12:00:00.000Z"


@pytest.mark.parametrize(
    ("consumer", "now", "says"),
    [
        ({}, "2026-11-30T12:00:04.000Z", "3 messages of its topic are ready; consumers: c"),
        ({}, "2026-11-30T12:00:07.000Z", "no consumer has asked in the last 7 s (c did before)"),
        ({"waiting": True}, "2026-11-30T12:00:50.000Z", "3 messages of its topic are ready; consumers: c"),
        ({"waiting": True}, "2026-11-30T12:01:40.000Z", "no consumer has asked in the last 1 min 40 s (c did before)"),
    ],
)
def test_a_consumer_without_a_waiting_receive_is_silent_after_five_seconds(
    consumer: dict[str, object], now: str, says: str
) -> None:
    topic = {"leased": 0, "ready": 3, "consumers": [{"name": "c", "asked_at": _ASKED, **consumer}]}
    assert waits_for(topic, now) == says
