"""Checks of the nodes once all have applied the same entries: nodes have equal files, their states are consistent, and
their metrics agree with the history."""

import zlib
from typing import Any

from chaos.sim import cursorcheck, ledgercheck, memorycheck, transfers
from chaos.sim.batches import CALLBACKS, MEMBERS
from chaos.sim.cluster import SimCluster
from chaos.sim.door import whole
from chaos.sim.evidence import WAITING, found_by_key_of, where
from chaos.sim.fanout import OUTCOMES
from chaos.sim.fanout import TOPIC as EVENTS
from chaos.sim.fuzz import TOPICS
from chaos.sim.owndelays import TOPIC as LATER
from chaos.sim.scheduler import PATIENT, TOPIC
from chaos.sim.uniques import TOPIC as ONCE
from hadelay.ledger import checkpoint
from hadelay.ledger.hours.transitions import FLAG_KEYED
from hadelay.ledger.messages import idempotency
from hadelay.ledger.messages.copies import published_id
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, SEPARATOR, Event
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.storage.store import Storage
from hadelay.storage.tables import HOUR_STATES


def measured(node: Node) -> dict[str, Any]:
    """Name of each metric family without its prefix → its values, as in /metrics."""
    return {family.name.removeprefix("hadelay_"): values for family, values in whole(NodeMetrics(node).collect())}


def honest(cluster: SimCluster) -> None:
    """I18: each counter in /metrics lies between the numbers of confirmed and of all requests of clients."""
    history = cluster.history
    stored = len({m.id for m in history.messages if m.id is not None})
    acked = len({h.id for h in history.hand_outs if h.acked is not None})
    asked = len({h.id for h in history.hand_outs if h.ack_invoked is not None})
    # A publish that is repeated after its idempotency key was forgotten is stored again.
    stored_again = 3 * sum(message.repeated_late for message in history.messages)
    # Look the messages up on one node only: all nodes have equal states by now.
    ids = {m.id for m in history.messages if m.id is not None}
    waiting = sum(where(node, i)[1] in WAITING for node in cluster.nodes()[:1] for i in ids)
    for node in cluster.nodes():
        values = measured(node)
        messages, settled = values["messages"], values["settled_messages_total"]
        others = (*TOPICS, TOPIC, PATIENT, EVENTS, ONCE, LATER, OUTCOMES, MEMBERS, CALLBACKS, *transfers.TOPICS)
        aside = [topic for topic in node.ledger.topics.all if topic.name.partition(SEPARATOR)[0] in others]
        published, done = sum(t.published for t in aside), sum(t.settled[Event.ACKED] for t in aside)
        bounds = {
            "published": (values["published_messages_total"] - published, stored, len(history.messages) + stored_again),
            "acked": (settled["acked",] - done, acked, asked),
        }
        for name, (value, least, most) in bounds.items():
            text = f"{node.name} says {value} were {name}, and it is {least} to {most}"
            history.decide("I18 metrics honesty", not least <= value <= most, text, who=node.name)
        broken = messages["waiting",] + messages["blocked",] + messages["leased",] < waiting
        text = f"{node.name} says {messages}, and {waiting} wait or are leased"
        history.decide("I18 metrics honesty, waiting", broken, text, who=node.name)


def diverged(cluster: SimCluster) -> None:
    """I12: at one applied index, all nodes have byte-identical files, equal state, and one checksum of all entries."""
    first, *others = cluster.nodes()
    want = fingerprint(first)
    for node in others:
        have = fingerprint(node)
        parts = [part for part in want if have.get(part) != want[part]]
        values = "; ".join(f"{have.get(part)!r:.200} {want[part]!r:.200}" for part in parts)
        text = f"{node.name} and {first.name} differ in {', '.join(parts)}: {values}"
        cluster.history.decide("I12 divergence, replicas", bool(parts), text, who=node.name)


def fingerprint(node: Node) -> dict[str, Any]:
    return {"applied index": node.raft.applied_index, **state_parts(node.ledger, node.storage)}


def state_parts(ledger: Ledger, storage: Storage) -> dict[str, Any]:
    """Parts of a node's state that have to be equal on all nodes: answers to `check replicas`, and what readers see."""
    core, rows = checkpoint.dump(ledger)
    per_hour = {int.from_bytes(key, "big"): value for key, value in rows.pop(HOUR_STATES)}
    hours = storage.hours
    parts: dict[str, Any] = {
        "chain": ledger.chain,
        "state": zlib.crc32(repr(rows).encode(), zlib.crc32(core)),
        "file checksums": hours.checksums(),
        "tables": zlib.crc32(repr(_tables(storage)).encode()),
        "keys": zlib.crc32(repr(_keys(ledger)).encode()),
    }
    for hour in hours.hours():
        parts[f"entries of {hour}"] = zlib.crc32(hours.entries(hour, slice(None)).tobytes())
        parts[f"events of {hour}"] = zlib.crc32(hours.events(hour).tobytes())
        parts[f"state of {hour}"] = zlib.crc32(per_hour.get(hour, b""))
    return parts


def _tables(storage: Storage) -> list[list[tuple[bytes, bytes]]]:
    names = (
        b"ackres", b"place", b"key", b"keyof", b"ttl", b"ttlof", b"dead", b"sched", b"schedst", b"schednext",
        b"schedof", b"group", b"groupq", b"groupof", b"uniq", b"uniqend",
        b"batch", b"batchkey", b"batchof", b"batchend", b"batchfail",
    )  # fmt: skip
    return [storage.tables.range(name, limit=100_000) for name in names]


def _keys(ledger: Ledger) -> list[list[tuple[bytes, bytes]]]:
    """Remembered idempotency keys with their answers."""
    epochs = (ledger.key_epoch - 1, ledger.key_epoch)
    return [ledger.tables.range(idempotency.table(epoch), limit=100_000) for epoch in epochs]


def conserved(cluster: SimCluster) -> None:
    """I2: on every node bitmaps, grants and counters agree with the entries: published = open + ended, per topic; and a
    leader's counters in memory agree with the objects that they count."""
    for node in cluster.nodes():
        wrong = ""
        try:
            ledgercheck.check(node.ledger)
            memorycheck.check_node(node)
            cursorcheck.check_node(node)
        except AssertionError as error:
            wrong = f"{node.name}: {error}"
        cluster.history.decide("I2 conservation", bool(wrong), wrong, who=node.name)


def nothing_forgotten(cluster: SimCluster) -> None:
    """Check that no node's sweeper found a due message that the timing wheels had forgotten
    (Oracles.nothing_forgotten)."""
    for node in cluster.nodes():
        cluster.oracles.nothing_forgotten(node)


def one_per_key(cluster: SimCluster) -> None:
    """Check that at most one message per client key is pending, and that a look-up by key finds it."""
    for node in cluster.nodes():
        ledger = node.ledger
        for hour in (hour for hour in ledger.store.hours() if hour < DEAD_HOURS):
            rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
            rows = rows[(rows["flags"] & FLAG_KEYED != 0) & ledger.topics.alive(rows)]
            for first_id, index in rows[["first_id", "index"]].tolist():
                if ledger.outcome_of(hour, index)[0] is None:
                    # For a copy for a subscription, expect the published message's id: a look-up by key returns that
                    # id.
                    published = published_id(ledger, first_id)
                    found = found_by_key_of(ledger, published or first_id)
                    text = f"{first_id:x} is pending and its key finds {found:x}"
                    cluster.history.decide("one per key", found != published, text, first_id, found, who=node.name)
