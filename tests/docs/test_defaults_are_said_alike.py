"""The defaults of retries: every text that names them names the numbers of settings/topic.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadelay.settings.topic import DEFAULTS, SETTINGS, WEBHOOK_FLOOR_MS, Exponential

ROOT = Path(__file__).resolve().parents[2]
ATTEMPTS = f"{DEFAULTS.max_attempts} attempts"


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


TEXTS = {
    name: page(name)
    for name in (
        "README.md", "docs/howto/retries.md", "docs/howto/webhooks.md", "docs/howto/dead-letters.md", "CHANGELOG.md",
        "docs/reference/http.md", "docs/reference/webhooks.md",
    )
}  # fmt: skip
TEXTS |= {
    # Also in the OpenAPI document, the client's types and `hadelay topic set --help`, which are made from the rows.
    "rows of settings": " ".join(known.help for known in SETTINGS.values()),
}


@pytest.mark.parametrize("where", TEXTS)
def test_attempts_and_hours(where: str) -> None:
    backoff = DEFAULTS.backoff
    assert isinstance(backoff, Exponential)
    plain = [min(backoff.min_ms * int(backoff.factor) ** n, backoff.max_ms) for n in range(DEFAULTS.max_attempts - 1)]
    assert ATTEMPTS in TEXTS[where]
    assert f"{sum(plain) // 3_600_000} hours" in TEXTS[where]


@pytest.mark.parametrize("where", [name for name in TEXTS if name not in ("README.md", "rows of settings")])
def test_waits(where: str) -> None:
    backoff = DEFAULTS.backoff
    assert isinstance(backoff, Exponential)
    assert (backoff.factor, backoff.min_ms % 1_000, backoff.max_ms % 3_600_000) == (2, 0, 0)
    for wait in (f"{backoff.min_ms // 1_000} s", f"{backoff.max_ms // 3_600_000} h"):
        assert wait in TEXTS[where], wait


def test_the_floor_of_webhooks() -> None:
    for name in ("docs/howto/webhooks.md", "CHANGELOG.md"):
        assert f"at least {WEBHOOK_FLOOR_MS // 1_000} s apart" in page(name), name
