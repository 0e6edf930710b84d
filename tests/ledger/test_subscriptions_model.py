"""Random commands on a topic with subscriptions, against a model of copies in dicts: none is missing, doubled or early,
and commands for the published id mean what the model says. `World` checks the ledger after each third command."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.jobcommands import LAST, FillBegin, JobCursor
from hadelay.codec.results import Done, RowCode
from hadelay.ledger.jobs.bulkscan import JobScan
from hadelay.ledger.messages.copies import copies_of
from hadelay.model import HOUR_MS, KEEP, REJECT, REPLACE, pack_id
from tests.ledger.test_subscriptions import message
from tests.ledger.world import START_MS, World
from tests.scale import size

FILTERS: list[dict[str, list[str]]] = [{}, {"tags": ["eu"]}, {"tags": ["eu", "vip"]}, {"any_tags": ["us", "vip"]}]
NAMES = ["orders", "orders~a", "orders~b", "orders~c"]
#: Subscription with group_concurrency 1; `World` checks who is blocked.
GROUPED = "orders~c"
WAITING, LEASED, OVER = "waiting", "leased", "over"


@dataclass
class Copy:
    id: int
    topic: str
    due: int
    state: str = WAITING
    lease: Any = None


@dataclass
class Message:
    id: int
    copies: list[Copy]
    tags: tuple[str, ...] = ()
    deleted: set[int] = field(default_factory=set)

    def pending(self) -> list[Copy]:
        """Copies that are pending. A leased copy of a deleted subscription only ends its lease."""
        alive = [copy for copy in self.copies if copy.id == self.id or copy.id not in self.deleted]
        return [copy for copy in alive if copy.state != OVER]


class Model:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        self.world.checking = 3
        self.messages: list[Message] = []
        self.filters: dict[str, dict[str, list[str]]] = {}
        self.keys: dict[str, Message] = {}
        self.own_queue = True
        #: Running fill: name of the subscription, and the messages whose copies it still has to make.
        self.fill: tuple[str, list[Message]] | None = None
        self.filled = 0
        #: What the fill's search found, and no step has named yet: the job's cursor at that time, the cursor behind the
        #: entries, and the entries.
        self.searched: tuple[JobCursor, JobCursor, list[int]] | None = None
        self.world.one(commands.encode_topic_put("orders", {}))

    def passing(self, tags: tuple[str, ...]) -> list[str]:
        found = []
        # Topics have numbers in the order in which they first existed.
        for topic in self.world.ledger.topics.all[1:]:
            if (wanted := self.filters.get(topic.name)) is not None:
                some = wanted.get("any_tags")
                if set(wanted.get("tags", ())) <= set(tags) and (not some or set(some) & set(tags)):
                    found.append(topic.name)
        return found if found and not self.own_queue else ["orders", *found]

    def publish(self) -> None:
        rng, now = self.random, START_MS + self.world.now
        for _ in range(rng.randint(1, 3)):
            tags = tuple(rng.sample(("eu", "us", "vip"), rng.randint(0, 3)))
            key, mode = rng.choice((None, None, "k", "l")), rng.choice((KEEP, REPLACE, REJECT))
            delay = rng.choice((0, 0, 1_000, 600_000, HOUR_MS, 2 * HOUR_MS))
            group = rng.choice((None, 1, 2))
            result = self.world.publish(message(delay, tags, key=key, mode=mode, group=group))
            code, message_id = int(result.codes[0]), int(result.ids[0])
            known = self.keys.get(key) if key is not None else None
            if known is not None and known.pending():
                leased = any(copy.state == LEASED for copy in known.pending())
                if mode == KEEP:
                    assert (code, message_id, bool(result.duplicate[0])) == (0, known.id, True)
                    continue
                if mode == REJECT or leased:
                    assert code == (RowCode.KEY_PENDING if mode == REJECT else RowCode.KEY_LEASED)
                    continue
                for copy in known.pending():
                    self.cancelled(copy)
            assert code == 0
            assert not result.duplicate[0]
            copies = [Copy(message_id + n, name, now + delay) for n, name in enumerate(self.passing(tags))]
            self.messages.append(Message(message_id, copies, tags))
            assert copies_of(self.world.ledger, message_id) == [copy.id for copy in copies[1:]]
            if key is not None:
                self.keys[key] = self.messages[-1]

    def some(self, state: str) -> list[Copy]:
        now = START_MS + self.world.now
        found = [copy for one in self.messages for copy in one.copies if copy.state == state and copy.due <= now]
        found = [copy for copy in found if self.world.states(copy.id) != ["blocked"]]
        return self.random.sample(found, min(len(found), self.random.randint(1, 4)))

    def lease(self) -> None:
        for copy in self.some(WAITING):
            if self.world.states(copy.id) == ["blocked"]:
                continue  # an earlier one of its group has just been leased, or is due earlier
            copy.lease = self.world.lease(copy.id, lease_ms=10**9)
            copy.state = LEASED

    def settle(self) -> None:
        for copy in self.some(LEASED):
            if self.random.random() < 0.5:
                assert self.world.ack(copy.lease) == [0]
                copy.state = OVER
            elif self.random.random() < 0.2:
                assert self.world.nack(copy.lease, delay_ms=commands.DEAD_NOW) == [0]
                self.discover()
                copy.state = OVER
            else:
                delay = self.random.choice((0, 1_000, HOUR_MS, 3 * HOUR_MS))
                assert self.world.nack(copy.lease, delay_ms=delay) == [0]
                self.discover()
                copy.state = WAITING
                copy.due = START_MS + self.world.now + delay
                if self.gone(copy):
                    self.cancelled(copy)

    def gone(self, copy: Copy) -> bool:
        return any(copy.id in one.deleted for one in self.messages)

    def target(self) -> tuple[int, list[Copy]] | None:
        if not self.messages:
            return None
        one = self.random.choice(self.messages[-8:])
        if self.random.random() < 0.6 or len(one.copies) == 1:
            return one.id, one.copies
        copy = self.random.choice(one.copies[1:])
        return copy.id, [copy]

    def cancel(self) -> None:
        if (found := self.target()) is not None:
            self.world.cancel(found[0])
            for copy in found[1]:
                self.cancelled(copy)

    def cancelled(self, copy: Copy) -> None:
        if copy.state == WAITING:
            copy.state = OVER
            if self.fill is not None:
                self.fill = self.fill[0], [one for one in self.fill[1] if one.copies[0] is not copy]

    def reschedule(self) -> None:
        if (found := self.target()) is not None:
            delay, now = self.random.choice((0, 5_000, HOUR_MS, 4 * HOUR_MS)), START_MS + self.world.now
            self.world.one(commands.encode_reschedule("n1", delay, True, [found[0]]))
            for copy in found[1]:
                if copy.state == WAITING and (delay or copy.due > now):
                    # The message's missing copy was filed before the message was moved, and then moved with it.
                    self.discover()
                    copy.due = now + delay

    def subscribe(self) -> None:
        name, wanted = self.random.choice(NAMES[1:]), self.random.choice(FILTERS)
        settings: dict[str, Any] = {"tags": None, "any_tags": None} | wanted
        if name == GROUPED:
            settings |= {"group_concurrency": 1, "max_attempts": 1_000}
        own = name.partition("~")[2]
        if self.fill is not None and self.fill[0] == name:
            return  # a later filter means what is copied later
        if name in self.filters or self.random.random() < 0.5:
            put = commands.encode_subscription_put("orders", own, settings)
        else:
            put = commands.encode_subscription_fill(FillBegin("n1", "", "orders", own, settings))
            if not self.own_queue or self.fill is not None:
                assert self.world.one(put).code == ("fill_running" if self.own_queue else "no_own_queue")
                return
            self.searched = None
            own_queue = [one for one in self.messages if one.copies[0].topic == "orders"]
            self.fill = (name, [one for one in own_queue if one.copies[0].state != OVER and self.fits(one, wanted)])
        assert isinstance(self.world.one(put), Done)
        self.filters[name] = wanted

    @staticmethod
    def fits(one: Message, wanted: dict[str, list[str]]) -> bool:
        some = wanted.get("any_tags")
        return set(wanted.get("tags", ())) <= set(one.tags) and (not some or bool(set(some) & set(one.tags)))

    def discover(self) -> None:
        """Note the copies that the fill has made; each message gets one, with the due time that the message had."""
        for one in self.fill[1] if self.fill is not None else []:
            known = [copy.id for copy in one.copies]
            new = [copy for copy in copies_of(self.world.ledger, one.id) if copy not in known]
            assert len(new) <= 1
            if new and self.fill is not None:
                one.copies.append(Copy(new[0], self.fill[0], one.copies[0].due))
                self.fill = self.fill[0], [other for other in self.fill[1] if other is not one]
                self.filled += 1

    def search(self) -> None:
        """Let the fill look for the next entries, some hours at once, as the leader does."""
        if self.fill is None:
            return
        ledger = self.world.ledger
        (job,) = ledger.fills.values()
        scan, most, found = JobScan(ledger, job.spec, job.topics, job.began_ms, job.cursor), 3, list[int]()
        cursor = scan.cursor
        while scan.cursor != LAST and len(found) < most:
            hour, rows = scan.step(ledger.now_ms)
            some = rows["index"][: most - len(found)].tolist()
            cursor = scan.cursor if len(some) == len(rows) else (hour, int(rows["index"][len(some)]))
            found += [pack_id(0, hour, index) for index in some]
        self.searched = (job.cursor, cursor, found)

    def step(self) -> None:
        """Let the fill copy what its search found, at once or before."""
        if self.fill is None:
            return
        (job,) = self.world.ledger.fills.values()
        if self.searched is None or self.searched[0] != job.cursor:
            self.search()
        assert self.searched is not None
        before, cursor, found = self.searched
        if cursor > before:
            assert self.world.one(commands.encode_job_step(job.number, before, cursor, found)) == Done()
        self.discover()
        if job.ended_ms:
            assert not self.fill[1], "the fill left messages out"
            self.fill = None

    def unsubscribe(self) -> None:
        if self.filters:
            name = self.random.choice(sorted(self.filters))
            self.world.one(commands.encode_topic_delete(name, True))
            del self.filters[name]
            if self.fill is not None and self.fill[0] == name:
                self.fill = None
            for one in self.messages:
                for copy in one.copies:
                    if copy.topic == name:
                        one.deleted.add(copy.id)
                        copy.state = OVER if copy.state == WAITING else copy.state

    def purge(self) -> None:
        """Cancel what waits in the queue of the topic; of what is leased, only acks still count."""
        self.world.one(commands.encode_purge("orders", 3))
        for one in self.messages:
            if one.copies[0].topic == "orders":
                self.cancelled(one.copies[0])
                one.deleted.add(one.copies[0].id)

    def switch(self) -> None:
        self.own_queue = not self.own_queue
        self.world.one(commands.encode_topic_put("orders", {"own_queue": self.own_queue}))

    def advance(self) -> None:
        self.world.now += self.random.choice((1_000, 60_000, HOUR_MS, 2 * HOUR_MS))
        self.world.apply(commands.encode_noop())
        hour = (START_MS + self.world.now) // HOUR_MS
        self.world.maintain(Job.SWEEP)
        for past in [past for past in self.world.store.hours() if past < hour]:
            self.world.maintain(Job.ROLL_FORWARD, past)
            self.world.maintain(Job.RETIRE, past)

    def check(self) -> None:
        now = START_MS + self.world.now
        pending = dict.fromkeys(NAMES, 0)
        deleted = {each for one in self.messages for each in one.deleted}
        for copy in (copy for one in self.messages for copy in one.copies):
            (state,) = self.world.states(copy.id)
            if copy.state == OVER:
                assert state in ("acked", "cancelled", "dead", "gone"), f"{copy}: {state}"
                continue
            expected = LEASED if copy.state == LEASED else "ready" if copy.due <= now else "scheduled"
            blocked = copy.topic == GROUPED and expected != LEASED and state == "blocked"
            assert blocked or state == expected, f"{copy}: {state}"
            pending[copy.topic] += copy.id not in deleted
        for name, count in pending.items():
            topic = self.world.ledger.known_topic(name)
            assert topic is None or topic.exists is False or topic.pending - self.left(name) == count, name

    def left(self, name: str) -> int:
        """Number of leased messages of the deleted life of a topic, which count until their leases end."""
        return sum(
            copy.state == LEASED and copy.topic == name and copy.id in one.deleted
            for one in self.messages
            for copy in one.copies
        )


@pytest.mark.parametrize("seed", range(size(8, 25)))
def test_random_commands(seed: int) -> None:
    model = Model(seed)
    steps = [
        *[model.publish] * 6, *[model.lease] * 4, *[model.settle] * 5, *[model.cancel] * 2, *[model.reschedule] * 3,
        *[model.subscribe] * 2, model.unsubscribe, *[model.advance] * 4, *[model.search] * 2, *[model.step] * 4,
        model.purge,
    ]  # fmt: skip
    if seed % 2:
        steps.append(model.switch)  # without an own queue there are no fills
    for n in range(120):
        model.random.choice(steps)()
        model.discover()
        model.check()
        if n % 40 == 39:
            model.world.restart()
    while model.fill is not None:
        model.step()
        model.check()
