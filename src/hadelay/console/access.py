"""The page Access: tokens and the audit trail."""

import secrets

from hadelay.api.text import format_instant, parse_duration
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, NotFound
from hadelay.http.access import PREFIX, hash_token
from hadelay.http.answers import Answer
from hadelay.rights import MAX_AUDIT, MAX_LIFETIME_MS, problem_of_scope

pages = Pages()

#: Number of entries of the audit trail on a page.
_PAGE = 100


@pages.get("/console/access")
async def show(visit: Visit) -> Answer:
    return await _page(visit)


async def _page(visit: Visit, secret: str = "", name: str = "") -> Answer:
    """Render the page Access. secret, name: of a token that this request created; no other answer shows the secret."""
    visit.need("admin")
    tokens = await visit.service.access.list_tokens(stale=visit.stale)
    entries = await visit.service.access.audit(0, MAX_AUDIT, stale=visit.stale)
    limit = whole(visit.query.get("before", ""), 12) or 1 << 62
    older = [entry for entry in reversed(entries) if entry.number < limit]
    now_ms = visit.service.access.now_ms()
    return visit.page(
        "access.html", active="access", title="Access", tokens=sorted(tokens, key=lambda token: token.created_at_ms),
        now_ms=now_ms, secret=secret, made=name, entries=older[:_PAGE], further=len(older) > _PAGE,
        when=format_instant, required=visit.call.context.authenticator is not None,
    )  # fmt: skip


@pages.post("/console/access/create")
async def create(visit: Visit) -> Answer:
    visit.need("admin")
    scopes = visit.text("scopes").replace(",", " ").split()
    if not scopes:
        raise BadRequest("scopes: give at least one, such as read or publish:orders-*")
    for scope in scopes:
        if wrong := problem_of_scope(scope):
            raise BadRequest(f"scopes: {wrong}")
    lifetime_ms = parse_duration("lifetime", text) if (text := visit.text("lifetime")) else None
    if lifetime_ms is not None and not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise BadRequest("lifetime: expected more than 0 and at most 100 years")
    secret = PREFIX + secrets.token_urlsafe(32)
    await visit.service.access.create_token(visit.text("name"), hash_token(secret), scopes, lifetime_ms, visit.actor)
    return await _page(visit, secret, visit.text("name"))


@pages.post("/console/access/revoke")
async def revoke(visit: Visit) -> Answer:
    visit.need("admin")
    token_id = visit.text("id")
    if token_id not in visit.service.access.tokens:
        raise NotFound("there is no such token: it was revoked before")
    name = visit.service.access.tokens[token_id].name
    await visit.service.access.revoke_token(token_id, visit.actor)
    return visit.go("/console/access", f"The token {name} is revoked.")
