"""Service for receiving messages, and for settling their leases."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hadelay.api.consuming import Received
from hadelay.api.service import Granting, Handed, ReceiveRequest, SettleKind, settled_by
from hadelay.api.text import format_instant
from hadelay.codec import commands
from hadelay.codec.ackparts import encode_results
from hadelay.codec.leasetokens import decode_leases, encode_leases
from hadelay.codec.meta import Meta, filter_of, unpack
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import BadRequest, Conflict, DiskFull, HadelayError
from hadelay.handout.polls import WAITING, Delivery, Poll
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.hours.retries import excused
from hadelay.ledger.messages.copies import published_in
from hadelay.ledger.state import Ledger
from hadelay.model import SEPARATOR, encode_id
from hadelay.server.reading import published_ms, split_record
from hadelay.server.service.part import Service, partly_done
from hadelay.server.webhooks.pool import CONSUMER

#: Limit of leases that one command settles, some milliseconds of apply; more leases take several commands.
_SETTLED_AT_ONCE = 2_500
_DONE = {"ack": "acked", "nack": "nacked", "extend": "extended"}


def _unreceivable(ledger: Ledger, ask: ReceiveRequest) -> Conflict | None:
    """Error for a receive that names a topic with a webhook, or asks for tags in a topic with group_concurrency 1;
    None if the receive may wait."""
    for name in ask.topics:
        topic = ledger.topic(name)
        if topic is not None and topic.settings.webhook is not None:
            return Conflict(f"{name} has a webhook: its messages are pushed there, and cannot be received")
        if topic is not None and topic.settings.group_concurrency == 1 and (ask.tags or ask.any_tags):
            return Conflict(
                f"{name} hands out one message of a group at a time (group_concurrency 1): receive without tags, "
                "because a message whose tags nobody asks for would stop its group"
            )
    return None


class ConsumingService(Service):
    async def receive(self, ask: ReceiveRequest) -> Handed:
        """Wait up to ask.wait_ms for messages; if none comes in time, the answer is empty. Raises NoLeader on a
        follower.

        Cancelling withdraws the request; a grant that was proposed for it stands until its lease ends.
        """
        node = self._node
        if ask.consumer == CONSUMER:
            raise BadRequest(f"consumer: {ask.consumer!r} is reserved for webhooks: use another name")
        await self._judge(lambda: _unreceivable(node.ledger, ask))
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
            group_max=ask.group_max,
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
        # Read cluster time again: reading the records from the disk has taken some time.
        now, topics = max(delivery.now_ms, self._node.now_ms()), node.ledger.topics.all
        until_ms, due_ms = int(delivery.until_ms.min()), int(rows["deliver_at_ms"].max())
        until, left_ms = format_instant(until_ms), max(0, until_ms - now)
        metas: dict[bytes, Meta] = {}
        due_texts = {at: format_instant(at) for at in set(rows["deliver_at_ms"].tolist())}
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
                key=meta.key, tags=meta.tags, meta=meta.meta, deliver_at=due_texts[at], late_ms=max(0, now - at),
                attempt=attempt, uncounted=uncounted, traceparent=meta.tp, group=meta.group, redelivered=again,
                lease_until=until, lease_left_ms=left_ms,
            )  # fmt: skip
            if meta.batch is not None:
                received.batch = meta.batch
            if meta.sch is not None:
                received.schedule, received.occurrence = meta.sch, format_instant(meta.oc)
            if SEPARATOR in received.topic:
                received.published_id = encode_id(published_in(node.ledger, first_id, record))
            messages.append(received)
        answered = partial(node.delivery.answered, delivery.term, delivery.seq, delivery.positions, due_ms)
        return Handed(messages, answered, map(published_ms, bodies))

    async def settle(
        self, kind: SettleKind, leases: list[str], value_ms: int | None, reason: str = "", *, count: bool = True,
        dead: bool = False, results: Sequence[bytes | None] = (),
    ) -> list[str]:  # fmt: skip
        """Settle leases; returns the outcome per lease after the commit: acked | nacked | extended, already_acked, or
        lease_lost (also for a malformed lease).

        value_ms: the delay of a nack (None: the topic's), the new lease of an extend (required), None for ack. reason:
        of a nack, or progress that comes with an extend, at most 128 bytes. count: whether a nack counts as an attempt.
        dead: whether a nack ends the message as dead. results: of an ack, JSON per lease. Raises DiskFull for results
        that would need the space that is kept for leases and plain acks.
        """
        node = self._node
        if results and (full := node.peers.no_space("results")):
            raise DiskFull(full, retry_after_ms=5_000)
        if dead:
            value_ms = commands.DEAD_NOW
        if not count:
            value_ms = commands.uncounted(value_ms or 0)
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
        total = len(left)
        while len(left):
            some = left[:_SETTLED_AT_ONCE]
            given = [results[at] for at in some.tolist()] if results else []
            try:
                result = await self._propose(self._settlement(kind, rows[some], value_ms, reason, given))
            except HadelayError as error:
                if len(left) == total:
                    raise
                raise partly_done(error) from error
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
        name = self._node.name
        if kind == "extend":
            assert value_ms is not None
            return commands.encode_extend(name, rows, value_ms, reason)
        delays = self._node.delivery.delays_of(rows)
        if kind == "nack":
            return commands.encode_nack(name, rows, -1 if value_ms is None else value_ms, reason, delays=delays)
        return commands.encode_ack(name, rows, encode_results(results) if results else b"", delays=delays)

    async def topics_of_leases(self, leases: list[str]) -> set[str]:
        """Names of the topics to which the leased messages belong; invalid leases are ignored."""
        return {topic for topic in await self.topic_of_each(leases) if topic}

    async def topic_of_each(self, leases: list[str]) -> list[str]:
        """For each lease, the name of the topic to which its message belongs; "" for an invalid lease."""
        rows, fine = decode_leases(self._node.config.cluster.group, leases)
        ledger, found = self._node.ledger, [""] * len(leases)
        if any(ledger.store.count(hour) <= rows["index"][where].max() for hour, where in rows_by_value(rows["hour"])):
            # Catch up with the leader first: this node may not have applied the publish of a message just leased.
            await self._confirm()
        for hour, where in rows_by_value(rows["hour"]):
            at = np.arange(len(rows))[where]
            at = at[fine[at] & (rows["index"][at] < ledger.store.count(hour))]
            numbers = ledger.store.entries(hour, rows["index"][at])["topic"].tolist() if len(at) else []
            for place, number in zip(at.tolist(), numbers, strict=True):
                found[place] = ledger.topics[number].name
        return found
