"""Pages of a listing against the naive way: describe every message there ever was, and sort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.leasetokens import LEASE
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.views import listing
from hadelay.ledger.views.describe import describe
from hadelay.ledger.views.listing import ListPage, ListQuery
from hadelay.model import FIRST, HOUR_MS, PENDING, Key, State
from tests.ledger.world import START_MS, World, draft
from tests.scale import size

ALL = frozenset(State)
FOREVER = 1 << 50


def drain(pages: Any) -> Any:
    while True:
        try:
            next(pages)
        except StopIteration as end:
            return end.value


def query(world: World, states: frozenset[State] = PENDING, *, topic: str = "t", **rest: Any) -> ListQuery:
    fields = {"from_ms": 0, "to_ms": FOREVER, "tag_mask": 0, "after": FIRST, "limit": 10} | rest
    return ListQuery(world.topic(topic).number if topic else every_topic(world), states, **fields)


def every_topic(world: World) -> Any:
    """Mask of all topics for a list over all of them."""
    return np.array([topic.exists for topic in world.ledger.topics.all] + [False])


def pages(world: World, question: ListQuery, budget: int = listing.BUDGET) -> Iterator[ListPage]:
    after: Key | None = question.after
    while after is not None:
        page = drain(listing.listing(world.ledger, question._replace(after=after), START_MS + world.now, budget))
        yield page
        assert page.after is None or page.after > after, "a cursor always leads on"
        after = page.after


def listed(world: World, question: ListQuery, budget: int = listing.BUDGET) -> list[tuple[int, State]]:
    found = []
    for page in pages(world, question, budget):
        found += zip(page.rows["first_id"].tolist(), page.states, strict=True)
    return found


def naive(world: World, question: ListQuery, ids: list[int]) -> list[tuple[int, State]]:
    every, one = world.ledger.topics, question.topics
    names = {every[one].name} if isinstance(one, int) else {topic.name for topic in every.all}
    found = []
    for message_id in ids:
        view = describe(world.ledger, message_id, START_MS + world.now)
        if view is None or view.topic not in names or view.state not in question.states:
            continue
        row = world.store.entries(view.hour, np.array([view.index]))[0]
        due = max(view.deliver_at_ms, view.hour * HOUR_MS + int(row["second"]) * 1000)
        if question.from_ms <= due < question.to_ms:
            found.append((due, message_id, view.state))
    return [(message_id, state) for due, message_id, state in sorted(found) if (due, message_id) > question.after]


@pytest.fixture
def world() -> World:
    return World()


def test_few_far_hours_are_looked_at_in_one_slice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of each are read from its files."""
    world.ids(*(draft(in_ms=n * HOUR_MS) for n in range(60)))
    heads, looked, most = world.store.heads, 0, 0

    def counted(hour: int) -> Any:
        nonlocal looked
        looked += 1
        return heads(hour)

    monkeypatch.setattr(world.store, "heads", counted)
    monkeypatch.setattr(world.store, "mapped", lambda hour: False)
    for _ in listing.listing(world.ledger, query(world, limit=100), START_MS + world.now):
        most, looked = max(most, looked), 0
    assert 0 < max(most, looked) <= 8


# ---- what an owner asks


def test_due_order_and_the_id_within_a_millisecond(world: World) -> None:
    late, first, second = world.ids(draft(in_ms=5_000), draft(in_ms=1_000), draft(in_ms=1_000))
    assert [i for i, _ in listed(world, query(world))] == [first, second, late]


def test_pending_is_what_is_asked_for_by_default(world: World) -> None:
    later, now, taken, gone, done = world.ids(draft(in_ms=9_000), draft(), draft(), draft(), draft())
    leases = world.lease(taken, done)
    world.cancel(gone)
    world.ack(leases[1:])
    assert listed(world, query(world)) == [(now, "ready"), (taken, "leased"), (later, "scheduled")]
    assert listed(world, query(world, frozenset((State.ACKED, State.CANCELLED)))) == [
        (gone, "cancelled"),
        (done, "acked"),
    ]


@pytest.mark.parametrize("state", list(State))
def test_one_state_alone(world: World, state: State) -> None:
    ids = world.ids(*(draft(in_ms=n % 3 * 4_000) for n in range(30)))
    world.cancel(*ids[::7])
    leases = world.lease(*[i for i in ids[::3] if world.states(i) == ["ready"]])
    world.ack(leases[::2])
    question = query(world, frozenset((state,)))
    assert listed(world, question) == naive(world, question, ids)


def test_a_range_takes_its_start_and_leaves_its_end(world: World) -> None:
    ids = world.ids(*(draft(in_ms=n * 1_000) for n in range(5)))
    question = query(world, from_ms=START_MS + 1_000, to_ms=START_MS + 3_000)
    assert [i for i, _ in listed(world, question)] == ids[1:3]


def test_a_returned_message_stands_where_it_is_due_now(world: World) -> None:
    a, b = world.ids(draft(), draft(in_ms=60_000))
    world.nack(world.lease(a), 2 * HOUR_MS)
    assert listed(world, query(world)) == [(b, "scheduled"), (a, "scheduled")]


def test_carried_messages_are_listed_in_their_new_hour(world: World) -> None:
    (a,) = world.ids(draft())
    hour = world.place(a)[0]
    world.now = 3 * HOUR_MS + 5
    (b,) = world.ids(draft())
    world.maintain(Job.ROLL_FORWARD, hour)
    assert world.place(a)[0] == hour + 3
    assert listed(world, query(world)) == [(a, "ready"), (b, "ready")]


def test_a_deleted_topic_leaves_cancelled_messages(world: World) -> None:
    old = world.ids(draft(), draft(in_ms=HOUR_MS))
    world.one(commands.encode_topic_delete("t", True))
    (new,) = world.ids(draft())
    assert listed(world, query(world)) == [(new, "ready")]
    question = query(world, frozenset((State.CANCELLED,)))
    assert listed(world, question) == [(i, "cancelled") for i in old]
    world.maintain(Job.SWEEP)
    assert listed(world, question) == [(i, "cancelled") for i in old]


def test_tags_are_matched_by_all_their_bits(world: World) -> None:
    both, one, _ = world.ids(
        replace(draft(), tag_mask=0b11), replace(draft(), tag_mask=0b01), replace(draft(), tag_mask=0)
    )
    assert [i for i, _ in listed(world, query(world, tag_mask=0b01))] == [both, one]
    assert [i for i, _ in listed(world, query(world, tag_mask=0b11))] == [both]


def test_a_page_that_took_too_long_is_short_and_goes_on(world: World) -> None:
    ids = world.ids(*(draft("other" if n % 50 else "t", n * HOUR_MS // 20) for n in range(200)))
    question = query(world, limit=100)
    found = list(pages(world, question, budget=1))
    assert len(found) > 5
    assert [i for page in found for i in page.rows["first_id"].tolist()] == ids[::50]


def test_a_cursor_survives_that_its_message_is_settled(world: World) -> None:
    ids = world.ids(*(draft(in_ms=n * 10) for n in range(40)))
    question = query(world, limit=5)
    seen: list[int] = []
    for page in pages(world, question):
        here = page.rows["first_id"].tolist()
        seen += here
        world.cancel(*here)
    assert seen == ids


def test_messages_past_their_ttl_are_listed_as_expired_before_that_is_recorded(world: World) -> None:
    world.one(commands.encode_topic_put("t", {"ttl_ms": 5_000}))
    old, new = world.ids(draft(), draft(in_ms=60_000))
    world.now = 6_000
    world.one(commands.encode_noop())
    assert listed(world, query(world)) == [(new, "scheduled")]
    assert listed(world, query(world, frozenset((State.EXPIRED,)))) == [(old, "expired")]


def test_messages_of_several_topics_are_one_list(world: World) -> None:
    ids = world.ids(draft(in_ms=9_000), draft("u", 2_000), draft("v", 1_000), draft("u", 5_000))
    every = query(world, topic="", limit=1)
    assert [one for one, _ in listed(world, every)] == [ids[2], ids[1], ids[3], ids[0]]
    mask = every.topics.copy()  # type: ignore[union-attr]
    mask[world.topic("v").number] = False
    world.ids(draft("born-later", 500))
    assert [one for one, _ in listed(world, every._replace(topics=mask))] == [ids[1], ids[3], ids[0]]


def test_dead_letters_come_last_until_they_are_purged(world: World) -> None:
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    dying, well = world.ids(draft(), draft(in_ms=60_000))
    world.nack(world.lease(dying), reason="no such account")
    everything = query(world, ALL)
    assert listed(world, everything) == [(well, "scheduled"), (dying, "dead")]
    assert listed(world, query(world, frozenset((State.DEAD,)), limit=1)) == [(dying, "dead")]
    assert listed(world, query(world)) == [(well, "scheduled")]
    world.one(commands.encode_purge("t", topicchanges.DEAD))
    assert listed(world, everything) == [(well, "scheduled")]


# ---- whatever happens meanwhile


class ListingAgainstSorting(RuleBasedStateMachine):
    """A listing in slices, with changes between them: what was not touched meanwhile is there exactly once, in order;
    what was touched is there in a state that it had at some time."""

    @initialize(
        costs=st.sampled_from([(64, {True: 4, False: 16}), (1, {True: 1, False: 1}), (65_536, {True: 10**6, False: 1})])
    )
    def begin(self, costs: Any) -> None:
        self.world = World()
        listing._ROWS = 5
        self.ids = self.world.ids(draft(), draft("u"))
        self.costs = costs

    def some(self, numbers: list[int]) -> list[int]:
        return [self.ids[-1 - n % len(self.ids)] for n in numbers]

    def change(self, what: str, numbers: list[int], delay: int) -> set[int]:
        """Ids that are not what they were."""
        world, some = self.world, list(dict.fromkeys(self.some(numbers)))
        if what == "publish":
            some = world.ids(*(draft("tu"[n % 2], n * delay // 3) for n in numbers))
            self.ids += some
        elif what == "cancel":
            world.cancel(*some)
        elif what == "clock":
            world.now += delay
            world.one(commands.encode_noop())
            return set(self.ids)  # what was scheduled may be ready
        elif what == "carry":
            world.maintain(Job.ROLL_FORWARD, self.world.place(some[0])[0])
            return set(self.ids)
        else:
            due = [i for i in some if world.states(i) == ["ready"]]
            if due:
                leases: Any = world.lease(*due)
                if what == "ack":
                    world.ack(leases)
                elif what == "nack":
                    world.nack(leases, delay)
            assert leases.dtype == LEASE if due else True
        return set(some)

    changes = st.tuples(
        st.sampled_from(["publish", "publish", "cancel", "clock", "lease", "ack", "nack", "carry"]),
        st.lists(st.integers(0, 30), min_size=1, max_size=12),
        st.sampled_from([0, 3, 700, 1_500, 60_000, HOUR_MS // 2, 2 * HOUR_MS]),
    )

    @rule(change=changes)
    def happen(self, change: Any) -> None:
        self.change(*change)

    @rule(
        states=st.sets(st.sampled_from(list(State)), min_size=1).map(frozenset),
        limit=st.sampled_from([1, 3, 100]),
        budget=st.sampled_from([0, 50, 10**9]),
        window=st.sampled_from([(0, FOREVER), (START_MS, START_MS + HOUR_MS), (START_MS + 700, START_MS + 60_000)]),
        meanwhile=st.lists(changes, max_size=4),
        topic=st.sampled_from(["t", "t", ""]),
    )
    def look(
        self, states: frozenset[State], limit: int, budget: int, window: tuple[int, int], meanwhile: list[Any],
        topic: str,
    ) -> None:  # fmt: skip
        world = self.world
        question = query(world, states, topic=topic, limit=limit, from_ms=window[0], to_ms=window[1])
        before = naive(world, question, self.ids)
        costs = listing._SLICE, listing._STEP_COST
        listing._SLICE, listing._STEP_COST = self.costs
        touched: set[int] = set()
        found: list[tuple[int, State]] = []
        after: Key | None = FIRST
        try:
            while after is not None:
                pages = listing.listing(world.ledger, question._replace(after=after), START_MS + world.now, budget)
                while True:
                    try:
                        next(pages)
                    except StopIteration as end:
                        page: ListPage = end.value
                        break
                    if meanwhile:
                        touched |= self.change(*meanwhile.pop())
                assert len(page.rows) <= limit
                found += zip(page.rows["first_id"].tolist(), page.states, strict=True)
                after = page.after
                if meanwhile:
                    touched |= self.change(*meanwhile.pop())
        finally:
            listing._SLICE, listing._STEP_COST = costs
        assert [pair for pair in found if pair[0] not in touched] == [p for p in before if p[0] not in touched]
        assert all(state in states for _, state in found)
        if not touched:
            assert found == before


TestListingAgainstSorting = ListingAgainstSorting.TestCase
TestListingAgainstSorting.settings = settings(
    max_examples=size(20, 60), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
