"""Applies SHARD_MAP, and says which topics this cluster may create as one of several shards (docs/spec/shards.md)."""

import msgspec

from hadelay.codec.results import Done, Refused
from hadelay.codec.shardcommands import PutShardMap, ShardStep
from hadelay.ledger.state import Ledger
from hadelay.model import SEPARATOR
from hadelay.settings.shardmap import ALONE, MAX_REPLACED, ShardMap, Shards


def is_foreign(ledger: Ledger, name: str) -> bool:
    """Whether the topic does not exist here, and this shard may not create it. A subscription is where its topic is."""
    if ledger.shards is ALONE:
        return False
    topic = name.partition(SEPARATOR)[0]
    return ledger.topic(topic) is None and not ledger.shards.may_create(ledger.group, topic)


def owner_in_words(shards: Shards, name: str) -> str:
    """Explain to users why this shard may not create a topic."""
    if shards.suspended:
        return "this shard was restored, and creates no topics until it has the shard map: hadelay shards apply"
    if shards.current is None:
        return "this shard is about to join others, and creates no topics until then: repeat `hadelay shards add`"
    if len(shards.replaced) == MAX_REPLACED:
        return (
            f"{MAX_REPLACED} changes of the shard map were begun and not finished, and this shard creates no topics "
            "until one is: repeat the last one"
        )
    owners = sorted({one.owner(name) for one in shards.maps()})
    if len(owners) == 1:
        return f"topic {name!r} belongs to shard {owners[0]}"
    return f"topic {name!r} is changing from shard {owners[0]} to another one: repeat the change of the shard map"


def foreign_target(shards: Shards, name: str) -> str:
    """Explain to users why dead letters and callbacks cannot go to this topic."""
    return f"{owner_in_words(shards, name)}; dead letters and callbacks stay in the shard of their topic"


def apply_shard_map(ledger: Ledger, command: PutShardMap) -> Done | Refused:
    """Carry out one step of a change of the shard map."""
    try:
        new = _decode(command.map)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        return Refused("bad_shard_map", str(error))
    known = ledger.shards
    if command.step is ShardStep.COMMIT and new == known.current:
        return Done(False)  # the command is a repetition: its first answer was lost
    mixed = new.mixed() if command.step is ShardStep.PREPARE else ""
    if wrong := new.problem() or mixed or _problem_here(ledger, new):
        return Refused("bad_shard_map", wrong)
    if wrong := _STEPS[command.step](known, new):
        return Refused("other_shard_map", wrong)
    ledger.shards = {
        ShardStep.PREPARE: known.preparing(new),
        ShardStep.COMMIT: Shards(new),
        ShardStep.ADDRESS: Shards(new, suspended=known.suspended),
    }[command.step]
    return Done()


_decode = msgspec.msgpack.Decoder(ShardMap).decode


def _problem_here(ledger: Ledger, new: ShardMap) -> str:
    """Describe why the map does not fit this cluster; "" if it fits."""
    index, known = new.index_of(ledger.group), ledger.shards.current
    if index is None:
        return f"shards: no shard has the group number {ledger.group} of this cluster"
    if known is None:
        return ""
    if missing := sorted(known.shards.keys() - new.shards.keys()):
        return f"shards: shard {missing[0]} is missing; a shard stays in the map"
    # A restored shard has a new group number, which the known map does not have: `before` is None, and nothing is
    # compared.
    before = known.issuer(ledger.group)
    if before is not None and before != index:
        return f"shards: this cluster is shard {before}, and cannot become shard {index}"
    return ""


def _newer(known: Shards, new: ShardMap) -> str:
    if known.current is not None and new.version <= known.current.version:
        return f"version {new.version} is not above the version {known.current.version} of the current map"
    return ""


def _refuse_prepare(known: Shards, new: ShardMap) -> str:
    if known.prepared is not None and new.version <= known.prepared.version:
        return f"version {new.version} is not above the version {known.prepared.version} of the prepared map"
    return _newer(known, new)


def _refuse_commit(known: Shards, new: ShardMap) -> str:
    before = known.prepared
    if before is None or (before.version, before.rules, before.shards) != (new.version, new.rules, new.shards):
        found = "none" if before is None else f"version {before.version}"
        return f"version {new.version} with these rules and shards is not prepared here (prepared: {found})"
    return ""


def _refuse_address(known: Shards, new: ShardMap) -> str:
    before = known.current
    kept = new.rules, new.pinned, new.shards.keys()
    if before is None or (before.rules, before.pinned, before.shards.keys()) != kept:
        return "only addresses and group numbers may change in one step; the current map has other rules or pins"
    if known.prepared is not None:
        return f"a change to version {known.prepared.version} is under way: finish it first"
    return _newer(known, new)


_STEPS = {
    ShardStep.PREPARE: _refuse_prepare,
    ShardStep.COMMIT: _refuse_commit,
    ShardStep.ADDRESS: _refuse_address,
}
