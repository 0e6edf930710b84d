"""Applies commands that change tokens and the audit trail (ADR 122, 123)."""

from hadelay.codec.commandtypes import LEVEL_OF, Audited, TokenCreate, TokenRevoke
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


def apply_token_create(ledger: Ledger, command: TokenCreate) -> Done | Refused:
    if wrong := _problem(command):
        return Refused("bad_token", wrong)
    now_ms = ledger.now_ms
    expires_at_ms = None if command.lifetime_ms is None else now_ms + command.lifetime_ms
    token = Token(command.name, command.digest, tuple(command.scopes), now_ms, expires_at_ms, command.aws_key)
    if token.id in ledger.tokens:
        return Refused("token_exists", "a token with this id (the start of its hash) exists: create another token")
    kept = ledger.tokens
    if len(kept) >= MAX_TOKENS:
        kept = {token_id: other for token_id, other in kept.items() if other.holds(now_ms)}
    if len(kept) >= MAX_TOKENS:
        return Refused("too_many_tokens", f"there are {len(kept)} tokens: revoke those that nobody uses")
    set_tokens(ledger, {**kept, token.id: token})
    return Done()


def _problem(command: TokenCreate) -> str:
    name, lifetime_ms = command.name, command.lifetime_ms
    # Check for control characters here, because str.isprintable may differ between versions of Python.
    if not 0 < len(name) <= MAX_TOKEN_NAME or min(name) < " " or "\x7f" in name:
        return f"name: 1 to {MAX_TOKEN_NAME} printable characters"
    if len(command.digest) != HASH_BYTES:
        return f"hash: {HASH_BYTES} bytes"
    if command.aws_key is not None and len(command.aws_key) != HASH_BYTES:
        return f"aws_key: {HASH_BYTES} bytes"
    if not 0 < len(command.scopes) <= MAX_TOKEN_SCOPES:
        return f"scopes: 1 to {MAX_TOKEN_SCOPES}"
    for scope in command.scopes:
        if wrong := problem_of_scope(scope):
            return f"scopes: {wrong}"
    if lifetime_ms is not None and not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        return "lifetime: more than 0 and at most 100 years"
    return ""


def apply_token_revoke(ledger: Ledger, command: TokenRevoke) -> Done | Refused:
    token_id = command.id
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
        # Store the outcome that a replica with an older program stores, as audit trails must not differ: the older
        # program does not know the command's number, or a setting in the command.
        outcome = "malformed" if LEVEL_OF.get(command.kind, FIRST_LEVEL) > ledger.level else "bad_config"
    for number in (ledger.audit.count + 1, ledger.audit.count + 1 - MAX_AUDIT):
        if number > 0:
            ledger.changes.note(AUDIT, number)
    who = (command.node, command.token_id, command.token)
    entry = AuditEntry(ledger.audit.count + 1, ledger.now_ms, *who, command.action, command.target, outcome)
    ledger.audit.add(entry)
    return result
