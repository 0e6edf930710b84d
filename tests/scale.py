"""How much the tests try: `make test` takes a part of what `make long` takes, which takes an hour."""

from __future__ import annotations

import os

LONG = os.environ.get("HADELAY_LONG") == "1"


def size(short: int, long: int) -> int:
    """Number of examples, seeds or steps."""
    return long if LONG else short
