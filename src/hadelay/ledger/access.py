"""Applies commands that change tokens and the audit trail, and encodes both for checkpoints (ADR 122, 123)."""

from operator import attrgetter
from typing import Any

from hadelay.codec.commandtypes import Audited, Command
from hadelay.codec.results import Done, Refused, Result
from hadelay.ledger.state import Ledger
from hadelay.model import SEPARATOR
from hadelay.rights import (
    HASH_BYTES,
    MAX_LIFETIME_MS,
    MAX_TOKEN_NAME,
    MAX_TOKEN_SCOPES,
    MAX_TOKENS,
    Audit,
    AuditEntry,
    Token,
    problem_of_scope,
)
from hadelay.version import SUBSCRIPTION_LEVEL

#: Values of an AuditEntry that a checkpoint has, in this order.
_IN_CHECKPOINT = attrgetter("at_ms", "node", "token_id", "token", "action", "target", "outcome")


def apply_token_create(ledger: Ledger, command: Any) -> Done | Refused:
    """Create a token. command: any msgpack value; valid is only [name, hash, scopes, lifetime_ms or nil]."""
    wrong = _problem(command)
    if not wrong and ledger.level < SUBSCRIPTION_LEVEL and any(SEPARATOR in scope for scope in command[2]):
        wrong = "scopes: subscriptions need every node to be upgraded (feature_level)"
    if wrong:
        return Refused("bad_token", wrong)
    name, digest, scopes, lifetime_ms = command
    now_ms = ledger.now_ms
    token = Token(name, digest, tuple(scopes), now_ms, None if lifetime_ms is None else now_ms + lifetime_ms)
    if token.id in ledger.tokens:
        return Refused("token_exists", "a token with this id (the start of its hash) exists: create another token")
    kept = ledger.tokens
    if len(kept) >= MAX_TOKENS:
        kept = {token_id: other for token_id, other in kept.items() if other.holds(now_ms)}
    if len(kept) >= MAX_TOKENS:
        return Refused("too_many_tokens", f"there are {len(kept)} tokens: revoke those that nobody uses")
    # Replace the dict of tokens, so that caches notice the change.
    ledger.tokens = {**kept, token.id: token}
    return Done()


def _problem(command: Any) -> str:
    if not isinstance(command, list) or len(command) != 4:
        return "a token must be [name, hash, scopes, lifetime_ms]"
    name, digest, scopes, lifetime_ms = command
    # Check for control characters here, because str.isprintable may differ between versions of Python.
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOKEN_NAME or min(name) < " " or "\x7f" in name:
        return f"name: 1 to {MAX_TOKEN_NAME} printable characters"
    if not isinstance(digest, bytes) or len(digest) != HASH_BYTES:
        return f"hash: {HASH_BYTES} bytes"
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
    ledger.tokens = {other: token for other, token in ledger.tokens.items() if other != token_id}
    return Done()


def note(ledger: Ledger, command: Audited, result: Result) -> Result:
    outcome = result.code if isinstance(result, Refused) else "done"
    if outcome == "needs_upgrade":
        # Programs of earlier releases apply the same command, and find its number, or a setting in it, unknown.
        outcome = "bad_config" if command.kind == Command.TOPIC_PUT else "malformed"
    # Audited and AuditEntry have the same first five fields: node, token_id, token, action, target.
    ledger.audit.add(AuditEntry(ledger.audit.count + 1, ledger.now_ms, *command[:5], outcome))
    return result


def dump(ledger: Ledger) -> dict[str, Any]:
    """Tokens and audit trail for the main blob of a checkpoint, as key → value; parts that are empty are left out."""
    found: dict[str, Any] = {}
    if ledger.tokens:
        found["tokens"] = [list(token) for token in ledger.tokens.values()]
    if ledger.audit.count:
        found["audit"] = [ledger.audit.count, [_IN_CHECKPOINT(entry) for entry in ledger.audit.entries]]
    return found


def load(ledger: Ledger, whole: dict[str, Any]) -> None:
    tokens = [Token(name, digest, tuple(scopes), *times) for name, digest, scopes, *times in whole.get("tokens", ())]
    ledger.tokens = {token.id: token for token in tokens}
    count, entries = whole.get("audit", (0, ()))
    ledger.audit = Audit(count, (AuditEntry(n, *e) for n, e in enumerate(entries, count - len(entries) + 1)))
