"""Services for messages and dead letters: look-ups, pages and changes."""

import asyncio
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from hadelay.api.messages import Copy, DeadLetter, Failure, History, Message
from hadelay.api.service import Actor, ListRequest, Target
from hadelay.api.text import format_instant
from hadelay.codec import commands
from hadelay.codec.formats import REASON
from hadelay.codec.meta import mask_of, unpack
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import (
    CancelOutcome,
    CancelResult,
    JobResult,
    RedriveOutcome,
    RedriveResult,
    RescheduleResult,
    TargetOutcome,
)
from hadelay.errors import Conflict, Impossible, NotFound
from hadelay.ledger import dead, topicchanges
from hadelay.ledger.copies import copies_of, published_id
from hadelay.ledger.describe import describe, described, over
from hadelay.ledger.keys import find_key
from hadelay.ledger.listing import ListQuery, listing
from hadelay.ledger.lookup import find_entry, state_of
from hadelay.ledger.topics import TopicState
from hadelay.ledger.transitions import failures_of
from hadelay.model import DEAD_HOURS, NONE32, PENDING, Description, Key, PastEvent, State, encode_id, hour_name
from hadelay.server.reading import LISTS, extents_of
from hadelay.server.service.part import Service, once_begun

#: Limits of bytes of records: read before other tasks of the event loop have a turn, and on one page.
_TURN_BYTES, _PAGE_BYTES = 1 << 18, 16 << 20
#: Number of bytes that reading a record counts as, besides its own; and that the first record of an hour counts as,
#: because files must be opened.
_RECORD_COST, _HOUR_COST = 8_192, 128 << 10
#: Limit of a page of dead letters in bytes, exceeded only by a single larger letter; and number of letters read before
#: other tasks of the event loop have a turn.
_DEAD_PAGE_BYTES, _LETTERS = 4 << 20, 50
#: First and longest pause between two looks for the end of a message that a reader waits for, in seconds, and factor by
#: which the pauses grow.
_FIRST_LOOK_S, _LAST_LOOK_S, _LOOK_LATER = 0.01, 0.25, 1.2
_SETTLED = (State.ACKED, State.CANCELLED, State.EXPIRED)


class MessageService(Service):
    async def describe(self, target: Target, *, body: bool, stale: bool, wait_ms: int = 0) -> Message[str]:
        """Describe one message. Raises NotFound for an id never issued, or past its retention. stale: use this node's
        state without confirming that it is current. wait_ms: time to wait for the end of a message that is pending."""
        await self._confirm(stale)
        node = self._node
        if wait_ms:
            await self._ended(target, wait_ms)
        message_id = target if isinstance(target, int) else find_key(node.ledger, target[0], hash_client_key(target[1]))
        if message_id is None:
            raise _not_found(target)
        now_ms = self._node.now_ms()
        view = await node.reader.repaired(lambda: describe(node.ledger, message_id, now_ms, body=body))
        if view is None:
            raise _not_found(target)
        found = message_of(view, [event_of(event) for event in view.history])
        if not node.ledger.topics.subscriptions:
            return found
        copies = await node.reader.repaired(lambda: self._copies(message_id, now_ms))
        published = await node.reader.repaired(lambda: published_id(node.ledger, message_id))
        other = None if published in (None, message_id) else encode_id(published or 0)
        return msgspec.structs.replace(found, copies=copies or None, published_id=other)

    async def _ended(self, target: Target, wait_ms: int) -> None:
        """Wait until the message is settled or dead, as this node knows, but no longer than wait_ms. Reads the state
        now and then: an event for each message that ends would cost more than the few that somebody waits for."""
        node, loop, pause_s = self._node, asyncio.get_running_loop(), _FIRST_LOOK_S
        until = loop.time() + wait_ms / 1000
        while (left_s := until - loop.time()) > 0:
            found = target if isinstance(target, int) else find_key(node.ledger, target[0], hash_client_key(target[1]))
            place = None if found is None else find_entry(node.ledger, found)
            if place is None or state_of(node.ledger, place, node.now_ms()) not in PENDING:
                return
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * _LOOK_LATER, _LAST_LOOK_S)

    def _copies(self, message_id: int, now_ms: int) -> list[Copy[str]]:
        ledger = self._node.ledger
        found = [describe(ledger, copy, now_ms) for copy in copies_of(ledger, message_id)]
        return [
            Copy(encode_id(view.id), view.topic, str(view.state), format_instant(view.deliver_at_ms), view.attempt)  # type: ignore[arg-type]
            for view in found
            if view is not None
        ]

    async def cancel(self, target: Target, by: Actor | None = None) -> tuple[str, dict[str, str] | None]:
        """Cancel a message, and its copies for subscriptions; returns cancelled (also if repeated) | leased | acked |
        expired | dead | partial, and the outcome by topic and subscription if there are copies. by: puts the change
        into the audit trail. Raises NotFound."""
        result = await self._change(target, "cancel", commands.encode_cancel(self._node.name, *_named(target)), by)
        assert isinstance(result, CancelResult)
        outcome = CancelOutcome(result.outcomes[0])
        if outcome is CancelOutcome.NOT_FOUND:
            raise _not_found(target)
        return outcome.name.lower(), _by_topic(result.copies, CancelOutcome)

    async def reschedule(
        self, target: Target, when_ms: int, relative: bool, by: Actor | None = None
    ) -> tuple[int, int, bool, dict[str, str] | None]:
        """Reschedule a message, and its copies for subscriptions; returns (id, deliver_at_ms, whether its group blocks
        it, outcome by topic and subscription if there are copies). by: puts the change into the audit trail. Raises
        NotFound, Impossible, and Conflict whose outcome is leased, acked, cancelled, expired, dead or partial."""
        command = commands.encode_reschedule(self._node.name, when_ms, relative, *_named(target))
        result = await self._change(target, "reschedule", command, by)
        assert isinstance(result, RescheduleResult)
        outcome = TargetOutcome(result.outcomes[0])
        if outcome is TargetOutcome.NOT_FOUND:
            raise _not_found(target)
        if outcome is TargetOutcome.TOO_FAR:
            raise Impossible("the new time is further ahead than this cluster allows (limits.max_delay)")
        outcomes = _by_topic(result.copies, TargetOutcome)
        if outcome is TargetOutcome.PARTIAL:
            raise partly("rescheduled", outcomes)
        if outcome is not TargetOutcome.DONE:
            word = outcome.name.lower()
            raise Conflict(f"the message cannot be rescheduled: it is {word}", outcome=word)
        blocked = result.blocked is not None and bool(result.blocked[0])
        return int(result.ids[0]), int(result.deliver_at_ms[0]), blocked, outcomes

    async def _change(self, target: Target, action: str, command: bytes, by: Actor | None) -> Any:
        if by is None:
            return await self._propose(command)
        name = (
            encode_id(target) if isinstance(target, int) else f"{target[0]}: key {target[1].decode(errors='replace')}"
        )
        return await self._administer(by, f"message.{action}", name, command)

    async def list_messages(self, name: str, ask: ListRequest, *, stale: bool) -> tuple[list[Message[str]], Key | None]:
        """Returns (messages in due order without histories, key after which the next page begins, or None at the end).
        A page may be short, even empty, although more messages follow. Raises NotFound."""
        await self._confirm(stale)
        node, topic = self._node, self._topic(name)
        mask = mask_of(ask.tags)
        query = ListQuery(topic.number, ask.states, ask.from_ms, ask.to_ms, mask, ask.after, ask.limit)
        now_ms = self._node.now_ms()
        page = await node.reader.in_slices(lambda: listing(node.ledger, query, now_ms))
        messages: list[Message[str]] = []
        wanted, turn, total = set(ask.tags), 0, 0
        fits = int(np.searchsorted(page.rows["size"].cumsum(dtype=np.int64), _PAGE_BYTES))
        await node.reader.read_off_loop(extents_of(page.hours[:fits], page.rows[:fits]), LISTS)
        for n, (hour, state) in enumerate(zip(page.hours.tolist(), page.states, strict=True)):
            row = page.rows[n]
            size = int(row["size"])
            other = not n or hour != page.hours[n - 1]
            turn += size + (_RECORD_COST if not other or node.storage.hours.mapped(hour) else _HOUR_COST)
            total += size
            if total > _PAGE_BYTES and n:
                return messages, (int(page.due_ms[n - 1]), int(page.rows["first_id"][n - 1]))
            if turn > _TURN_BYTES:
                turn = 0
                await asyncio.sleep(0)
            found = await node.reader.repaired(lambda h=hour, r=row, s=state: self._listed(topic, h, r, s))  # type: ignore[misc]
            # The tag mask may match other tags too (codec/meta.py), so the tags in the record decide.
            if found is not None and wanted <= set((message := message_of(found)).tags):
                messages.append(message)
        return messages, page.after

    def _listed(self, topic: TopicState, hour: int, row: np.void, state: State) -> Description | None:
        """Describe a message without its history; None if its hour file was deleted or its retention has passed."""
        node, index = self._node, int(row["index"])
        if not node.storage.hours.count(hour):
            return None
        if state in _SETTLED and over(node.ledger, topic, hour, index, self._node.now_ms()):
            return None
        # The entry's attempt count does not include the attempt that is under way, or that settled the message.
        attempt = int(row["attempt"])
        if state in (State.LEASED, State.ACKED):
            hour_state = node.ledger.hours.get(hour)
            attempt += hour_state is None or index not in hour_state.late
        return described(node.ledger, hour, row, state, attempt, [], body=False)

    async def dead_letters(
        self, topic: str, after: bytes, limit: int, *, body: bool, stale: bool
    ) -> tuple[list[DeadLetter[str]], bytes | None]:
        """Returns (dead letters after `after` in the order of their deaths, position after which the next page begins).
        The position is None if there is no next page. after: empty for the first page. Raises NotFound."""
        await self._confirm(stale)
        node, letters, room = self._node, list[DeadLetter[str]](), _DEAD_PAGE_BYTES
        state = self._topic(topic)
        found = await node.reader.in_slices(lambda: dead.listing(node.ledger, state, after, limit))
        for n, (at, first_id) in enumerate(found):
            if n % _LETTERS == _LETTERS - 1:
                await asyncio.sleep(0)
            letter = await node.reader.repaired(lambda first_id=first_id: self._letter(first_id, body))  # type: ignore[misc]
            if letter is not None:
                letters.append(letter)
                room -= letter.size if body else 0
            if room <= 0:
                return letters, at
        return letters, found[-1][0] if len(found) == limit else None

    def _letter(self, first_id: int, body: bool) -> DeadLetter[str] | None:
        """A dead letter by its message id; None if it was redriven or deleted since the list was made."""
        ledger = self._node.ledger
        place = find_entry(ledger, first_id)
        if place is None or place.hour < DEAD_HOURS:
            return None
        row = place.rows[0]
        message = message_of(described(ledger, place.hour, row, State.DEAD, int(row["attempt"]), [], body=body))
        errors = [
            Failure(
                event.name.lower(), format_instant(at_ms), attempt,  # type: ignore[arg-type]
                None if reason == NONE32 else ledger.names.name(REASON, reason),
            )
            for at_ms, event, attempt, reason in failures_of(ledger, first_id)
        ]  # fmt: skip
        return DeadLetter(
            id=message.id, topic=message.topic, key=message.key, deliver_at=message.deliver_at,
            published_at=message.published_at, died_at=format_instant(int(row["deliver_at_ms"])),
            attempt=message.attempt, tags=message.tags, meta=message.meta, content_type=message.content_type,
            size=message.size, errors=errors, group=message.group, body=message.body,
        )  # fmt: skip

    async def redrive(self, topic: str, ids: list[int], by: Actor) -> list[str]:
        """Redrive dead letters; returns the outcome per id: redriven, key_taken, not_found, or the state of a message
        that is not dead: scheduled, ready, blocked, leased, acked, cancelled, expired."""
        outcomes: dict[int, str] = {}
        left = ids
        while left:
            command = commands.encode_redrive(self._node.name, topic, left)
            with once_begun(bool(outcomes)):
                result = await self._administer(by, "topic.redrive", f"{topic}: {len(left)} ids", command)
            assert isinstance(result, RedriveResult)
            found = list(zip(left, map(RedriveOutcome, result.outcomes.tolist()), strict=True))
            outcomes |= {i: outcome.name.lower() for i, outcome in found if outcome is not RedriveOutcome.AGAIN}
            left = [i for i, outcome in found if outcome is RedriveOutcome.AGAIN]
        return [outcomes[i] for i in ids]

    async def redrive_all(self, topic: str, rate: float | None, by: Actor) -> int:
        """Begin to redrive all present dead letters of the topic, `rate` per second; returns the number of letters."""
        command = commands.encode_redrive(self._node.name, topic, [], all=True, rate=rate)
        result = await self._administer(by, "topic.redrive", f"{topic}: all", command)
        assert isinstance(result, JobResult)
        return result.count

    async def purge(self, topic: str, states: list[str], by: Actor) -> None:
        """Remove the topic's messages that were published, or died, before the call and are in one of `states`:
        scheduled, ready, dead.

        Raises NotFound, LimitReached."""
        bits = {"scheduled": topicchanges.SCHEDULED, "ready": topicchanges.READY, "dead": topicchanges.DEAD}
        command = commands.encode_purge(topic, sum(bits[state] for state in set(states)))
        await self._administer(by, "topic.purge", f"{topic}: {' '.join(states)}", command)


def partly(changed: str, outcomes: dict[str, str] | None) -> Conflict:
    """Make the error for a change of which some copies of the message were too late. changed: what the others are."""
    return Conflict(f"not every copy of the message could be {changed}", outcome="partial", outcomes=outcomes or {})


def _by_topic(
    copies: list[list[tuple[str, int, int]]] | None, kind: type[CancelOutcome] | type[TargetOutcome]
) -> dict[str, str] | None:
    """Outcome by topic and subscription, of the only message that a command named; None if it has no copies."""
    if not copies:
        return None
    return {topic: "rescheduled" if one == TargetOutcome.DONE and kind is TargetOutcome else kind(one).name.lower()
            for topic, _, one in copies[0]}  # fmt: skip


def message_of(view: Description, history: list[History[str]] | None = None) -> Message[str]:
    meta = unpack(view.meta)
    return Message(
        id=encode_id(view.id), topic=view.topic, key=meta.key, state=str(view.state),  # type: ignore[arg-type]
        deliver_at=format_instant(view.deliver_at_ms), published_at=format_instant(view.published_at_ms),
        attempt=view.attempt, tags=meta.tags, meta=meta.meta, content_type=meta.ct, size=view.size,
        traceparent=meta.tp or None, group=meta.group, history=history,
        body=None if view.body is None else bytes(view.body),
        schedule=meta.sch, occurrence=None if meta.sch is None else format_instant(meta.oc),
        result=UNSET if view.result is None else msgspec.json.decode(view.result),
        progress=view.progress,
    )  # fmt: skip


def event_of(e: PastEvent) -> History[str]:
    left, went = (None if hour is None else hour_name(hour) for hour in (e.from_hour, e.to_hour))
    due_at = None if e.due_ms is None else format_instant(e.due_ms)
    return History(
        e.event.name.lower(), format_instant(e.at_ms), e.attempt, e.consumer, e.node, e.reason or None,  # type: ignore[arg-type]
        left, went, due_at,
    )  # fmt: skip


def _named(target: Target) -> tuple[list[int], list[tuple[str, bytes]]]:
    """Arguments (ids, keys) of a command for one target, which is an id or a key."""
    return ([target], []) if isinstance(target, int) else ([], [target])


def _not_found(target: Target) -> NotFound:
    if isinstance(target, int):
        return NotFound("no such message: never issued, or past its retention")
    return NotFound(f"topic {target[0]} has no message with that key, or the message is past its retention")
