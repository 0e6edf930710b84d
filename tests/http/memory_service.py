"""A `Service` in memory: messages in a dict, polls in a list. Too simple to be wrong, and slow on purpose nowhere.

It stands for a whole cluster of one node; `leader` makes it a follower of somebody else, `fail` makes it answer the
next calls with an error, `hold` keeps publishes waiting until `release`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace

from hadelay.api.cluster import (
    BackupOut,
    CheckOut,
    Cluster,
    Dispatch,
    Hour,
    HourFileOut,
    Member,
    Names,
    Quorum,
    Snapshot,
    SnapshotFileOut,
    Term,
)
from hadelay.api.consuming import Received
from hadelay.api.jobs import Job, JobCount, JobFilterOut
from hadelay.api.messages import DeadLetter, Failure, Message
from hadelay.api.service import (
    Actor,
    Family,
    Handed,
    Histogram,
    Leader,
    ListRequest,
    Measured,
    PublishDone,
    Receipts,
    ReceiveRequest,
    Target,
)
from hadelay.api.settings import settings_out
from hadelay.api.text import format_instant
from hadelay.api.topics import Group, GroupHead, Topic
from hadelay.codec.jobcommands import JobCursor, JobSpec
from hadelay.codec.leasetokens import decode_leases, encode_leases
from hadelay.codec.meta import unpack
from hadelay.errors import BadRequest, Conflict, HadelayError, Impossible, NoLeader, NotFound
from hadelay.model import (
    HOUR_MS,
    KEEP,
    REJECT,
    Description,
    Draft,
    Event,
    PastEvent,
    State,
    encode_id,
    hour_name,
    pack_id,
)
from hadelay.rights import AuditEntry, Token, covers
from hadelay.server.service.messages import event_of, message_of
from hadelay.settings import topic
from hadelay.settings.cluster import Settings
from tests.http.memory_schedules import schedule_service

_NOBODY = Actor()


@dataclass
class Stored:
    id: int
    draft: Draft
    deliver_at_ms: int
    published_at_ms: int
    state: str = "scheduled"
    attempt: int = 0
    lease: str = ""
    until_ms: int = 0
    history: list[PastEvent] = field(default_factory=list)
    #: JSON that the ack carried.
    result: bytes | None = None
    #: Progress that came with an extend.
    progress: str | None = None


class MemoryJobs:
    """Jobs that change nothing: they are `running` until they are stopped."""

    def __init__(self, service: MemoryService) -> None:
        self.service = service
        self.known: dict[int, Job[str]] = {}
        self.specs: list[JobSpec] = []
        self.requests: dict[str, int] = {}

    async def begin(self, spec: JobSpec, request_id: str, by: Actor) -> Job[str]:
        self.service.actors.append(by)
        if request_id in self.requests:
            return self.known[self.requests[request_id]]
        counted, _ = await self.count(spec, (0, 0))
        self.specs.append(spec)
        number = len(self.specs)
        self.requests[request_id or f"#{number}"] = number
        started = format_instant(self.service.now_ms())
        ids = list(map(encode_id, spec.ids))
        of = JobFilterOut(spec.topic, list(spec.tags), spec.key_prefix, ids=ids, error=spec.error)
        self.known[number] = Job(
            id=number, action=spec.action, filter=of, rate=spec.rate, state="running", began_at=started, ended_at=None,
            by=by.token, progress=0.5, done=counted.matched, leased=0, settled=0, moved=0, refused=0,
        )  # fmt: skip
        return self.known[number]

    async def get_job(self, number: int, *, stale: bool) -> Job[str]:
        if number not in self.known:
            raise NotFound(f"there is no job {number}")
        return self.known[number]

    async def list_jobs(self, *, stale: bool) -> list[Job[str]]:
        return list(self.known.values())

    async def stop(self, number: int, by: Actor) -> Job[str]:
        self.service.actors.append(by)
        ended = format_instant(self.service.now_ms())
        self.known[number] = replace(await self.get_job(number, stale=False), state="stopped", ended_at=ended)
        return self.known[number]

    async def count(self, spec: JobSpec, after: JobCursor) -> tuple[JobCount[str], JobCursor | None]:
        """A part for each message."""
        if "*" not in spec.topic:
            self.service._topic(spec.topic)
        found = [m for m in self.service.stored.values() if covers(spec.topic, m.draft.topic)]
        found = [m for m in found if set(spec.tags) <= set(unpack(m.draft.meta).tags)]
        found = [m for m in found if (m.draft.key or b"").decode().startswith(spec.key_prefix)]
        some = found[after[1] : after[1] + 1] if spec.rate is None else found
        due = [format_instant(m.deliver_at_ms) for m in some]
        more = (0, after[1] + 1) if after[1] + len(some) < len(found) else None
        counts = JobCount(len(some), 0, min(due, default=None), max(due, default=None), 0.5 if more else 1.0, None)
        return counts, more


class MemoryService:
    node = "n1"
    leader_name: str | None = "n1"
    applied_index = 7

    def __init__(self) -> None:
        self.consume = self.messages = self.topics = self.cluster = self.files = self.access = self
        self.jobs = MemoryJobs(self)
        self.schedules = schedule_service(self.now_ms)
        self.stored: dict[int, Stored] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.deleted: set[str] = set()
        self.by_key: dict[tuple[str, bytes], int] = {}
        #: Message that began the period of a client key with `unique_for`, and the end of the period.
        self.unique: dict[tuple[str, bytes], tuple[Stored, int]] = {}
        self.keys: dict[bytes, tuple[Any, Receipts]] = {}
        self.leases: dict[str, tuple[int, int]] = {}
        self.grants: dict[tuple[str, bytes], Handed] = {}
        self.leader: Leader | None = Leader("n1", "", True)
        self.fail: HadelayError | None = None
        self.held: list[Callable[[], None]] | None = None
        self.published: list[Draft] = []
        self.polls: list[ReceiveRequest] = []
        self.snapshots: set[str] = set()
        #: Snapshots whose reader said that its copy is complete.
        self.copied: set[str] = set()
        self.withdrawn = 0
        self.tokens: dict[str, Token] = {}
        self.actors: list[Actor] = []
        self.reason, self.count = "", True
        self.rate: float | None = None
        self.hour_bytes = b"".join(bytes([n % 251]) for n in range(5000))
        self.hours_there = 1
        self._index = count()
        self._seq = count(1)
        self._wake = asyncio.Event()

    @staticmethod
    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    # ---- who may

    knows_tokens = True

    async def list_tokens(self) -> list[Token]:
        return list(self.tokens.values())

    async def create_token(
        self, name: str, digest: bytes, scopes: list[str], lifetime_ms: int | None, by: Actor
    ) -> Token:
        self.actors.append(by)
        now = self.now_ms()
        token = Token(name, digest, tuple(scopes), now, None if lifetime_ms is None else now + lifetime_ms)
        self.tokens = {**self.tokens, token.id: token}
        return token

    async def revoke_token(self, token_id: str, by: Actor = _NOBODY) -> None:
        self.actors.append(by)
        if token_id not in self.tokens:
            raise NotFound(f"there is no token {token_id}")
        self.tokens = {other: token for other, token in self.tokens.items() if other != token_id}

    async def audit(self, after: int, limit: int) -> list[AuditEntry]:
        entries = [AuditEntry(n, 1_795_197_600_000, "n1", "", "", "topic.set", "orders", "done") for n in (1, 2, 3)]
        return [entry for entry in entries if entry.number > after][:limit]

    async def topics_of_leases(self, leases: list[str]) -> set[str]:
        return {self.stored[self.leases[lease][0]].draft.topic for lease in leases if lease in self.leases}

    # ---- publishing

    def hold(self) -> None:
        self.held = []

    def release(self) -> None:
        held, self.held = self.held or [], None
        for go in held:
            go()

    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        if self.held is not None:
            self.held.append(lambda: self._publish(drafts, request_key, done))
        else:
            self._publish(drafts, request_key, done)

    def _publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        if self.fail is not None:
            done(None, self.fail)
            return
        if request_key is not None and request_key in self.keys:
            before, answer = self.keys[request_key]
            if before == drafts:
                done(Receipts(answer.ids, answer.deliver_at_ms, frozenset(range(len(drafts)))), None)
            else:
                done(None, Impossible("the Idempotency-Key was used with another payload or other options"))
            return
        answer = self._commit(drafts)
        if request_key is not None:
            self.keys[request_key] = drafts, answer
        done(answer, None)
        self._wake.set()

    def _commit(self, drafts: list[Draft]) -> Receipts:
        answer = Receipts([], [], frozenset(), {}, {})
        for n, draft in enumerate(drafts):
            message_id, deliver_at = self._commit_one(n, draft, answer)
            answer.ids.append(message_id)
            answer.deliver_at_ms.append(deliver_at)
        self.published += drafts
        return answer

    def _commit_one(self, n: int, draft: Draft, answer: Receipts) -> tuple[int, int]:
        now = self.now_ms()
        if draft.key is not None:
            first, until_ms = self.unique.get((draft.topic, draft.key), (None, 0))
            if draft.unique_ms and first is not None and until_ms > now:
                answer.duplicates |= {n}
                return first.id, first.deliver_at_ms
            first = self.stored.get(self.by_key.get((draft.topic, draft.key), -1))
            if first is not None and first.state in ("scheduled", "leased"):
                if draft.on_conflict == KEEP:
                    answer.duplicates |= {n}
                    return first.id, first.deliver_at_ms
                if draft.on_conflict == REJECT or first.state == "leased":
                    answer.problems[n] = Conflict("pending", outcome="pending", id=encode_id(first.id))
                    return 0, 0
                first.state = "cancelled"
                answer.replaced[n] = first.id
        deliver_at = now + draft.when_ms if draft.relative else draft.when_ms
        message_id = pack_id(0, max(deliver_at, now) // HOUR_MS, next(self._index))
        self.stored[message_id] = Stored(message_id, draft, deliver_at, now)
        self.configs.setdefault(draft.topic, {})
        if draft.key is not None:
            self.by_key[draft.topic, draft.key] = message_id
            if draft.unique_ms:
                self.unique[draft.topic, draft.key] = (self.stored[message_id], now + draft.unique_ms)
        return message_id, deliver_at

    # ---- consuming

    async def find_leader(self) -> Leader:
        if self.leader is None:
            await asyncio.sleep(0)
            raise NoLeader("no leader is known", retry_after_ms=500)
        return self.leader

    async def receive(self, poll: ReceiveRequest) -> Handed:
        self.polls.append(poll)
        again = self.grants.get((poll.consumer, poll.request_id))
        if again is not None:
            return again
        deadline = self.now_ms() + poll.wait_ms
        try:
            while True:
                if self.fail is not None:
                    raise self.fail
                delivery = self._grant(poll)
                left_ms = deadline - self.now_ms()
                if delivery.messages or left_ms <= 0:
                    # Whoever gets them may change them.
                    again = Handed([replace(message) for message in delivery.messages])
                    self.grants[poll.consumer, poll.request_id] = again
                    return delivery
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), min(left_ms, self._next_due_ms()) / 1000)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise

    def _next_due_ms(self) -> int:
        now = self.now_ms()
        waiting = (m.deliver_at_ms for m in self.stored.values() if m.state == "scheduled")
        return max(1, min((at - now for at in waiting if at > now), default=HOUR_MS))

    def _grant(self, poll: ReceiveRequest) -> Handed:
        now = self.now_ms()
        lease_ms = poll.lease_ms or 30_000
        messages = []
        for m in self.stored.values():
            if m.state == "leased" and m.until_ms <= now:
                m.state = "scheduled"
            if m.state == "scheduled" and m.deliver_at_ms <= now and m.draft.topic in poll.topics:
                m.state, m.attempt, m.until_ms = "leased", m.attempt + 1, now + lease_ms
                m.lease = encode_leases(0, 1, next(self._seq), [0], [m.id >> 32], [m.id & 0xFFFFFFFF])[0]
                m.history.append(PastEvent(Event.LEASED, now, m.attempt, poll.consumer, self.node))
                self.leases[m.lease] = m.id, m.attempt
                meta = unpack(m.draft.meta)
                received = Received(
                    id=encode_id(m.id), lease=m.lease, topic=m.draft.topic, body=m.draft.body, content_type=meta.ct,
                    key=meta.key, tags=meta.tags, meta=meta.meta, deliver_at=format_instant(m.deliver_at_ms),
                    late_ms=now - m.deliver_at_ms, attempt=m.attempt, traceparent=meta.tp, redelivered=False,
                    lease_until=format_instant(now + lease_ms), lease_left_ms=lease_ms,
                )  # fmt: skip
                messages.append(received)
                if len(messages) == poll.max:
                    break
        return Handed(messages)

    async def settle(
        self, kind: str, leases: list[str], value_ms: int | None, reason: str = "", *, count: bool = True,
        dead: bool = False, results: Sequence[bytes | None] = (),
    ) -> list[str]:  # fmt: skip
        self.reason, self.count, self.dead = reason, count, dead
        if self.fail is not None:
            raise self.fail
        _, ok = decode_leases(0, leases)
        return [
            self._settle(kind, token, value_ms, result) if fine else "lease_lost"
            for token, fine, result in zip(leases, ok, results or [None] * len(leases), strict=True)
        ]

    def _settle(self, kind: str, token: str, value_ms: int | None, result: bytes | None) -> str:
        message_id, attempt = self.leases.get(token.upper(), (None, 0))
        m = self.stored.get(message_id) if message_id is not None else None
        if m is None or m.attempt != attempt:
            return "lease_lost"
        if m.state == "acked":
            return "already_acked"
        if m.state != "leased":
            return "lease_lost"
        now = self.now_ms()
        if kind == "ack":
            m.state, m.result = "acked", result
        elif kind == "nack":
            m.state, m.deliver_at_ms = "scheduled", now + (value_ms or 0)
            self._wake.set()
        else:
            m.until_ms, m.progress = now + (value_ms or 0), self.reason or m.progress
        return {"ack": "acked", "nack": "nacked", "extend": "extended"}[kind]

    # ---- messages

    def _find(self, target: Target) -> Stored:
        if self.fail is not None:
            raise self.fail
        m = self.stored.get(target if isinstance(target, int) else self.by_key.get(target, -1))
        if m is None:
            raise NotFound("no message has this id, or its retention is over")
        return m

    async def describe(self, target: Target, *, body: bool, stale: bool, wait_ms: int = 0) -> Message[str]:
        m = self._find(target)
        until = time.monotonic() + wait_ms / 1000
        while m.state in ("scheduled", "ready", "leased") and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        state = "ready" if m.state == "scheduled" and m.deliver_at_ms <= self.now_ms() else m.state
        found = Description(
            m.id,
            m.draft.topic,
            State(state),
            m.deliver_at_ms,
            m.published_at_ms,
            m.attempt,
            m.draft.meta,
            len(m.draft.body),
            m.history,
            m.draft.body if body else None,
            result=m.result,
            progress=m.progress if m.state == "leased" else None,
        )
        return message_of(found, [event_of(event) for event in m.history])

    async def list_messages(
        self, name: str, ask: ListRequest, *, stale: bool
    ) -> tuple[list[Message[str]], tuple[int, int] | None]:
        self._topic(name)
        found = []
        for m in sorted(self.stored.values(), key=lambda m: (m.deliver_at_ms, m.id)):
            view = replace(await self.describe(m.id, body=False, stale=stale), history=None)
            inside = ask.from_ms <= m.deliver_at_ms < ask.to_ms and (m.deliver_at_ms, m.id) > ask.after
            tagged = set(ask.tags) <= set(unpack(m.draft.meta).tags)
            if inside and tagged and m.draft.topic == name and view.state in ask.states:
                found.append((view, (m.deliver_at_ms, m.id)))
        page = found[: ask.limit]
        return [view for view, _ in page], page[-1][1] if len(found) > ask.limit else None

    async def cancel(self, target: Target) -> tuple[str, dict[str, str] | None]:
        m = self._find(target)
        if m.state == "scheduled":
            m.state = "cancelled"
        return m.state, None

    async def reschedule(
        self, target: Target, when_ms: int, relative: bool
    ) -> tuple[int, int, bool, dict[str, str] | None]:
        m = self._find(target)
        if m.state != "scheduled":
            raise Conflict(f"the message cannot be rescheduled: it is {m.state}", outcome=m.state)
        m.deliver_at_ms = max(self.now_ms(), self.now_ms() + when_ms if relative else when_ms)
        return m.id, m.deliver_at_ms, False, None

    # ---- topics

    def _topic(self, name: str) -> Topic[str]:
        if name not in self.configs:
            raise NotFound(f"there is no topic {name!r}; it appears when something is published to it")
        now = self.now_ms()
        mine = [m for m in self.stored.values() if m.draft.topic == name]
        ready = [m for m in mine if m.state == "scheduled" and m.deliver_at_ms <= now]
        scheduled = sum(m.state == "scheduled" for m in mine) - len(ready)
        oldest = max((now - m.deliver_at_ms for m in ready), default=None)
        leased = sum(m.state == "leased" for m in mine)
        return Topic(name, scheduled, len(ready), leased, 0, oldest, 0, None, **settings_out(self.configs[name]))

    # ---- dead letters

    async def dead_letters(
        self, topic: str, after: bytes, limit: int, *, body: bool, stale: bool
    ) -> tuple[list[DeadLetter[str]], bytes | None]:
        self._topic(topic)
        letters = [m for m in self.stored.values() if m.draft.topic == topic and m.state == "dead"]
        letters = [m for m in letters if m.id.to_bytes(16, "big") > after]
        views: list[DeadLetter[str]] = []
        for m in letters[:limit]:
            message = await self.describe(m.id, body=body, stale=stale)
            failure = Failure("nacked", format_instant(1_795_197_600_000), 1, "no")
            letter = DeadLetter(
                id=message.id, topic=message.topic, key=message.key, deliver_at=message.deliver_at,
                published_at=message.published_at, died_at=format_instant(m.deliver_at_ms), attempt=message.attempt,
                tags=message.tags, meta=message.meta, content_type=message.content_type, size=message.size,
                errors=[failure], body=message.body,
            )  # fmt: skip
            views.append(letter)
        return views, letters[limit - 1].id.to_bytes(16, "big") if len(letters) > limit else None

    async def redrive(self, topic: str, ids: list[int], by: Actor) -> list[str]:
        self._topic(topic)
        outcomes = []
        for message_id in ids:
            m = self.stored.get(message_id)
            key = None if m is None else m.draft.key
            taken = key is not None and self.by_key[topic, key] != message_id
            dead = "key_taken" if taken else "redriven"
            outcomes.append("not_found" if m is None else dead if m.state == "dead" else m.state)
            if m is not None and m.state == "dead" and not taken:
                m.state = "scheduled"
        return outcomes

    async def redrive_all(self, topic: str, rate: float | None, by: Actor) -> int:
        self._topic(topic)
        self.rate = rate
        return sum(m.draft.topic == topic and m.state == "dead" for m in self.stored.values())

    async def purge(self, topic: str, states: list[str], by: Actor) -> None:
        self.actors.append(by)
        self._topic(topic)
        self.stored = {i: m for i, m in self.stored.items() if m.draft.topic != topic or m.state not in states}

    async def put_topic(
        self, name: str, config: dict[str, Any], by: Actor, *, subscribes: bool = True, pending: bool = False
    ) -> Topic[str]:
        self.actors.append(by)
        if "~" in name and not subscribes and name not in self.configs:
            raise NotFound(f"there is no subscription {name!r}")
        if wrong := topic.problem(config, Settings()):
            raise BadRequest(wrong)
        config, wrong = topic.unmasked(self.configs.get(name, {}), config)
        if wrong:
            raise BadRequest(wrong)
        self.configs[name] = topic.merged(self.configs.get(name, {}), config)
        return self._topic(name)

    async def get_topic(self, name: str, *, stale: bool) -> Topic[str]:
        return self._topic(name)

    async def get_group(self, name: str, group: str, *, stale: bool) -> Group[str]:
        mine = [m for m in self.stored.values() if m.draft.topic == name and unpack(m.draft.meta).group == group]
        if not mine:
            raise NotFound(f"no pending message of {name!r} is in group {group!r}")
        first, limit = mine[0], self.configs[name]["group_concurrency"]
        head = GroupHead(encode_id(first.id), "scheduled", format_instant(first.deliver_at_ms), 0)
        return Group(name, group, limit, len(mine) - 1, [head])

    async def list_subscriptions(self, name: str, *, stale: bool) -> list[Topic[str]]:
        self._topic(name)
        return [self._topic(other) for other in self.configs if other.startswith(f"{name}~")]

    async def list_topics(self, *, stale: bool, prefix: str = "") -> list[Topic[str]]:
        return [self._topic(name) for name in self.configs if name.startswith(prefix)]

    async def delete_topic(self, name: str, *, force: bool, by: Actor) -> None:
        if name in self.deleted and name not in self.configs:
            return
        view = self._topic(name)
        if (view.scheduled or view.ready or view.leased) and not force:
            raise Conflict(f"{name} has pending messages: add ?force=true to cancel them", outcome="pending")
        for m in self.stored.values():
            if m.draft.topic == name and m.state in ("scheduled", "leased"):
                m.state = "cancelled"
        del self.configs[name]
        self.deleted.add(name)

    async def due(
        self, topic: str | None, from_ms: int, to_ms: int, step_ms: int, *, stale: bool
    ) -> tuple[list[int], list[int]]:
        buckets: dict[int, int] = {}
        for m in self.stored.values():
            if from_ms <= m.deliver_at_ms < to_ms and topic in (None, m.draft.topic):
                start = from_ms + (m.deliver_at_ms - from_ms) // step_ms * step_ms
                buckets[start] = buckets.get(start, 0) + 1
        return sorted(buckets), [buckets[at] for at in sorted(buckets)]

    # ---- cluster

    async def view(self, *, stale: bool) -> Cluster[str]:
        now = self.now_ms()
        member = Member("n1", "http://127.0.0.1:1", "127.0.0.1:2", "leader", "7", 0, "0.1.0", 0, 0.0)
        cursor = Dispatch(hour_name(now // HOUR_MS), 1, 2, "commit")
        terms = [
            Term(3, "n1", format_instant(now), "n2 handed over: it is drained"),
            Term(2, "n2", format_instant(0), None),
        ]
        backups = [BackupOut("n1", format_instant(now), "9000", "4096", "complete")]
        return Cluster("c", 1, self.leader_name, 3, "7", format_instant(now), cursor, [member], terms, backups)

    async def transfer(self, to: str | None, by: Actor) -> str:
        if to not in (None, "n1", "n2"):
            raise NotFound(f"no member is named {to!r}; there are n1, n2")
        return to or "n2"

    async def drain(self, node: str, undo: bool, by: Actor) -> None:
        if node not in ("n1", "n2"):
            raise NotFound(f"there is no node {node!r}")

    async def add_member(self, name: str, raft: str, by: Actor) -> None:
        if name == "n1":
            raise Conflict(f"{name} is a member already")

    async def remove_member(self, name: str, by: Actor) -> None:
        if name != "n2":
            raise NotFound(f"there is no node {name!r}")

    async def hours(self) -> tuple[int, Iterator[Hour]]:
        sizes = ((3, len(self.hour_bytes), 1), (3, 192, 2), (1, 32, 3))
        files = [HourFileOut(entries, str(size), f"{crc:08x}") for entries, size, crc in sizes]
        return 7, (Hour(hour_name(494_000 + n), True, False, *files) for n in range(self.hours_there))

    async def hour_file_length(self, hour: int, file: str) -> int:
        if hour != 494_000:
            raise NotFound("nothing is filed under this hour")
        return len(self.hour_bytes)

    async def read_hour_file(self, hour: int, file: str, offset: int, length: int) -> bytes:
        return self.hour_bytes[offset : offset + length]

    async def open_snapshot(self) -> Snapshot:
        files = [
            SnapshotFileOut("hours/2026051008.log", str(len(self.hour_bytes)), f"{1:08x}"),
            SnapshotFileOut("state-7", "0", f"{0:08x}"),
        ]
        self.snapshots.add("7-00c0ffee")
        return Snapshot("7-00c0ffee", "c", 0, "7", 3, 1, format_instant(self.now_ms()), files)

    async def snapshot_file_length(self, snapshot: str, file: str) -> int:
        if snapshot not in self.snapshots or file not in ("hours/2026051008.log", "state-7"):
            raise NotFound("no such snapshot, or no such file")
        return len(self.hour_bytes) if file.startswith("hours/") else 0

    async def read_snapshot(self, snapshot: str, file: str, offset: int, length: int) -> bytes:
        return self.hour_bytes[offset : offset + length]

    async def release_snapshot(self, snapshot: str, *, complete: bool) -> None:
        self.snapshots.discard(snapshot)
        self.copied |= {snapshot} if complete else set()

    async def names(self) -> Names:
        topics = {name: n for n, name in enumerate(self.configs)}
        return Names(topics, {"anonymous": 0}, {"n1": 0}, {})

    def livez(self) -> list[CheckOut]:
        return [CheckOut("loop", True)]

    def readyz(self) -> list[CheckOut]:
        known = self.leader is not None
        return [CheckOut("leader", known, "" if known else "no leader is known"), CheckOut("disk", True)]

    def quorum(self, without: str) -> Quorum:
        if without not in ("n1", "n2", "n3"):
            raise NotFound(f"there is no node {without!r}")
        left = [name for name in ("n1", "n2") if name != without]
        return Quorum(without, left, 3, 2)

    async def metrics(self) -> Measured:
        return [
            (Family("hadelay_raft_term", "gauge", "Raft term"), 3),
            (Family("hadelay_sweeper_found_messages_total", "counter", "Forgotten"), 0),
            (Family("hadelay_messages", "gauge", "Kept", ("state",)), {("waiting",): 1, ('odd "\\\n',): 2}),
            (Family("hadelay_nobody", "gauge", "Without a value", ("peer",)), {}),
            (
                Family("hadelay_delivery_lateness_seconds", "histogram", "Late"),
                Histogram([0.001, 0.01], [3, 1, 0], 0.012),
            ),
        ]
