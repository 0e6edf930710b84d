"""The state of a backup in a cluster with another group: old ids stay, new ones are others (ADR 141)."""

from __future__ import annotations

from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import CancelOutcome
from hadelay.ledger import checkpoint
from hadelay.ledger.checkpoint import for_new_cluster
from hadelay.ledger.hours.transitions import PLACE
from hadelay.ledger.messages.keys import KEY, KEYOF, find_key
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, unpack_id
from tests.ledger.world import START_HOUR, World, draft


def restored(world: World, group: int = 1) -> World:
    main, hours = checkpoint.dump(world.ledger)
    world.store.group = group
    world.ledger = Ledger(group, world.store, world.tables, world.names)
    checkpoint.load(world.ledger, for_new_cluster(main, group), hours)
    return world


def test_old_ids_stay_and_new_ones_are_others() -> None:
    world = World()
    world.one(commands.encode_incarnation("n2", 1_795_000_000_000))
    waits, moves, comes_back, acked = world.ids(*[draft(in_ms=0) for _ in range(4)])
    world.ack(world.lease(acked))
    world.nack(world.lease(comes_back), delay_ms=0)
    leased = world.lease(moves, lease_ms=1_000)
    restored(world)
    assert world.ledger.incarnations == {}
    assert world.states(waits, moves, comes_back, acked) == ["ready", "leased", "ready", "acked"]
    # The lost cluster gave out the next place, too; here it is another message's, under another id.
    lost = world.ids(draft())[0] & ~(0xFF << 56)
    (new,) = world.ids(draft())
    assert unpack_id(new)[0] == 1
    assert world.states(lost) == ["gone"]
    assert world.cancel(lost, new) == [CancelOutcome.NOT_FOUND, CancelOutcome.CANCELLED]
    # A lease of before runs out, and its message comes back under its id.
    world.now += 2_000
    world.expire((int(leased["term"][0]), int(leased["seq"][0])))
    assert world.states(moves) == ["ready"]
    for message_id in (waits, moves, comes_back):
        world.ack(world.lease(message_id))
    assert world.states(waits, moves, comes_back) == ["acked"] * 3
    world.restart()


def test_an_hour_of_two_groups_retires_and_leaves_nothing() -> None:
    world = World()
    keyed = [replace(draft(), key=b"%d" % n) for n in range(5)]
    old = world.ids(*keyed[:3])
    world.nack(world.lease(*old), delay_ms=0)
    restored(world)
    new = world.ids(*keyed[3:])
    world.nack(world.lease(*new), delay_ms=0)
    world.nack(world.lease(*old), delay_ms=HOUR_MS)
    world.ack(world.lease(*new))
    assert world.tables.range(PLACE)
    world.now += 4 * HOUR_MS
    world.apply(commands.encode_maintain(Job.RETIRE, START_HOUR))
    assert world.states(*new) == ["gone"] * 2
    assert world.states(*old) == ["ready"] * 3
    world.ack(world.lease(*old))
    world.now += 4 * HOUR_MS
    for hour in world.store.hours():
        world.apply(commands.encode_maintain(Job.RETIRE, hour))
    assert list(world.store.hours()) == []
    assert [world.tables.range(table) for table in (PLACE, KEY, KEYOF)] == [[], [], []]
    assert find_key(world.ledger, "t", hash_client_key(b"1")) is None
