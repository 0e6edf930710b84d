"""Copies access tokens to a shard that joins a map, by their hashes: no secret of a token is known to anyone but its
owner. Secret access keys of tokens for AWS SDKs are copied themselves. Copying may be repeated, and deletes no token.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hadelay.api.text import parse_instant
from hadelay.cli.output import Remote
from hadelay.cli.remote import call
from hadelay.errors import Conflict, Unauthorized


class Copied(NamedTuple):
    """Result of a copy: tokens as id → name. made: the new copies. unknown: tokens that only the new shard knows."""

    made: dict[str, str]
    unknown: dict[str, str]


def copy(source: Remote, to: Remote, shard: int, bootstrap: str = "") -> Copied:
    """Create the unexpired tokens of the shard at `source` in the shard at `to`. bootstrap: bootstrap token of the
    shard at `to`, to create its first token. Raises Unauthorized if that shard knows neither the user's token nor
    `bootstrap`."""
    known = _tokens(source)
    now_ms = _now_ms(source)
    own = known.get(hashlib.sha256(source.token.strip().encode()).hexdigest())
    made = {}
    if own is not None and _introduced(to, shard, own, now_ms, bootstrap):
        made[own["id"]] = own["name"]
    there, chosen = _tokens(to), _chosen(to)
    missing = [one for one in known.values() if not one["expired"] and one["hash"] not in there]
    for one in missing:
        call(to, "POST", "/v1/tokens", _document(one, now_ms), needs="id", query=chosen)
        made[one["id"]] = one["name"]
    unknown = {one["id"]: one["name"] for digest, one in there.items() if digest not in known and not one["expired"]}
    return Copied(made, unknown)


def _introduced(to: Remote, shard: int, own: Mapping[str, Any], now_ms: int, bootstrap: str) -> bool:
    """Create the user's own token in the new shard. The request is sent with that token, which may be known there or
    be the bootstrap token there, and if refused, with `bootstrap`. Returns True if the token was not known there."""
    document = _document(own, now_ms)
    for by in (to, replace(to, token=bootstrap)) if bootstrap else (to,):
        try:
            call(by, "POST", "/v1/tokens", document, needs="id")
            return True
        except Conflict:
            return False
        except Unauthorized as error:
            refused = error
    raise Unauthorized(
        f"shard {shard} does not know your token: start its nodes with security.bootstrap_token_hash, and give the "
        f"bootstrap token in HADELAY_BOOTSTRAP_TOKEN ({refused.detail})"
    )


def _document(token: Mapping[str, Any], now_ms: int) -> dict[str, Any]:
    document = {name: token[name] for name in ("name", "scopes", "hash", "aws_key") if token.get(name) is not None}
    if token["expires_at"] is not None:
        document["lifetime"] = f"{max(1, parse_instant('expires_at', token['expires_at']) - now_ms)}ms"
    return document


def _tokens(at: Remote) -> dict[str, dict[str, Any]]:
    """Tokens of the shard at this address, by hash."""
    query = {"hashes": True, **_chosen(at)}
    return {one["hash"]: one for one in call(at, "GET", "/v1/tokens", needs="tokens", query=query)["tokens"]}


def _chosen(at: Remote) -> dict[str, int]:
    """Query that names the shard at this address; empty if that shard is in no shard map."""
    shard = call(at, "GET", "/v1/shards", needs="cluster_id")["shard"]
    return {} if shard is None else {"shard": shard}


def _now_ms(at: Remote) -> int:
    """Cluster time of the shard at this address, in Unix ms: tokens expire by it."""
    return parse_instant("time", call(at, "GET", "/v1/cluster", needs="members")["time"])
