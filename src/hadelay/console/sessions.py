"""Sessions of browsers that signed in with a token, in the memory of this node (ADR 230)."""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

#: Limits of sessions, of all tokens and of one; beyond them the session that was used longest ago ends.
MOST, MOST_OF_ONE = 1_000, 50
#: Time without a request after which a session ends, and its longest life, in seconds.
IDLE_S, LIFE_S = 3_600.0, 12 * 3_600.0


@dataclass(slots=True)
class Session:
    #: Authorization header of the token: each request is admitted with it anew, so a revoked token ends the session.
    authorization: str
    opened: float
    used: float
    #: Secret that each form of this session sends along.
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class Sessions:
    """All open sessions at this node. monotonic: clock in seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: Session by the value of its cookie, the least recently used first.
        self._open: OrderedDict[str, Session] = OrderedDict()

    def open(self, authorization: str) -> str:
        """Open a session; returns the value of its cookie."""
        name, now = secrets.token_urlsafe(32), self._monotonic()
        same = [other for other, session in self._open.items() if session.authorization == authorization]
        if len(same) >= MOST_OF_ONE:
            self.close(same[0])
        self._open[name] = Session(authorization, now, now)
        while len(self._open) > MOST:
            self._open.popitem(last=False)
        return name

    def find(self, name: str | None, *, looks: bool = True) -> Session | None:
        """The session with this cookie; None once it has ended. looks: whether a person asks, which keeps the session
        alive; the stream of a page that nobody looks at does not."""
        session = self._open.get(name or "")
        if session is None:
            return None
        now = self._monotonic()
        if now - session.used > IDLE_S or now - session.opened > LIFE_S:
            self.close(name)
            return None
        if looks:
            session.used = now
            self._open.move_to_end(name or "")
        return session

    def close(self, name: str | None) -> None:
        self._open.pop(name or "", None)
