"""Hypothesis chooses without chance, so that a run that fails fails again. HYPOTHESIS_PROFILE=explore looks elsewhere
each time, and remembers what it found in .hypothesis."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
