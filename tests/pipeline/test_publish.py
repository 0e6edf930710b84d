"""Rows to messages: each once, whatever is sent again, and what is refused is put aside with the reason."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hadelay import Client, Put
from hadelay.client import PutResult, Receipt
from hadelay.client.wire import batches
from hadelay.errors import BadRequest, LimitReached, NotFound, Overloaded
from hadelay.pipeline import publish, schedule
from hadelay.pipeline.schedule import ScheduleOptions
from hadelay.pipeline.schema import WriteOptions, check_published, parse_write_options
from tests.cli.support import Dev, cluster, hadelay
from tests.system.cluster import Cluster as Nodes
from tests.system.cluster import spawn, until

DUE = datetime(2030, 1, 1, tzinfo=UTC)
NOW = datetime(2029, 1, 1, tzinfo=UTC)


class Cluster(Client):
    """Answers as a cluster does that knows keys. refuse: key → errors to answer first."""

    def __init__(self, refuse: dict[str, list[Exception]] | None = None) -> None:
        self.sent: list[Put] = []
        self.known: dict[str, Put] = {}
        self.refuse = refuse or {}
        #: id → when it was published: of what a later try finds, as the answer to the first one was lost.
        self.published: dict[str, datetime] = {}

    def put_many(self, puts: Iterable[Put], *, timeout: float | None = None) -> list[PutResult]:
        return [self._put(put) for put in puts]

    def _put(self, put: Put) -> Any:
        self.sent.append(put)
        assert put.idempotency_key
        if errors := self.refuse.get(put.idempotency_key):
            return errors.pop(0)
        if put.idempotency_key in self.published:
            return Receipt(put.idempotency_key, put.topic, DUE, duplicate=True, resent=True)
        again = put.idempotency_key in self.known
        self.known.setdefault(put.idempotency_key, put)
        return Receipt("", put.topic, DUE, duplicate=again)

    def cluster(self) -> Any:
        return SimpleNamespace(time=NOW)

    def get(self, message_id: str) -> Any:
        return SimpleNamespace(published_at=self.published[message_id])


def options(directory: Path | None = None, **more: Any) -> WriteOptions:
    return WriteOptions(endpoint="http://127.0.0.1:1", rejected=str(directory or ""), **more)


def table(n: int = 3, **columns: Any) -> pa.RecordBatch:
    rows = {"idempotency_key": [f"k{i}" for i in range(n)], "topic": ["t"] * n, "deliver_at": [DUE] * n} | columns
    return pa.RecordBatch.from_pydict({name: values for name, values in rows.items() if values is not None})


def test_a_row_is_the_message_that_its_columns_say() -> None:
    rows = table(
        1, body=[b"x"], key=["c"], tags=[["a", "b"]], ttl=["1h"], content_type=["text/plain"], on_conflict=["replace"],
        max_wait=[5], callback=["http://x"], group=["g"], on_success=["done"], on_failure=["failed"],
        meta=pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())),
        forward=pa.array([[("x-a", "1")]], pa.map_(pa.string(), pa.string())),
    )  # fmt: skip
    assert list(publish.messages(rows, options())) == [
        Put(
            topic="t", body=b"x", at=int(DUE.timestamp() * 1000), key="c", tags=["a", "b"], ttl="1h",
            content_type="text/plain", on_conflict="replace", max_wait=5, callback="http://x", group="g",
            on_success="done", on_failure="failed", forward={"x-a": "1"}, meta={"a": "b"}, idempotency_key="k0",
        )
    ]  # fmt: skip
    (unique,) = publish.messages(table(1, key=["c"], unique_for=["1d"]), options())
    assert unique.unique_for == "1d"
    rows = table(2, topic=None, deliver_at=None, delay=["15m", "1s"], tags=["a, b", None], row=[1, 2])
    given = options(topic="u", key_column="row", key_prefix="job:")
    assert list(publish.messages(rows, given)) == [
        Put(topic="u", delay="15m", tags=["a", "b"], idempotency_key="job:1"),
        Put(topic="u", delay="1s", idempotency_key="job:2"),
    ]


def test_times_are_rounded_up_to_the_millisecond() -> None:
    at = [DUE, DUE + timedelta(microseconds=1), DUE - timedelta(microseconds=1)]
    found = [put.at for put in publish.messages(table(deliver_at=at), options()) if isinstance(put, Put)]
    ms = int(DUE.timestamp() * 1000)
    assert found == [ms, ms + 1, ms]


def test_a_row_sent_before_is_no_second_message(tmp_path: Path) -> None:
    there = Cluster()
    rows = table(25_000)
    seen: list[int] = []
    done = publish.publish([rows], options(), "x", client=there, progress=lambda d: seen.append(d.rows))
    assert (done.rows, done.published, done.duplicates, done.rejected) == (25_000, 25_000, 0, 0)
    assert seen == [10_000, 20_000, 25_000]
    done = publish.publish([rows], options(), "x", client=there)
    assert (done.published, done.duplicates) == (0, 25_000)
    assert len(there.known) == 25_000


def test_rejected_rows_are_put_aside_with_the_reason(tmp_path: Path) -> None:
    there = Cluster({"k1": [BadRequest("a topic has no spaces")]})
    body = pa.array([b"0", b"1", b"2", b"3", b"4"])
    rows = table(
        5, body=body, deliver_at=[DUE, DUE, None, DUE, DUE], topic=["t", "t", "t", None, "t"],
        idempotency_key=["k0", "k1", "k2", "k3", None],
    )  # fmt: skip
    done = publish.publish([rows], options(tmp_path), "job-00003", client=there)
    assert (done.rows, done.published, done.rejected) == (5, 1, 4)
    assert done.aside == [str(tmp_path / "job-00003.parquet")]
    found = pq.read_table(tmp_path / "job-00003.parquet").to_pylist()
    assert [(row["body"], row["reason"].partition(":")[0]) for row in found] == [
        (b"1", "a topic has no spaces"),
        (b"2", "deliver_at and delay are null"),
        (b"3", "topic is null"),
        (b"4", "idempotency_key is null"),
    ]
    assert sum(done.reasons.values()) == 4
    assert "4 of 5 rows were rejected, 1 of them: " in done.refusal()
    publish.publish([table()], options(tmp_path), "none", client=Cluster())
    assert [path.name for path in tmp_path.iterdir()] == ["job-00003.parquet"]


def test_an_attempt_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield table(1, deliver_at=[None], body=[b"x"], delay=pa.array([None], pa.string()))
        raise RuntimeError("the disk of the source is gone")

    with pytest.raises(RuntimeError, match="is gone"):
        publish.publish(batches(), options(tmp_path), "x", client=Cluster())
    assert list(tmp_path.iterdir()) == []


def test_retryable_rows_alone_are_sent_again_and_with_their_keys() -> None:
    there = Cluster({"k1": [LimitReached("publish_rate", retry_after_ms=1), Overloaded("full", retry_after_ms=1)]})
    done = publish.publish([table()], options(), "x", client=there)
    assert (done.published, done.rejected) == (3, 0)
    assert [put.idempotency_key for put in there.sent] == ["k0", "k1", "k2", "k1", "k1"]


def test_rows_are_not_sent_again_for_ever() -> None:
    there = Cluster({"k1": [Overloaded("full")] * 3})
    done = publish.publish([table()], options(timeout=0), "x", client=there)
    assert (done.published, done.rejected, done.reasons) == (2, 1, {"full": 1})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"topic": "string", "deliver_at": "timestamp"}, "no column idempotency_key, .* Set the option keyColumn"),
        ({"topic": "string", "idempotency_key": "string"}, "no column deliver_at or delay"),
        ({"deliver_at": "timestamp", "idempotency_key": "int"}, "the topic is missing"),
        (
            {"topic": "string", "delver_at": "bigint", "delay": "int", "idempotency_key": "int"},
            "delver_at is not a message field",
        ),
        (
            {"topic": "string", "deliver_at": "date", "idempotency_key": "int"},
            "deliver_at has the type date; allowed is TIM",
        ),
        (
            {"topic": "string", "deliver_at": "timestamp_ntz", "idempotency_key": "int"},
            "deliver_at has the type timestamp_ntz",
        ),
        ({"topic": "string", "delay": "float", "idempotency_key": "boolean"}, "idempotency_key has the type boolean"),
    ],
)
def test_a_table_that_could_not_be_meant_is_refused(columns: dict[str, str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        check_published(columns, options())


def test_wrong_options_of_the_writer_are_refused_in_words() -> None:
    assert parse_write_options({"endpoint": "x", "keycolumn": "n", "TIMEOUT": "5"}).timeout == 5
    for given, said in (({}, "option endpoint"), ({"endpoint": "x", "keyColum": "n"}, "no option keyColum")):
        with pytest.raises(BadRequest, match=said):
            parse_write_options(given)


# ---- tables


def test_a_row_that_no_request_can_carry_is_rejected_alone() -> None:
    """The client would refuse the whole request."""
    keys, delays = ["4711 ", "a\nb", "k2", "k3"], [1.0, 1.0, math.nan, 1.0]
    found = list(publish.messages(table(4, idempotency_key=keys, delay=delays, deliver_at=None), options()))
    reasons = ["idempotency_key '4711 ': must not", "idempotency_key 'a\\nb': must not", "nan cannot be sent"]
    assert [str(reason).startswith(text) for reason, text in zip(found, reasons, strict=False)] == [True] * 3
    assert found[3] == Put(topic="t", delay=1.0, idempotency_key="k3")
    times = ["\N{SUPERSCRIPT TWO}", "9" * 40, "9" * 5_000]
    puts = [put for put in publish.messages(table(deliver_at=times), options()) if isinstance(put, Put)]
    assert [put.at for put in puts] == times, "the cluster refuses each by itself"
    msgspec.msgpack.encode(list(batches(puts)))


def test_names_of_columns_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,due,payload,comment\n1,2030-01-01T00:00:00Z,a,x\n2,,b,\n3,1893456000000,,\n")
    given = ScheduleOptions(options(topic="t", key_column="id"), str(path), columns="deliver_at=due,body=payload")
    (rows,) = schedule.batches(given)
    assert list(publish.messages(rows, given.write)) == [
        Put(topic="t", body="a", at="2030-01-01T00:00:00Z", idempotency_key="1"),
        "deliver_at and delay are null: say when",
        Put(topic="t", body=b"", at=1893456000000, idempotency_key="3"),
    ]
    with pytest.raises(BadRequest, match=r"t\.csv has no column duh; there are id, due"):
        list(schedule.batches(ScheduleOptions(options(topic="t", key_column="id"), str(path), columns="delay=duh")))
    with pytest.raises(BadRequest, match="'pay' is not a message field"):
        ScheduleOptions(options(), str(path), columns="pay=payload")
    with pytest.raises(BadRequest, match="say whether it is csv or parquet"):
        ScheduleOptions(options(), "table.txt")
    with pytest.raises(NotFound, match="no such file"):
        schedule.run(None, ScheduleOptions(options(), str(tmp_path / "x.csv")))


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with cluster(tmp_path_factory.mktemp("publish")) as running:
        yield running


@pytest.mark.processes
def test_a_table_is_published_once_however_often_it_is_scheduled(dev: Dev, tmp_path: Path) -> None:
    count, day = 2_500, f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"
    path = tmp_path / "orders.csv"
    bad = f"{count},orders,{day} 00:00:00,no zone\n"
    path.write_text(
        "id,topic,deliver_at,body\n"
        + "".join(f"{n},orders,{day}T00:{n // 60:02}:{n % 60:02}Z,order {n}\n" for n in range(count))
        + bad
    )
    words = ("pipeline", "schedule", path, "--key", "id", "--master", "none", "--endpoint", dev.servers, "-o", "json")
    for published in (count, 0):
        done = hadelay(*words, "--rejected", tmp_path / "rejected")
        assert done.returncode == 1, done.stderr
        reported = json.loads(done.stdout)
        assert (reported["rows"], reported["published"], reported["duplicates"]) == (
            count + 1,
            published,
            count - published,
        )
        assert "1 rejected: deliver_at" in done.stderr
        (row,) = pq.read_table(reported["aside"][0]).to_pylist()
        assert (row["id"], row["body"]) == (str(count), "no zone")
    with Client(dev.servers) as client:
        assert client.topic("orders").scheduled == count
        first = next(client.messages("orders"))
        assert client.get(first.id, body=True).body == b"order 0"


def test_a_row_whose_answer_was_lost_counts_as_published() -> None:
    known = Cluster()
    hour = timedelta(hours=1)
    known.published = {"k0": NOW + timedelta(seconds=1), "k1": NOW + timedelta(seconds=1), "k2": NOW - hour}
    done = publish.publish([table(5), table(2)], options(), "x", client=known)
    # k2 is of a job an hour ago; k3 and k4 are new; the second k0 and k1 are those of the first rows.
    assert (done.rows, done.published, done.duplicates) == (7, 4, 3)


@pytest.mark.processes
def test_rows_are_published_once_while_the_leader_is_killed_and_what_is_past_is_due_at_once(tmp_path: Path) -> None:
    count = 6_000
    with cluster(tmp_path) as dev, Client(dev.servers) as client:
        given = WriteOptions(dev.servers, topic="orders", timeout=60)
        due = [datetime.now(UTC) + timedelta(days=30)] * count
        rows = table(count, topic=None, deliver_at=due)
        killed: list[str] = []

        def kill(_: publish.RowTotals) -> None:
            if not killed:
                killed.append(client.cluster().leader or "")
                os.kill(next(node["pid"] for node in dev.nodes if node["name"] == killed[0]), signal.SIGKILL)

        done = publish.publish([rows.slice(at, 1_000) for at in range(0, count, 1_000)], given, "x", progress=kill)
        assert (done.rows, done.published, done.duplicates, done.rejected) == (count, count, 0, 0)
        assert client.topic("orders").scheduled == count
        past = table(
            1,
            topic=["past"],
            deliver_at=[datetime(2020, 1, 1, tzinfo=UTC)],
            body=[b"long ago"],
            idempotency_key=["past"],
        )
        assert publish.publish([past], given, "y").published == 1
        assert [message.body for message in client.receive("past", wait=10)] == [b"long ago"]


@pytest.mark.processes
def test_each_row_is_published_once_while_the_whole_cluster_or_the_job_is_killed(tmp_path: Path) -> None:
    """Two tasks write the same rows at once, as speculative ones do, and all nodes are killed."""
    count = 20_000
    rows = table(count, topic=["rows"] * count, deliver_at=[datetime.now(UTC) + timedelta(days=30)] * count)
    with Nodes(tmp_path) as nodes:
        # So slow that what happens meanwhile does.
        assert nodes.ask("n1", "PUT", "/v1/topics/rows", {"publish_rate": 10_000}).status == 200
        given = WriteOptions(",".join(nodes.urls.values()), timeout=120)
        both = [nodes.later(publish.publish, [rows], given, "x") for _ in range(2)]
        until(lambda: nodes.topic("n1", "rows")["scheduled"] > count / 4, "rows")
        nodes.kill(*nodes.names)
        assert not any(task.done() for task in both)
        nodes.restart(*nodes.names)
        done = [task.result(120) for task in both]
        assert [(reported.rows, reported.rejected) for reported in done] == [(count, 0)] * 2
        # What was committed when its answer was lost is published to each that asks again: who was first, nobody knows.
        assert count <= sum(reported.published for reported in done) <= 2 * count
        assert nodes.topic("n1", "rows")["scheduled"] == count
        # A job that is killed half way, and run again.
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_batches([rows]), path)
        words = ("pipeline", "schedule", path, "--key", "idempotency_key", "--prefix", "job:", "--master", "none")
        words = (*words, "--endpoint", given.endpoint, "-o", "json")
        job = spawn(*words, errors=tmp_path / "job.err")
        nodes.children.append(job)
        until(lambda: nodes.topic("n1", "rows")["scheduled"] > count * 5 / 4, "rows of the job")
        assert job.poll() is None
        job.kill()
        job.wait()
        again = hadelay(*words)
        reported = json.loads(again.stdout)
        assert (again.returncode, reported["rows"], reported["rejected"]) == (0, count, 0), again.stderr
        assert reported["duplicates"] > count / 4
        assert nodes.topic("n1", "rows")["scheduled"] == 2 * count
        nodes.assert_identical()
