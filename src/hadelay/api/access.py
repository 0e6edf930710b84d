"""Tokens, and the audit trail of administrative requests."""

from hadelay.api.base import Document, Duration, Request


class CreateToken(Request):
    #: Name for people. Two tokens may share a name, for example while one replaces the other.
    name: str
    scopes: list[str]
    #: Time from creation to expiry; None: valid until revoked.
    lifetime: Duration | None = None


class TokenOut(Document, frozen=True):
    id: str
    name: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    expired: bool
    #: The secret, only in the answer to its creation.
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
    #: "done", or the reason of the refusal.
    outcome: str


class AuditTrail(Document, frozen=True):
    #: Oldest first.
    entries: list[AuditOut]
