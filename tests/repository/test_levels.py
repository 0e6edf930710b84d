"""Each setting of a topic that is newer than the baseline needs a feature level: in a rolling upgrade, apply would else
refuse the setting on old nodes and accept it on new ones, and the replicas would differ."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hadelay.settings.topic import SETTINGS
from hadelay.version import FEATURE_LEVEL, FIRST_LEVEL

#: Settings that the first release has. This list may only get shorter: a new setting is not added here, its row names
#: the next feature level.
BASELINE = {
    "alert", "any_tags", "backoff", "catch_up_rate", "concurrency", "dead_letter", "dead_retention_ms", "delay_ms",
    "dispatch_sync", "expires_after_ms", "group_concurrency", "group_rate", "labels", "lease_ms", "max_attempts",
    "max_bytes", "max_messages", "on_failure", "on_full", "on_success", "own_queue", "paused", "paused_reason",
    "publish_rate", "rate", "retention_ms", "tags", "ttl_ms", "webhook",
}  # fmt: skip


def without_level(settings: Mapping[str, Any], newest: int) -> set[str]:
    """Settings that are newer than the baseline, and whose row has no feature level between the first and `newest`."""
    levels = {name: getattr(row, "level", None) for name, row in settings.items() if name not in BASELINE}
    return {name for name, level in levels.items() if level is None or not FIRST_LEVEL < level <= newest}


def test_settings_newer_than_the_baseline_have_a_level() -> None:
    assert without_level(SETTINGS, FEATURE_LEVEL) == set()


@pytest.mark.parametrize("row", [SimpleNamespace(), SimpleNamespace(level=FIRST_LEVEL), SimpleNamespace(level=9)])
def test_planted_setting_without_a_level_is_found(row: Any) -> None:
    assert without_level({**SETTINGS, "planted": row}, 8) == {"planted"}


def test_planted_setting_with_the_next_level_passes() -> None:
    assert without_level({**SETTINGS, "planted": SimpleNamespace(level=FIRST_LEVEL + 1)}, FIRST_LEVEL + 1) == set()
