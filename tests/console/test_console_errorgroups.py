"""Groups of failed messages by their last errors."""

from __future__ import annotations

from hadelay.api.messages import Failure
from hadelay.console.errorgroups import ErrorGroup, grouped


def test_groups_have_the_latest_example_and_both_times() -> None:
    failures = [
        (Failure(event="nacked", at=at, attempt=1, reason=reason), at)
        for at, reason in (("02", "HTTP 503"), ("03", "HTTP 404"), ("01", "HTTP 500"), ("05", "no route"), ("04", None))
    ]
    assert grouped([*failures, (None, "06")]) == [
        ErrorGroup("HTTP #", "HTTP 404", 3, "01", "03"),
        ErrorGroup("no route", "no route", 1, "05", "05"),
        ErrorGroup("nacked", "nacked", 1, "04", "04"),
        ErrorGroup("no attempt failed", "no attempt failed", 1, "06", "06"),
    ]
