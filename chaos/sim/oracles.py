"""Differential oracles on running nodes: each compares a value that a node updates with every entry with the same value
computed anew, or with the value of another node. chaos/sim/views.py does so for answers to readers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chaos.sim import ledgercheck, savedcheck
from chaos.sim.machines import Machines
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import decode_entry
from hadelay.errors import DamagedFile
from hadelay.ledger import checkpoint
from hadelay.ledger.state import Ledger
from hadelay.raft.part import Peer
from hadelay.server import checkpoints
from hadelay.server.clustertime import NEAR_MS

if TYPE_CHECKING:
    from hadelay.server.node import Node

#: `_DIGESTS`: interval, in entries, of comparing states between nodes. `_RECOUNTS`: interval, in entries, of recounting
#: a ledger.
_DIGESTS, _RECOUNTS = 48, 96


def digest(ledger: Ledger) -> int:
    """Checksum of the whole ledger: equal ledgers have equal checksums."""
    core, rows = checkpoint.dump(ledger)
    found = zlib.crc32(core)
    for table in rows.values():
        for key, value in table:
            found = zlib.crc32(value, zlib.crc32(key, found))
    return found


class Oracles:
    """Oracles of one cluster. `observe` attaches them to each node that starts."""

    def __init__(self, watch: Machines) -> None:
        self.watch, self.decide = watch, watch.decide
        #: Index of a sampled entry → (digest of the ledger after it, first node that applied it).
        self._digests: dict[int, tuple[int, str]] = {}
        self._recounted: set[int] = set()

    def observe(self, node: Node) -> None:
        self._observe_clock(node)
        apply, begin, agreed = node.raft.machine.apply, node.checkpoints.begin, node.raft.membership.agreed
        since, storage, disk = 0, node.storage, self.watch.machines[node.name].disk

        def applied(index: int, term: int, command: bytes) -> Any:
            nonlocal since, storage
            if node.storage is not storage:  # a snapshot replaced the ledger: count its bytes anew
                since, storage = 0, node.storage
            before = {topic.number: (topic.pending, topic.bytes) for topic in node.ledger.topics.all if _bounded(topic)}
            results = apply(index, term, command)
            since += max(len(command), checkpoints._ENTRY_BYTES)
            text = f"{node.name} counts {node.checkpoints.bytes_since} bytes since its checkpoint, and it is {since}"
            self.decide("I2 conservation, log since checkpoint", node.checkpoints.bytes_since < since, text)
            with disk.spared():
                if before and all(kind == Command.PUBLISH for kind, _ in decode_entry(command)[2]):
                    self._look_at_quotas(node, before)
                if not index % _DIGESTS:
                    self._compare(index, node)
                if not index % _RECOUNTS and index not in self._recounted:
                    self._recounted.add(index)
                    self._recount(index, node)
            return results

        def begun(then: Callable[[], None] = lambda: None) -> None:
            nonlocal since
            was, storage, began = node.storage.checkpointing, node.storage, False
            rows = savedcheck.dumped(node.ledger)

            def durable() -> None:
                if began and node.storage is storage:
                    self._look_at_rows(node, rows)
                then()

            begin(durable)
            if node.storage.checkpointing and not was:
                since, began = 0, True

        def counted(peers: Any) -> bool:
            some = list(peers)
            found = agreed(some)
            self._look_at_majority(node, some, found)
            return found

        node.raft.machine.apply = applied  # type: ignore[method-assign]
        node.checkpoints.begin = begun  # type: ignore[method-assign]
        node.raft.membership.agreed = counted  # type: ignore[method-assign]

    def _observe_clock(self, node: Node) -> None:
        """Wrap methods of the node's clock, to record cold starts, and cluster time that was learned from slow
        answers."""
        watch, start_cold = self.watch, node.clock._start_cold

        def started(agreed: float | None, mono: float) -> None:
            start_cold(agreed, mono)
            if node.clock.ready:
                watch.note(f"takes cluster time from the wall clocks: {node.clock.exact(mono):.1f}", node.name)
                watch.cold_starts.append(watch.world.now)

        node.clock._start_cold = started  # type: ignore[method-assign]
        learn = node.clock._learn

        def learnt(least: float, most: float, ahead_ms: int, mono: float) -> bool:
            ready = learn(least, most, ahead_ms, mono)
            low, high = node.clock._bounds
            if ready and high - low > NEAR_MS:
                watch.note(f"learns cluster time from slow answers: to {(high - low) / 2:.1f} ms", node.name)
                watch.history.count("learnt slowly")
                watch.doubt_ms = max(watch.doubt_ms, (high - low) / 2)
            return ready

        node.clock._learn = learnt  # type: ignore[method-assign]

    def _compare(self, index: int, node: Node) -> None:
        """I12: after the same entry all nodes have the same state, whether they applied all entries, began with a
        checkpoint, or got a snapshot."""
        found = digest(node.ledger)
        first, other = self._digests.setdefault(index, (found, node.name))
        text = f"after entry {index}, {node.name} has another state than {other}"
        self.decide("I12 divergence, states", found != first, text, who=node.name)

    def _recount(self, index: int, node: Node) -> None:
        """I2, during a run: the counters of the ledger agree with its entries."""
        wrong = ""
        try:
            ledgercheck.check(node.ledger)
        except AssertionError as error:
            wrong = f"{node.name}, entry {index}: {error}"
        except DamagedFile:
            if node.name not in self.watch.rotten:
                raise
            return  # skip the check: it reads more entries than apply does, and met a damaged one
        self.decide("I2 conservation", bool(wrong), wrong, who=node.name)

    def _look_at_rows(self, node: Node, wanted: dict[tuple[bytes, bytes], bytes]) -> None:
        """I2: the durable rows of a checkpoint are those that the ledger had when the checkpoint began."""
        found = savedcheck.stored(node.storage)
        wrong = [key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)]
        text = f"{node.name} stored other rows than it had: {sorted(wrong)[:3]}"
        self.decide("I2 conservation, checkpoint", bool(wrong), text, who=node.name)

    def _look_at_quotas(self, node: Node, before: dict[int, tuple[int, int]]) -> None:
        """Quotas: no publish adds messages or bytes to a topic beyond its quota; a redrive or an ack's result may."""
        for number, (pending, size) in before.items():
            topic = node.ledger.topics[number]
            most, most_bytes = topic.settings.max_messages, topic.settings.max_bytes
            over = most is not None and topic.pending > max(most, pending)
            over |= most_bytes is not None and topic.bytes > max(most_bytes, size)
            text = f"{topic.name} has {topic.pending} messages and {topic.bytes} bytes, of {most} and {most_bytes}"
            self.decide("quotas", over, text, who=node.name)

    def _look_at_majority(self, node: Node, peers: list[Peer], found: bool) -> None:
        """Check that a majority that a leader counts consists of admitted nodes: it must not need a node that is not
        admitted."""
        if found:
            membership, blank = node.raft.membership, [peer.name for peer in peers if self.is_blank(peer)]
            mine = node.raft.journal.admitted and membership.votes
            sure = mine + sum(peer.name in membership.voters and peer.name not in blank for peer in peers)
            text = f"{node.name} counts a majority that needs {blank}, which are not admitted"
            self.decide("what leaders count, majority", sure < membership.majority, text, who=node.name)

    def nothing_forgotten(self, node: Node) -> None:
        """Check that the sweeper finds no due message that is missing from the timing wheels, and no broken link
        between entries, and that each localIndex it recounted was right; except on a node with flipped bits."""
        if node.name not in self.watch.rotten:
            found, links = node.delivery.sweeper_found, node.delivery.damaged_links
            text = f"{node.name} found {found} by the sweeper, {links} broken links"
            self.decide("forgotten", bool(found or links), text, who=node.name)
            wrong = node.delivery.wrong_cursors
            text = f"the sweeper of {node.name} found {wrong} localIndexes wrong"
            self.decide("forgotten, localIndex", bool(wrong), text, who=node.name)

    def is_blank(self, peer: Peer) -> bool:
        """Whether the peer's running process is the incarnation that the node knows, and is not admitted."""
        process = self.watch.process(peer.name)
        raft = process.raft if process is not None else None
        return raft is not None and raft.journal.incarnation == peer.incarnation and not raft.journal.admitted


def _bounded(topic: Any) -> bool:
    settings = topic.settings
    return topic.exists and (settings.max_messages is not None or settings.max_bytes is not None)
