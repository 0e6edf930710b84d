"""The page Access: tokens and the audit trail."""

import secrets

from hadelay.api.text import format_instant, parse_duration
from hadelay.console.problems import Flash, Wrong, sentence
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import NotFound
from hadelay.http.answers import Answer
from hadelay.rights import (
    MAX_AUDIT,
    MAX_LIFETIME_MS,
    TOKEN_PREFIX,
    aws_key,
    aws_secret,
    hash_token,
    problem_of_scope,
)

pages = Pages()

#: Number of entries of the audit trail on a page.
_PAGE = 100
#: Time before the end of a token at which the page warns of it, in ms.
_SOON_MS = 7 * 86_400_000


@pages.get("/console/access")
async def show(visit: Visit) -> Answer:
    visit.need("admin")
    tokens = await visit.service.access.list_tokens(stale=visit.stale)
    entries = await visit.service.access.audit(0, MAX_AUDIT, stale=visit.stale)
    limit = whole(visit.query.get("before", ""), 12) or 1 << 62
    q = visit.query.get("q", "").strip()[:128]
    part = q.lower()
    older = [
        entry
        for entry in reversed(entries)
        if entry.number < limit and any(part in text.lower() for text in (entry.token, entry.action, entry.target))
    ]
    tokens = [token for token in tokens if any(part in text.lower() for text in (token.name, token.id, *token.scopes))]
    now_ms = visit.service.access.now_ms()
    return visit.page(
        "access.html",
        active="access",
        title="Access",
        tokens=sorted(tokens, key=lambda token: token.created_at_ms),
        now_ms=now_ms,
        soon_ms=now_ms + _SOON_MS,
        q=q,
        entries=older[:_PAGE],
        further=len(older) > _PAGE,
        when=format_instant,
        required=visit.call.context.authenticator is not None,
    )


@pages.post("/console/access/create")
async def create(visit: Visit) -> Answer:
    visit.need("admin")
    scopes = visit.text("scopes").replace(",", " ").split()
    if not scopes:
        raise Wrong("scopes", "Give at least one, such as read or publish:orders-*.")
    for scope in scopes:
        if wrong := problem_of_scope(scope):
            raise Wrong("scopes", sentence(wrong))
    lifetime_ms = parse_duration("lifetime", text) if (text := visit.text("lifetime")) else None
    if lifetime_ms is not None and not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise Wrong("lifetime", "Give more than 0 and at most 100 years, such as 90d; nothing: for ever.")
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    key = aws_key(secret) if visit.text("aws") else None
    made = await visit.service.access.create_token(
        visit.text("name"), hash_token(secret), scopes, lifetime_ms, visit.actor, aws_key=key
    )
    # A cookie carries the secrets to the next page, as safely as the cookie of the session; that page shows them, and
    # deletes the cookie.
    aws = "" if made.aws_key is None else aws_secret(made.aws_key)
    return visit.go("/console/access", Flash(made=made.name, secret=secret, aws_id=made.id, aws_secret=aws))


@pages.post("/console/access/revoke")
async def revoke(visit: Visit) -> Answer:
    visit.need("admin")
    token_id = visit.text("id")
    if token_id not in visit.service.access.tokens:
        raise NotFound("there is no such token: it was revoked before")
    name = visit.service.access.tokens[token_id].name
    await visit.service.access.revoke_token(token_id, visit.actor)
    return visit.go("/console/access", f"The token {name} is revoked.")
