"""`hadelay shards`: the shard map, and its changes over all shards (cli/shardchange.py has the order of the steps)."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace as with_fields
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from msgspec.structs import replace

from hadelay.cli import shardchange, shardtokens
from hadelay.cli.output import Remote, emit_json, note, say, table
from hadelay.cli.remote import call
from hadelay.cli.shardchange import Collect, Edit, Known, Look, Named, Prepare, Step, Stopped
from hadelay.errors import BadRequest, Conflict, HadelayError, NotFound, Unauthorized
from hadelay.settings.shardmap import ALL, Rule, Shard, ShardMap

#: Timeout of one step of a change in one shard, in seconds.
_STEP_S = 30.0
#: Number of pinned names that a plan shows.
_SHOWN = 20
#: Advice in errors about a shard that was restored from a backup.
_ELSEWHERE = "run `hadelay shards apply --at N=URL` at another shard, with a URL of this one."

Plan = Annotated[bool, Parameter(help="Show the names that the change would pin, and change nothing.")]
Key = Literal["name", "prefix", "number"]
BootstrapToken = Annotated[
    str,
    Parameter(
        env_var="HADELAY_BOOTSTRAP_TOKEN",
        show_default=False,
        help="Bootstrap token of the shard that is named by its URL, if that shard does not know --token yet.",
    ),
]


def list_(*, remote: Remote = Remote()) -> None:
    """Show the shard map: shards with their nodes, rules in their order, and the number of pinned names."""
    found = call(remote, "GET", "/v1/shards", needs="cluster_id")
    if remote.output == "json":
        emit_json(found)
        return
    current = found["current"]
    if current is None and found["suspended"]:
        say(f"Cluster {found['cluster_id']} was restored, and creates no topics until it has the map: {_ELSEWHERE}")
        return
    if current is None:
        say(f"Cluster {found['cluster_id']} has no shard map: it owns all topics. `hadelay shards add` begins one.")
        return
    rows = [
        {
            "shard": index, "group": one["group"], "former": ", ".join(map(str, one.get("former", ()))),
            "nodes": ", ".join(one.get("nodes", {}).values()),
        }
        for index, one in sorted(current["shards"].items(), key=lambda item: int(item[0]))
    ]  # fmt: skip
    restored = any(row["former"] for row in rows)
    table(rows, ("shard", "group", "former", "nodes") if restored else ("shard", "group", "nodes"))
    say()
    rules = [
        {"pattern": one["pattern"], "shards": ", ".join(map(str, one["shards"])), "key": one.get("key", "name")}
        for one in current["rules"]
    ]
    table(rules, ("pattern", "shards", "key"))
    answered = (
        f"Cluster {found['cluster_id']} answered, whose group number {found['group']} is not in this map."
        if found["shard"] is None
        else f"Shard {found['shard']} answered."
    )
    say(f"\nVersion {current['version']}, {len(current['pinned'])} pinned names. {answered}")
    if found["suspended"]:
        say(f"This shard was restored, and creates no topics until it has the newest map: {_ELSEWHERE}")
    if found["prepared"] is not None:
        version = found["prepared"]["version"]
        say(f"A change to version {version} is under way: repeat it, or run `hadelay shards apply`.")


def add(
    shard: int, url: str, /, *, bootstrap_token: BootstrapToken = "", plan: Plan = False, remote: Remote = Remote()
) -> None:
    """Add a shard to the map: a running cluster with a group number of its own. Its topics stay in it. No rule names
    the new shard yet.

    The new shard first gets the tokens of the shard that --servers names, by their hashes, and the secret access keys
    of tokens for AWS SDKs.

    Args:
        shard: Index of the new shard, 0 to 127. The index never changes.
        url: URL of a node of the new shard; several, separated by commas.
    """
    _change(remote, lambda base: base, {shard: url}, plan, added=shard, bootstrap=bootstrap_token)


def rule(
    pattern: str,
    shards: Annotated[str, Parameter(help="Indexes of the shards that share the names, such as 0,1.")] = "",
    /,
    *,
    key: Key = "name",
    remove: bool = False,
    plan: Plan = False,
    remote: Remote = Remote(),
) -> None:
    """Set the shards of the topics that a pattern matches. Existing topics stay where they are: their names are pinned.

    A new pattern is tried before all others.

    Args:
        pattern: Pattern of names; * stands for any text. Quote it.
        key: Part of the name that chooses among the shards: the name, its part up to the first ".", or the number at
            its end.
        remove: Remove the rule of this pattern.
    """
    if remove == bool(shards):
        raise BadRequest("give the shards of the pattern, such as 0,1; or --remove")
    try:
        indexes = tuple(int(part) for part in shards.split(",") if part)
    except ValueError:
        raise BadRequest(f"{shards!r} is no list of shards, such as 0,1") from None

    def edit(base: ShardMap) -> ShardMap:
        others = [one for one in base.rules if one.pattern != pattern]
        if remove and (len(others) == len(base.rules) or pattern == ALL):
            raise NotFound(f"no rule has the pattern {pattern!r}, or it is the last rule, which always stays")
        if remove:
            return replace(base, rules=tuple(others))
        new = Rule(pattern, indexes, key)
        if len(others) < len(base.rules):
            return replace(base, rules=tuple(new if one.pattern == pattern else one for one in base.rules))
        return replace(base, rules=(new, *base.rules))

    _change(remote, edit, {}, plan)


def pin(topic: str, shard: int, /, *, plan: Plan = False, remote: Remote = Remote()) -> None:
    """Give the name of a topic that does not exist yet to a shard, whatever the rules say.

    Args:
        topic: Name of the topic.
        shard: Index of the shard.
    """
    _change(remote, lambda base: replace(base, pinned={**base.pinned, topic: shard}), {}, plan, pinned=topic)


def apply(
    *,
    at: Annotated[str, Parameter(help="N=URL of a shard that was restored, or moved to other addresses.")] = "",
    bootstrap_token: BootstrapToken = "",
    plan: Plan = False,
    remote: Remote = Remote(),
) -> None:
    """Apply the present map again in all shards: finish a change that stopped, refresh the addresses of all nodes, give
    a restored shard its map, and the tokens of the shard that --servers names."""
    index, equals, url = at.partition("=")
    if at and not (equals and index.isdigit()):
        raise BadRequest(f"--at {at}: expected N=URL, such as 1=http://10.0.0.2:7000")
    _change(remote, lambda base: base, {int(index): url} if at else {}, plan, bootstrap=bootstrap_token)


def share(at: Mapping[int, Remote], nodes: Mapping[int, dict[str, str]]) -> None:
    """Put several clusters into one shard map. at: shard → addresses to ask. nodes: shard → addresses of its nodes for
    the map. If a cluster was in no map, all clusters share the names that no other rule matches. If such a map is
    already in force, nothing is changed."""
    shards = Shards(at)
    known = {index: shards.take(Look(index)) for index in at}
    added = any(one.current is None for one in known.values())

    def edit(base: ShardMap) -> ShardMap:
        found = {index: base.shards.get(index, Shard(one.group)) for index, one in known.items()}
        found = {index: replace(one, nodes=nodes[index]) for index, one in found.items()}
        last = Rule(ALL, tuple(sorted(at)), "prefix") if added else base.rules[-1]
        return replace(base, shards={**base.shards, **found}, rules=(*base.rules[:-1], last))

    new = edit(shardchange.first_map(known))
    if added or any(one.prepared is not None or one.suspended or one.current != new for one in known.values()):
        _changed(shards, edit)


def _change(
    remote: Remote,
    edit: Edit,
    given: Mapping[int, str],
    plan: bool,
    *,
    pinned: str = "",
    added: int | None = None,
    bootstrap: str = "",
) -> None:
    if remote.shard is not None:
        raise BadRequest(
            "--shard: a change is made in all shards: leave the option out, and name any node with --servers"
        )
    shards = Shards.named_by(remote, given)
    known = _looked_at(shards, given, plan, bootstrap)
    try:
        if added is not None:
            shardchange.refuse_another(known, added)
        new = shardchange.next_map(known, lambda base: shards.with_nodes(edit(base), known))
        named = {index: shards.take(Collect(index)) for index in shards.at}
        final = shardchange.pinning(new, named)
        if pinned and final.owner(pinned) != new.owner(pinned):
            raise Conflict(
                f"topic {pinned!r} exists in shard {final.owner(pinned)}, or is named there, and cannot move"
            )
        if plan:
            _show_plan(remote, final, new)
            return
    except Stopped as error:
        raise Conflict(str(error)) from None
    final = _changed(shards, lambda base: shards.with_nodes(edit(base), known))
    if remote.output == "json":
        emit_json(msgspec.to_builtins(final, str_keys=True))
    else:
        where = ", ".join(map(str, sorted(final.shards)))
        say(f"Version {final.version} is in force in shards {where}. Pinned names: {len(final.pinned)}.")


def _looked_at(shards: "Shards", given: Container[int], plan: bool, bootstrap: str) -> dict[int, Known]:
    """Read the shard maps that each shard of a change knows. Unless the change is only planned, this first copies the
    access tokens of a shard that was not restored to the `given` shards, and to shards restored from a backup."""
    known = {index: shards.look(index) for index in shards.at if index not in given}
    if known and all(one.suspended and one.current is None for one in known.values()):
        raise Conflict(f"this shard was restored from a backup without a shard map: {_ELSEWHERE}")
    source = next((index for index, one in known.items() if not one.suspended), None)
    for index, to in shards.at.items():
        if source is not None and not plan and (index in given or known[index].suspended):
            _copy_tokens(shards.at[source], to, index, bootstrap)
    return {index: known[index] if index in known else shards.look(index) for index in shards.at}


def _copy_tokens(source: Remote, to: Remote, shard: int, bootstrap: str) -> None:
    copied = shardtokens.copy(source, to, shard, bootstrap)
    for said, tokens in (
        (f"Copied to shard {shard}", copied.made),
        (
            f"Known only to shard {shard}: revoke those that the other shards revoked since, and create the rest there",
            copied.unknown,
        ),
    ):
        if tokens:
            names = ", ".join(f"{name} ({token_id})" for token_id, name in list(tokens.items())[:_SHOWN])
            note(f"{said}: {names}" + (f" … {len(tokens)} tokens" if len(tokens) > _SHOWN else ""))


def _changed(shards: "Shards", edit: Edit) -> ShardMap:
    """Change the map in all shards; returns the new map. Raises Conflict if the change cannot go on."""
    try:
        return _carry_out(shards, edit)
    except Stopped as error:
        raise Conflict(str(error)) from None


def _carry_out(shards: "Shards", edit: Edit) -> ShardMap:
    running = shardchange.change(shards.at, edit)
    step = next(running)
    while True:
        try:
            answer = shards.take(step)
        except (HadelayError, OSError) as error:
            note(
                f"The change stopped at shard {step.shard} ({type(step).__name__.lower()}). Existing topics go on; new "
                "names that change owner get 503 until the change is repeated."
            )
            raise error
        try:
            step = running.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _show_plan(remote: Remote, final: ShardMap, new: ShardMap) -> None:
    pins = {name: index for name, index in sorted(final.pinned.items()) if name not in new.pinned}
    if remote.output == "json":
        emit_json(msgspec.to_builtins(final, str_keys=True))
        return
    say(f"The change would pin {len(pins)} names of existing topics, targets and schedules to their shards.")
    table([{"name": name, "shard": index} for name, index in list(pins.items())[:_SHOWN]], ("name", "shard"))
    if len(pins) > _SHOWN:
        say(f"… and {len(pins) - _SHOWN} more.")


def _allowed(remote: Remote, shard: int, urls: Iterable[str]) -> list[str]:
    """The addresses of another shard's nodes that the user's token may be sent to: only https addresses, if --servers
    has one."""
    encrypted = bool(remote.token) and any(url.startswith("https:") for url in remote.addresses())
    found = [url for url in urls if not encrypted or url.startswith("https:")]
    if not found:
        raise BadRequest(
            f"shard {shard} has only unencrypted addresses, and --servers has https: no token is sent there"
        )
    return found


def _of_shard(remote: Remote, base: ShardMap, shard: int) -> Remote:
    """`remote` without the addresses in --servers that belong to other shards: their nodes would answer for their own
    shard."""
    foreign = {url for index, one in base.shards.items() if index != shard for url in one.nodes.values()}
    return with_fields(remote, servers=",".join(url for url in remote.addresses() if url not in foreign))


class Shards:
    """The shards that a change concerns, with their addresses."""

    def __init__(self, at: Mapping[int, Remote]) -> None:
        self.at = dict(at)

    @classmethod
    def named_by(cls, remote: Remote, given: Mapping[int, str], *, stale: bool = False) -> "Shards":
        """The shards of the shard map, which is read from the shard of --servers, and the shards of `given` (shard →
        addresses). stale: read the map of one node, which works without a leader."""
        found = cls._known(remote, stale=stale)
        base = found.current or found.prepared
        mine = 0 if base is None else base.issuer(found.group)
        at = {} if mine is None else {mine: remote if base is None else _of_shard(remote, base, mine)}
        for index, one in ({} if base is None else base.shards).items():
            if one.nodes and index not in at:
                at[index] = with_fields(remote, servers=",".join(_allowed(remote, index, one.nodes.values())))
        for index, urls in given.items():
            addresses = with_fields(remote, servers=urls).addresses()
            at[index] = with_fields(remote, servers=",".join(_allowed(remote, index, addresses)))
        return cls(at)

    @staticmethod
    def _known(at: Remote, *, stale: bool = False) -> Known:
        found = call(at, "GET", "/v1/shards", needs="cluster_id", query={"stale": stale})
        try:
            return msgspec.convert(found, Known, strict=False)
        except msgspec.ValidationError as error:
            raise HadelayError(f"the answer to GET /v1/shards is no shard map: {error}") from None

    def with_nodes(self, shards: ShardMap, known: Mapping[int, Known]) -> ShardMap:
        """The map with all shards of the change, and the present addresses of their nodes. A node that has announced no
        address keeps its address in the map."""
        found = {}
        for index, at in self.at.items():
            shard = shards.shards.get(index, Shard(known[index].group))
            members = call(at, "GET", "/v1/cluster", needs="members")["members"]
            urls = {one["name"]: one["http"].rstrip("/") or shard.nodes.get(one["name"], "") for one in members}
            found[index] = replace(shard, nodes={name: url for name, url in urls.items() if url})
        return replace(shards, shards={**shards.shards, **found})

    def look(self, index: int) -> Known:
        try:
            return self._known(self.at[index])
        except Unauthorized as error:
            what = f"shard {index} does not know your token ({error.detail})"
            raise Unauthorized(f"{what}. If it was restored: hadelay shards apply --at {index}=URL") from None

    def take(self, step: Step) -> Any:
        at = self.at[step.shard]
        if isinstance(step, Look):
            return self.look(step.shard)
        if isinstance(step, Collect):
            return self._names(at)
        body = {
            "step": "prepare" if isinstance(step, Prepare) else "commit",
            "map": msgspec.to_builtins(step.map, str_keys=True),
        }
        return call(at, "PUT", "/v1/shards", body, needs="cluster_id", timeout_s=_STEP_S)

    @staticmethod
    def _names(at: Remote) -> Named:
        topics, targets, after, prepared = set[str](), set[str](), "", list[int | None]()
        while True:
            page = call(at, "GET", "/v1/shards/names", needs="topics", query={"after": after} if after else {})
            topics.update(page["topics"])
            targets.update(page["targets"])
            prepared.append(page["prepared"])
            if page["next"] is None:
                break
            after = page["next"]
        # prepared=None if the prepared map changed between two pages: the names may then be incomplete.
        return Named(frozenset(topics), frozenset(targets), prepared[0] if len(set(prepared)) == 1 else None)
