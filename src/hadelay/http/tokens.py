"""Routes for tokens, and for the audit trail of administrative requests."""

import re
import secrets

from hadelay.api.cluster import AuditOut, AuditQuery, AuditTrail, CreateToken, TokenOut, Tokens
from hadelay.api.text import check_limit, format_instant
from hadelay.errors import BadRequest, NotFound
from hadelay.http.access import PREFIX, hash_token
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.routes import Routes
from hadelay.rights import MAX_LIFETIME_MS, Token, problem_of_scope

routes = Routes()

_ID = re.compile("[0-9a-f]{12}")


@routes.add("POST", "/v1/tokens", body=CreateToken, returns={201: TokenOut}, errors=(409, 429, 503, 504))
async def create_token(call: Call) -> Answer:
    """Create a token; only this answer shows its secret"""
    wish = call.body
    for scope in wish.scopes:
        if wrong := problem_of_scope(scope):
            raise BadRequest(f"scopes: {wrong}")
    lifetime_ms = None if wish.lifetime is None else int(wish.lifetime)
    if lifetime_ms is not None and not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise BadRequest("lifetime: must be more than 0 and at most 100 years")
    secret = PREFIX + secrets.token_urlsafe(32)
    token = await call.service.access.create_token(wish.name, hash_token(secret), wish.scopes, lifetime_ms, call.actor)
    return call.answer(
        _out(call, token, secret), 201, {"Location": f"/v1/tokens/{token.id}", "Cache-Control": "no-store"}
    )


@routes.add("GET", "/v1/tokens", returns={200: Tokens}, errors=(503,))
async def list_tokens(call: Call) -> Answer:
    """All tokens and their scopes, without secrets"""
    return call.answer(Tokens([_out(call, token) for token in await call.service.access.list_tokens()]))


@routes.add("DELETE", "/v1/tokens/{token_id}", returns={204: None}, errors=(404, 503, 504))
async def revoke_token(call: Call) -> Answer:
    """Revoke a token"""
    token_id = call.path["token_id"]
    if not _ID.fullmatch(token_id):
        raise NotFound(f"{token_id[:80]!r} is not a token id; token ids have 12 hex digits (GET /v1/tokens lists them)")
    await call.service.access.revoke_token(token_id, call.actor)
    return NOTHING


def _out(call: Call, token: Token, secret: str | None = None) -> TokenOut:
    return TokenOut(
        id=token.id, name=token.name, scopes=list(token.scopes), created_at=format_instant(token.created_at_ms),
        expires_at=None if token.expires_at_ms is None else format_instant(token.expires_at_ms),
        expired=not token.holds(call.service.access.now_ms()), token=secret,
    )  # fmt: skip


@routes.add("GET", "/v1/audit", query=AuditQuery, returns={200: AuditTrail}, errors=(503,))
async def audit(call: Call) -> Answer:
    """The last 1,000 administrative requests, and their tokens"""
    query = call.query
    entries = await call.service.access.audit(query.after, check_limit(query.limit))
    shown = [
        AuditOut(e.number, format_instant(e.at_ms), e.node, e.token_id, e.token, e.action, e.target, e.outcome)
        for e in entries
    ]
    return call.answer(AuditTrail(shown))
