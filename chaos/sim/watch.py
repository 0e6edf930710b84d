"""Observers of a simulated cluster as it runs: of every applied entry, every vote, every failed sync."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

from chaos.sim.history import Violation
from chaos.sim.machines import Machines, Process
from chaos.sim.network import NetworkProfile
from chaos.sim.receiver import Receiver
from chaos.sim.runtime import SimWorld
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import decode_entry, members_in
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.raft.node import RaftNode
from hadelay.server.clustertime import NEAR_MS
from hadelay.server.node import Node
from hadelay.settings.node import RaftSettings

#: Of one entry in so many the results are compared as well.
_SAMPLE = 16


class Watch(Machines):
    """What the nodes applied, granted and promised so far, and each broken promise. Base of SimCluster."""

    def __init__(self, world: SimWorld, names: tuple[str, ...], profile: NetworkProfile | None, **more: Any) -> None:
        super().__init__(world, names, profile, quiet_s=RaftSettings().election_min_ms / 1000, **more)
        #: The receiver of the limited topic's webhook; None: it has none.
        self.receiver: Receiver | None = None
        #: What each index was applied as, by whoever was first: (term, crc of entry, crc of results).
        self.applied: dict[int, tuple[int, int, int]] = {}
        #: The entries themselves: when they were first applied, where, and what.
        self.entries: dict[int, tuple[float, str, bytes]] = {}
        #: When a grant was first applied, its cluster time, and the term it was committed in.
        self.grants: dict[tuple[int, int], tuple[float, int, int]] = {}
        #: When leases that were extended end: (term, seq, position) → cluster time.
        self.extended: dict[tuple[int, int, int], int] = {}
        #: When an entry of that term was first applied.
        self.term_began: dict[int, float] = {}
        #: When an entry was proposed; (true seconds, now_ms) of those that were committed.
        self.proposed: dict[bytes, float] = {}
        self.stamps: list[tuple[float, int]] = []
        #: When a new leader was first seen.
        self.elected: list[float] = []
        #: When the cluster switched to the feature level of this code.
        self.switched = float("inf")
        #: When cluster time was taken from the wall clocks, because no node knew it any more.
        self.cold_starts: list[float] = []
        #: How wrong, at most, a node may have been that learnt cluster time from slow answers only.
        self.doubt_ms = 0.0

    def _observe(self, process: Process, node: Node) -> None:
        """Every apply of every node goes through here."""
        machine = node.raft.machine
        apply = machine.apply

        def observed(index: int, term: int, command: bytes) -> Any:
            results = apply(index, term, command)
            # Results are costly to compare, and equal states give equal ones: a sample is enough.
            mark = (term, zlib.crc32(command), 0 if index % _SAMPLE else zlib.crc32(pickle.dumps(results)))
            first = self.applied.setdefault(index, mark)
            if first is mark:
                self.entries[index] = (self.world.now, node.name, bytes(command))
                self._committed(index, term, command, results, node)
            else:
                text = f"{node.name} applied another entry {index}"
                self.decide("I12 divergence, entries", first[:2] != mark[:2], text, who=node.name)
                if not index % _SAMPLE and first[:2] == mark[:2]:
                    text = f"{node.name} applied entry {index} with other results"
                    self.decide("I12 divergence, results", first != mark, text, who=node.name)
            return results

        machine.apply = observed  # type: ignore[method-assign]
        propose = node.raft.propose

        def proposed(command: bytes, done: Any) -> None:
            # What waits for a transfer to end passes here twice; the first time is the stamp's.
            self.proposed.setdefault(bytes(command), self.world.now)
            propose(command, done)

        node.raft.propose = proposed  # type: ignore[method-assign]
        start_cold = node.clock._start_cold

        def started(agreed: float | None, mono: float) -> None:
            start_cold(agreed, mono)
            if node.clock.ready:
                self.note(f"takes cluster time from the wall clocks: {node.clock.exact(mono):.1f}", node.name)
                self.cold_starts.append(self.world.now)

        node.clock._start_cold = started  # type: ignore[method-assign]
        learn = node.clock._learn

        def learnt(least: float, most: float, mono: float) -> bool:
            ready = learn(least, most, mono)
            low, high = node.clock._told
            if ready and high - low > NEAR_MS:
                self.note(f"learns cluster time from slow answers: to {(high - low) / 2:.1f} ms", node.name)
                self.history.count("learnt slowly")
                self.doubt_ms = max(self.doubt_ms, (high - low) / 2)
            return ready

        node.clock._learn = learnt  # type: ignore[method-assign]

    def _committed(self, index: int, term: int, entry: bytes, results: list[Any], node: Node) -> None:
        """An entry that counts: when its leader wrote cluster time into it, what it grants, and on whose disks it is
        (I14: on those of a majority, or it may be lost with an answer that was given)."""
        _, now_ms, commands = decode_entry(entry)
        at = self.proposed.get(bytes(entry))
        if at is not None:
            self.stamps.append((at, now_ms))
        self.term_began.setdefault(term, self.world.now)
        for (kind, body), result in zip(commands, results, strict=True):
            if kind in (Command.EXTEND, Command.ACK, Command.SETTLE) and isinstance(result, LeaseResult):
                self._note_leases(decode(kind, body), kind, result)
            elif kind == Command.GRANT:
                grant = decode(kind, body)
                self.grants.setdefault((grant.term, grant.seq), (self.world.now, now_ms, term))
                if (grant.consumer, grant.request_id) in self.history.hung_up:
                    text = f"grant {grant.term}.{grant.seq} is for {grant.consumer}, who hung up while it waited"
                    self.violate(Violation("hang-ups", text, who=node.name))
            elif kind == Command.FEATURE:
                self.switched = min(self.switched, self.world.now)
        for machine in self.machines.values():
            if machine.process is not None and machine.process.raft is not None:
                machine.had = max(machine.had, machine.process.raft.journal.synced_index)
        having = {name for name, m in (*self.machines.items(), *self.retired.items()) if m.had >= index}
        votes = node.raft.membership.electorates(index)
        stored = any(len(voters & having) > len(voters) // 2 for voters in votes)
        text = f"entry {index} counts as committed, and only the disks of {sorted(having)} have it"
        self.decide("I14 durability, majority", not stored, text)

    def _note_leases(self, command: Any, kind: int, result: LeaseResult) -> None:
        """Leases that were extended, and webhooks' leases that ended with an ack."""
        if kind == Command.SETTLE:
            kind, command = command
        for row, outcome in zip(command.rows.tolist(), result.outcomes, strict=True):
            if kind == Command.EXTEND and outcome == LeaseOutcome.DONE:
                self.extended[row[:3]] = result.until_ms
            elif kind == Command.ACK and outcome == LeaseOutcome.DONE and self.receiver is not None:
                self.receiver.settled(row[:3])

    def _watch_process(self, process: Process, raft: RaftNode) -> None:
        self._watch_members(process.name, raft)
        if raft.is_leader and raft.term not in self.safety.leaders:
            self.elected.append(self.world.now)

    def _watch_members(self, name: str, raft: RaftNode) -> None:
        """I13: majorities go by lists of the members that are in the log."""
        if raft.applier.installing:
            return  # the state may be the snapshot's, and the log not yet
        at, members = raft.machine.members()
        since, counted = raft.membership.applied_list
        wrong = [since] if since != at or (members and counted != members) else []
        for since, counted in raft.membership.appended_lists:
            self.history.count("checked I13 log safety, members")
            if since > raft.last_index or members_in(raft.journal.entries(since, 1)[0][0]) != counted:
                wrong.append(since)
        if wrong:
            text = f"{name} goes by a list of the members, of entry {wrong[0]}, that its log does not have"
            self.violate(Violation("I13 log safety, members", text, who=name))
