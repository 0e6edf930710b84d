"""Access tokens, their scopes, and the audit trail (ADR 122, 123).

    scope := ("publish" | "consume" | "read" | "admin") [":" glob]        glob: topics; "*" in it is any text, also none

Without a glob, a scope covers all topics and the cluster itself. `admin` includes the other three. Only the SHA-256 of
a token's secret is stored, which is enough to recognise the token; its first digits are the token's id.

A token for AWS SDKs also has a secret access key. A signature (Signature Version 4) is an HMAC with that key, so nodes
must store the key. The key is derived from the token by a one-way function: it signs requests of AWS SDKs, and gives
no other access.
"""

import hashlib
import re
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SCOPES = ("publish", "consume", "read", "admin")
HASH_BYTES = 32
#: Prefix of a token's 43 random characters, for people and for scanners that look for leaked secrets.
TOKEN_PREFIX = "hadelay_"
MAX_TOKENS = 1_000
MAX_TOKEN_NAME = 64
MAX_TOKEN_SCOPES = 64
#: Limit of a token's lifetime, in ms, so that sums of times do not overflow.
MAX_LIFETIME_MS = 100 * 365 * 86_400_000
#: Limit of entries in the audit trail; the oldest are dropped first.
MAX_AUDIT = 1_000
_SCOPE = re.compile(r"(publish|consume|read|admin)(?::([A-Za-z0-9._*~-]{1,128}))?")
_ALL = "*"
#: Prefix of a token in the hash that makes the secret access key. Without the prefix, the key would be the token's
#: hash, which all nodes store.
_AWS_KEY = b"hadelay secret access key\0"


class Token(NamedTuple):
    name: str
    hash: bytes
    scopes: tuple[str, ...]
    created_at_ms: int
    #: Time at which the token expires, Unix ms; None: valid until revoked.
    expires_at_ms: int | None
    #: Secret access key of the token for AWS SDKs, as bytes (aws_key); None: AWS SDKs cannot use the token.
    aws_key: bytes | None = None

    @property
    def id(self) -> str:
        return self.hash.hex()[:12]

    def holds(self, now_ms: int) -> bool:
        return self.expires_at_ms is None or now_ms < self.expires_at_ms


class AuditEntry(NamedTuple):
    """One administrative request, done or refused. Times are Unix ms, cluster time."""

    #: Number of the audit entry, from 1 without gaps.
    number: int
    at_ms: int
    #: Name of the node that received the request.
    node: str
    #: Id and name of the token; both empty where no tokens are required.
    token_id: str
    token: str
    action: str
    target: str
    #: Outcome of the request: "done", or the reason of the refusal.
    outcome: str


def hash_token(token: str) -> bytes:
    """The stored form of a token. A token has 256 random bits, so guessing needs no slow hash."""
    return hashlib.sha256(token.encode()).digest()


def aws_key(token: str) -> bytes:
    """The secret access key of a token, which nodes store to check signatures of AWS SDKs. The token cannot be computed
    from the key."""
    return hashlib.sha256(_AWS_KEY + token.encode()).digest()


def aws_secret(key: bytes) -> str:
    """The text of a secret access key, as AWS SDKs get it. Scanners find the prefix in leaked text."""
    return f"{TOKEN_PREFIX}aws_{urlsafe_b64encode(key).decode().rstrip('=')}"


def problem_of_scope(scope: str) -> str:
    """Error text for an invalid scope; "" for a valid one."""
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
    """Operations that a set of scopes allows."""

    #: Limit of cached results of `may`.
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
        """Whether the scopes allow this operation on a topic. topic None: on all topics and the cluster."""
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
    """The last entries of the audit trail. count: number of all entries ever added."""

    def __init__(self, count: int = 0, entries: Iterable[AuditEntry] = ()) -> None:
        self.count = count
        self.entries = deque(entries, MAX_AUDIT)

    def add(self, entry: AuditEntry) -> None:
        self.count = entry.number
        self.entries.append(entry)
