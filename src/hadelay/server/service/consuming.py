"""Receiving messages, and settling their leases."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hadelay.api.consuming import Received
from hadelay.api.service import Granting, Handed, ReceiveRequest, SettleKind, settled_by
from hadelay.api.text import format_instant
from hadelay.codec import commands, settlement
from hadelay.codec.ackresults import encode_results
from hadelay.codec.leasetokens import decode_leases, encode_leases
from hadelay.codec.meta import Meta, filter_of, unpack
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import BadRequest, Conflict, DiskFull
from hadelay.handout.polls import WAITING, Delivery, Poll
from hadelay.ledger.copies import published_in
from hadelay.ledger.hourstate import groups
from hadelay.ledger.transitions import excused
from hadelay.model import SEPARATOR, encode_id
from hadelay.server.reading import split_record
from hadelay.server.service.part import Service, once_begun
from hadelay.server.webhooks.pool import CONSUMER
from hadelay.version import OUTCOMES_LEVEL, UNCOUNTED

#: Limit of leases in one command that settles them; apply takes some milliseconds for this many.
_SETTLED_AT_ONCE = 2_500
_DONE = {"ack": "acked", "nack": "nacked", "extend": "extended"}


class ConsumingService(Service):
    async def receive(self, ask: ReceiveRequest) -> Handed:
        """Wait up to ask.wait_ms for messages; no message in time is an empty answer. Raises NoLeader on a follower.

        Cancelling withdraws the request; a grant that was proposed for it stands until its lease ends.
        """
        node = self._node
        if ask.consumer == CONSUMER:
            raise BadRequest(f"consumer: {ask.consumer!r} is reserved for webhooks: use another name")
        for name in ask.topics:
            if (topic := node.ledger.topic(name)) is not None and topic.settings.webhook is not None:
                raise Conflict(f"{name} has a webhook: its messages are pushed there, and cannot be received")
            if topic is not None and topic.settings.group_concurrency == 1 and (ask.tags or ask.any_tags):
                raise Conflict(
                    f"{name} hands out one message of a group at a time (group_concurrency 1): receive without tags, "
                    "because a message whose tags nobody asks for would stop its group"
                )
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        poll = Poll(
            consumer=ask.consumer,
            request_id=ask.request_id,
            topics=tuple(ask.topics),
            max=ask.max,
            lease_ms=self._lease(ask),
            wait_ms=ask.wait_ms,
            done=settled_by(future),
            filter=filter_of(ask.tags, ask.any_tags),
            listed=ask.listed,
            node=ask.node if ask.node in node.peers.peers else "",
        )
        node.delivery.poll(poll)
        try:
            return await self._handed(await future)
        except asyncio.CancelledError:
            nothing = poll.phase == WAITING
            node.delivery.cancel_poll(poll)
            if nothing:
                raise
            raise Granting from None

    def _lease(self, ask: ReceiveRequest) -> int:
        if ask.lease_ms is not None:
            return ask.lease_ms
        topics = [self._node.ledger.topic(name) for name in ask.topics]
        leases = [topic.settings.lease_ms for topic in topics if topic is not None and topic.settings.lease_ms]
        return min(leases, default=self._node.config.http.default_lease_ms)

    async def _handed(self, delivery: Delivery) -> Handed:
        node, rows = self._node, delivery.rows
        if not len(delivery.indexes):
            return Handed([])
        tokens = encode_leases(
            node.config.cluster.group, delivery.term, delivery.seq, delivery.positions, delivery.hours, delivery.indexes
        )
        bodies = await node.reader.records(delivery.hours, rows)
        # Read cluster time again: time passed while the records were read from the disk.
        now, topics = max(delivery.now_ms, self._node.now_ms()), node.ledger.topics.all
        until_ms, due_ms = int(delivery.until_ms.min()), int(rows["deliver_at_ms"].max())
        until, left_ms = format_instant(until_ms), max(0, until_ms - now)
        metas: dict[bytes, Meta] = {}
        columns = zip(
            rows["first_id"].tolist(), tokens, rows["topic"].tolist(), bodies, rows["deliver_at_ms"].tolist(),
            delivery.attempts.tolist(), excused(rows).tolist(), delivery.redelivered.tolist(), strict=True,
        )  # fmt: skip
        messages = []
        for first_id, token, topic, record, at, attempt, uncounted, again in columns:
            packed, body = split_record(record)
            raw = bytes(packed)
            meta = metas.get(raw)
            if meta is None:
                meta = metas[raw] = unpack(raw)
            received = Received(
                id=encode_id(first_id), lease=token, topic=topics[topic].name, body=body, content_type=meta.ct,
                key=meta.key, tags=meta.tags, meta=meta.meta, deliver_at=format_instant(at), late_ms=max(0, now - at),
                attempt=attempt, uncounted=uncounted, traceparent=meta.tp, group=meta.group, redelivered=again,
                lease_until=until, lease_left_ms=left_ms,
            )  # fmt: skip
            if meta.sch is not None:
                received.schedule, received.occurrence = meta.sch, format_instant(meta.oc)
            if SEPARATOR in received.topic:
                received.published_id = encode_id(published_in(node.ledger, first_id, record))
            messages.append(received)
        answered = partial(node.delivery.answered, delivery.term, delivery.seq, delivery.positions, due_ms)
        return Handed(messages, answered)

    async def settle(
        self, kind: SettleKind, leases: list[str], value_ms: int | None, reason: str = "", *, count: bool = True,
        dead: bool = False, results: Sequence[bytes | None] = (),
    ) -> list[str]:  # fmt: skip
        """Settle leases; returns the outcome per lease after the commit: acked | nacked | extended, already_acked, or
        lease_lost (also for a malformed lease).

        value_ms: the delay of a nack (None: the topic's), the new lease of an extend (required), None for ack. reason:
        of a nack, or progress that comes with an extend, at most 128 bytes. count: whether a nack counts as an attempt;
        below feature level 3 each nack does. dead: whether a nack ends the message as dead. results: of an ack, JSON
        per lease. Raises Conflict for dead, results and progress below their feature level, and DiskFull for results
        that would need the space that is kept for leases and plain acks.
        """
        node = self._node
        if (dead or results or (kind == "extend" and reason)) and node.ledger.level < OUTCOMES_LEVEL:
            what = "dead" if dead else "result" if results else "progress"
            raise Conflict(f"{what}: not before every node is upgraded (feature_level of GET /v1/cluster)")
        if results and (full := node.peers.no_space("results")):
            raise DiskFull(full, retry_after_ms=5_000)
        if dead:
            value_ms = commands.DEAD_NOW
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
            with once_begun(len(left) < int(fine.sum())):
                given = [results[at] for at in some.tolist()] if results else []
                result = await self._propose(self._settlement(kind, rows[some], value_ms, reason, given))
            assert isinstance(result, LeaseResult)
            again = result.outcomes == LeaseOutcome.AGAIN
            for place, outcome in zip(some[~again].tolist(), result.outcomes[~again].tolist(), strict=True):
                outcomes[place] = words[outcome]
            left = np.concatenate((some[again], left[_SETTLED_AT_ONCE:]))
        return outcomes

    def _settlement(
        self, kind: SettleKind, rows: NDArray[np.void], value_ms: int | None, reason: str,
        results: Sequence[bytes | None],
    ) -> bytes:  # fmt: skip
        if kind == "ack":
            command, section = commands.encode_ack(self._node.name, rows), encode_results(results)
            return settlement.encode_settle(command, None, section) if section else command
        if kind == "nack":
            return commands.encode_nack(self._node.name, rows, -1 if value_ms is None else value_ms, reason)
        assert value_ms is not None
        return commands.encode_extend(self._node.name, rows, value_ms, reason)

    async def topics_of_leases(self, leases: list[str]) -> set[str]:
        """Names of the topics whose messages are leased by `leases`; invalid leases are ignored."""
        rows, fine = decode_leases(self._node.config.cluster.group, leases)
        # Catch up with the leader first: this node may not have applied the grant of a new lease yet.
        await self._confirm()
        ledger, rows = self._node.ledger, rows[fine]
        numbers: set[int] = set()
        for hour, where in groups(rows["hour"]):
            indexes = rows["index"][where]
            indexes = indexes[indexes < ledger.store.count(hour)]
            if len(indexes):
                numbers.update(ledger.store.entries(hour, indexes)["topic"].tolist())
        return {ledger.topics[number].name for number in numbers}
