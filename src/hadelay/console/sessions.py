"""Sessions of browsers that signed in with a token: signed cookies, which every node accepts (ADR 300)."""

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable

import msgspec

from hadelay.server.sessions import SharedSessions

#: Limits of a session, in ms: time without a request after which it ends, lifetime, and age of a cookie that is
#: renewed.
IDLE_MS, LIFE_MS, FRESH_MS = 3_600_000, 12 * 3_600_000, 60_000
#: Limit of the characters of a cookie.
_LONGEST = 400


class Session(msgspec.Struct, array_like=True, frozen=True):
    #: Random name of the session, which nobody can guess.
    name: str
    #: Id of the token with which the person signed in. Each request checks the token anew, so a revoked token ends the
    #: session.
    token_id: str
    #: Cluster time of the sign-in, in Unix ms.
    opened_ms: int
    #: Cluster time of the last use that the cookie records, in Unix ms.
    used_ms: int

    @property
    def csrf(self) -> str:
        """Secret that each form of this session sends along: scripts cannot read the cookie that it is made from."""
        return _text(hashlib.sha256(b"csrf " + self.name.encode()).digest())


_SESSION = msgspec.json.Decoder(Session)


class Sessions:
    """Makes and reads the cookies of sessions. now_ms: cluster time."""

    def __init__(self, shared: SharedSessions, now_ms: Callable[[], int]) -> None:
        self._shared, self._now_ms = shared, now_ms

    def open(self, token_id: str) -> Session:
        now_ms = self._now_ms()
        return Session(secrets.token_urlsafe(16), token_id, now_ms, now_ms)

    def cookie(self, session: Session) -> str:
        """Value of the session's cookie."""
        body = msgspec.json.encode(session)
        return f"{_text(body)}.{_text(_sign(self._shared.keys[0], body))}"

    def find(self, cookie: str | None) -> Session | None:
        """The session with this cookie; None once it has ended, and for a cookie that no node has signed."""
        body, _, signature = ((cookie or "")[:_LONGEST]).partition(".")
        try:
            raw, given = (urlsafe_b64decode(text + "=" * (-len(text) % 4)) for text in (body, signature))
        except (Base64Error, ValueError):
            return None
        if not any(hmac.compare_digest(_sign(key, raw), given) for key in self._shared.keys):
            return None
        session, now_ms = _SESSION.decode(raw), self._now_ms()
        over = now_ms - session.used_ms > IDLE_MS or now_ms - session.opened_ms > LIFE_MS
        return None if over or session.name in self._shared.closed else session

    def renewed(self, session: Session) -> Session | None:
        """The session with the present time as its last use; None if the cookie is too new to be renewed."""
        now_ms = self._now_ms()
        return msgspec.structs.replace(session, used_ms=now_ms) if now_ms - session.used_ms > FRESH_MS else None

    def close(self, session: Session) -> None:
        """End the session at all nodes."""
        self._shared.close(session.name)

    def csrf(self, given: str) -> bool:
        """Whether a node of this cluster made the secret `given` for forms without a session."""
        return any(hmac.compare_digest(given.encode(), _form(key).encode()) for key in self._shared.keys)

    @property
    def form(self) -> str:
        """Secret of forms without a session: the sign-in form, and every form in a cluster without tokens."""
        return _form(self._shared.keys[0])


def _form(key: bytes) -> str:
    return _text(_sign(key, b"form"))


def _sign(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")
