"""Tokens, and the trail of what administrators did."""

from __future__ import annotations

from hadelay.api.base import Document, Duration, Request


class CreateToken(Request):
    #: For people: two tokens may have the same, as they do while one takes the place of the other.
    name: str
    scopes: list[str]
    #: It expires so long after it was made; without it, it holds until it is revoked.
    lifetime: Duration | None = None


class TokenOut(Document, frozen=True):
    id: str
    name: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    expired: bool
    #: The token itself: shown once, when it is made.
    token: str | None = None


class Tokens(Document, frozen=True):
    tokens: list[TokenOut]


class AuditQuery(Request):
    after: int = 0
    limit: int = 100


class AuditOut(Document, frozen=True):
    number: int
    at: str
    node: str
    token_id: str
    token: str
    action: str
    target: str
    #: "done", or why it was refused.
    outcome: str


class AuditTrail(Document, frozen=True):
    #: Oldest first.
    entries: list[AuditOut]
