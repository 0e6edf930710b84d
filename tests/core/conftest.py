from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what the scenarios answer now into their files")


@pytest.fixture(autouse=True)
def plain_topics(retries_at_once: None) -> None:
    """A module that tests the defaults of topics has a fixture of the same name."""
