"""Importers, against a real Redis with data that the real libraries wrote."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import time
import tracemalloc
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hadelay.client.putoptions import Put
from hadelay.client.queues import topic_of
from hadelay.importers import engine, fromredis, pickles
from hadelay.importers.engine import BATCH, Entry, Skipped, copy
from hadelay.importers.pickles import PICKLE, Unknown, call_of, read
from hadelay.testing import LocalNode
from tests.system.cluster import hadelay

#: Due time of all jobs.
DUE = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
DUE_MS = round(DUE.timestamp() * 1000)


def messages(node: LocalNode, topic: str) -> dict[str, Any]:
    """Waiting messages with their payloads, by key."""
    found = [node.client.get(message.id, body=True) for message in node.client.messages(topic)]
    return {str(message.key): message for message in found}


def remind(order: int, *, by: str = "mail") -> None:
    """A job."""


@pytest.mark.parametrize("scale", [1, 1_000])
def test_a_sorted_set(redis: Any, node: LocalNode, scale: int) -> None:
    topic = f"zset-{scale}"
    redis.zadd("delayed", {f"cart {n}": (DUE_MS / 1000 + n) * scale for n in range(2 * BATCH + 1)})
    source = list(fromredis.zset(redis, "delayed", topic))
    counted = copy(source, None)
    assert (counted.found, counted.imported, counted.first_ms, counted.overdue) == (2 * BATCH + 1, 0, DUE_MS, 0)
    done = []
    assert copy(source[:700], node.client, done.append).imported == 700
    assert done == [BATCH, 200]
    # An import that was stopped half-way is run again: entries are kept once, also under other Idempotency-Keys.
    again = copy(fromredis.zset(redis, "delayed", topic), node.client)
    assert (again.imported, again.repeated, again.refused) == (2 * BATCH + 1 - 700, 700, 0)
    found = messages(node, topic)
    assert len(found) == 2 * BATCH + 1
    assert (found["cart 7"].body, found["cart 7"].deliver_at) == (b"cart 7", DUE + timedelta(seconds=7))


def test_a_sorted_set_with_a_hash(redis: Any, node: LocalNode) -> None:
    redis.zadd("delayed", {"one": DUE_MS, "gone": DUE_MS, "x" * 300: 5, b"\xff": DUE_MS})
    redis.hset("bodies", mapping={"one": b"\x00 1", "x" * 300: "long", b"\xff": "bytes"})
    report = copy(fromredis.zset(redis, "delayed", "hash", "bodies"), node.client)
    assert (report.found, report.imported, report.overdue) == (4, 3, 1)
    assert report.skipped == {"its data is gone": 1}
    assert messages(node, "hash")["one"].body == b"\x00 1"


def test_refused_entries(redis: Any, node: LocalNode) -> None:
    redis.zadd("delayed", {"far": DUE_MS * 100, "good": DUE_MS})
    report = copy(fromredis.zset(redis, "delayed", "far"), node.client)
    assert (report.imported, report.refused) == (1, 1)
    assert report.refusals[0][0] == "far"
    assert "delay" in report.refusals[0][1]


def test_sidekiq(redis: Any, node: LocalNode) -> None:
    """By its documented format: https://github.com/sidekiq/sidekiq/wiki/Job-Format."""
    job = {"class": "Remind", "jid": "b4a577edbccf1d805744efa9", "args": [4711], "queue": "mails", "retry": True}
    redis.zadd("schedule", {json.dumps(job): DUE_MS / 1000})
    redis.zadd("retry", {json.dumps(job | {"jid": "b4a5", "retry_count": 1}): DUE_MS / 1000, "no job": 1})
    report = copy(fromredis.sidekiq(redis), node.client)
    assert (report.imported, report.skipped) == (2, {"it is no job of Sidekiq": 1})
    found = messages(node, "mails")[job["jid"]]
    assert (json.loads(found.body), found.deliver_at, found.meta) == (job, DUE, {"class": "Remind"})


@pytest.mark.filterwarnings("ignore:Version 0.22:FutureWarning", "ignore:.*utc:DeprecationWarning")
def test_rq_and_rq_scheduler(redis: Any, node: LocalNode) -> None:
    scheduling = pytest.importorskip("rq_scheduler")
    from rq import Queue

    scheduler = scheduling.Scheduler("mails", connection=redis)
    naive = DUE.replace(tzinfo=None)
    one = scheduler.enqueue_at(naive, remind, 4711, by="sms")
    two = scheduler.enqueue_at(naive, remind, {1, 2})
    scheduler.cron("0 9 * * 1", remind, args=[1])
    scheduler.schedule(naive, remind, args=[1], interval=60)
    three = Queue("other", connection=redis).enqueue_at(DUE, remind, 3)
    report = copy(fromredis.rq(redis), node.client)
    assert (report.found, report.imported) == (5, 3)
    assert report.skipped == {"it repeats: make a schedule of it": 2}
    found, func = messages(node, "mails"), f"{remind.__module__}.remind"
    assert json.loads(found[one.id].body) == {"func": func, "args": [4711], "kwargs": {"by": "sms"}}
    assert found[one.id].deliver_at == DUE
    assert json.loads(messages(node, "other")[three.id].body)["args"] == [3]
    assert found[two.id].content_type in ("application/json", "application/x-python-pickle")


def test_apscheduler(redis: Any, node: LocalNode, server: str) -> None:
    pytest.importorskip("apscheduler")
    from apscheduler.jobstores.redis import RedisJobStore
    from apscheduler.schedulers.background import BackgroundScheduler

    port = int(server.rpartition(":")[2].partition("/")[0])
    scheduler = BackgroundScheduler(timezone="UTC", jobstores={"default": RedisJobStore(port=port)})
    scheduler.start(paused=True)
    scheduler.add_job("json:dumps", "date", run_date=DUE, args=[4711], kwargs={"indent": 1}, id="one")
    scheduler.add_job("json:dumps", "date", run_date=DUE, args=[Skipped("a", "b")], id="class")
    scheduler.add_job("json:dumps", "interval", hours=1, args=[1], id="each hour")
    scheduler.shutdown()
    redis.zadd("apscheduler.run_times", {"broken": 1})
    redis.hset("apscheduler.jobs", "broken", b"cos\nsystem\n(S'exit 1'\ntR.")
    report = copy(fromredis.apscheduler(redis, "apscheduler"), node.client)
    assert (report.imported, report.refused) == (2, 0)
    assert report.skipped == {"it repeats: make a schedule of it": 1, "it is no job of APScheduler 3": 1}
    found = messages(node, "apscheduler")
    assert json.loads(found["one"].body) == {"func": "json:dumps", "args": [4711], "kwargs": {"indent": 1}}
    assert (found["one"].deliver_at, found["class"].content_type) == (DUE, "application/x-python-pickle")


def test_celery(redis: Any, node: LocalNode, server: str) -> None:
    pytest.importorskip("celery")
    from celery import Celery

    from hadelay.celery.messages import received

    app = Celery("shop", broker=server, set_as_current=False)

    @app.task(name="remind")
    def task(order: int) -> None: ...

    late = task.apply_async((4711,), eta=DUE, expires=DUE + timedelta(hours=1))
    high = task.apply_async((1,), eta=DUE, queue="mails", priority=9)
    task.delay(2)
    # As a worker holds it that took a task ahead of its time.
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("celery")
        queue.get(timeout=5)
        report = copy(fromredis.celery(redis, "shop."), node.client)
    assert report.imported == 2
    assert report.skipped == {"it has no ETA: let a worker of Redis run it": 1}
    found = next(iter(messages(node, "shop.celery").values()))
    assert found.deliver_at == DUE
    (message,) = [one for one in messages(node, "shop.mails").values() if high.id in str(one.key)]
    assert message.deliver_at == DUE
    raw = received(AsMessage(found))  # type: ignore[arg-type]
    assert (raw["headers"]["id"], raw["headers"]["task"]) == (late.id, "remind")


class FewScores:
    """What a source reads of Redis."""

    def __init__(self, **sets: list[tuple[bytes, float]]) -> None:
        self.sets = sets

    def zscan_iter(self, key: Any, count: int) -> Any:
        return iter(self.sets.get(key if isinstance(key, str) else key.decode().replace(":", "_"), []))

    def scan_iter(self, pattern: str, count: int) -> Any:
        return iter([b"bull:mail:delayed", b"bull:sms:delayed"])

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {b"data": b"{}"}


def test_scores_that_are_no_times_and_members_that_are_no_text() -> None:
    scores = [float("inf"), float("nan"), 1e300, -5.0, DUE_MS]
    few = FewScores(delayed=[(b"%d" % n, score) for n, score in enumerate(scores)])
    found = list(fromredis.zset(few, "delayed", "t"))
    assert [type(one) for one in found] == [Skipped] * 4 + [type(found[4])]
    bytes_and_text = FewScores(delayed=[(b"\xff", DUE_MS), (b"\\xff", DUE_MS)])
    assert len({one.id for one in fromredis.zset(bytes_and_text, "delayed", "t")}) == 2


def test_numbers_of_two_queues_of_bullmq_are_two_ids() -> None:
    few = FewScores(bull_mail_delayed=[(b"1", DUE_MS << 12)], bull_sms_delayed=[(b"1", DUE_MS << 12)])
    assert [one.id for one in fromredis.bullmq(few, topic="all")] == ["mail:1", "sms:1"]
    assert {one.put.at for one in fromredis.bullmq(few, topic="all")} == {DUE_MS}  # type: ignore[union-attr]


def deep() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize("args", [(b"ab",), (float("nan"),), ({1, 2},), ({1: 2},), (deep(),)])
def test_a_call_that_json_would_change_keeps_its_pickle(args: tuple[Any, ...]) -> None:
    assert call_of("f", args, {}, b"pickled") == (b"pickled", PICKLE)
    assert call_of("f", (1, "a"), {"b": [None]}, b"")[1] == "application/json"


def test_a_strangers_pickle_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    found = read(pickle.dumps({"when": DUE, "evil": Evil()}))
    assert found["when"] == DUE
    assert isinstance(found["evil"], Unknown)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="not a pickle"):
        read(b"c")


def laughs(kind: type, depth: int = 60) -> bytes:
    """A value of some bytes that contains itself 2 ** depth times."""
    found: Any = kind(("ha",))
    for _ in range(depth):
        found = kind((found, found))
    return pickle.dumps(found)


def grown_later() -> bytes:
    """As `laughs`, of lists that get their parts after they are used."""
    lists: list[Any] = [["ha"]] + [[] for _ in range(60)]
    for small, large in pairwise(lists):
        large += [small, small]
    return pickle.dumps([lists[::-1], lists])


HUGE: dict[str, bytes] = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo as text": b"Np999999999\n.",
    "length": b"\x80\x04B" + (1 << 31).to_bytes(4, "little") + b"x.",
    "long length": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
    "frame": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"N.",
    "lists": laughs(list),
    "tuples": laughs(tuple),
    "hashed tuples": laughs(tuple)[:-1] + b"N\x86}\x94h\x00Ns.",
    "lists that grow": grown_later(),
    "text many times": pickle.dumps([["x" * 1_000_000] * 1_000]),
    "deep": b"N" + b"\x85" * 1_000 + b".",
    "steps": b"N" * 6_000 + b".",
}


@pytest.mark.parametrize("name", HUGE)
def test_a_pickle_that_asks_for_too_much_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_MOST_OPCODES", 5_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"its pickle|not a pickle"):
            read(HUGE[name])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_one_huge_job_is_skipped_in_words() -> None:
    few = FewScores(times=[(b"big", DUE_MS), (b"\xff", DUE_MS)])
    few.hget = lambda key, member: HUGE["lists that grow"] if member == b"big" else b"no"  # type: ignore[attr-defined]
    found = list(fromredis.apscheduler(few, "t", times="times"))
    assert [type(one) for one in found] == [Skipped, Skipped]
    assert "parts" in found[0].reason  # type: ignore[union-attr]


def test_jobs_of_rq_repeat_by_their_meta_and_not_by_their_words() -> None:
    meta = {
        b"a": pickle.dumps({"about": "interval training"}), b"b": pickle.dumps({"interval": 60, "repeat": 3}),
        b"c": b'{"cron_string": "0 9 * * 1"}', b"d": pickle.dumps({"interval": None}), b"e": HUGE["memo"], b"f": b"",
    }  # fmt: skip
    few = FewScores(rq_scheduler_scheduled_jobs=[(name, DUE_MS) for name in meta])
    few.scan_iter = lambda pattern, count: iter(())  # type: ignore[method-assign]
    few.hgetall = lambda key: {b"data": b"[1]", b"meta": meta[key[-1:].encode()]}  # type: ignore[method-assign]
    found = {one.id: one.reason if isinstance(one, Skipped) else "" for one in fromredis.rq(few)}
    assert {id: reason.partition(":")[0] for id, reason in found.items()} == {
        "a": "", "b": "it repeats", "c": "it repeats", "d": "", "e": "its meta cannot be read", "f": ""
    }  # fmt: skip


def test_an_import_holds_few_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BATCH_BYTES", 1_000)
    sizes = [400, 400, 400, 5_000, 100, *([1] * 600)]
    entries = [Entry(str(n), Put(topic="t", body=b"x" * size)) for n, size in enumerate(sizes)]
    made, most = 0, 0
    steps: list[int] = []

    def source() -> Any:
        nonlocal made
        for entry in entries:
            made += 1
            yield entry

    def advance(count: int) -> None:
        nonlocal most
        steps.append(count)
        most = max(most, made - sum(steps))

    assert copy(source(), None, advance).found == len(sizes)
    assert (steps, most) == ([2, 1, 1, 500, 101], 1)


def test_an_entry_without_an_id_has_a_key() -> None:
    entry = engine._named(Entry("", Put(topic="t", body=b"")))
    assert len(entry.put.key or "") == 64
    assert topic_of("jobs.", "") != "jobs."


class AsMessage:
    """A message that was looked up, as a consumer gets it."""

    lease, redelivered, schedule = "lease", False, None

    def __init__(self, found: Any) -> None:
        self.body, self.id = found.body, found.id


def test_bullmq(redis: Any, node: LocalNode, server: str) -> None:
    """By the library from npm, in the directory that HADELAY_BULLMQ names."""
    directory = Path(os.environ.get("HADELAY_BULLMQ", "/nowhere"))
    if not (directory / "node_modules/bullmq").is_dir() or shutil.which("node") is None:
        pytest.skip("HADELAY_BULLMQ names no directory with the npm package bullmq")
    program = f"""
      const {{ Queue }} = require("bullmq");
      (async () => {{
        const queue = new Queue("mails", {{ connection: {{ url: "{server}", maxRetriesPerRequest: null }} }});
        const delay = {DUE_MS} - Date.now();
        await queue.add("welcome", {{ to: "jo" }}, {{ delay, jobId: "welcome-jo" }});
        for (let n = 0; n < 3; n++) await queue.add("more", {{ n }}, {{ delay, priority: 1 }});
        await queue.upsertJobScheduler("each-hour", {{ every: 3600000, startDate: {DUE_MS} }}, {{ name: "tick" }});
        await queue.close();
      }})();
    """
    subprocess.run(["node", "-e", program], cwd=directory, check=True, timeout=60)
    report = copy(fromredis.bullmq(redis), node.client)
    assert report.imported == 4
    assert report.skipped == {"it repeats: make a schedule of it": 1}
    found = messages(node, "mails")["welcome-jo"]
    assert (json.loads(found.body), found.meta) == ({"to": "jo"}, {"name": "welcome"})
    assert abs(found.deliver_at.timestamp() * 1000 - DUE_MS) < 5_000


def test_the_commands(redis: Any, node: LocalNode, server: str) -> None:
    redis.zadd("delayed", {"one": DUE_MS, "two": time.time() - 5})
    words = ("import", "redis-zset", server, "--key", "delayed", "--topic", "cli", "--servers", node.url)
    dry = json.loads(hadelay(*words, "--dry-run", "-o", "json").stdout)
    assert (dry["found"], dry["overdue"], dry["topics"]) == (2, 1, {"cli": 2})
    assert "imported" not in dry
    shown = hadelay(*words)
    assert shown.returncode == 0, shown.stderr
    assert "imported   2" in shown.stdout
    node.client.receive("cli", wait=5)[0].ack()
    again = json.loads(hadelay(*words, "-o", "json").stdout)
    assert (again["imported"], again["repeated"]) == (0, 2)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:9/0", "http://nowhere"])
def test_no_redis(url: str) -> None:
    pytest.importorskip("redis")
    found = hadelay("import", "sidekiq", url)
    assert (found.returncode, found.stdout) == (2, "")
    assert "the jobs cannot be read from Redis" in found.stderr
