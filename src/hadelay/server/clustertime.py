"""Cluster time: the one clock that decides what is due. Pure: callers pass the monotonic time and clock readings.

Law 1: cluster time never runs backwards, and never jumps once it runs: a message due "in 15 minutes" is not early
       because a wall clock was stepped.
Law 2: the leader's clock is the previous leader's plus *monotonic* time since, slewed by at most 500 ppm towards the
       median of a majority's wall clocks. Without such a majority it runs on alone and raises an alarm.
Law 3: wall clocks set cluster time only at a cold start of the whole cluster, and only if a majority agrees on a time
       that is not behind the last stamped one. Until then `ready` is False: nothing is published or due.

Times called `mono` are Runtime.monotonic() in seconds; all others are Unix milliseconds. Published designs align the
clock at a change of master only, or not at all (docs/explanation/sources.md, S2 and S3).
"""

from collections import deque
from collections.abc import Iterable

#: Limit of the step by which a status message from the leader moves a follower's clock, in ms. Such messages come once
#: a second; in a second, the leader's slew and the drift of both nodes' crystals are smaller.
_FOLLOW_MS = 1.0
#: Time, in seconds, for which a restarted node compares the cluster times that its peers report, before it sets its
#: clock.
_LEARN_S = 0.25
#: Time over which a clock error is slewed away, in ms: small errors cause small slews. A slew ends after this time,
#: too: else the clock of a node that slept meanwhile would be slewed too far.
_SLEW_HORIZON_MS = 2_000.0
#: Largest age at which the last sample of a node's wall clock still counts, in seconds.
_FRESH_S = 10.0
#: Number of wall clock samples kept per node; the sample with the shortest round trip gives the node's clock offset.
_SAMPLES = 4
#: Limit of the distance of two bounds of another node's clock, in ms, that count as narrow. Within narrow bounds, wall
#: clocks that can be equal count as equal, and a restarted node waits for no more peers.
NEAR_MS = 10.0
#: Largest clock reading accepted, in Unix ms: the year 10000; later readings are ignored.
_LARGEST_MS = 253_402_300_800_000


class ClusterClock:
    """Clock of one node and group. About once a second the node calls `observe_wall` for itself and each peer;
    heartbeats call `observe_leader`; `read` returns the time."""

    def __init__(
        self, node: str, members: Iterable[str], *, floor_ms: int = 0, slew_ppm: int = 500, skew_ms: int = 250
    ) -> None:
        """floor_ms: the last cluster time stamped into an entry, from the checkpoint; `read` never returns less."""
        self.node = node
        self.majority = len(set(members)) // 2 + 1
        self.slew = slew_ppm * 1e-6
        self.skew_ms = skew_ms
        #: True once cluster time is known: from a peer that knows it, or from the wall clocks of a majority at a cold
        #: start.
        self.ready = False
        self.leading = False
        #: Names of the present clock problems, for logs and metrics: no_majority, behind_checkpoint, skew:<node>.
        self.alarms: set[str] = set()
        self._floor = float(floor_ms)
        #: The last leader that this node knows of.
        self._leader = ""
        self._base_ms = 0.0
        self._base_mono = 0.0
        self._rate = 1.0
        #: Used only until the clock is ready: monotonic time at which the first peer reported cluster time; and bounds
        #: that the reports of all peers give for cluster time minus monotonic time, in ms.
        self._learning_since: float | None = None
        self._bounds = (float("-inf"), float("inf"))
        #: Last wall clock samples per node: (round trip in s, wall minus monotonic clock in ms, time in s).
        self._walls: dict[str, deque[tuple[float, float, float]]] = {}

    def __repr__(self) -> str:
        role = "leading" if self.leading else "following"
        return f"<ClusterClock {self.node} {role} ready={self.ready} floor={self._floor:.0f} {sorted(self.alarms)}>"

    def set_voters(self, names: Iterable[str]) -> None:
        """Set the names of the nodes whose wall clocks count, this node included if it votes."""
        voters = list(names)
        self.majority = len(voters) // 2 + 1
        self._walls = {name: samples for name, samples in self._walls.items() if name in voters}

    def exact(self, mono: float) -> float:
        """Cluster time in Unix ms with a fraction. While the clock is not ready: the last time stamped into an
        entry."""
        if not self.ready:
            return self._floor
        return max(self._floor, self._running(mono))

    def read(self, mono: float) -> int:
        """Cluster time in Unix ms, rounded down so that it is never ahead of the exact time."""
        return int(self.exact(mono))

    def delay_s(self, at_ms: int, mono: float) -> float:
        """Seconds of monotonic time until `read` returns at_ms; 0 if cluster time has reached at_ms."""
        left_ms = at_ms - self.exact(mono)
        slewed_ms = max(0.0, _SLEW_HORIZON_MS - (mono - self._base_mono) * 1000.0)
        return max(0.0, left_ms - min(left_ms / self._rate, slewed_ms) * (self._rate - 1.0)) / 1000.0

    def raise_floor(self, now_ms: int) -> None:
        """Raise the lower bound of `read` to now_ms, the cluster time in a committed entry."""
        if now_ms > self._floor:
            self._floor = float(now_ms)

    def skews(self, mono: float) -> dict[str, float]:
        """Difference of each node's wall clock from cluster time, in ms (positive: ahead), from recent samples."""
        now = self.exact(mono)
        return {node: offset + mono * 1000.0 - now for node, offset in self._offsets(mono).items()}

    def observe_leader(self, node: str, now_ms: int, mono: float) -> None:
        """Take now_ms, the leader's cluster time, from a heartbeat of the leader `node`. The heartbeat's delay is
        unknown, so now_ms can only move this clock forward, and does not set a clock that is not ready."""
        if self.leading or not self.ready or not 0 <= now_ms < _LARGEST_MS:
            return
        self._leader = node
        self._anchor(max(self._running(mono), now_ms), mono)

    def follow(self, mono: float) -> None:
        """Run as a follower's clock, because this node does not lead."""
        if self.ready:
            self._anchor(self.exact(mono), mono)
        self.leading = False

    def lead(self, now_ms: int, mono: float) -> None:
        """Run as the leader's clock. now_ms: newest cluster time in a log entry of an earlier leader."""
        self.raise_floor(now_ms)
        self.leading, self._leader = True, self.node
        if self.ready:
            self._anchor(self.exact(mono), mono)
        self._steer(mono)

    def observe_wall(self, node: str, wall_ms: int, mono: float, now_ms: int | None = None, rtt_s: float = 0.0) -> None:
        """Take a reading of the wall clock of `node`, wall_ms, which came with a round trip of rtt_s. now_ms: the
        cluster time of `node`, if `node` knows it. A restarted node learns cluster time from any peer; later it follows
        the leader (or any peer, until it knows a leader or has led)."""
        if not 0 <= (wall_ms if now_ms is None else now_ms) < _LARGEST_MS:
            return
        width_ms, wall = rtt_s * 1000.0, wall_ms - mono * 1000.0
        if now_ms is not None:
            least, ahead_ms = now_ms - mono * 1000.0, now_ms - wall_ms
            if not self.ready:
                if not self._learn(least, least + width_ms, ahead_ms, mono):
                    return  # a peer knows cluster time: no need to derive it from the wall clocks of a majority
            elif not self.leading and self._leader in ("", node):
                self._keep_to(least, least + width_ms, ahead_ms, mono)
        likely = self._likely(wall, wall + width_ms, 0)
        self._walls.setdefault(node, deque(maxlen=_SAMPLES)).append((rtt_s, likely, mono))
        self._steer(mono)

    def _likely(self, least: float, most: float, ahead_ms: int) -> float:
        """Likeliest difference of another node's clock to this node's monotonic clock, in ms, between the bounds
        `least` and `most`. Within narrow bounds, wall clocks count as equal: the result is this node's wall clock plus
        ahead_ms, if that is within the bounds. (A round trip does not show how its time divides into its two ways; on a
        busy node, often one way took all of it.) Otherwise: the middle of the bounds."""
        own = self._walls.get(self.node)
        if own and most - least <= NEAR_MS and least <= own[-1][1] + ahead_ms <= most:
            return own[-1][1] + ahead_ms
        return (least + most) / 2

    def _running(self, mono: float) -> float:
        """Cluster time of a ready clock in ms, without the lower bound that `exact` applies."""
        passed_ms = (mono - self._base_mono) * 1000.0
        return self._base_ms + passed_ms + min(passed_ms, _SLEW_HORIZON_MS) * (self._rate - 1.0)

    def _anchor(self, now_ms: float, mono: float) -> None:
        self._base_ms, self._base_mono, self._rate, self.ready = now_ms, mono, 1.0, True

    def _keep_to(self, least: float, most: float, ahead_ms: int, mono: float) -> None:
        """Move this clock into the bounds of the leader's clock. least, most: these bounds, as cluster time minus the
        monotonic time `mono`, in ms. ahead_ms: leader's clock minus its wall clock. Inside the bounds the clock moves
        by a small step only, because the bounds of a slow link are less exact than this clock. A clock ahead of the
        leader's would end delays early if this node led next."""
        offset_ms = self._running(mono) - mono * 1000.0
        if most - least <= self.skew_ms:
            likely = self._likely(least, most, ahead_ms)
            offset_ms = max(offset_ms - _FOLLOW_MS, min(offset_ms + _FOLLOW_MS, likely))
        self._anchor(max(least, min(most, offset_ms)) + mono * 1000.0, mono)

    def _learn(self, least: float, most: float, ahead_ms: int, mono: float) -> bool:
        """Set the clock to the likeliest value within the bounds that all peers have in common, once these bounds are
        narrow or `_LEARN_S` has passed. Bounds wider than the skew bound are ignored, because this node may lead next.
        Returns whether the clock is ready."""
        if most - least > self.skew_ms:
            return False
        self._learning_since = mono if self._learning_since is None else self._learning_since
        low, high = max(self._bounds[0], least), min(self._bounds[1], most)
        # If the bounds of the peers do not overlap (old bounds, or another leader), use the latest bounds alone.
        self._bounds = low, high = (low, high) if low <= high else (least, most)
        if high - low <= NEAR_MS or mono - self._learning_since >= _LEARN_S:
            self._anchor(self._likely(low, high, ahead_ms) + mono * 1000.0, mono)
        return self.ready

    def _offsets(self, mono: float) -> dict[str, float]:
        """Wall clock minus monotonic clock, in ms, of each node with a recent sample."""
        return {
            node: min(reversed(samples), key=lambda sample: sample[0])[1]
            for node, samples in self._walls.items()
            if mono - samples[-1][2] <= _FRESH_S
        }

    def _agreed(self, mono: float) -> float | None:
        """Median of the largest set of wall clocks that agree; None if the set is no majority."""
        offsets = sorted(self._offsets(mono).values())
        best: list[float] = []
        last = 0
        for first in range(len(offsets)):
            while last < len(offsets) and offsets[last] - offsets[first] <= 2 * self.skew_ms:
                last += 1
            if last - first > len(best):
                best = offsets[first:last]
        if len(best) < self.majority:
            return None
        middle = len(best) // 2
        median = best[middle] if len(best) % 2 else (best[middle - 1] + best[middle]) / 2
        return median + mono * 1000.0

    def _steer(self, mono: float) -> None:
        agreed = self._agreed(mono)
        self.alarms.clear()
        if agreed is None:
            self.alarms.add("no_majority")
        if self.leading:
            if not self.ready:
                self._start_cold(agreed, mono)
            if self.ready:
                self._slew(agreed, mono)
        if self.ready:
            far = (node for node, skew in self.skews(mono).items() if abs(skew) > self.skew_ms)
            self.alarms.update(f"skew:{node}" for node in far)

    def _start_cold(self, agreed: float | None, mono: float) -> None:
        if agreed is None:
            return
        if agreed < self._floor:
            # The agreed time is before the last stamped time. Do not set the clock before the wall clocks have caught
            # up: cluster time cannot run backwards, and a clock that stands still and then jumps would end delays
            # early.
            self.alarms.add("behind_checkpoint")
            return
        self._anchor(agreed, mono)

    def _slew(self, agreed: float | None, mono: float) -> None:
        now = self.exact(mono)
        self._anchor(now, mono)
        if agreed is not None:
            wanted = (agreed - now) / _SLEW_HORIZON_MS
            self._rate = 1.0 + max(-self.slew, min(self.slew, wanted))
