"""(signatures; implementation follows)"""

from __future__ import annotations

TOPIC, CONSUMER, NODE = 1, 2, 3


class Names:
    """Numbers for topic, consumer and node names: the hour files hold numbers only. Numbers count from 0 per kind."""

    def number(self, kind: int, name: str) -> int:
        """KeyError if it was never registered."""
        raise NotImplementedError

    def name(self, kind: int, number: int) -> str:
        """KeyError if there is none."""
        raise NotImplementedError

    def register(self, kind: int, name: str) -> int:
        """The number of `name`, given now if it has none yet. Only from apply."""
        raise NotImplementedError
