"""Leadership of a node: its terms, planned transfers, drains, and settings that all nodes take from the leader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from hadelay.codec.commands import encode_feature, encode_settings
from hadelay.errors import Conflict, HadelayError, NoLeader, Overloaded
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import Finished
from hadelay.server.checkpoints import Replica
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.ledterm import LedTerm
from hadelay.server.link import Reply
from hadelay.server.peers import Peers
from hadelay.settings.node import Config

log = logging.getLogger(__name__)

#: Timeout, in seconds, of a planned transfer requested from another node: longer than any transfer takes.
TRANSFER_S = 5.0
#: Number of topics whose reports are made before other tasks of the event loop run.
_REPORTS_AT_ONCE = 500
_NOT_LEADING = "this node does not lead (any more)"
_TRANSFERRING = "a transfer is already under way"


class TermPart(Protocol):
    """A part that works only while this node leads."""

    def on_leader(self, term: int) -> None: ...

    def on_follower(self) -> None: ...


class Leadership:
    def __init__(
        self,
        config: Config,
        replica: Replica,
        raft: RaftNode,
        peers: Peers,
        group_commit: GroupCommit,
        delivery: DeliveryLoop,
        *,
        led: LedTerm,
    ) -> None:
        self._config, self._replica, self._raft, self._clock = config, replica, raft, peers.clock
        self._link, self._peers, self._group_commit, self._delivery = peers.link, peers, group_commit, delivery
        self._led = led
        self._elected = 0
        self._transferring = False
        #: Called at each sign of life of a leader, such as a heartbeat, and when this node begins to lead.
        self.on_sign: Callable[[], None] = lambda: None
        #: Parts that work only while this node leads: `on_leader` calls them in this order, `on_follower` in reverse
        #: order.
        self.parts: list[TermPart] = [delivery]
        self._link.handlers |= {
            "ready": self._on_ready, "consumers": self._on_consumers, "blocked": self._on_blocked,
            "groups": self._on_groups,
            "transfer": lambda peer, to, reply: self.transfer(to, partial(reply, None)),
            "drain": lambda peer, drained, reply: self.drain(bool(drained), partial(reply, None)),
        }  # fmt: skip

    @property
    def leading(self) -> int:
        """The term that this node leads and in which it may propose; 0 when it does not lead."""
        return self._led.number

    @property
    def level(self) -> int:
        """Feature level of the cluster, as of the last entry that this node has applied."""
        return self._replica.ledger.level

    def confirm(self, problem: Callable[[], HadelayError | None], done: Finished) -> None:
        """Call done(problem()), where problem() returns an error or None about this node's state. If it
        returns an error, it is called again after a ReadIndex, because this node may have just started or be cut off,
        and not know the present state. done(NoLeader): the present state cannot be known now."""

        def known(error: HadelayError | None) -> None:
            if error is None and not self._clock.ready:
                error = NoLeader("this node does not know the cluster's time yet", retry_after_ms=500)
            done(error or problem())

        if problem() is None:
            done(None)
        else:
            self._raft.read_index(known)

    def serves(self) -> bool:
        """Whether this node can serve: it knows a leader, and has applied all entries that it knows to be committed."""
        leads = bool(self.leading)
        follows = self._raft.leader not in (None, self._raft.name) and self._clock.ready
        return (leads or follows) and self._raft.applied_index >= self._raft.commit_index

    def on_leader(self, term: int) -> None:
        self._elected = term
        self._clock.lead(self._replica.ledger.now_ms, self._raft.runtime.monotonic())
        self._peers.tell()  # send cluster time to the other nodes, so that they follow this node's clock at once
        self.clock_changed()

    def on_follower(self) -> None:
        self._elected = self._led.number = 0
        self._clock.follow(self._raft.runtime.monotonic())
        self.stop()
        self._group_commit.flush_soon()

    def stop(self) -> None:
        for part in reversed(self.parts):
            part.on_follower()

    def clock_changed(self) -> None:
        """Begin to lead if this node is elected and cluster time is known. Before that, this node proposes nothing."""
        if self._elected and not self.leading and self._clock.ready:
            self._led.number = self._elected
            self.agree_on_settings()
            self._agree_on_level()
            for part in self.parts:
                part.on_leader(self.leading)
            self.leader_seen()
        elif self.leading:
            self._delivery.clock_changed()
            self._agree_on_level()

    def leader_seen(self) -> None:
        """Send commands that wait, because a leader (perhaps a new one) showed a sign of life."""
        self._group_commit.flush_soon()
        self.on_sign()

    def _agree_on_level(self) -> None:
        if (level := self._peers.common_level()) > self._replica.ledger.level:
            self._group_commit.propose_as_leader(encode_feature(level), _ignore)

    def agree_on_settings(self) -> None:
        """Replicate those settings of the leader on which the results of apply depend, so that all nodes use the same
        values; the other nodes' configuration files do not count."""
        limits = self._config.limits
        wanted = {
            "max_delay_ms": limits.max_delay_ms,
            "idempotency_window_ms": limits.idempotency_window_ms,
            "idempotency_max_keys": limits.idempotency_keys,
            "auto_create_topics": limits.auto_create_topics,
            "max_lease_ms": self._config.http.max_lease_ms,
        }
        if not wanted.items() <= self._replica.ledger.settings.to_map().items():
            self._group_commit.propose_as_leader(encode_settings(wanted), _ignore)

    def transfer(self, to: str | None, done: Finished, why: str = "it was asked to") -> None:
        """Hand leadership over: stop hand-outs, commit the dispatch state, then transfer. Leader only. why: the reason
        in words."""
        if not self.leading:
            done(NoLeader("this node does not lead"))
            return
        if self._transferring:
            done(Overloaded(_TRANSFERRING, retry_after_ms=1_000))
            return
        self._transferring = True

        def quiet() -> None:
            self._group_commit.hold(True)
            self._raft.transfer(to, over, why)

        def over(error: HadelayError | None) -> None:
            self._transferring = False
            self._group_commit.hold(False)
            if self.leading:
                self._delivery.resume()
            done(error)

        self._delivery.hold(quiet)

    @property
    def drained(self) -> bool:
        """Whether this node refuses publishes and polls, because it is drained. A draining node that still leads
        accepts them."""
        return self._raft.elections.draining and not self.leading

    def drain(self, drained: bool, done: Finished) -> None:
        """Hand leadership over and refuse new publishes and polls; or end the drain. A restart ends the drain, too."""

        def judged(refused: HadelayError | None) -> None:
            if refused is not None:
                done(refused)
            else:
                self._drain(drained, done)

        if drained:
            self.confirm(self._drain_problem, judged)
        else:
            self._drain(drained, done)

    def _drain_problem(self) -> HadelayError | None:
        if not self._raft.membership.sole_voter:
            return None
        return Conflict(f"{self._raft.name} is the only voter; draining it would stop the cluster")

    def _drain(self, drained: bool, done: Finished) -> None:
        raft = self._raft
        if drained and self._transferring:
            # This drain has failed, but must not end another drain that is under way
            done(Overloaded(_TRANSFERRING, retry_after_ms=1_000))
            return
        log.info("drained" if drained else "undrained")
        raft.elections.draining = drained

        def handed_over(error: HadelayError | None) -> None:
            if error is not None:
                raft.elections.draining = False
            done(error)

        if drained and self.leading:
            self.transfer(None, handed_over, "it is drained")
        else:
            done(None)

    def ask_leader(self, op: str, payload: Any, timeout_s: float, done: Reply) -> None:
        """Call a link operation on the leader; or on this node, if this node leads or knows no leader."""
        leader, name = self._raft.leader, self._raft.name
        if self.leading or leader is None or leader == name:
            self._link.handlers[op](name, payload, done)
        else:
            self._link.call(leader, op, payload, timeout_s, done)

    def _on_ready(self, peer: str, numbers: Any, reply: Reply) -> None:
        """Answer the link operation "ready": reports of the topics `numbers`; nil: of all topics with something to
        report."""
        self._report(self._delivery.active_topics() if numbers is None else list(map(int, numbers)), 0, {}, reply)

    def _report(self, numbers: Sequence[int], start: int, found: dict[int, tuple[int, ...]], reply: Reply) -> None:
        """Reply with reports of the topics `numbers`. found: the reports of the topics before index `start`, which are
        made already."""
        end = start + _REPORTS_AT_ONCE
        found |= self._delivery.topic_reports(numbers[start:end])
        if not self.leading:
            reply(None, NoLeader(_NOT_LEADING, retry_after_ms=50))
        elif end < len(numbers):
            self._raft.runtime.call_soon(self._report, numbers, end, found, reply)
        else:
            reply(found, None)

    def _on_consumers(self, peer: str, topic: Any, reply: Reply) -> None:
        """Answer the link operation "consumers": the consumers of a topic; for None, those of all topics, each with its
        topics."""
        mine = self._raft.name
        rows: list[tuple[Any, ...]] = []
        rows += self._delivery.all_consumers() if topic is None else self._delivery.consumers(str(topic))
        found = [(name, at_ms, node or mine, *rest) for name, at_ms, node, *rest in rows]
        reply(found if self.leading else None, None)

    def _on_groups(self, peer: str, most: Any, reply: Reply) -> None:
        """Answer the link operation "groups": of each topic with blocked messages, the key of the group in which a
        message waits longest."""
        reply(self._delivery.groups.longest_of_topics(int(most)) if self.leading else None, None)

    def _on_blocked(self, peer: str, topic: Any, reply: Reply) -> None:
        """Answer the link operation "blocked": Unix ms since which a due message of the topic waits behind its group; 0
        if none does."""
        known = self._replica.ledger.topic(str(topic)) if self.leading else None
        reply(None if known is None else self._delivery.groups.waits_since_ms(known.number), None)


def _ignore(result: Any, error: HadelayError | None) -> None:
    """Callback for proposals whose failure needs no action: after a failure, this node leads no longer, and the next
    leader proposes the command."""
