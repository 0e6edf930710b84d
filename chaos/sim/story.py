"""What happened to one message, or on one node, in words: clients, nemesis and the entries of the log, by time."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.sim.cluster import SimCluster
from chaos.sim.history import Violation
from chaos.sim.machines import Machines
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Cancel, Command, Grant, SettleLeases
from hadelay.codec.entries import decode_entry
from hadelay.codec.wire import Malformed
from hadelay.ledger.lookup import find_entry
from hadelay.model import unpack_id

_LINES = 70


def tell(sim: Machines, violation: Violation) -> list[str]:
    """The last lines that concern these message ids (or else this node), and everything the nemesis did meanwhile."""
    ids, who = violation.ids, violation.who
    lines = [
        (at, actor, text)
        for at, actor, text, about in sim.history.notes
        if actor == "nemesis" or (about & ids if ids else not who or actor == who)
    ]
    if ids and isinstance(sim, SimCluster):
        lines += _entries(sim, ids)
    lines.sort(key=lambda line: line[0])
    return [f"{at:10.4f}  {actor:<9} {text}" for at, actor, text in lines[-_LINES:]]


def _entries(cluster: SimCluster, ids: frozenset[int]) -> Iterator[tuple[float, str, str]]:
    """Committed commands that name one of these messages: by id, by where it is, or by a grant that held it."""
    places = {unpack_id(i)[1:] for i in ids}
    for node in cluster.nodes()[:1]:
        places |= {(ref.hour, ref.index) for i in ids if (ref := find_entry(node.ledger, i)) is not None}
    grants: set[tuple[int, int]] = set()
    for index, (at, node_name, entry) in sorted(cluster.entries.items()):
        term = cluster.applied[index][0]
        try:
            _, now_ms, commands = decode_entry(entry)
            decoded = [(kind, decode(kind, body)) for kind, body in commands]
        except Malformed:
            continue  # of a fuzz client: refused
        for kind, command in decoded:
            text = _about(command, kind, places, grants, ids)
            if text:
                yield at, node_name, f"applies {index}, term {term}, at {now_ms}: {Command(kind).name} {text}"


def _about(
    command: object, kind: int, places: set[tuple[int, int]], grants: set[tuple[int, int]], ids: frozenset[int]
) -> str:
    if isinstance(command, Grant):
        if any(place in places for place in zip(command.hours.tolist(), command.indexes.tolist(), strict=True)):
            grants.add((command.term, command.seq))
            return f"{command.term}.{command.seq} to {command.consumer} for {command.lease_ms} ms"
    elif isinstance(command, SettleLeases):
        rows = [row for row in command.rows.tolist() if (row[3], row[4]) in places]
        if rows:
            return f"{rows} {command.value_ms}"
    elif isinstance(command, Cancel):
        if any(int(i) in ids for i in command.ids):
            return "of it"
    elif kind == Command.EXPIRE and isinstance(command, list):
        named = [key for key in command if key in grants]
        if named:
            return f"{named}"
    return ""
