"""`hadelay shards balance`: transfers leadership of shards between machines, until each machine leads about as many
shards as the others. The leader of a shard does most of its work. Nodes with the same name in different shards count as
one machine."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from hadelay.cli.output import Remote, emit_json, note, say, table
from hadelay.cli.remote import call
from hadelay.cli.shards import Shards
from hadelay.errors import Conflict, HadelayError

#: Timeout of one transfer, in seconds.
_TRANSFER_S = 30.0

DryRun = Annotated[bool, Parameter(help="Show the transfers, and change nothing.")]


class Seen(NamedTuple):
    """Leader of a shard, and the nodes that are `able` to lead the shard: voters that answer and are not drained."""

    leader: str
    able: frozenset[str]


class Move(NamedTuple):
    """One transfer of leadership."""

    shard: int
    source: str
    target: str


def balance(*, dry_run: DryRun = False, remote: Remote = Remote()) -> None:
    """Transfer leadership of shards, one after the other, until the machines differ by at most one leader. Nodes with
    the same name in different shards count as one machine."""
    at = Shards.named_by(remote, {}).at
    seen = {}
    for index in sorted(at):
        try:
            seen[index] = _look(at[index])
        except (HadelayError, OSError):
            note(f"Shard {index} does not answer: no leadership was transferred.")
            raise
    moves = plan(seen)
    for number, move in enumerate(() if dry_run else moves):
        try:
            _transfer(at[move.shard], move)
        except (HadelayError, OSError):
            note(f"The transfer of shard {move.shard} failed, after {number} of {len(moves)}: run the command again.")
            raise
    _show(seen, moves, dry_run, remote)


def plan(seen: Mapping[int, Seen]) -> list[Move]:
    """Transfers, at most one per shard, that spread the leaders over the machines as evenly as any chain of transfers
    can."""
    leads = {shard: one.leader for shard, one in seen.items()}
    while chain := _chain(leads, seen):
        leads.update(chain)
    return [Move(shard, one.leader, leads[shard]) for shard, one in sorted(seen.items()) if leads[shard] != one.leader]


def _chain(leads: Mapping[int, str], seen: Mapping[int, Seen]) -> dict[int, str]:
    """Find a chain of transfers after which the first machine has one leader less, the last machine has one more, and
    the others have as many as before. The last machine had at least two leaders less than the first: of the machines
    that chains reach, the one with the fewest, by its shortest chain. Returns shard → new leader; empty if no chain."""
    counts = Counter(dict.fromkeys(sorted({node for one in seen.values() for node in one.able}), 0))
    counts.update(leads.values())
    for first, most in counts.most_common():
        chains: dict[str, dict[int, str]] = {first: {}}
        waiting = deque([first])
        while waiting:
            node = waiting.popleft()
            for shard in sorted(shard for shard, leader in leads.items() if leader == node):
                for target in sorted(seen[shard].able - chains.keys()):
                    chains[target] = {**chains[node], shard: target}
                    waiting.append(target)
        last = min(chains, key=lambda node: (counts[node], len(chains[node])))
        if counts[last] <= most - 2:
            return chains[last]
    return {}


def _look(at: Remote) -> Seen:
    found = call(at, "GET", "/v1/cluster", needs="members")
    able = {m["name"] for m in found["members"] if m["role"] in ("leader", "follower") and not m.get("drained")}
    return Seen(found["leader"], frozenset(able))


def _transfer(at: Remote, move: Move) -> None:
    now = _look(at)
    if now.leader == move.target:
        return
    if now.leader != move.source or move.target not in now.able:
        raise Conflict(
            f"shard {move.shard} has changed: {now.leader} leads. The planned transfer from {move.source} to "
            f"{move.target} is not possible any more"
        )
    call(at, "POST", "/v1/cluster:transfer-leader", {"to": move.target}, needs="leader", timeout_s=_TRANSFER_S)


def _show(seen: Mapping[int, Seen], moves: list[Move], dry_run: bool, remote: Remote) -> None:
    leads = {shard: one.leader for shard, one in seen.items()} | {move.shard: move.target for move in moves}
    nodes = {node for one in seen.values() for node in (*one.able, one.leader)}
    counts = {node: sum(leader == node for leader in leads.values()) for node in sorted(nodes)}
    rows = [{"shard": move.shard, "from": move.source, "to": move.target} for move in moves]
    if remote.output == "json":
        emit_json({"dry_run": dry_run, "moves": rows, "leaders": counts})
        return
    if rows:
        table(rows, ("shard", "from", "to"))
        say()
    table([{"node": node, "leaders": count} for node, count in counts.items()], ("node", "leaders"))
    if dry_run:
        say(f"\nNothing was changed. {len(moves)} transfers would be made.")
    elif not moves:
        say("\nNo transfer makes the machines more alike.")
