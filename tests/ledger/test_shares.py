"""Tables that all tenants share: no token takes all rows, and nothing stops silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chaos.sim.savedcheck import Saved
from hadelay.codec import commands
from hadelay.codec import schedules as codec
from hadelay.codec.formats import CONSUMER, REASON
from hadelay.codec.jobcommands import JobBegin, JobSpec
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish
from hadelay.codec.results import Done, JobBegun, Refused, RowCode
from hadelay.codec.schedules import ANY_VERSION, KEEP_PAUSE, Spec, Stored
from hadelay.ledger import checkpoint
from hadelay.ledger.jobs.bulk import MAX_JOBS
from hadelay.ledger.schedules import schedules
from hadelay.ledger.state import OTHER_REASONS, Ledger
from hadelay.ledger.views.fill import fill_ratios
from hadelay.model import Draft
from hadelay.settings.cluster import Settings
from tests.ledger.world import World, draft


def test_every_failure_has_a_reason() -> None:
    ledger = World(Settings(max_reasons=10)).ledger
    for n in range(200):
        number = ledger.number_of(REASON, f"order {n} of 7f3a-{n} not found")
    assert ledger.names.name(REASON, number) == "order # of # not found"
    names = [ledger.names.name(REASON, ledger.number_of(REASON, "x" * n)) for n in range(1, 100)]
    assert names[-1] == OTHER_REASONS
    assert ledger.named[REASON] == 10
    assert ledger.names.name(REASON, ledger.number_of(REASON, "x")) == "x"
    assert fill_ratios(ledger)["reasons"] == 1


def test_every_hand_out_has_a_consumer() -> None:
    ledger = World(Settings(max_consumers=10)).ledger
    for n in range(200):
        number = ledger.number_of(CONSUMER, f"worker-{n}-of-7f3a{n}")
    assert ledger.names.name(CONSUMER, number) == "worker-#-of-#"
    names = [ledger.names.name(CONSUMER, ledger.number_of(CONSUMER, "x" * n)) for n in range(1, 100)]
    assert names[-1] == "(other consumers)"
    assert ledger.named[CONSUMER] == 10
    assert ledger.names.name(CONSUMER, ledger.number_of(CONSUMER, "worker-1-of-7f3a1")) == "worker-1-of-7f3a1"


def with_tokens(settings: Settings | None = None) -> World:
    """A cluster with an admin's token, and with tokens `low` and `other` for topics."""
    world = World(settings)
    for n, (name, scope) in enumerate(
        (("root", "admin"), ("low", "publish"), ("low", "admin:a-*"), ("other", "publish"))
    ):
        assert world.one(commands.encode_token_create(name, bytes([n]) * 32, [scope], None)) == Done()
    return world


def asked(world: World, by: str, command: bytes) -> Any:
    return world.one(commands.encode_audited("n1", "", by, "some", "thing", command))


def published(world: World, by: str, drafts: list[Draft], key: bytes | None = None) -> list[RowCode]:
    found = world.one(commands.encode_publish("n1", drafts, key, by)).codes.tolist()
    return [RowCode(code) for code in found]


def restarted(world: World) -> World:
    """The world, after its ledger was written and read again."""
    other = World()
    other.__dict__.update(world.__dict__)
    other.ledger = Ledger(0, world.store, world.tables, world.names)
    checkpoint.load(other.ledger, *checkpoint.dump(world.ledger))
    other.saved = Saved(other.ledger)
    return other


def test_no_token_takes_all_jobs() -> None:
    world = with_tokens()
    world.one(commands.encode_topic_put("t", {}))

    def begin(by: str, rate: float | None = 1) -> object:
        spec = JobSpec("cancel", "t", rate=rate)
        return world.one(commands.encode_job_begin(JobBegin("n1", by, b"", ["t"], spec)))

    for _ in range(25):
        assert isinstance(begin("low"), JobBegun)
    refused = begin("low")
    assert isinstance(refused, Refused)
    assert "'low'" in refused.detail
    assert isinstance(begin("other"), JobBegun)
    assert fill_ratios(world.ledger)["jobs"] == 26 / MAX_JOBS
    refused = begin("other", 1e-9)
    assert isinstance(refused, Refused)
    assert "0.01" in refused.detail
    world.one(commands.encode_job_stop(1))
    assert isinstance(begin("low"), JobBegun)
    for n in range(64):
        assert isinstance(begin(f"more{n // 25}"), JobBegun)
    refused = begin("last")
    assert isinstance(refused, Refused)
    assert "kept for tokens with the scope admin" in refused.detail
    assert [type(begin("root")) for _ in range(11)] == [*[JobBegun] * 10, Refused]


def _fill_by_publish(world: World, by: str, n: int) -> bool:
    (code,) = published(world, by, [draft(f"{by}-{n}")])
    assert code in (RowCode.OK, RowCode.SHARE_OF_TOPICS, RowCode.TOO_MANY_TOPICS)
    return code == RowCode.OK


def _fill_by_put(world: World, by: str, n: int) -> bool:
    return isinstance(asked(world, by, commands.encode_topic_put(f"{by}-{n}", {})), Done)


def _fill_by_schedule(world: World, by: str, n: int) -> bool:
    return isinstance(asked(world, by, schedule_put(f"{by}-{n}", by, topic=f"{by}-{n}")), Done)


def _fill_by_callback(world: World, by: str, n: int) -> bool:
    """A message names another topic for its callback, and its own topic exists."""
    meta = pack(Meta(os=f"{by}-{n}"))
    if world.ledger.topic("shared") is None:
        hook = {"url": "https://example.org", "allow_per_message": True}
        asked(world, "root", commands.encode_topic_put("shared", {"webhook": hook}))
    (code,) = published(world, by, [Draft("shared", 0, True, 0, 0, meta, b"x", callback=True)])
    return code == RowCode.OK


def _fill_by_setting(world: World, by: str, n: int) -> bool:
    """The same topic gets its dead letters routed elsewhere again and again."""
    return isinstance(asked(world, by, commands.encode_topic_put(f"{by}-0", {"dead_letter": f"{by}-dead{n}"})), Done)


@pytest.mark.parametrize(
    "fill", [_fill_by_publish, _fill_by_put, _fill_by_schedule, _fill_by_callback, _fill_by_setting]
)
def test_no_token_takes_all_topics(fill: Callable[[World, str, int], bool]) -> None:
    world = with_tokens(Settings(max_topics=100))
    filled = [fill(world, "low", n) for n in range(60)]
    assert 20 <= sum(filled) <= 25, filled
    topics = len(world.ledger.topics.all)
    assert topics <= 26
    assert isinstance(asked(world, "low", commands.encode_topic_delete("low-0", True)), Done | Refused)
    assert not fill(world, "low", 99), "a deleted topic still has its row"
    world = restarted(world)
    assert not fill(world, "low", 99), "the count is gone after a restart"
    assert fill(world, "other", 0)
    assert _fill_by_publish(world, "other", 1)
    for n in range(100):
        _fill_by_put(world, f"more{n % 9}", n)
    assert len(world.ledger.topics.all) == 90, "the last tenth is for admins"
    assert all(_fill_by_publish(world, "root", n) for n in range(5))
    assert all(_fill_by_put(world, "root", 5 + n) for n in range(5))
    assert not _fill_by_put(world, "root", 10)
    assert "there are 100 topics" in asked(world, "root", commands.encode_topic_put("more", {})).detail
    assert published(world, "low", [draft("low-1"), draft("root-1")])[-1] == RowCode.OK, "existing topics go on"


def test_a_refused_topic_says_what_to_do() -> None:
    world = with_tokens(Settings(max_topics=100))
    for n in range(25):
        _fill_by_put(world, "low", n)
    refused = asked(world, "low", commands.encode_topic_put("one-more", {}))
    for words in ("'low'", "25", "100", "ask an admin to create"):
        assert words in refused.detail
    assert asked(world, "low", commands.encode_subscription_put("low-1", "copy", {})).code == "too_many_topics"


def test_the_limit_alone_holds_for_requests_without_a_token() -> None:
    world = World(Settings(max_topics=50))
    assert published(world, "", [draft(f"t{n}") for n in range(60)]) == [
        *[RowCode.OK] * 50, *[RowCode.TOO_MANY_TOPICS] * 10
    ]  # fmt: skip
    assert world.ledger.made == {}


def test_no_token_takes_all_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "MAX_SCHEDULES", 40)
    world = with_tokens()
    assert [isinstance(asked(world, "low", schedule_put(f"s{n}", "low")), Done) for n in range(12)] == [
        *[True] * 10, False, False
    ]  # fmt: skip
    refused = asked(world, "low", schedule_put("s20", "low"))
    assert refused.code == "too_many_schedules"
    assert "'low' has 10 of the 40 schedules" in refused.detail
    assert isinstance(asked(world, "low", schedule_put("s1", "low", b"other")), Done), "a change makes no row"
    world = restarted(world)
    assert isinstance(asked(world, "low", schedule_put("s20", "low")), Refused)
    assert asked(world, "other", schedule_put("s1", "other")) == Done(), "the row is the other token's now"
    assert asked(world, "low", schedule_put("s21", "low")) == Done()
    assert asked(world, "low", codec.encode_delete("s2")) == Done()
    assert asked(world, "low", schedule_put("s22", "low")) == Done()
    assert world.ledger.made["schedules"] == {"low": 10, "other": 1}
    monkeypatch.setattr(schedules, "MAX_BYTES", 4 * world.ledger.made["schedule_bytes"]["low"])
    refused = asked(world, "low", schedule_put("s1", "low", b"longer than before"))
    assert "bytes of messages of schedules" in refused.detail
    assert asked(world, "other", schedule_put("s1", "other", b"longer than before")) == Done()


def test_no_token_takes_all_idempotency_keys() -> None:
    world = with_tokens(Settings(idempotency_max_keys=80))

    def keyed(by: str, n: int) -> RowCode:
        return published(world, by, [draft(idem=b"%s-%d" % (by.encode(), n))])[0]

    # As long as a token is alone, the oldest of its keys are forgotten early.
    assert {keyed("low", n) for n in range(50)} == {RowCode.OK}
    assert keyed("other", 0) == RowCode.OK
    found = [keyed("low", 100 + n) for n in range(80)]
    assert set(found) == {RowCode.OK, RowCode.SHARE_OF_KEYS}
    assert found.count(RowCode.OK) <= 30
    assert keyed("low", 100) == RowCode.OK, "a repetition"
    assert world.publish(draft(idem=b"other-0")).duplicate.tolist() == [True], "another token's key was forgotten"
    world = restarted(world)
    assert keyed("low", 999) == RowCode.SHARE_OF_KEYS
    batch = [draft(idem=b"b-%d" % n) for n in range(3)]
    assert published(world, "low", batch, b"whole") == [RowCode.SHARE_OF_KEYS] * 3
    assert published(world, "low", [draft()]) == [RowCode.OK], "without a key"
    assert keyed("root", 1) == RowCode.OK
    world.now += 3_600_001
    assert keyed("low", 999) == RowCode.OK, "a refusal is not remembered, and the next window has room"


def test_a_token_that_is_alone_keeps_the_whole_table_after_a_pause() -> None:
    world = with_tokens(Settings(idempotency_max_keys=80))
    for begin in (0, 100, 200):
        found = {published(world, "low", [draft(idem=b"%d" % (begin + n))])[0] for n in range(90)}
        assert found == {RowCode.OK}
        world.now += 2 * 3_600_000 + 1  # longer than two windows: both tables are over


@pytest.mark.parametrize("by_job", [False, True])
def test_refusals_under_keys_do_not_take_other_tenants_keys(by_job: bool) -> None:
    world = with_tokens(Settings(idempotency_max_keys=80))

    def refused(n: int) -> str:
        if by_job:
            spec = JobSpec("cancel", "a-none")
            command = commands.encode_job_begin(JobBegin("n1", "low", b"%d" % n + bytes(12), ["a-none"], spec))
        else:
            command = codec.encode_run("a-none", ANY_VERSION, [(0, 0)], b"%d" % n)
        return asked(world, "low", command).code  # type: ignore[no-any-return]

    assert published(world, "other", [draft(idem=b"kept")]) == [RowCode.OK]
    codes = [refused(1_000 + n) for n in range(200)]
    assert set(codes) == {"no_topic" if by_job else "no_schedule", "share_of_keys"}
    assert Refused("share_of_keys").retryable
    assert world.publish(draft(idem=b"kept")).duplicate.tolist() == [True], "another token's key was forgotten"
    assert refused(1_000) == codes[0], "a remembered refusal stays"


def test_no_token_takes_all_unique_keys() -> None:
    world = with_tokens(Settings(idempotency_max_keys=80))

    def once(by: str, n: int, for_ms: int = 60_000) -> RowCode:
        key = b"%s-%d" % (by.encode(), n)
        return published(world, by, [Draft("t", 0, True, 0, 0, b"", b"x", key=key, unique_ms=for_ms)])[0]

    assert [once("low", n) for n in range(22)] == [*[RowCode.OK] * 20, *[RowCode.SHARE_OF_KEYS] * 2]
    assert [once("other", n) for n in range(17)] == [*[RowCode.OK] * 16, RowCode.SHARE_OF_KEYS]
    assert [once("root", n) for n in range(5)] == [*[RowCode.OK] * 4, RowCode.TOO_MANY_KEYS]
    world = restarted(world)
    world.now += 60_000
    assert [once("low", 100 + n) for n in range(22)] == [*[RowCode.OK] * 20, *[RowCode.SHARE_OF_KEYS] * 2]
    assert [once("other", 100 + n) for n in range(5)] == [RowCode.OK] * 5
    assert world.ledger.made["unique_keys"] == {"low": 20, "other": 5}


def test_a_name_is_an_admins_only_if_all_its_tokens_are() -> None:
    world = with_tokens()
    assert world.ledger.admins == {"root"}
    world.one(commands.encode_token_create("root", bytes([9]) * 32, ["admin:*", "publish:x"], None))
    assert world.ledger.admins == {"root"}
    world.one(commands.encode_token_create("root", bytes([8]) * 32, ["admin:x-*"], None))
    assert world.ledger.admins == frozenset()
    world.one(commands.encode_token_revoke((bytes([8]) * 32).hex()[:12]))
    assert restarted(world).ledger.admins == {"root"}


def schedule_put(name: str, creator: str, body: bytes = b"x", topic: str = "t") -> bytes:
    meta = codec.template_meta(pack(Meta(sch=name)))
    template = encode_publish("n1", [Draft(topic, 0, True, 0, 0, meta, body)])
    stored = Stored(creator, Spec(topic, every_ms=60_000), template)
    return codec.encode_put(name, ANY_VERSION, KEEP_PAUSE, stored)
