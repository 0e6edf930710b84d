"""One call and what came of it, as the pool asks for it and whoever makes it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Request(NamedTuple):
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float


class Answer(NamedTuple):
    #: 0: there was none.
    status: int
    #: Why it failed, empty if it did not: "HTTP 503", "timeout", "connection refused", …
    reason: str
    retry_after_ms: int | None
    seconds: float


Done = Callable[[Answer], None]


class Caller(Protocol):
    def call(self, request: Request, done: Done) -> None:
        """`done` is called once, later, on the loop; never after the caller was closed."""
        ...
