"""Who may do what, and what was done by those who may do much: tokens and the audit trail (ADR 122, 123).

    scope := ("publish" | "consume" | "read" | "admin") [":" glob]        glob: topics; "*" in it is any text, also none

Without a glob a scope means all topics, and what is no topic's: the cluster. `admin` includes the other three. A
token's secret never comes here: its SHA-256 does, which is enough to recognise it, and its first digits are its id.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hadelay.core.results import Done, Refused, Result

if TYPE_CHECKING:
    from hadelay.core.state import DelayState

SCOPES = ("publish", "consume", "read", "admin")
HASH_BYTES = 32
MAX_TOKENS = 1_000
MAX_TOKEN_NAME = 64
MAX_TOKEN_SCOPES = 64
#: Longer than anybody plans for; so that a sum of times stays one.
MAX_LIFETIME_MS = 100 * 365 * 86_400_000
#: Entries of the audit trail that are kept; the oldest go first.
MAX_AUDIT = 1_000
_SCOPE = re.compile(r"(publish|consume|read|admin)(?::([A-Za-z0-9._*-]{1,128}))?")
_ALL = "*"


class Token(NamedTuple):
    name: str
    hash: bytes
    scopes: tuple[str, ...]
    created_at_ms: int
    #: None: it holds until it is revoked.
    expires_at_ms: int | None

    @property
    def id(self) -> str:
        return self.hash.hex()[:12]

    def holds(self, now_ms: int) -> bool:
        return self.expires_at_ms is None or now_ms < self.expires_at_ms


@dataclass(slots=True)
class AuditEntry:
    """One thing that was asked for, whether it was done or refused. Times are Unix ms, cluster time."""

    #: From 1, without gaps.
    number: int
    at_ms: int
    #: That took the request.
    node: str
    #: Of the token; both empty where no tokens are asked for.
    token_id: str
    token: str
    action: str
    target: str
    #: "done", or why it was refused.
    outcome: str


def problem_of_scope(scope: str) -> str:
    """Empty when it is one; otherwise what it should be."""
    if _SCOPE.fullmatch(scope):
        return ""
    return f"{scope[:80]!r} is no scope: {', '.join(SCOPES)}, alone or with topics, such as publish:orders-*"


def covers(glob: str, topic: str) -> bool:
    first, *others = glob.split(_ALL)
    if not others:
        return topic == glob
    *middle, last = others
    at, end = len(first), len(topic) - len(last)
    if at > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for part in middle:
        found = topic.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class Rights:
    """What a set of scopes allows."""

    #: Answers remembered.
    _MOST = 4_096

    def __init__(self, scopes: Iterable[str]) -> None:
        self.globs: dict[str, set[str]] = {scope: set() for scope in SCOPES}
        for text in scopes:
            scope, _, glob = text.partition(":")
            self.globs[scope].add(_ALL if not glob.strip(_ALL) else glob)
        for globs in self.globs.values():
            globs |= self.globs["admin"]
        self._known: dict[tuple[str, str], bool] = {}

    def may(self, scope: str, topic: str | None) -> bool:
        """topic None: all of them, and the cluster."""
        globs = self.globs[scope]
        if _ALL in globs:
            return True
        if topic is None:
            return False
        known = self._known.get((scope, topic))
        if known is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            known = self._known[scope, topic] = any(covers(glob, topic) for glob in globs)
        return known

    def may_somewhere(self, scope: str) -> bool:
        return bool(self.globs[scope])


class Audit:
    """The last entries; `count`: how many there ever were."""

    def __init__(self, count: int = 0, entries: Iterable[AuditEntry] = ()) -> None:
        self.count = count
        self.entries = deque(entries, MAX_AUDIT)

    def add(self, at_ms: int, node: str, token_id: str, token: str, action: str, target: str, outcome: str) -> None:
        self.count += 1
        self.entries.append(AuditEntry(self.count, at_ms, node, token_id, token, action, target, outcome))


# ---- apply


def apply_token_create(state: DelayState, command: Any) -> Done | Refused:
    """`command`: what msgpack had in it, [name, hash, scopes, lifetime_ms or nil]."""
    wrong = _problem(command)
    if wrong:
        return Refused("bad_token", wrong)
    name, digest, scopes, lifetime_ms = command
    now_ms = state.now_ms
    token = Token(name, digest, tuple(scopes), now_ms, None if lifetime_ms is None else now_ms + lifetime_ms)
    if token.id in state.tokens:
        return Refused("token_exists", "there is a token with that hash, or one that begins alike: make another")
    kept = state.tokens
    if len(kept) >= MAX_TOKENS:
        kept = {token_id: other for token_id, other in kept.items() if other.holds(now_ms)}
    if len(kept) >= MAX_TOKENS:
        return Refused("too_many_tokens", f"there are {len(kept)} tokens: revoke those that nobody uses")
    # A new dict: who remembers what the old one said sees that it is another.
    state.tokens = {**kept, token.id: token}
    return Done()


def _problem(command: Any) -> str:
    if not isinstance(command, list) or len(command) != 4:
        return "a token is [name, hash, scopes, lifetime]"
    name, digest, scopes, lifetime_ms = command
    # Not str.isprintable: two versions of Python may differ about a character.
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


def apply_token_revoke(state: DelayState, token_id: str) -> Done | Refused:
    if token_id not in state.tokens:
        return Refused("no_token", f"there is no token {token_id!r}: it was revoked before, or never was")
    state.tokens = {other: token for other, token in state.tokens.items() if other != token_id}
    return Done()


class Audited(NamedTuple):
    """A command, and who wanted it: the answer is the command's own."""

    node: str
    token_id: str
    token: str
    action: str
    target: str
    kind: int
    body: memoryview


def note(state: DelayState, command: Audited, result: Result) -> Result:
    outcome = result.code if isinstance(result, Refused) else "done"
    state.audit.add(
        state.now_ms, command.node, command.token_id, command.token, command.action, command.target, outcome
    )
    return result


# ---- checkpoints


def dump(state: DelayState) -> dict[str, Any]:
    """What goes into the main blob; nothing while there is nothing."""
    found: dict[str, Any] = {}
    if state.tokens:
        found["tokens"] = [list(token) for token in state.tokens.values()]
    if state.audit.count:
        entries = [
            [e.at_ms, e.node, e.token_id, e.token, e.action, e.target, e.outcome] for e in state.audit.entries
        ]  # fmt: skip
        found["audit"] = [state.audit.count, entries]
    return found


def load(state: DelayState, whole: dict[str, Any]) -> None:
    tokens = [Token(name, digest, tuple(scopes), *times) for name, digest, scopes, *times in whole.get("tokens", ())]
    state.tokens = {token.id: token for token in tokens}
    count, entries = whole.get("audit", (0, ()))
    state.audit = Audit(count, (AuditEntry(n, *e) for n, e in enumerate(entries, count - len(entries) + 1)))
