"""Hypothesis chooses without chance, so that a run that fails fails again. HYPOTHESIS_PROFILE=explore looks elsewhere
each time, and remembers what it found in .hypothesis."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_finish() -> None:
    """What was imported stays until the end: looking through it again and again was a third of some tests' time."""
    gc.collect()
    gc.freeze()
