from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_topics(retries_at_once: None) -> None:
    """A module that tests the defaults of topics has a fixture of the same name."""
