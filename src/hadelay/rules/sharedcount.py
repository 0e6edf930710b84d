"""Limits what all tenants of a node share, such as waiting receives, so that no token takes all of it (ADR 265)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hadelay.errors import LimitReached
from hadelay.rules.access import RequestRights


class SharedCount:
    """A counter of running requests with a limit. Tokens of one name have a share of it, and the last tenth is kept for
    tokens with the scope admin, which have no share. Without tokens, only the limit holds."""

    def __init__(self, limit: int, what: str, advice: str) -> None:
        """what: the requests that are counted, in words for users. advice: what a user can do instead."""
        self.limit, self.what, self.advice = limit, what, advice
        self.count = 0
        self._by: Counter[str] = Counter()

    @contextmanager
    def one_more(self, access: RequestRights) -> Iterator[None]:
        """Count a request while it runs. Raises LimitReached."""
        by = access.actor.token
        if problem := self._problem(by, bounded=bool(by) and not access.may("admin", None)):
            raise LimitReached(f"{problem}; {self.advice}", retry_after_ms=1_000)
        self.count += 1
        self._by[by] += 1
        try:
            yield
        finally:
            self.count -= 1
            self._by[by] -= 1
            if not self._by[by]:
                del self._by[by]

    def _problem(self, by: str, bounded: bool) -> str:
        share, kept = max(self.limit // 4, 1), self.limit // 10
        if self.count >= self.limit:
            return f"too many {self.what} on this node ({self.count:,})"
        if bounded and self._by[by] >= share:
            return f"too many {self.what} of the token {by!r} on this node: its share is {share:,} of {self.limit:,}"
        if bounded and self.count >= self.limit - kept:
            return f"too many {self.what} on this node ({self.count:,}): the last {kept:,} are kept for admin tokens"
        return ""
