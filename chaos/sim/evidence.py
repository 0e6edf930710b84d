"""Facts that the checks of promises use: entries, grants, and bounds of clock differences.

Cluster time may be slewed by 500 ppm and crystals drift by 50 ppm; that much, rounding, and a little for each new
leader, is what "not early" allows.
"""

from chaos.sim.cluster import SimCluster
from chaos.sim.history import HandOut, Message
from chaos.sim.machines import WATCH_S
from hadelay.ledger.hours.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.hours.transitions import ID_KEY
from hadelay.ledger.messages.keys import KEY, KEYOF
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import State
from hadelay.server.node import Node

#: Largest drift of a quartz clock, as a rate (50e-6 = 50 ppm).
DRIFT = 50e-6
#: Largest rate error of cluster time against true time.
RATE = 600e-6
ROUNDING_MS = 1.5
#: Largest step of cluster time at a change of leader, in ms. A node's error about the leader's clock is at most the
#: delay of its link: 2 ms here, and twice as much for restarted nodes. Restarts behind a slow link: see
#: `change_bound_ms`.
CHANGE_MS = 5.0
#: Largest step of cluster time, in ms, at a cold start of all nodes: twice the error of the wall clocks of a majority.
COLD_MS = 2 * 250.0
WAITING = (State.SCHEDULED, State.READY, State.BLOCKED, State.LEASED)


def latest(cluster: SimCluster) -> list[Node]:
    """The running node with the highest applied index, as a list of one; an empty list if no node runs."""
    return sorted(cluster.nodes(), key=lambda node: -node.raft.applied_index)[:1]


def lease_began(cluster: SimCluster, h: HandOut) -> tuple[float, int]:
    """Latest possible start of the lease of a hand-out: (true time, cluster time)."""
    at, now_ms, _ = cluster.grants.get((h.term, h.seq), (h.answered, h.now_ms, 0))
    return min(at, h.answered), min(now_ms, h.now_ms)


def took_effect(cluster: SimCluster, h: HandOut) -> float:
    """True time at which a hand-out took effect. A repeated receive takes effect when the log extends its lease; any
    other receive, when the node answers. After the extension, the node may still read the messages from its disk:
    meanwhile, another request may settle the lease and get its answer."""
    extensions = cluster.extended.get((h.term, h.seq, h.position), [])
    return min([h.answered, *(at for until_ms, at in extensions if h.again and until_ms == h.until_ms)])


def where(node: Node, message_id: int) -> tuple[EntryRef | None, str]:
    """Entry and state of a message on this node; state "gone" if the node does not know the message."""
    place = find_entry(node.ledger, message_id)
    return place, "gone" if place is None else state_of(node.ledger, place, node.ledger.now_ms)


def forgets(cluster: SimCluster, message: Message) -> bool:
    """Whether the cluster may have forgotten the message, if the message ended: hours have passed, or its topic's
    retention is brief."""
    return cluster.history.slept or message.topic == cluster.workload.brief


def was_cold(cluster: SimCluster, at: float) -> bool:
    """Whether there was a cold start before `at`, besides the one at the cluster's start: a majority that knew no
    cluster time took it from its wall clocks. A leader may end before others learn its time, so another cold start may
    follow. Then two times may exist: a node that was cut off keeps the old time until it hears the new leader."""
    return any(start <= at for start in cluster.cold_starts[1:])


def change_bound_ms(cluster: SimCluster) -> float:
    """Largest step of cluster time, in ms, when another node becomes leader. Two things add to CHANGE_MS: the error of
    a restarted node that learned cluster time only from slow answers (docs/explanation/time-and-dispatch.md), and the
    drift between the nodes' clocks while their machines were suspended."""
    return CHANGE_MS + cluster.doubt_ms + cluster.slept_s * 1000 * 2 * DRIFT


def ahead_ms(cluster: SimCluster, start: float, end: float) -> float:
    """Largest gain, in ms, of cluster time over true time between two instants, in addition to the rate error RATE."""
    # Include leaders noticed up to WATCH_S after `end`: `elected` has the times at which leaders were noticed, which
    # may be that much later than their elections.
    leaders = sum(start < at < end + WATCH_S for at in cluster.elected)
    return ROUNDING_MS + change_bound_ms(cluster) * leaders + (COLD_MS if was_cold(cluster, end) else 0.0)


def published_ms(node: Node, message_id: int) -> int:
    """Cluster time of the message's publish; 0 if the node does not know the message."""
    description = describe(node.ledger, message_id)
    return 0 if description is None else description.published_at_ms


def found_by_key_of(ledger: Ledger, first_id: int) -> int:
    """Id of the message that now has the client key of this message; 0 if there is none."""
    key = ledger.tables.get(KEYOF, ID_KEY.pack(first_id)) or b""
    return int.from_bytes((ledger.tables.get(KEY, key) or bytes(8))[:8], "little")
