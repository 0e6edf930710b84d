"""Feature levels: what a mixed cluster does not use, and how it comes to use it (ADR 142)."""

from __future__ import annotations

import pytest

from hadelay.core import checkpoint, commands, state
from hadelay.core.commands import Command, encode_entry
from hadelay.core.results import Done, Refused
from hadelay.core.state import DelayState
from hadelay.core.topics import SCHEDULED
from hadelay.errors import FatalError
from tests.core.world import START_MS, World, draft


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This program brings PURGE, with level 2."""
    monkeypatch.setitem(commands.LEVEL_OF, Command.PURGE, 2)
    monkeypatch.setattr(state, "FEATURE_LEVEL", 2)


def purge(world: World) -> object:
    return world.one(commands.encode_purge("t", SCHEDULED))


@pytest.mark.usefixtures("newer")
def test_a_new_command_waits_for_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    (message_id,) = world.ids(draft(in_ms=60_000))
    before = world.state.dump(everything=True)
    refused = purge(world)
    assert isinstance(refused, Refused)
    assert (refused.code, world.states(message_id)) == ("needs_upgrade", ["scheduled"])
    # Just what a program does that has never heard of it.
    old = World()
    old.ids(draft(in_ms=60_000))
    assert old.state.dump(everything=True) == before
    with monkeypatch.context() as patch:
        patch.delitem(commands._DECODERS, Command.PURGE)
        assert isinstance(purge(old), Refused)
    assert old.state.dump(everything=True) == world.state.dump(everything=True)
    assert world.one(commands.encode_feature(2)) == Done(True)
    assert world.one(commands.encode_feature(2)) == Done(False)
    assert not isinstance(purge(world), Refused)
    assert world.states(message_id) == ["cancelled"]


@pytest.mark.usefixtures("newer")
def test_after_the_switch_a_program_that_lacks_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.one(commands.encode_feature(2))
    world.state.apply(2, 1, encode_entry(START_MS, [commands.encode_noop()], level=2))
    blobs = world.state.dump(everything=True)
    monkeypatch.setattr(state, "FEATURE_LEVEL", 1)
    with pytest.raises(FatalError, match="upgrade it"):
        World().one(commands.encode_feature(2))
    with pytest.raises(FatalError, match="feature level 2"):
        World().state.apply(1, 1, encode_entry(START_MS, [], level=2))
    monkeypatch.setattr(checkpoint, "FEATURE_LEVEL", 1)
    with pytest.raises(FatalError, match="level 2"):
        DelayState(0, world.store, world.tables, world.names).load(*blobs)


def test_a_new_cluster_begins_with_the_first(newer: None) -> None:
    assert World().state.level == 1
