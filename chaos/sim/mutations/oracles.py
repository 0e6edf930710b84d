"""Deliberate bugs that comparisons of nodes or rarer kinds of runs notice: in fan-out without an own queue, proposals
that are refused under a leader that stays, alerts, answers about a majority, and answers to readers."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from pyroaring import BitMap

from chaos.sim import views
from chaos.sim.mutations.table import Original, bug, stub
from hadelay.ledger import checkpoint
from hadelay.ledger.changedrows import ChangedRows
from hadelay.ledger.hours import retries
from hadelay.ledger.limits.quotas import Room
from hadelay.ledger.messages import publish
from hadelay.ledger.messages.subscriptions import FanOut
from hadelay.ledger.views import describe, listing
from hadelay.model import Event
from hadelay.raft.membership import Membership
from hadelay.raft.part import Peer
from hadelay.server.checkpoints import Checkpoints
from hadelay.server.delivery.maintenance import LeaseExpiry
from hadelay.server.node import Node
from hadelay.server.service import duecounts
from hadelay.server.webhooks.alerts import Alerts


@bug(
    "a majority counts nodes that are not admitted",
    "wipe kill",
    "what leaders count, majority",
    at=(Membership, "agreed"),
)
def blank_majority(_: Original, members: Membership, peers: Iterable[Peer]) -> bool:
    return members.votes + sum(peer.name in members.voters for peer in peers) >= members.majority


@bug("a node that is not admitted counts as left", "wipe kill", "reads, quorum", at=(views, "others_left"))
def blank_left(_: Original, node: Node, without: str) -> list[str]:
    names = [node.name, *(name for name, peer in node.raft.peers.items() if peer.up and node.peers.live(name))]
    return sorted(name for name in names if name != without and name in node.raft.membership.voters)


@bug(
    "the own queue of a topic forgets an earlier subscription's match",
    "",
    "F1 fan-out, copies",
    at=(publish, "fan_out"),
)
def forgotten_match(fan_out: Original, ledger: Any, batch: Any) -> Any:
    found = fan_out(ledger, batch)
    if found is not None and not found.own.all():
        return FanOut(~found.copies[-1][1], found.copies)
    return found


@bug("a lease whose end is not proposed in time never ends", "overload", "I15 liveness", at=(LeaseExpiry, "_expired"))
def one_expire(expired: Original, expiry: LeaseExpiry, keys: Any, result: Any, error: Any) -> None:
    expired(expiry, [] if error is not None else keys, result, error)


@bug("deaths during an alert's call are in no alert", "", "alerts", at=(Alerts, "_answered"))
def untold_deaths(answered: Original, alerts: Alerts, term: int, topic: Any, watch: Any, upto: int, *more: Any) -> None:
    answered(alerts, term, topic, watch, topic.settled[Event.DEAD], *more)


@bug(
    "a checkpoint does not count what is applied while it runs",
    "",
    "I2 conservation, log since checkpoint",
    at=(Checkpoints, "begin"),
)
def uncounted_log(begin: Original, checkpoints: Checkpoints, *then: Any) -> None:
    def done() -> None:
        checkpoints.bytes_since = 0
        for one in then:
            one()

    begin(checkpoints, done)


@bug(
    "a checkpoint has rows as they are when their turn comes",
    "",
    "I2 conservation, checkpoint",
    at=(ChangedRows, "note"),
)
def late_rows(_: Original, changes: ChangedRows, table: bytes, key: Any) -> None:
    changes._changed[table][key] = None


@bug(
    "a checkpoint forgets which topics settled messages of an hour have",
    "kill stop",
    "I12 divergence, states",
    at=(checkpoint, "load_hour"),
)
def forgotten_topics(load: Original, blob: bytes) -> Any:
    hour_state = load(blob)
    hour_state.topics = BitMap()
    return hour_state


@bug("a replacement is free of a quota of bytes", "", "quotas", at=(Room, "refusal"))
def free_replacement(refusal: Original, room: Room, size: int, replacing: bool) -> Any:
    return refusal(room, 0 if replacing else size, replacing)


@bug("messages of one batch take no bytes of a quota from each other", "", "quotas", at=(Room, "take"))
def free_bytes(take: Original, room: Room, size: int, *more: Any) -> None:
    take(room, 0, *more)


@bug("the next page begins half a second late", "", "reads, listed", at=(listing._Look, "page"))
def skipped_message(page: Original, look: Any, reached: Any) -> Any:
    found = page(look, reached)
    return found if found.after is None else found._replace(after=(found.after[0] + 500, 0))


@bug("the histogram counts a settled message", "", "reads, counted", at=(duecounts._Settled, "look_up"))
def counted_settled(look_up: Original, settled: Any, ledger: Any, hour: int) -> int:
    rows: int = look_up(settled, ledger, hour)
    if rows:
        settled.seconds[np.flatnonzero(settled.seconds)[:1]] -= 1
        settled.topics["count"][:1] -= 1
    return rows


@bug("a look-up shows the due time rounded to seconds", "", "reads, described", at=(describe, "described"))
def rounded_due(described: Original, *args: Any, **more: Any) -> Any:
    view = described(*args, **more)
    view.deliver_at_ms = view.deliver_at_ms // 1000 * 1000
    return view


stub(
    "still_retrying", "a message counts as retrying after it was leased again", "", ("I2 conservation",),
    (retries, "end", lambda ledger, hour, rows: None),
)  # fmt: skip
