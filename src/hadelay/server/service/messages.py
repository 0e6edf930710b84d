"""Services for messages and dead letters: look-ups, pages and changes."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from hadelay.api.messages import Copy, DeadLetter, Failure, History, Message, Retry
from hadelay.api.service import Actor, ListRequest, Target
from hadelay.api.text import format_instant
from hadelay.codec import commands
from hadelay.codec.formats import REASON, Mask
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
from hadelay.ledger.hours.lookup import find_entry, state_of
from hadelay.ledger.hours.transitions import failures_of, source_of
from hadelay.ledger.leases import dead
from hadelay.ledger.messages.copies import copies_of, published_id
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.views.describe import describe, described, over
from hadelay.ledger.views.listing import ListPage, ListQuery, listing
from hadelay.model import (
    DEAD_HOURS,
    NONE32,
    PENDING,
    Description,
    Event,
    Key,
    PastEvent,
    State,
    encode_id,
    hour_name,
)
from hadelay.model import Retry as PendingRetry
from hadelay.server.reading import LISTS, extents_of
from hadelay.server.service.part import Service, once_begun

#: Limits, in bytes, of the records that are read before other tasks of the event loop run, and of those on one page.
_TURN_BYTES, _PAGE_BYTES = 1 << 18, 16 << 20
#: Number of topics whose names are tested before other tasks of the event loop run.
_TOPICS_AT_ONCE = 1_000
#: Numbers of bytes by which the count of bytes read is raised: for each record, and for the first record of an hour,
#: because the hour's files must be opened.
_RECORD_COST, _HOUR_COST = 8_192, 128 << 10
#: Limit of a page of dead letters in bytes, exceeded only by a single larger letter; and number of letters read before
#: other tasks of the event loop run.
_DEAD_PAGE_BYTES, _LETTERS = 4 << 20, 50
#: Pauses between two reads of the state of a message whose end a reader waits for: first and longest pause in seconds,
#: and factor by which the pauses grow.
_FIRST_LOOK_S, _LAST_LOOK_S, _LOOK_LATER = 0.01, 0.25, 1.2
#: Number of topics in which a key is looked up before other tasks of the event loop run.
_TOPICS_AT_ONCE = 500
_SETTLED = (State.ACKED, State.CANCELLED, State.EXPIRED)


class MessageService(Service):
    async def describe(self, target: Target, *, body: bool, stale: bool, wait_ms: int = 0) -> Message[str]:
        """Describe one message. Raises NotFound for an id that was never issued, or whose message is past its
        retention. stale: use this node's state without confirming that it is current. wait_ms: if the message is
        pending, time to wait for its end."""
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
        found = message_of(view, [event_of(event) for event in view.history], self._shard)
        if not node.ledger.topics.subscriptions:
            return found
        copies = await node.reader.repaired(lambda: self._copies(message_id, now_ms))
        published = await node.reader.repaired(lambda: published_id(node.ledger, message_id))
        other = None if published in (None, message_id) else encode_id(published or 0)
        return msgspec.structs.replace(found, copies=copies or None, published_id=other)

    def died_in(self, message_id: int, topic: str) -> str | None:
        """Name of the topic in which a message, now in the dead-letter topic `topic`, died, as far as this node knows;
        None if the message came from no other topic, or that topic's dead letters no longer go to `topic`."""
        ledger = self._node.ledger
        number = source_of(ledger, message_id)
        source = None if number == NONE32 else ledger.topics[number]
        return source.name if source is not None and source.exists and source.settings.dead_letter == topic else None

    async def topics_with_key(self, key: bytes, *, stale: bool) -> list[str]:
        """Names of the topics in which a message with this client key is remembered. Costs a look-up per topic."""
        await self._confirm(stale)
        ledger, digest, found = self._node.ledger, hash_client_key(key), list[str]()
        known = ledger.topics.all
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = [topic for topic in known[first : first + _TOPICS_AT_ONCE] if topic.exists]
            found += [topic.name for topic in few if find_key(ledger, topic.name, digest) is not None]
            await asyncio.sleep(0)
        return found

    async def _ended(self, target: Target, wait_ms: int) -> None:
        """Wait until the message is settled or dead, as far as this node knows, but no longer than wait_ms. Reads the
        state at intervals: an event for every message that ends would cost more, because only few readers wait."""
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
            Copy(encode_id(view.id), view.topic, str(view.state), format_instant(view.deliver_at_ms), view.attempt)
            for view in found
            if view is not None
        ]

    async def cancel(self, target: Target, by: Actor | None = None) -> dict[str, str] | None:
        """Cancel a message, and its copies for subscriptions; may be repeated. Returns the outcome by topic and
        subscription if there are copies. by: token for an entry in the audit trail; None: no entry. Raises NotFound,
        and Conflict whose outcome is leased, acked, expired, dead or partial."""
        result = await self._change(target, "cancel", commands.encode_cancel(self._node.name, *_named(target)), by)
        assert isinstance(result, CancelResult)
        outcome = CancelOutcome(result.outcomes[0])
        if outcome is CancelOutcome.NOT_FOUND:
            raise _not_found(target)
        outcomes = _by_topic(result.copies, CancelOutcome)
        if outcome is not CancelOutcome.CANCELLED:
            raise too_late("cancelled", outcome, outcomes)
        return outcomes

    async def reschedule(
        self, target: Target, when_ms: int, relative: bool, by: Actor | None = None, *, expected_ms: int | None = None
    ) -> tuple[int, int, bool, dict[str, str] | None]:
        """Reschedule a message, and its copies for subscriptions; returns (id, deliver_at_ms, whether its group blocks
        it, outcome by topic and subscription if there are copies). by: token for an entry in the audit trail; None:
        no entry. expected_ms: due time that the message must have. Raises NotFound, Impossible, and Conflict whose
        outcome is leased, acked, cancelled, expired, dead, moved or partial."""
        named = _named(target)
        command = commands.encode_reschedule(self._node.name, when_ms, relative, *named, expected_ms=expected_ms)
        result = await self._change(target, "reschedule", command, by)
        assert isinstance(result, RescheduleResult)
        outcome = TargetOutcome(result.outcomes[0])
        if outcome is TargetOutcome.NOT_FOUND:
            raise _not_found(target)
        if outcome is TargetOutcome.TOO_FAR:
            raise Impossible("the new time is further ahead than this cluster allows (limits.max_delay)")
        outcomes = _by_topic(result.copies, TargetOutcome)
        if outcome is TargetOutcome.MOVED and expected_ms is not None:
            present, expected = (format_instant(at_ms) for at_ms in (int(result.deliver_at_ms[0]), expected_ms))
            detail = f"the message is due at {present}, not at {expected}: it was rescheduled or retried meanwhile"
            raise Conflict(f"{detail}; read the message again, then reschedule it", outcome="moved", deliver_at=present)
        if outcome is not TargetOutcome.DONE:
            raise too_late("rescheduled", outcome, outcomes)
        blocked = result.blocked is not None and bool(result.blocked[0])
        return int(result.ids[0]), int(result.deliver_at_ms[0]), blocked, outcomes

    async def _change(self, target: Target, action: str, command: bytes, by: Actor | None) -> Any:
        if by is None:
            return await self._propose(command)
        name = (
            encode_id(target) if isinstance(target, int) else f"{target[0]}: key {target[1].decode(errors='replace')}"
        )
        return await self._administer(by, f"message.{action}", name, command)

    async def list_messages(
        self, topics: str | Callable[[str], bool], ask: ListRequest, *, stale: bool
    ) -> tuple[list[Message[str]], Key | None]:
        """Same as `list_with_keys`, but returns the messages without their keys."""
        found, after = await self.list_with_keys(topics, ask, stale=stale)
        return [message for _, message in found], after

    async def list_with_keys(
        self, topics: str | Callable[[str], bool], ask: ListRequest, *, stale: bool
    ) -> tuple[list[tuple[Key, Message[str]]], Key | None]:
        """Returns (messages in due order, without histories, each with its key in this order; key after which the next
        page begins, or None at the end). A page may be short, even empty, although more messages follow. topics: name
        of a topic, or a function that tests names: messages of all topics that pass are listed together. Raises
        NotFound."""
        await self._confirm(stale)
        node, mask = self._node, mask_of(ask.tags)
        of = self._topic(topics).number if isinstance(topics, str) else await self._topics_like(topics)
        query = ListQuery(of, ask.states, ask.from_ms, ask.to_ms, mask, ask.after, ask.limit, ask.retrying)
        now_ms = self._node.now_ms()
        page = await node.reader.in_slices(lambda: listing(node.ledger, query, now_ms))
        messages, shard = list[tuple[Key, Message[str]]](), self._shard
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
                return messages, _key(page, n - 1)
            if turn > _TURN_BYTES:
                turn = 0
                await asyncio.sleep(0)
            found = await node.reader.repaired(lambda h=hour, r=row, s=state: self._listed(h, r, s, ask.body))  # type: ignore[misc]
            # The tag mask may match messages with other tags, too (codec/meta.py), so compare the tags in the record.
            if found is not None and wanted <= set((message := message_of(found, shard=shard)).tags):
                messages.append((_key(page, n), message))
        return messages, page.after

    async def _topics_like(self, wanted: Callable[[str], bool]) -> Mask:
        """Mask, by topic number, of the topics whose names pass the test `wanted`. Its last element, for topics created
        later, is False."""
        known = self._node.ledger.topics.all
        mask = np.zeros(len(known) + 1, np.bool_)
        for first in range(0, len(mask) - 1, _TOPICS_AT_ONCE):
            few = known[first : first + _TOPICS_AT_ONCE]
            mask[first : first + len(few)] = [topic.exists and wanted(topic.name) for topic in few]
            await asyncio.sleep(0)
        return mask

    def _listed(self, hour: int, row: np.void, state: State, body: bool) -> Description | None:
        """Describe a message without its history; None if its hour file was deleted or its retention has passed."""
        node, index = self._node, int(row["index"])
        if not node.storage.hours.count(hour):
            return None
        topic = node.ledger.topics[int(row["topic"])]
        if state in _SETTLED and over(node.ledger, topic, hour, index, self._node.now_ms()):
            return None
        # The entry's attempt count does not include the attempt that is under way, or the attempt that settled the
        # message.
        attempt = int(row["attempt"])
        if state in (State.LEASED, State.ACKED):
            hour_state = node.ledger.hours.get(hour)
            attempt += hour_state is None or index not in hour_state.late
        return described(node.ledger, hour, row, state, attempt, [], body=body)

    async def dead_letters(
        self, topic: str, after: bytes, limit: int, *, body: bool, stale: bool
    ) -> tuple[list[DeadLetter[str]], bytes | None]:
        """Returns (dead letters in the order in which they died, position after which the next page begins). The
        position is None if there is no next page. after: the position that the page before returned; empty for the
        first page. Raises NotFound."""
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
        """The dead letter with this message id; None if it was redriven or deleted after the list was made."""
        ledger = self._node.ledger
        place = find_entry(ledger, first_id)
        if place is None or place.hour < DEAD_HOURS:
            return None
        row = place.rows[0]
        message = message_of(described(ledger, place.hour, row, State.DEAD, int(row["attempt"]), [], body=body))
        errors = [
            _failure(event, at_ms, attempt, None if reason == NONE32 else ledger.names.name(REASON, reason))
            for at_ms, event, attempt, reason in failures_of(ledger, first_id)
        ]
        return DeadLetter(
            id=message.id,
            topic=message.topic,
            key=message.key,
            deliver_at=message.deliver_at,
            published_at=message.published_at,
            died_at=format_instant(int(row["deliver_at_ms"])),
            attempt=message.attempt,
            tags=message.tags,
            meta=message.meta,
            content_type=message.content_type,
            size=message.size,
            errors=errors,
            group=message.group,
            body=message.body,
        )

    async def redrive(self, topic: str, ids: list[int], by: Actor) -> list[str]:
        """Redrive dead letters. Returns the outcome per id: redriven, key_taken, not_found; or, for a message that is
        not dead, its state: scheduled, ready, blocked, leased, acked, cancelled, expired."""
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
        """Remove those messages of the topic that are in one of `states` (scheduled, ready, dead) and were published,
        or died, before the call.

        Raises NotFound, LimitReached."""
        bits = {"scheduled": topicchanges.SCHEDULED, "ready": topicchanges.READY, "dead": topicchanges.DEAD}
        command = commands.encode_purge(topic, sum(bits[state] for state in set(states)))
        await self._administer(by, "topic.purge", f"{topic}: {' '.join(states)}", command)


def too_late(changed: str, outcome: CancelOutcome | TargetOutcome, outcomes: dict[str, str] | None) -> Conflict:
    """Error for a change that came too late for the message, or for some of its copies. changed: "cancelled" or
    "rescheduled". outcomes: outcome of each copy, by topic and subscription."""
    word = outcome.name.lower()
    if word == "partial":
        return Conflict(f"not every copy of the message could be {changed}", outcome=word, outcomes=outcomes or {})
    return Conflict(f"the message cannot be {changed}: it is {word}", outcome=word)


def _by_topic(
    copies: list[list[tuple[str, int, int]]] | None, kind: type[CancelOutcome] | type[TargetOutcome]
) -> dict[str, str] | None:
    """Outcome by topic and subscription, for a command about one message; None if the message has no copies."""
    if not copies:
        return None
    return {
        topic: "rescheduled" if one == TargetOutcome.DONE and kind is TargetOutcome else kind(one).name.lower()
        for topic, _, one in copies[0]
    }


def _key(page: ListPage, n: int) -> Key:
    """Sort key (due time in ms, id) of the message at position `n` of the page."""
    return int(page.due_ms[n]), int(page.rows["first_id"][n])


def message_of(view: Description, history: list[History[str]] | None = None, shard: int | None = None) -> Message[str]:
    meta = unpack(view.meta)
    return Message(
        id=encode_id(view.id),
        topic=view.topic,
        key=meta.key,
        state=str(view.state),
        deliver_at=format_instant(view.deliver_at_ms),
        published_at=format_instant(view.published_at_ms),
        attempt=view.attempt,
        tags=meta.tags,
        meta=meta.meta,
        content_type=meta.ct,
        size=view.size,
        traceparent=meta.tp or None,
        group=meta.group,
        batch=meta.batch,
        history=history,
        body=None if view.body is None else bytes(view.body),
        schedule=meta.sch,
        occurrence=None if meta.sch is None else format_instant(meta.oc),
        result=UNSET if view.result is None else msgspec.json.decode(view.result),
        progress=view.progress,
        retry=None if view.retry is None else _retry_of(view.retry),
        shard=shard,
    )


def _retry_of(retry: PendingRetry) -> Retry[str]:
    last = retry.failure
    failure = None if last is None else _failure(last.event, last.at_ms, last.attempt, last.reason)
    return Retry(retry.attempt, retry.most, failure)


def _failure(event: Event, at_ms: int, attempt: int, reason: str | None) -> Failure[str]:
    return Failure(event.name.lower(), format_instant(at_ms), attempt, reason)


def event_of(e: PastEvent) -> History[str]:
    left, went = (None if hour is None else hour_name(hour) for hour in (e.from_hour, e.to_hour))
    due_at = None if e.due_ms is None else format_instant(e.due_ms)
    before, after = (None, None) if e.moved_ms is None else map(format_instant, e.moved_ms)
    return History(
        e.event.name.lower(),
        format_instant(e.at_ms),
        e.attempt,
        e.consumer,
        e.node,
        e.reason or None,
        left,
        went,
        due_at,
        before,
        after,
    )


def _named(target: Target) -> tuple[list[int], list[tuple[str, bytes]]]:
    """Arguments (ids, keys) of a command for a single target, which is either an id or a key."""
    return ([target], []) if isinstance(target, int) else ([], [target])


def _not_found(target: Target) -> NotFound:
    if isinstance(target, int):
        return NotFound("no such message: never issued, or past its retention")
    return NotFound(f"topic {target[0]} has no message with that key, or the message is past its retention")
