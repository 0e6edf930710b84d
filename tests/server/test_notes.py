"""What nodes tell each other once a second: which notes say something of a clock, and which do not."""

from __future__ import annotations

import random
from unittest.mock import Mock

import msgpack
import pytest

from hadelay.server.clustertime import ClusterClock
from hadelay.server.link import CALL, Link
from hadelay.server.peers import Peers, PeerStatus

MONO, NOW = 1_000.0, 1_795_197_600_000


class Hearing:
    """Node a, which b and c tell something; its clock is ready, and b leads."""

    def __init__(self) -> None:
        runtime = Mock(random=random.Random(1), monotonic=lambda: MONO, wall_ms=lambda: NOW)
        self.clock = ClusterClock("a", ["a", "b"])
        self.link = Link(runtime, lambda *_: True)
        self.peers = Peers(["a", "b", "c"], runtime, self.link, self.clock, lambda: PeerStatus("a"))
        self.peers.changed = self.changed
        self.peers.voters = frozenset("ab")
        self.clock.observe_wall("b", NOW, MONO, NOW)
        self.clock.observe_leader("b", NOW, MONO)

    def changed(self) -> None:
        self.skews = {name: round(ms) for name, ms in self.clock.skews(MONO).items()}

    def hear(self, ahead_ms: int, yours: float | None, *, name: str = "b", theirs: float = 5.0) -> int:
        """How far its clock is moved by a note that says cluster time is `ahead_ms` further."""
        note = [NOW, NOW + ahead_ms, theirs, yours, "http://b", "1", 1, 1, True, False, 0.0]
        self.link.on_message(name, CALL, msgpack.packb([0, "hello", note]))
        return self.clock.read(MONO) - NOW


def test_a_note_moves_the_clock_into_what_it_allows() -> None:
    assert Hearing().hear(-70, MONO - 0.05) == -20
    assert Hearing().hear(70, MONO - 0.05) == 70


@pytest.mark.parametrize(
    ("yours", "name"),
    [
        (None, "b"),  # it has not heard this node yet
        (MONO + 60.0, "b"),  # it has heard this machine as it was before it was started anew, or suspended
        (MONO, "c"),  # whose clock does not count
    ],
)
def test_a_note_that_says_nothing_of_a_clock_moves_none(yours: float | None, name: str) -> None:
    hearing = Hearing()
    assert hearing.hear(-70, yours, name=name) == 0
    assert hearing.hear(70, yours, name=name) == 0
    assert hearing.peers.live(name), "what else it says counts"


@pytest.mark.parametrize("yours", [MONO - 100.0, 0.0, -1e308])
def test_nobody_knows_when_a_very_late_note_was_sent(yours: float) -> None:
    """Half of its round trip would be how far the peer's wall clock seems to be off."""
    hearing = Hearing()
    for _ in range(10):
        assert hearing.hear(-70, yours) == 0
    assert hearing.skews == {"b": 0}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), "1"])
def test_a_clock_that_is_no_number_is_ignored(number: float) -> None:
    hearing = Hearing()
    assert hearing.hear(70, MONO, theirs=number) == 0
    assert hearing.hear(70, number) == 0
    assert not hearing.peers.live("b")
