"""How far a job is, where it runs in this process; Spark shows a bar of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
#: Called with (items done, items in all).
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None: ...


def told(work: Callable[[T], R], total: int, progress: Progress) -> Callable[[T], R]:
    """The same work, which tells after each item."""
    done = 0

    def one(item: T) -> R:
        nonlocal done
        found = work(item)
        done += 1
        progress(done, total)
        return found

    return one
