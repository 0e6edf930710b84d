"""Routes for tokens, and for the audit trail of administrative requests."""

import re
import secrets
from typing import Any

import msgspec
from msgspec.structs import replace

from hadelay.api.cluster import AuditOut, AuditQuery, AuditTrail, CreateToken, TokenOut, Tokens, TokensQuery
from hadelay.api.text import check_limit, format_instant
from hadelay.errors import BadRequest, Conflict, HadelayError, NotFound
from hadelay.http import merging, parts
from hadelay.http.answers import JSON, NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.decoding import MSGPACK_NAMES
from hadelay.http.routes import Routes
from hadelay.http.sharding import ShardRouter
from hadelay.rights import MAX_LIFETIME_MS, TOKEN_PREFIX, Token, aws_key, aws_secret, hash_token, problem_of_scope

routes = Routes()

_ID = re.compile("[0-9a-f]{12}")


@routes.add("POST", "/v1/tokens", body=CreateToken, returns={201: TokenOut}, errors=(409, 429, 503, 504))
async def create_token(call: Call) -> Answer:
    """Create a token; only this answer shows its secret"""
    document = call.body
    for scope in document.scopes:
        if wrong := problem_of_scope(scope):
            raise BadRequest(f"scopes: {wrong}")
    lifetime_ms = None if document.lifetime is None else int(document.lifetime)
    if lifetime_ms is not None and not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise BadRequest("lifetime: must be more than 0 and at most 100 years")
    router = call.router
    secret = None if document.hash is not None else TOKEN_PREFIX + secrets.token_urlsafe(32)
    digest = _digest("hash", document.hash) if secret is None else hash_token(secret)
    key = _aws_key(document, secret)
    token = await call.service.access.create_token(
        document.name, digest, document.scopes, lifetime_ms, call.actor, aws_key=key
    )
    missing = () if router is None else await _create_elsewhere(call, router, digest, key)
    shown = replace(_out(call, token, secret), missing=missing)
    return call.answer(shown, 201, {"Location": f"/v1/tokens/{token.id}", "Cache-Control": "no-store"})


def _aws_key(document: CreateToken, secret: str | None) -> bytes | None:
    """The secret access key of a new token; None without one. secret: the token's secret; None for a copy of another
    shard's token, which gets the key from the request."""
    if secret is not None:
        if document.aws_key is not None:
            raise BadRequest("aws_key: is only for the copy of a token of another shard: give that token's hash, too")
        return aws_key(secret) if document.aws else None
    if document.aws and document.aws_key is None:
        raise BadRequest("aws: a token that is created by its hash needs its aws_key, too")
    return None if document.aws_key is None else _digest("aws_key", document.aws_key)


def _digest(member: str, text: str | None) -> bytes:
    try:
        found = bytes.fromhex(text or "")
    except ValueError:
        found = b""
    if len(found) != 32:
        raise BadRequest(f"{member}: 64 hex digits, as GET /v1/tokens?hashes=true lists them")
    return found


async def _create_elsewhere(call: Call, router: ShardRouter, digest: bytes, key: bytes | None) -> tuple[int, ...]:
    """Create the token in all other shards; returns the shards in which that failed. A shard that had the token before
    is not among them."""
    form: Any = msgspec.msgpack if call.media_type in MSGPACK_NAMES else msgspec.json
    document = {**form.decode(call.data or b"", type=dict[str, Any]), "hash": digest.hex()}
    document["aws_key"] = None if key is None else key.hex()
    others = router.others()
    asking = (parts.ask_part(call, to, msgspec.json.encode(document), JSON, dict[str, Any]) for to in others)
    found = await parts.all_parts(asking)
    missed = zip(others, found, strict=True)
    return tuple(to.shard for to, one in missed if isinstance(one, HadelayError) and not isinstance(one, Conflict))


async def _tokens_of_all(call: Call, lists: merging.Lists) -> dict[str, Any]:
    """List each token once, with the shards that do not know it. Tokens with the same secret but other scopes are
    different tokens."""
    found = dict[tuple[str, str, tuple[str, ...]], tuple[TokenOut, set[int]]]()
    for shard, one in lists.items():
        for token in call.decode(one["tokens"], list[TokenOut]):
            _, known = found.setdefault((token.id, token.name, tuple(token.scopes)), (token, set()))
            known.add(shard)
    rows = [replace(token, missing=tuple(lists.keys() - known)) for token, known in found.values()]
    return {"tokens": sorted(rows, key=lambda token: (token.created_at, token.id))}


async def _tokens(call: Call) -> Answer:
    """List the tokens of all shards. With `hashes`, list those of this shard alone, because hashes serve to copy tokens
    from shard to shard."""
    return await (merging.at(call, None) if call.query.hashes else _MERGED(call))


_MERGED = merging.merged(_tokens_of_all)


@routes.add("GET", "/v1/tokens", query=TokensQuery, returns={200: Tokens}, errors=(503,), shards=_tokens)
async def list_tokens(call: Call) -> Answer:
    """All tokens and their scopes, without secrets"""
    tokens = await call.service.access.list_tokens()
    headers = {"Cache-Control": "no-store"} if call.query.hashes else None
    return call.answer(Tokens([_out(call, token, copied=call.query.hashes) for token in tokens]), headers=headers)


@routes.add("DELETE", "/v1/tokens/{token_id}", returns={204: None}, errors=(404, 503, 504))
async def revoke_token(call: Call) -> Answer:
    """Revoke a token"""
    token_id = call.path["token_id"]
    if not _ID.fullmatch(token_id):
        raise NotFound(f"{token_id[:80]!r} is not a token id; token ids have 12 hex digits (GET /v1/tokens lists them)")
    router = call.router
    if router is None:
        await call.service.access.revoke_token(token_id, call.actor)
        return NOTHING
    others = [parts.ask_part(call, to, b"", JSON, type(None)) for to in router.others()]
    found = await parts.all_parts([call.service.access.revoke_token(token_id, call.actor), *others])
    # The token is revoked if some shards had it, although others do not know it (any more).
    if all(isinstance(one, NotFound) for one in found):
        raise NotFound(f"there is no token {token_id}")
    error = parts.failure_of_all([None if isinstance(one, NotFound) else one for one in found])
    if error is not None:
        raise error
    return NOTHING


def _out(call: Call, token: Token, secret: str | None = None, *, copied: bool = False) -> TokenOut:
    """A token as an answer shows it. secret: secret of a new token. copied: whether to show the hash and the secret
    access key, with which another shard can create the token."""
    return TokenOut(
        id=token.id,
        name=token.name,
        scopes=list(token.scopes),
        created_at=format_instant(token.created_at_ms),
        expires_at=None if token.expires_at_ms is None else format_instant(token.expires_at_ms),
        expired=not token.holds(call.service.access.now_ms()),
        aws=token.aws_key is not None,
        token=secret,
        aws_secret=None if secret is None or token.aws_key is None else aws_secret(token.aws_key),
        hash=token.hash.hex() if copied else None,
        aws_key=token.aws_key.hex() if copied and token.aws_key is not None else None,
    )


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
