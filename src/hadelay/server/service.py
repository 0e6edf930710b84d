"""One node as its HTTP layer sees it (`server.api.Service`): futures over the callbacks of `Node`, and the reads.

Reads are linearizable by ReadIndex: the node first learns how far the log was committed when the read began, waits
until it has applied that much, and then answers from its own state.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from hadelay.codec import commands
from hadelay.codec.leasetokens import decode_leases, encode_leases
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import (
    CancelOutcome,
    CancelResult,
    LeaseOutcome,
    LeaseResult,
    Outcome,
    Progress,
    RedriveOutcome,
    RedriveResult,
    Refused,
    RescheduleResult,
)
from hadelay.errors import (
    BadRequest,
    Conflict,
    HadelayError,
    Impossible,
    NoLeader,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    shortened,
)
from hadelay.handout.filters import filter_of
from hadelay.handout.polls import WAITING
from hadelay.handout.polls import Delivery as Handed
from hadelay.handout.polls import Poll as CorePoll
from hadelay.ledger import topicchanges
from hadelay.ledger.describe import describe
from hadelay.ledger.hourstate import groups
from hadelay.ledger.keys import find_key
from hadelay.ledger.topics import Topic
from hadelay.model import Description
from hadelay.rights import AuditEntry, Token
from hadelay.server import views
from hadelay.server.api import (
    HOUR_FILES,
    Actor,
    Check,
    ClusterView,
    DeadPage,
    Delivered,
    Delivery,
    Granting,
    HourFile,
    HoursView,
    Leader,
    ListWish,
    Measured,
    MessagePage,
    Poll,
    QuorumView,
    SettleKind,
    SnapshotView,
    Target,
    TopicView,
    answered,
    settled_by,
)
from hadelay.server.copies import Copies
from hadelay.server.counting import DueCounts
from hadelay.server.dead import dead_page
from hadelay.server.listing import page_of
from hadelay.server.memberchanges import LEADS
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.server.reading import split_record
from hadelay.server.refusals import refusal
from hadelay.server.webhooks.checks import check_settings
from hadelay.server.webhooks.pool import CONSUMER
from hadelay.settings.topic import has_masked_headers
from hadelay.version import MASKED_OF_ORIGIN, RETRY_DEFAULTS, UNCOUNTED

log = structlog.get_logger("hadelay")

#: How long what forbids a change of the members may take to pass.
_CHANGE_S = 5.0
#: Of a list of all topics, between two turns of others.
_TOPICS_AT_ONCE = 200
#: Leases of one command: apply takes some milliseconds for so many.
_SETTLED_AT_ONCE = 2_500
_DONE = {"ack": "acked", "nack": "nacked", "extend": "extended"}


class NodeService:
    """Implements server.api.Service."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._due = DueCounts(node)
        self._metrics = NodeMetrics(node)
        self._copies = Copies(node.replica, node.raft, node.checkpoints)
        self.node = node.name
        self.publish = node.publish
        self._actor = Actor()
        self.knows_tokens = False

    def acting(self, who: Actor) -> NodeService:
        twin = copy.copy(self)
        twin._actor = who
        return twin

    @property
    def leader_name(self) -> str | None:
        return self._node.raft.leader

    @property
    def applied_index(self) -> int:
        return self._node.raft.applied_index

    # who may

    @property
    def tokens(self) -> Mapping[str, Token]:
        return self._node.ledger.tokens

    def now_ms(self) -> int:
        node = self._node
        return node.clock.read(node.runtime.monotonic()) if node.clock.ready else node.ledger.now_ms

    async def list_tokens(self) -> list[Token]:
        await self._confirm(False)
        return list(self.tokens.values())

    async def create_token(self, name: str, digest: bytes, scopes: list[str], lifetime_ms: int | None) -> Token:
        command = commands.encode_token_create(name, digest, scopes, lifetime_ms)
        await self._propose(command, "token.create", f"{digest.hex()[:12]} {name}: {' '.join(scopes)}")
        await self._confirm(False)
        token = next((token for token in self.tokens.values() if token.hash == digest), None)
        if token is None:
            raise Conflict("the token was made, and revoked at once by somebody else")
        return token

    async def revoke_token(self, token_id: str) -> None:
        found = self.tokens.get(token_id)
        target = token_id if found is None else f"{token_id} {found.name}"
        await self._propose(commands.encode_token_revoke(token_id), "token.revoke", target)
        await self._confirm(False)

    async def audit(self, after: int, limit: int) -> list[AuditEntry]:
        await self._confirm(False)
        return [entry for entry in self._node.ledger.audit.entries if entry.number > after][:limit]

    async def topics_of_leases(self, leases: list[str]) -> set[str]:
        rows, fine = decode_leases(self._node.config.cluster.group, leases)
        # What was granted just now may not be applied here yet.
        await self._confirm(False)
        ledger, rows = self._node.ledger, rows[fine]
        numbers: set[int] = set()
        for hour, where in groups(rows["hour"]):
            indexes = rows["index"][where]
            indexes = indexes[indexes < ledger.store.count(hour)]
            if len(indexes):
                numbers.update(ledger.store.entries(hour, indexes)["topic"].tolist())
        return {ledger.topics[number].name for number in numbers}

    # publishing and settling

    async def settle(
        self, kind: SettleKind, leases: list[str], value_ms: int | None, reason: str = "", *, count: bool = True
    ) -> list[str]:
        node = self._node
        if not count:
            value_ms = value_ms or 0
            value_ms = commands.uncounted(value_ms) if node.ledger.level >= UNCOUNTED else value_ms
        rows, fine = decode_leases(node.config.cluster.group, leases)
        outcomes = ["lease_lost"] * len(leases)
        if not fine.any():
            return outcomes
        words = {
            LeaseOutcome.DONE: _DONE[kind],
            LeaseOutcome.ALREADY_ACKED: "already_acked",
            LeaseOutcome.LEASE_LOST: "lease_lost",
        }
        left = np.flatnonzero(fine)
        while len(left):
            some = left[:_SETTLED_AT_ONCE]
            with _once_begun(len(left) < int(fine.sum())):
                result = await self._propose(self._settlement(kind, rows[some], value_ms, reason))
            assert isinstance(result, LeaseResult)
            again = result.outcomes == LeaseOutcome.AGAIN
            for place, outcome in zip(some[~again].tolist(), result.outcomes[~again].tolist(), strict=True):
                outcomes[place] = words[outcome]
            left = np.concatenate((some[again], left[_SETTLED_AT_ONCE:]))
        return outcomes

    def _settlement(self, kind: SettleKind, rows: NDArray[np.void], value_ms: int | None, reason: str) -> bytes:
        if kind == "ack":
            return commands.encode_ack(self.node, rows)
        if kind == "nack":
            return commands.encode_nack(self.node, rows, -1 if value_ms is None else value_ms, reason)
        assert value_ms is not None
        return commands.encode_extend(self.node, rows, value_ms)

    async def dead_letters(self, topic: str, after: bytes, limit: int, *, body: bool, stale: bool) -> DeadPage:
        await self._confirm(stale)
        return await dead_page(self._node, self._topic(topic), after, limit, body)

    async def redrive(self, topic: str, ids: list[int]) -> list[str]:
        outcomes: dict[int, str] = {}
        left = ids
        while left:
            command = commands.encode_redrive(self.node, topic, left)
            with _once_begun(bool(outcomes)):
                result = await self._propose(command, "topic.redrive", f"{topic}: {len(left)} ids")
            assert isinstance(result, RedriveResult)
            found = list(zip(left, map(RedriveOutcome, result.outcomes.tolist()), strict=True))
            outcomes |= {i: outcome.name.lower() for i, outcome in found if outcome is not RedriveOutcome.AGAIN}
            left = [i for i, outcome in found if outcome is RedriveOutcome.AGAIN]
        return [outcomes[i] for i in ids]

    async def redrive_all(self, topic: str, rate: float | None) -> int:
        command = commands.encode_redrive(self.node, topic, [], all=True, rate=rate)
        result = await self._propose(command, "topic.redrive", f"{topic}: all")
        assert isinstance(result, Progress)
        return result.count

    async def purge(self, topic: str, states: list[str]) -> None:
        bits = {"scheduled": topicchanges.SCHEDULED, "ready": topicchanges.READY, "dead": topicchanges.DEAD}
        command = commands.encode_purge(topic, sum(bits[state] for state in set(states)))
        await self._propose(command, "topic.purge", f"{topic}: {' '.join(states)}")

    async def cancel(self, target: Target) -> str:
        result = await self._propose(commands.encode_cancel(self.node, *_named(target)))
        assert isinstance(result, CancelResult)
        outcome = CancelOutcome(result.outcomes[0])
        if outcome is CancelOutcome.NOT_FOUND:
            raise _not_found(target)
        return outcome.name.lower()

    async def reschedule(self, target: Target, when_ms: int, relative: bool) -> tuple[int, int]:
        result = await self._propose(commands.encode_reschedule(self.node, when_ms, relative, *_named(target)))
        assert isinstance(result, RescheduleResult)
        outcome = Outcome(result.outcomes[0])
        if outcome is Outcome.NOT_FOUND:
            raise _not_found(target)
        if outcome is Outcome.TOO_FAR:
            raise Impossible("that is further ahead than this cluster allows (limits.max_delay)")
        if outcome is not Outcome.DONE:
            word = outcome.name.lower()
            raise Conflict(f"the message cannot be rescheduled: it is {word}", outcome=word)
        return int(result.ids[0]), int(result.deliver_at_ms[0])

    # consuming

    async def receive(self, poll: Poll) -> Delivery:
        node = self._node
        if poll.consumer == CONSUMER:
            raise BadRequest(f"consumer: {poll.consumer} is the cluster's own name for who pushes: take another")
        for name in poll.topics:
            if (topic := node.ledger.topic(name)) is not None and topic.settings.webhook is not None:
                raise Conflict(f"{name} has a webhook: its messages are pushed there, and cannot be received")
        future: asyncio.Future[Handed] = asyncio.get_running_loop().create_future()
        waiting = CorePoll(
            consumer=poll.consumer,
            request_id=poll.request_id,
            topics=tuple(poll.topics),
            max=poll.max,
            lease_ms=self._lease(poll),
            wait_ms=poll.wait_ms,
            done=settled_by(future),
            filter=filter_of(poll.tags, poll.any_tags),
        )
        node.dispatcher.poll(waiting)
        try:
            return await self._delivery(await future)
        except asyncio.CancelledError:
            nothing = waiting.phase == WAITING
            node.dispatcher.cancel_poll(waiting)
            if nothing:
                raise
            raise Granting from None

    def _lease(self, poll: Poll) -> int:
        if poll.lease_ms is not None:
            return poll.lease_ms
        topics = [self._node.ledger.topic(name) for name in poll.topics]
        leases = [topic.settings.lease_ms for topic in topics if topic is not None and topic.settings.lease_ms]
        return min(leases, default=self._node.config.http.default_lease_ms)

    async def _delivery(self, handed: Handed) -> Delivery:
        node = self._node
        if not len(handed.indexes):
            return Delivery([], 0, 0)
        tokens = encode_leases(
            node.config.cluster.group, handed.term, handed.seq, handed.positions, handed.hours, handed.indexes
        )
        rows = handed.rows
        bodies = await node.reader.records(handed.hours, rows)
        # The lease has run on while the disk was read.
        now, topics = max(handed.now_ms, node.clock.read(node.runtime.monotonic())), node.ledger.topics.all
        columns = zip(
            rows["first_id"].tolist(),
            tokens,
            rows["topic"].tolist(),
            bodies,
            rows["deliver_at_ms"].tolist(),
            handed.attempts.tolist(),
            handed.redelivered.tolist(),
            strict=True,
        )
        messages = []
        for first_id, token, topic, record, at, attempt, again in columns:
            meta, body = split_record(record)
            messages.append(
                Delivered(first_id, token, topics[topic].name, meta, body, at, max(0, now - at), attempt, again)
            )
        until, due_ms = int(handed.until_ms.min()), int(rows["deliver_at_ms"].max())
        answered = partial(node.dispatcher.answered, handed.term, handed.seq, handed.positions, due_ms)
        return Delivery(messages, until, max(0, until - now), answered)

    # reading

    async def describe(self, target: Target, *, body: bool, stale: bool) -> Description:
        await self._confirm(stale)
        message_id = target if isinstance(target, int) else self._find_key(*target)
        if message_id is None:
            raise _not_found(target)
        node = self._node
        now_ms = node.clock.read(node.runtime.monotonic())
        view = await node.reader.repaired(lambda: describe(node.ledger, message_id, now_ms, body=body))
        if view is None:
            raise _not_found(target)
        return view

    def _find_key(self, topic: str, key: bytes) -> int | None:
        return find_key(self._node.ledger, topic, hash_client_key(key))

    async def list_messages(self, topic: str, wish: ListWish, *, stale: bool) -> MessagePage:
        await self._confirm(stale)
        return await page_of(self._node, self._topic(topic), wish)

    async def get_topic(self, name: str, *, stale: bool) -> TopicView:
        await self._confirm(stale)
        view = views.topic(self._node, self._topic(name), await self._ready(stale))
        view.consumers = await self._consumers(name, stale)
        return view

    async def _consumers(self, topic: str, stale: bool) -> list[tuple[str, int]] | None:
        node, leader = self._node, self._node.raft.leader
        if node.leading:
            return node.dispatcher.askers.of(topic)
        if stale or leader is None:
            return None
        wait_s = node.config.http.no_leader_wait_ms / 1000
        try:
            found = await answered(lambda done: node.link.call(leader, "consumers", topic, wait_s, done))
        except HadelayError:  # of a leader of an earlier version, or that is none any more
            return None
        return None if found is None else [(str(name), int(at_ms)) for name, at_ms in found]

    def _topic(self, name: str) -> Topic:
        topic = self._node.ledger.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name!r}; it appears with its first message, or PUT it")
        return topic

    async def list_topics(self, *, stale: bool) -> list[TopicView]:
        await self._confirm(stale)
        ready, known, found = await self._ready(stale), self._node.ledger.topics.all, list[TopicView]()
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = known[first : first + _TOPICS_AT_ONCE]
            found += [views.topic(self._node, topic, ready) for topic in few if topic.exists]
            await asyncio.sleep(0)
        return found

    async def put_topic(self, name: str, config: dict[str, Any]) -> TopicView:
        await check_settings(self._node.guard, config)
        sync = self._node.config.dispatch.sync
        if config.get("dispatch_sync") not in (None, sync):
            # Accepting what is not done would promise the topic's owner the wrong thing after a crash.
            raise Impossible(f"dispatch_sync is one for all topics so far, here {sync!r}: set dispatch.sync")
        if has_masked_headers(config) and self._node.ledger.level < MASKED_OF_ORIGIN:
            raise Conflict("webhook: headers as GET shows them: not before every node is upgraded (feature_level)")
        if "defaults" in config and self._node.ledger.level < RETRY_DEFAULTS:
            raise Conflict("defaults: not before every node is upgraded (feature_level)")
        await self._propose(commands.encode_topic_put(name, config), *_put_in_words(name, config))
        with _once_begun():
            return await self.get_topic(name, stale=False)

    async def delete_topic(self, name: str, *, force: bool) -> None:
        try:
            await self._propose(commands.encode_topic_delete(name, force), "topic.delete", name)
        except NotFound:
            # Again after success is as good as once: the answer to the first may have been lost.
            await self._confirm(False)
            if self._node.ledger.known_topic(name) is None:
                raise

    async def due(
        self, topic: str | None, from_ms: int, to_ms: int, step_ms: int, *, stale: bool
    ) -> tuple[list[int], list[int]]:
        await self._confirm(stale)
        if topic is not None:
            self._topic(topic)
        return await self._node.reader.in_slices(lambda: self._due.count(topic, from_ms, to_ms, step_ms))

    # the cluster

    async def find_leader(self) -> Leader:
        if (gone := self._drained()) is not None:
            raise gone  # the poll goes to another node, and so do those that follow it
        return await self._find_leader()

    async def _find_leader(self) -> Leader:
        node = self._node
        deadline = node.runtime.monotonic() + node.config.http.no_leader_wait_ms / 1000
        while True:
            name = node.raft.leader
            if name == node.name and node.leading:
                return Leader(name, node.config.advertise, True)
            peer = node.peers.peers.get(name or "")
            if name is not None and name != node.name and peer is not None and peer.http:
                return Leader(name, peer.http, False)
            if node.runtime.monotonic() >= deadline:
                raise NoLeader(
                    "no majority can be reached (/readyz of the nodes says why); try again, or another node",
                    retry_after_ms=500,
                )
            await asyncio.sleep(0.01)

    async def cluster(self, *, stale: bool) -> ClusterView:
        if not stale:
            await self._confirm(False)
        return views.cluster(self._node)

    async def transfer(self, to: str | None) -> str:
        node = self._node
        if to is not None and to not in node.peers.peers:
            raise BadRequest(f"there is no node {to!r}; there are {', '.join(sorted(node.peers.peers))}")
        if to == node.raft.leader and to is not None:
            return to
        await self._propose(commands.encode_noop(), "cluster.transfer", to or "")
        await answered(lambda done: node.leadership.transfer_anywhere(to, done))
        with _once_begun():
            return (await self._find_leader()).name

    async def drain(self, node: str, undo: bool) -> None:
        mine = self._node
        names = [member.name for member in mine.raft.membership.members]
        if node not in names:
            raise NotFound(f"there is no node {node!r}; there are {', '.join(names)}")
        await self._propose(commands.encode_noop(), "cluster.undrain" if undo else "cluster.drain", node)
        if node == mine.name:
            await answered(lambda done: mine.leadership.drain(not undo, done))
        else:
            await answered(lambda done: mine.link.call(node, "drain", not undo, _CHANGE_S, done))

    def _drained(self) -> Overloaded | None:
        return (
            Overloaded(f"{self.node} is drained: ask another node", retry_after_ms=0)
            if self._node.leadership.drained
            else None
        )

    async def add_member(self, name: str, raft: str) -> None:
        await self._propose(commands.encode_noop(), "members.add", f"{name} {raft}")
        await self._change("add", name, raft)

    async def remove_member(self, name: str) -> None:
        await self._propose(commands.encode_noop(), "members.remove", name)
        await self._change("remove", name, "")

    async def _change(self, op: str, name: str, raft: str) -> None:
        """Asked again while what forbids it passes: a new leader, the change before."""
        node = self._node
        deadline = node.runtime.monotonic() + _CHANGE_S
        while True:
            try:
                await answered(lambda done: node.member_changes.anywhere(op, name, raft, done))
                return
            except HadelayError as error:
                passes = error.retryable and error.outcome_known
                if not (passes or error.outcome == LEADS) or node.runtime.monotonic() >= deadline:
                    raise
                if error.outcome == LEADS:
                    try:
                        await answered(lambda done: node.leadership.transfer_anywhere(None, done))
                    except HadelayError as failed:
                        log.warning("transfer_failed", error=str(failed))
            await asyncio.sleep(0.1)

    async def hours(self) -> HoursView:
        # What waits for far hours is written first, in slices: the checksums would do it in one go otherwise.
        await answered(self._node.storage.write_out)
        return views.hours(self._node)

    async def hour_file_length(self, hour: int, file: HourFile) -> int:
        store = self._node.storage.hours
        if not store.count(hour):
            raise NotFound("that hour has no messages, or is past its retention")
        return store.lengths(hour)[HOUR_FILES.index(file)]

    async def read_hour_file(self, hour: int, file: HourFile, offset: int, length: int) -> bytes:
        return self._node.storage.hours.read_file(hour, file, offset, length)

    async def open_snapshot(self) -> SnapshotView:
        await self._confirm(False)
        return await self._copies.open()

    async def snapshot_file_length(self, snapshot: str, file: str) -> int:
        return self._copies.length(snapshot, file)

    async def read_snapshot(self, snapshot: str, file: str, offset: int, length: int) -> bytes:
        return await self._copies.read(snapshot, file, offset, length)

    async def release_snapshot(self, snapshot: str) -> None:
        self._copies.release(snapshot)

    async def names(self) -> Mapping[str, dict[str, int]]:
        await self._confirm(False)
        return dict(zip(("topics", "consumers", "nodes", "reasons"), self._node.storage.names.all(), strict=True))

    # health

    def livez(self) -> list[Check]:
        return [Check("loop", True)]

    def readyz(self) -> list[Check]:
        return views.ready_checks(self._node)

    def quorum(self, without: str) -> QuorumView:
        membership = self._node.raft.membership
        names = [member.name for member in membership.members]
        if without not in names:
            raise NotFound(f"there is no node {without!r}; there are {', '.join(names)}")
        left = views.others_left(self._node, without)
        return QuorumView(without, left, len(membership.voters), membership.majority)

    async def metrics(self) -> Measured:
        return await self._node.reader.in_slices(self._metrics.collect)

    # inside

    async def _propose(self, command: bytes, action: str = "", target: str = "") -> Any:
        """The command's result; Refused is raised. action: it goes into the audit trail."""
        if action:
            who, target = self._actor, shortened(target)
            command = commands.encode_audited(self.node, who.token_id, who.token, action, target, command)
            log.info("admin_action", action=action, target=target, token=who.token, token_id=who.token_id)
        result = await answered(lambda done: self._node.propose(command, done))
        if isinstance(result, Refused):
            raise refusal(result)
        return result

    async def _ready(self, stale: bool) -> views.Reports:
        """What is ready is known to the leader's dispatcher alone; a stale read counts it as scheduled."""
        node = self._node
        if node.leading:
            return node.dispatcher.topic_reports()
        leader = node.raft.leader
        if stale or leader is None:
            return {}
        wait_s = node.config.http.no_leader_wait_ms / 1000
        try:
            reports: views.Reports = await answered(lambda done: node.link.call(leader, "ready", None, wait_s, done))
        except OutcomeUnknown as error:
            # Of a question it is known that nothing came of it.
            raise NoLeader(error.detail, retry_after_ms=100) from None
        return reports

    async def _confirm(self, stale: bool) -> None:
        if stale:
            return
        await answered(self._node.raft.read_index)


@contextmanager
def _once_begun(begun: bool = True) -> Iterator[None]:
    """Of a request of which something is done already: no failure of the rest may say that nothing happened."""
    try:
        yield
    except HadelayError as error:
        if not (begun and error.retryable and error.outcome_known):
            raise
        raise OutcomeUnknown(f"a part of it is done, but not all: {error}") from error


def _put_in_words(name: str, config: dict[str, Any]) -> tuple[str, str]:
    """(action, target) of a change of settings, without their values: some are secrets."""
    if "paused" in config:
        return "topic.pause" if config["paused"] else "topic.resume", name
    return "topic.set", f"{name}: {' '.join(sorted(config))}" if config else name


def _named(target: Target) -> tuple[list[int], list[tuple[str, bytes]]]:
    """(ids, keys) of a command for one target."""
    return ([target], []) if isinstance(target, int) else ([], [target])


def _not_found(target: Target) -> NotFound:
    if isinstance(target, int):
        return NotFound("no such message: never issued, or past its retention")
    return NotFound(f"no message of {target[0]} has that key, or it is past its retention")
