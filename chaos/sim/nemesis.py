"""Faults of a run, drawn from its seed: each run draws some fault families and mixes them (swarm testing)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from chaos.sim.backups import Backups
from chaos.sim.cluster import SimCluster
from chaos.sim.logsafety import FIRST_ANSWER
from chaos.sim.machines import Machines
from chaos.sim.operators import Operator
from chaos.sim.workload import HOUR_S
from hadelay.raft import messages
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import RaftTuning

#: Fault families, and the probability that a run has each.
FAMILIES = {
    "reset": 0.6,
    "partition": 0.5,
    "one_way": 0.4,
    "slow_link": 0.3,
    "pause": 0.4,
    "kill": 0.5,
    "crash_at_io": 0.4,
    "power_cut": 0.4,
    "power_cut_all": 0.3,
    "clock_step": 0.5,
    "slow_sync": 0.4,
    "failed_sync": 0.2,
    "wipe": 0.12,
    "transfer": 0.3,
    "stop": 0.2,
    "full_disk": 0.1,
    "lost_answers": 0.3,
    "members": 0.15,
    "power_at_send": 0.3,
    "rot": 0.3,
    "backup": 0.04,
    "overload": 0.3,
    "held_answers": 0.25,
}
#: Fault families that a run with a single node leaves out: they need a second node, for example one to ask for the
#: time.
_NOT_ALONE = {"reset", "partition", "one_way", "slow_link", "transfer", "wipe", "clock_step", "rot", "held_answers"}
_LATER = {"members", "power_at_send", "rot", "backup", "overload", "held_answers"}
#: Kinds of frames in which the sender promises that data are on its disk.
_PROMISES = {
    "vote": messages.VOTE_REPLY,
    "answer": messages.APPEND_REPLY,
    "snapshot": messages.SNAPSHOT_DONE,
    "first answer of a term": FIRST_ANSWER,
}


class Nemesis:
    """Source of faults: injects faults until time `until`, then heals all. At most a minority of clocks is wrong at a
    time, and at most one disk is ever lost: no promise covers more."""

    def __init__(
        self, cluster: Machines, until: float, families: dict[str, float] | None = None, *, pace_s: float = 1.0,
        down: int = 1,
    ) -> None:  # fmt: skip
        """families: probability of each fault family; None: FAMILIES. pace_s: mean seconds between two faults. down:
        limit of nodes that one fault may stop."""
        self.cluster, self.world, self.until = cluster, cluster.world, until
        self.random = random.Random(f"{cluster.seed} nemesis")
        chances = FAMILIES if families is None else families
        self.faults: list[tuple[str, Callable[[], None]]] = [
            (name, getattr(self, name))
            for name, chance in chances.items()
            if self._drawn(name) < chance and (len(cluster.names) > 1 or name not in _NOT_ALONE)
        ]
        names = [name for name, _ in self.faults]
        # With wrong clocks, keep three members: one of two clocks is not a minority.
        least = 3 if "clock_step" in names else 1
        self.operator = Operator(cluster, least) if "members" in names and isinstance(cluster, SimCluster) else None
        self.backups = Backups(cluster) if "backup" in names and isinstance(cluster, SimCluster) else None
        self.pace_s, self.down = pace_s, down
        self.strikes = 0
        #: Names of the fault families that have struck so far.
        self.struck: set[str] = set()
        self.wiped = False
        #: Name of the node with flipped bits.
        self.rotting = ""
        #: Functions that flip the bits of this node back.
        self._unrot: list[Callable[[], None]] = []
        self.liar = ""

    def _drawn(self, name: str) -> float:
        """Draw the random number that decides whether the run has this fault family. Newer families have their own
        random streams, so that old seeds keep their runs."""
        rng = random.Random(f"{self.cluster.seed} {name}") if name in _LATER else self.random
        return rng.random()

    def members(self) -> None:
        assert self.operator is not None
        self.operator.strike()

    def backup(self) -> None:
        assert self.backups is not None
        self.world.after(0.0, self.backups.back_up)

    def start(self) -> None:
        self.note("faults of this run: " + (", ".join(name for name, _ in self.faults) or "none"))
        self.world.after(self.random.choice((0.001, 0.1, 0.2)) * self.until, self._strike)
        self.world.at(self.until, self.heal)

    def note(self, text: str) -> None:
        self.cluster.note(text)

    def _strike(self) -> None:
        if self.world.now >= self.until:
            return
        if self.faults:
            part = f"f{self.strikes}"
            self.strikes += 1
            self.random = random.Random(f"{self.cluster.seed} {part}")
            name, fault = self.random.choice(self.faults)
            alone = len(self.cluster.names) == 1 and name in _NOT_ALONE
            if self.cluster.parts.take(part) and not alone:
                self.cluster.history.count(name)
                self.struck.add(name)
                fault()
            self.random = random.Random(f"{self.cluster.seed} after {part}")
        self.world.after(self.random.expovariate(1 / self.pace_s), self._strike)

    def heal(self) -> None:
        self.note("everything is healed")
        self.cluster.net.heal()
        self.cluster.net.profile.hiccup = 0.0
        self.cluster.lost_answers = 0.0
        self.cluster.safety.at_send.clear()
        self._set_max_waiting(RaftTuning().max_waiting)
        for undo in reversed(self._unrot):  # flip the bits back: the final checks read every file
            undo()
        for name, machine in self.cluster.machines.items():
            self._mend_disk(name)
            machine.disk.crash_in = 0
            self.cluster.step_clock(name, 0)
            if machine.process is not None:
                machine.process.runtime.resume()
            self.cluster.start(name)
        syncing_until = [machine.disk.busy_until for machine in self.cluster.machines.values()]
        self.cluster.healed_at = max([self.world.now, *syncing_until])

    def _node(self) -> str:
        """Name of a node to hit with a fault: the leader in half of the cases."""
        leader = self.cluster.leading()
        if leader is not None and self.random.random() < 0.5:
            return leader.name
        return self.random.choice(self.cluster.names)

    def _nodes(self) -> list[str]:
        """Names of the nodes to hit: one node, or more, up to the number that may be down together."""
        names = [self._node()]
        others = [name for name in self.cluster.names if name not in names]
        return names + self.random.sample(others, min(self.random.randrange(self.down), len(others)))

    def _pair(self) -> tuple[str, str]:
        a = self._node()
        return a, self.random.choice([name for name in self.cluster.names if name != a])

    def _later(self, low: float, high: float, fn: Callable[..., None], *args: object) -> None:
        self.world.after(self.random.uniform(low, high), fn, *args)

    def reset(self) -> None:
        a, b = self._pair()
        self.note(f"connection {a}–{b} reset")
        self.cluster.net.reset(a, b)

    def partition(self) -> None:
        names = list(self.cluster.names)
        if self.random.random() < 0.5:
            alone = {self._node()}
        else:
            alone = set(self.random.sample(names, len(names) // 2))
        self.note(f"partition: {', '.join(sorted(alone))} alone")
        for a, b in product(sorted(alone), names):
            if b not in alone:
                self.cluster.net.cut(a, b)
                self.cluster.net.cut(b, a)
        self._later(0.3, 5.0, self._heal_net)

    def one_way(self) -> None:
        a, b = self._pair()
        self.note(f"nothing passes from {a} to {b}")
        self.cluster.net.cut(a, b)
        self._later(0.3, 5.0, self._heal_net)

    def slow_link(self) -> None:
        a, b = self._pair()
        rate = self.random.choice((5e3, 5e4, 1e6))
        self.note(f"{a} to {b} carries {rate:.0f} bytes/s")
        self.cluster.net.slow[a, b] = rate
        self._later(0.3, 4.0, self._heal_net)

    def _heal_net(self) -> None:
        self.note("network healed")
        self.cluster.net.heal()

    def lost_answers(self) -> None:
        self.note("every third answer to a client is lost")
        self.cluster.lost_answers = 0.3
        self._later(0.3, 3.0, setattr, self.cluster, "lost_answers", 0.0)

    def pause(self) -> None:
        for name in self._nodes():
            process = self.cluster.process(name)
            if process is not None and not process.runtime.paused:
                seconds = self.random.choice((0.05, 0.3, 1.0, 3.0)) * self.random.uniform(0.5, 1.5)
                self.note(f"{name} is paused for {seconds:.2f} s")
                process.runtime.pause()
                self.world.after(seconds, process.runtime.resume)

    def _take_down(self, how: str, end: Callable[[str], None], names: Sequence[str], back_s: float) -> None:
        """End the processes of these nodes, and start each again within `back_s` seconds."""
        self.note(f"{how} {', '.join(names)}")
        for name in names:
            end(name)
            self._later(0.02, back_s, self.cluster.start, name)

    def kill(self) -> None:
        self._take_down("kill -9", self.cluster.kill, self._nodes(), 3.0)

    def stop(self) -> None:
        self._take_down("clean stop of", self.cluster.stop, [self._node()], 1.0)

    def power_cut(self) -> None:
        self._take_down("power cut of", self.cluster.power_cut, self._nodes(), 3.0)

    def power_cut_all(self) -> None:
        self._take_down("power cut of", self.cluster.power_cut, self.cluster.names, 1.5)

    def crash_at_io(self) -> None:
        name = self._node()
        steps = self.random.choice((1, 3, 10, 30))
        machine = self.cluster.machines[name]
        if not machine.disk.crash_in:
            self.note(f"{name} will crash {steps} I/O steps from now")
            machine.disk.crash_in = steps

    def power_at_send(self) -> None:
        """Cut the power of a node just after it sends a frame that promises that data are on its disk."""
        name = self._node()
        what, kind = self.random.choice(sorted(_PROMISES.items()))
        self.note(f"the power of {name} will be cut when it sends its next {what}")
        wait_s = self.random.uniform(0.02, 3.0)

        def strike() -> None:
            self.note(f"power cut of {name}, which has just sent its {what}")
            self.cluster.history.count(f"power cut after a {what}")
            self.cluster.power_cut(name)
            self.world.after(wait_s, self.cluster.start, name)

        self.cluster.safety.at_send[name, kind] = strike

    def overload(self) -> None:
        """Make Raft refuse proposals for a while, as if too many waited for their commit; the leader stays leader."""
        most = self.random.choice((0, 1))
        self.note(f"nodes refuse proposals while {most} wait for their commit")
        self._set_max_waiting(most)
        self._later(0.05, 0.4 if not most else 2.0, self._set_max_waiting, RaftTuning().max_waiting)

    def _set_max_waiting(self, most: int) -> None:
        for raft in self.cluster.rafts():
            raft.config = replace(raft.config, max_waiting=most)

    def held_answers(self) -> None:
        """Delay all frames from a follower to the leader, in most cases until after an election; they arrive
        afterwards."""
        leader = self.cluster.leading()
        others = [name for name in self.cluster.names if leader is not None and name != leader.name]
        asked = self.cluster.process(leader.name) if leader is not None else None
        if leader is None or asked is None or not others:
            return
        name = self.random.choice(others)
        self.note(f"answers of {name} to {leader.name} are delayed")
        self.cluster.net.cut(name, leader.name)
        if self.random.random() < 0.7:
            rest = [other for other in others if other != name] or [name]
            self._later(0.02, 0.3, self.cluster.transfer, asked, self.random.choice(rest))
        self._later(0.3, 1.5, self._heal_net)

    def transfer(self) -> None:
        leader, asked = self.cluster.leading(), self.cluster.any_process(self.random)
        if leader is not None and asked is not None:
            others = [name for name in self.cluster.names if name != leader.name]
            to = self.random.choice([*others, None])
            self.note(f"{asked.name} is asked to have {leader.name} hand over to {to or 'anyone'}")
            if to is not None and self.random.random() < 0.3:
                self.note(f"frames of {leader.name} to {to} are delayed")
                self.cluster.net.cut(leader.name, to)
                self._take_over_late(leader, to, self.world.now + 1.5)
            self.cluster.transfer(asked, to)

    def _take_over_late(self, leader: RaftNode, to: str, until: float, begun: bool = False) -> None:
        """Deliver a leader's delayed request to take over once its transfer has failed. Frames to the leader are cut,
        so the leader does not learn that the other node takes over."""
        under_way = leader.transfers.target is not None
        if self.world.now < until and (under_way or not begun):
            self.world.after(0.02, self._take_over_late, leader, to, until, begun or under_way)
        else:
            for name in self.cluster.names:
                self.cluster.net.cut(name, leader.name)
            self.cluster.net.mend((leader.name, to))
            self._later(0.3, 1.0, self._heal_net)

    def clock_step(self) -> None:
        """Set one wall clock wrong, by up to hours; always that of the same node: other nodes use a clock's time for
        ten seconds, and promises do not cover two wrong clocks."""
        self.liar = name = self.liar or self._node()
        if name not in self.cluster.machines:
            return  # skip the fault: its node was removed from the cluster
        sign = self.random.choice((-1, 1))
        ms = sign * self.random.choice((40, 400, 5_000, 60_000, HOUR_S * 1000, 25 * HOUR_S * 1000))
        self.note(f"the wall clock of {name} is {ms:+} ms off")
        self.cluster.step_clock(name, ms)

    def _spoil(self, name: str, what: str, low: float, **state: float) -> None:
        """Set attributes of a node's disk, for a random time from `low` to 3 seconds."""
        self.note(what)
        for attribute, value in state.items():
            setattr(self.cluster.machines[name].disk, attribute, value)
        self._later(low, 3.0, self._mend_disk, name)

    def slow_sync(self) -> None:
        name, delay_s = self._node(), self.random.choice((0.005, 0.03, 0.2, 1.5))
        self._spoil(name, f"a sync of {name} takes {delay_s} s", 0.2, sync_delay_s=delay_s)

    def failed_sync(self) -> None:
        name = self._node()
        if self.cluster.process(name) is not None:
            self._spoil(name, f"the next sync of {name} fails", 1.0, fail_syncs=1)

    def full_disk(self) -> None:
        name, left = self._node(), self.random.choice((0, 10_000, 600_000))
        capacity = self.cluster.machines[name].disk.used + left
        self._spoil(name, f"the disk of {name} has {left} bytes left", 0.5, capacity=capacity)

    def _mend_disk(self, name: str) -> None:
        machine = self.cluster.machines.get(name) or self.cluster.retired[name]
        disk = machine.disk
        disk.sync_delay_s, disk.fail_syncs, disk.capacity = disk.usual_sync_s, 0, 1 << 30

    def _can_spare_a_disk(self) -> bool:
        """Whether the cluster survives the loss of a disk: all other nodes must be admitted, and, if members change,
        enough voters must be left."""
        cluster = self.cluster
        if self.operator is None or not self.operator.begun:
            return cluster.admitted == set(cluster.names)
        leader = cluster.leading()
        voters = leader.membership.voters if leader is not None else frozenset()
        return voters <= cluster.admitted and len(voters) >= (4 if "remove" in cluster.changing else 3)

    def wipe(self) -> None:
        """Empty a disk, at most once per run, and only if every other disk is whole and admitted. Otherwise two of
        three nodes might wait for each other without voting: a founding member without a Raft term cannot prove that it
        lost nothing."""
        if self.wiped or self.rotting or not self._can_spare_a_disk():
            return
        self.wiped = True
        name = self._node()
        self._take_down("an empty disk for", self.cluster.wipe, [name], 2.0)
        others = [other for other in self.cluster.names if other != name]
        if self.operator is None and self.random.random() < 0.5:
            # Stop so many other nodes that the rest is a majority only together with the node with the empty disk: that
            # node must not count.
            few = self.random.sample(others, len(others) - len(self.cluster.names) // 2)
            self._take_down("kill -9", self.cluster.kill, few, 3.0)

    def rot(self) -> None:
        """Flip bits in hour files and full journal segments of one node, the same throughout the run. A node that finds
        the damage may have to start again with an empty disk."""
        if self.wiped or self.operator is not None or (not self.rotting and not self._can_spare_a_disk()):
            return
        name = self.rotting or self._node()
        disk, process = self.cluster.machines[name].disk, self.cluster.process(name)
        if process is None or process.node is None:
            return
        there, hours = disk.durable_sizes("/data"), process.node.storage.hours
        segments = sorted(path for path in there if path.startswith("/data/raft/g0/") and path.endswith(".seg"))
        sizes = {path: there[path] for path in segments[:-1]}
        for hour in hours.hours():
            for suffix, size in zip((".log", ".idx", ".dsp"), hours.lengths(hour), strict=True):
                path = hours.path(hour) + suffix
                sizes[path] = min(size, there.get(path, 0))
        sizes = {path: size for path, size in sizes.items() if size}
        if not sizes:
            return
        self.rotting = name
        self.cluster.rotten.add(name)
        for _ in range(self.random.choice((1, 10, 40, 200))):
            path = self.random.choice(sorted(sizes))
            # Flip bits mostly near the file's end, because the newest entries are read most.
            offset = int(sizes[path] * self.random.random() ** 0.3)
            self.note(f"{path} of {name} rots at {offset}")
            self.cluster.history.count("bits rotted")
            self._unrot.append(disk.flip_bit(path, offset, self.random.randrange(8)))
