"""A change of the shard map, over all shards (docs/spec/shards.md). No I/O happens here: a change yields one request
after the other, and gets the answers.

    look at each shard → PREPARE in each → collect the names of each → COMMIT in each

A change may stop anywhere, and its repetition ends it: existing topics go on, and only names that change owner cannot
be created meanwhile.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from hadelay.settings.shardmap import ALL, MAX_PINNED, Rule, Shard, ShardMap


class Known(msgspec.Struct, frozen=True):
    """The shard maps that a shard knows, as GET /v1/shards answers."""

    group: int
    current: ShardMap | None = None
    prepared: ShardMap | None = None
    suspended: bool = False


class Named(msgspec.Struct, frozen=True):
    """Names that a shard knows: topics that exist there, and topics that its settings and schedules name."""

    topics: frozenset[str]
    targets: frozenset[str]
    #: Version of the prepared map that the shard had when the names were read.
    prepared: int | None = None


class Look(msgspec.Struct, frozen=True):
    """Ask a shard for the shard maps that it knows; the answer is a Known."""

    shard: int


class Prepare(msgspec.Struct, frozen=True):
    shard: int
    map: ShardMap


class Collect(msgspec.Struct, frozen=True):
    """Ask a shard for its names, once it has prepared the new map; the answer is a Named."""

    shard: int


class Commit(msgspec.Struct, frozen=True):
    shard: int
    map: ShardMap


Step = Look | Prepare | Collect | Commit
#: Function that makes the new map's rules, and its shards with their nodes, from the map with the highest version.
Edit = Callable[[ShardMap], ShardMap]


class Stopped(Exception):
    """Error: the change of the shard map cannot go on, for the reason in the text."""


def first_map(known: Mapping[int, Known]) -> ShardMap:
    """The shard map with the highest version. If no shard has a map, a map that gives all names to the first shard."""
    found = [one.current for one in known.values() if one.current is not None]
    if found:
        return max(found, key=lambda one: one.version)
    first = min(known)
    return ShardMap(1, {first: Shard(known[first].group)}, (Rule(ALL, (first,)),))


def change(indexes: Iterable[int], edit: Edit) -> Generator[Step, Any, ShardMap]:
    """Change the map of these shards; returns the new map. Raises Stopped."""
    indexes = sorted(indexes)
    known: dict[int, Known] = {}
    for index in indexes:
        known[index] = yield Look(index)
    new = next_map(known, edit)
    for index in indexes:
        yield Prepare(index, new)
    named: dict[int, Named] = {}
    for index in indexes:
        named[index] = yield Collect(index)
        if named[index].prepared != new.version:
            raise Stopped(f"shard {index} got another change meanwhile: repeat this change")
    final = pinning(new, named)
    for index in indexes:
        yield Commit(index, final)
    return final


def next_map(known: Mapping[int, Known], edit: Edit) -> ShardMap:
    """The map to prepare: the edited map, with the next version, the present group numbers of the shards, and without
    the pins that its rules make needless."""
    versions = [one.version for state in known.values() for one in (state.current, state.prepared) if one is not None]
    new = edit(first_map(known))
    shards = {index: _numbered(shard, known.get(index)) for index, shard in new.shards.items()}
    unpinned = replace(new, pinned={})
    pinned = {name: index for name, index in new.pinned.items() if unpinned.owner(name) != index}
    new = replace(new, version=max(versions, default=0) + 1, shards=shards, pinned=pinned)
    if missing := sorted(new.shards.keys() ^ known.keys()):
        raise Stopped(f"shard {missing[0]} is not in the change: name the URL of each shard")
    if problem := new.problem() or new.mixed():
        raise Stopped(problem)
    return new


def refuse_another(known: Mapping[int, Known], index: int) -> None:
    """Raise Stopped if another cluster answered for the shard `index` than the cluster that the map has there."""
    there = first_map(known).shards.get(index)
    if there is not None and there.group != known[index].group:
        raise Stopped(
            f"shard {index} is another cluster, of the group number {there.group}: take a new index. If it was "
            f"restored, run `hadelay shards apply --at {index}=URL`"
        )


def _numbered(shard: Shard, known: Known | None) -> Shard:
    if known is None or known.group == shard.group:
        return shard
    former = tuple(number for number in dict.fromkeys((*shard.former, shard.group)) if number != known.group)
    return replace(shard, group=known.group, former=former)


def pinning(new: ShardMap, named: Mapping[int, Named]) -> ShardMap:
    """The map with more pins: each existing name is pinned to the shard that has it, if the rules give the name to
    another shard. Raises Stopped if two shards have a topic of one name."""
    pinned, homes = dict(new.pinned), dict[str, int]()
    twice = []
    for index in sorted(named):
        for name in sorted(named[index].topics):
            if homes.setdefault(name, index) != index:
                twice.append(f"{name} (shards {homes[name]} and {index})")
            elif new.owner(name) != index:
                pinned[name] = index
    if twice:
        shown = ", ".join(twice[:20]) + (", …" if len(twice) > 20 else "")
        raise Stopped(f"two shards have a topic of one name; delete one of each, or use another name: {shown}")
    for index in sorted(named):
        for name in sorted(named[index].targets):
            # A topic that does not exist yet goes to the first shard whose settings or schedules name the topic.
            if homes.setdefault(name, index) == index and new.owner(name) != index:
                pinned[name] = index
    final = replace(new, pinned=pinned)
    if problem := final.problem():
        raise Stopped(problem)
    if len(pinned) > MAX_PINNED:
        raise Stopped(f"{len(pinned)} names would be pinned, at most {MAX_PINNED} may be: choose rules that move fewer")
    return final
