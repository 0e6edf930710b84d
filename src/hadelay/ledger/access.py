"""Applies commands that change tokens and the audit trail (ADR 122, 123)."""

from typing import Any

from hadelay.codec.commandtypes import LEVEL_OF, Audited
from hadelay.codec.results import Done, Refused, Result
from hadelay.ledger.changedrows import AUDIT, TOKENS
from hadelay.ledger.limits import shares
from hadelay.ledger.state import Ledger
from hadelay.rights import (
    HASH_BYTES,
    MAX_AUDIT,
    MAX_LIFETIME_MS,
    MAX_TOKEN_NAME,
    MAX_TOKEN_SCOPES,
    MAX_TOKENS,
    AuditEntry,
    Token,
    problem_of_scope,
)
from hadelay.version import FIRST_LEVEL


def apply_token_create(ledger: Ledger, command: Any) -> Done | Refused:
    """Create a token. command: any msgpack value; valid is only [name, hash, scopes, lifetime_ms or nil,
    aws_key or nil]."""
    wrong = _problem(command)
    if wrong:
        return Refused("bad_token", wrong)
    name, digest, scopes, lifetime_ms, aws_key = command
    now_ms = ledger.now_ms
    expires_at_ms = None if lifetime_ms is None else now_ms + lifetime_ms
    token = Token(name, digest, tuple(scopes), now_ms, expires_at_ms, aws_key)
    if token.id in ledger.tokens:
        return Refused("token_exists", "a token with this id (the start of its hash) exists: create another token")
    kept = ledger.tokens
    if len(kept) >= MAX_TOKENS:
        kept = {token_id: other for token_id, other in kept.items() if other.holds(now_ms)}
    if len(kept) >= MAX_TOKENS:
        return Refused("too_many_tokens", f"there are {len(kept)} tokens: revoke those that nobody uses")
    set_tokens(ledger, {**kept, token.id: token})
    return Done()


def _problem(command: Any) -> str:
    if not isinstance(command, list) or len(command) != 5:
        return "a token must be [name, hash, scopes, lifetime_ms, aws_key]"
    name, digest, scopes, lifetime_ms, aws_key = command
    # Check for control characters here, because str.isprintable may differ between versions of Python.
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOKEN_NAME or min(name) < " " or "\x7f" in name:
        return f"name: 1 to {MAX_TOKEN_NAME} printable characters"
    if not isinstance(digest, bytes) or len(digest) != HASH_BYTES:
        return f"hash: {HASH_BYTES} bytes"
    if aws_key is not None and (not isinstance(aws_key, bytes) or len(aws_key) != HASH_BYTES):
        return f"aws_key: {HASH_BYTES} bytes"
    if not isinstance(scopes, list) or not 0 < len(scopes) <= MAX_TOKEN_SCOPES:
        return f"scopes: 1 to {MAX_TOKEN_SCOPES}"
    for scope in scopes:
        if not isinstance(scope, str) or problem_of_scope(scope):
            return "scopes: " + problem_of_scope(str(scope))
    if lifetime_ms is not None and (type(lifetime_ms) is not int or not 0 < lifetime_ms <= MAX_LIFETIME_MS):
        return "lifetime: more than 0 and at most 100 years"
    return ""


def apply_token_revoke(ledger: Ledger, token_id: str) -> Done | Refused:
    if token_id not in ledger.tokens:
        return Refused("no_token", f"there is no token {token_id!r}: it was revoked, or never existed")
    set_tokens(ledger, {other: token for other, token in ledger.tokens.items() if other != token_id})
    return Done()


def set_tokens(ledger: Ledger, tokens: dict[str, Token]) -> None:
    for token_id in {**ledger.tokens, **tokens}:
        if (token_id in ledger.tokens) != (token_id in tokens):
            ledger.changes.note(TOKENS, token_id)
    # Replace the dict of tokens, so that caches notice the change.
    ledger.tokens = tokens
    ledger.admins = shares.admin_names(tokens.values())


def note(ledger: Ledger, command: Audited, result: Result) -> Result:
    outcome = result.code if isinstance(result, Refused) else "done"
    if outcome == "needs_upgrade":
        # Answer as a replica with an older program does: the older program does not know the command's number, or a
        # setting in it.
        outcome = "malformed" if LEVEL_OF.get(command.kind, FIRST_LEVEL) > ledger.level else "bad_config"
    # Audited and AuditEntry have the same first five fields: node, token_id, token, action, target.
    for number in (ledger.audit.count + 1, ledger.audit.count + 1 - MAX_AUDIT):
        if number > 0:
            ledger.changes.note(AUDIT, number)
    ledger.audit.add(AuditEntry(ledger.audit.count + 1, ledger.now_ms, *command[:5], outcome))
    return result
