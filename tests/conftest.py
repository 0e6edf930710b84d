"""Hypothesis chooses without chance, so that a run that fails fails again. HYPOTHESIS_PROFILE=explore looks elsewhere
each time, and remembers what it found in .hypothesis."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from hadelay.settings import topic

settings.register_profile("repeatable", derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write what is answered now into scenarios and golden files"
    )


def pytest_collection_finish() -> None:
    """What was imported stays until the end: looking through it again and again was a third of some tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics of this process retry at once, 65,534 times: a test of something else need not wait for a backoff.
    tests/ledger/test_defaults.py tests the defaults."""
    monkeypatch.setattr(topic, "DEFAULTS", topic.TopicSettings(max_attempts=65_534, backoff=()))


@pytest.fixture
def tiny_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB, unless parametrized indirectly. Needs root."""
    path = tmp_path / "tiny"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    size = f"size={getattr(request, 'param', '96m')}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", path], capture_output=True).returncode:
        pytest.skip("this kernel does not let us mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
