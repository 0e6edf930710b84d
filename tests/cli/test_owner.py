"""What an owner does to messages and topics, from the command line."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hadelay.api.verdict import verdict
from hadelay.cli import dead
from hadelay.cli.output import Remote
from hadelay.client.paths import reachable
from hadelay.errors import BadRequest
from hadelay.handout.polls import Askers, Poll
from tests.cli.support import Dev, cluster, environment, hadelay
from tests.commands import started

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with cluster(tmp_path_factory.mktemp("dev")) as running:
        yield running


def answer(dev: Dev, *words: object) -> Any:
    done = dev.run(*words, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_message_by_its_key(dev: Dev) -> None:
    put = ("msg", "put", "owner", "x", "--delay", "1h", "--key", "a/ü", "--tag", "eu", "--tag", "vip", "--ttl", "1d")
    first = answer(dev, *put)
    assert answer(dev, *put)["duplicate"]
    second = answer(dev, *put, "--on-conflict", "replace", "--max-wait", "2h")
    assert second["replaced"] == first["id"]
    rejected = dev.run(*put, "--on-conflict", "reject")
    assert rejected.returncode == 1
    assert f"id {second['id']}" in rejected.stderr
    named = ("--topic", "owner", "--key", "a/ü")
    moved = answer(dev, "msg", "reschedule", *named, "--delay", "2h")
    assert (moved["id"], moved["deliver_at"] > second["deliver_at"]) == (second["id"], True)
    found = answer(dev, "msg", "get", *named)
    assert (found["key"], found["tags"], found["state"]) == ("a/ü", ["eu", "vip"], "scheduled")
    answer(dev, "msg", "deliver", *named)
    assert answer(dev, "msg", "get", second["id"])["state"] == "ready"
    assert answer(dev, "msg", "cancel", *named)[0]["outcome"] == "cancelled"
    late = dev.run("msg", "reschedule", second["id"], "--delay", "1h")
    assert late.returncode == 1
    assert "cancelled" in late.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("msg", "get"), "by --topic and --key"),
        (("msg", "get", "--key", "k"), "by --topic and --key"),
        (("msg", "cancel", "0000000000000", "--topic", "t", "--key", "k"), "by --topic and --key"),
        (("msg", "reschedule", "0000000000000"), "give one of --shift, --delay and --deliver-at"),
        (("topic", "set", "t", "--rate", "fast"), "expected a number"),
        (("topic", "set", "t", "--backoff", "min=1s,max"), "NAME=VALUE"),
        (("topic", "set", "t", "--webhook-secret", "whsec_x"), "--webhook URL"),
        (("topic", "set", "t", "--backoff", "min=1s,max=1m,foo=3"), "unknown field 'foo' at $.backoff\n"),
        (("dead", "redrive", "t"), "hadelay topic redrive"),
        (("msg", "put", "t", "x", "--meta", "=v"), "NAME=VALUE"),
        (("msg", "list", "t", "--from", "yesterday"), "from: 'yesterday' is not a time"),
        (("msg", "receive", "t", "--wait", "long"), "wait: 'long' is not a duration"),
        (("topic", "set", "t", "--backoff", "1s,foo"), "backoff[1]: 'foo' is not a duration"),
        (("msg", "put", "t", "x", "--meta", "ä=v"), "in ASCII"),
    ],
)
def test_commands_that_cannot_be_meant_end_with_2(dev: Dev, words: tuple[str, ...], hint: str) -> None:
    done = dev.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in done.stderr


def test_every_setting(dev: Dev) -> None:
    shown = answer(
        dev, "topic", "set", "settings", "--lease", "1m", "--max-attempts", 5, "--backoff", "1s,10s", "--dead-letter",
        "keep", "--dead-retention", "7d", "--rate", 10.5, "--publish-rate", 100, "--catch-up-rate", 20,
        "--concurrency", 3, "--max-messages", 1000, "--max-bytes", 1 << 20, "--ttl", "1d", "--retention", "2d",
        "--dispatch-sync", "commit", "--alert", "http://127.0.0.1:9/alert",
    )  # fmt: skip
    expected = {
        "lease": "1m", "max_attempts": 5, "backoff": ["1s", "10s"], "dead_letter": "keep", "dead_retention": "7d",
        "rate": 10.5, "publish_rate": 100, "catch_up_rate": 20, "concurrency": 3, "max_messages": 1000,
        "max_bytes": 1 << 20, "ttl": "1d", "retention": "2d", "dispatch_sync": "commit",
        "alert": {"url": "http://127.0.0.1:9/alert"},
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    exponential = answer(dev, "topic", "set", "settings", "--backoff", "min=1s,max=1h,factor=3,jitter=0.5")
    assert exponential["backoff"] == {"min": "1s", "max": "1h", "factor": 3, "jitter": 0.5}
    back = answer(dev, "topic", "set", "settings", "--rate", "default", "--alert", "default")
    assert "rate" not in back
    assert "alert" not in back
    assert back["lease"] == "1m"
    hook = answer(
        dev, "topic", "set", "hook", "--webhook", "http://127.0.0.1:9/x", "--webhook-timeout", "5s", "--webhook-header",
        "X-A=b", "--allow-per-message",
    )["webhook"]  # fmt: skip
    assert (hook["timeout"], hook["headers"], hook["allow_per_message"]) == ("5s", {"X-A": "****"}, True)


def test_pause_and_resume(dev: Dev) -> None:
    answer(dev, "msg", "put", "halting", "x")
    assert answer(dev, "topic", "pause", "halting", "--reason", "sale")["paused_reason"] == "sale"
    assert dev.run("msg", "receive", "halting").returncode == 3
    assert "paused" not in answer(dev, "topic", "resume", "halting")
    assert answer(dev, "msg", "receive", "halting", "--wait", "10s")["topic"] == "halting"


def test_only_what_was_asked_for(dev: Dev) -> None:
    answer(dev, "msg", "put", "tagged", "x", "--tag", "eu")
    assert dev.run("msg", "receive", "tagged", "--tag", "us").returncode == 3
    assert answer(dev, "msg", "receive", "tagged", "--any-tag", "us", "--any-tag", "eu", "--wait", "10s")["tags"] == [
        "eu"
    ]


def die(dev: Dev, topic: str, count: int) -> list[str]:
    answer(dev, "topic", "set", topic, "--max-attempts", 1, "--lease", "50ms")
    ids = [answer(dev, "msg", "put", topic, f"m{n}")["id"] for n in range(count)]
    got = 0
    while got < count:
        got += len(dev.run("msg", "receive", topic, "--wait", "10s", "--keep", "-o", "json").stdout.splitlines())
    while answer(dev, "topic", "get", topic)["dead"] < count:
        pass
    return ids


def test_dead_letters(dev: Dev, tmp_path: Path) -> None:
    ids = die(dev, "doomed", 3)
    listed = [json.loads(line) for line in dev.run("dead", "list", "doomed", "-o", "json").stdout.splitlines()]
    assert {letter["id"] for letter in listed} == set(ids)
    assert listed[0]["errors"][0]["event"] == "lease_expired"
    table = dev.run("dead", "list", "doomed", "-n", 1)
    assert "lease_expired" in table.stdout
    assert "raise --limit for more" in table.stderr
    file = tmp_path / "dead.jsonl"
    assert dev.run("dead", "export", "doomed", file).returncode == 0
    exported = [json.loads(line) for line in file.read_text().splitlines()]
    assert [letter["id"] for letter in exported] == [letter["id"] for letter in listed]
    assert exported[0]["body_base64"]
    assert not list(tmp_path.glob("*.cursor"))
    again = dev.run("dead", "export", "doomed", file)
    assert (again.returncode, "--restart" in again.stderr) == (2, True)
    assert dev.run("dead", "export", "doomed").stdout == file.read_text()
    assert answer(dev, "dead", "redrive", "doomed", ids[0])[0]["outcome"] == "redriven"
    twice = dev.run("dead", "redrive", "doomed", ids[0])
    assert twice.returncode == 1
    assert answer(dev, "topic", "redrive", "doomed", "--rate", 100)["redriving"] == 2
    while answer(dev, "topic", "get", "doomed")["dead"]:
        pass
    answer(dev, "topic", "purge", "doomed", "--yes")
    assert answer(dev, "topic", "get", "doomed")["ready"] == 0
    answer(dev, "dead", "purge", "doomed", "--yes")


def test_a_key_is_of_one_message(dev: Dev) -> None:
    answer(dev, "topic", "set", "keyed", "--max-attempts", 1, "--lease", "50ms")
    dead = answer(dev, "msg", "put", "keyed", "x", "--key", "k")["id"]
    assert dev.run("msg", "receive", "keyed", "--wait", "10s", "--keep").returncode == 0
    while not answer(dev, "topic", "get", "keyed")["dead"]:
        pass
    second = answer(dev, "msg", "put", "keyed", "y", "--key", "k", "--delay", "1h")["id"]
    refused = dev.run("dead", "redrive", "keyed", dead, "-o", "json")
    assert (refused.returncode, json.loads(refused.stdout)[0]["outcome"]) == (1, "key_taken")
    assert answer(dev, "msg", "cancel", second)[0]["outcome"] == "cancelled"
    assert answer(dev, "dead", "redrive", "keyed", dead)[0]["outcome"] == "redriven"


def test_an_export_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [{"id": str(n)} for n in range(250)]
    broken = True

    def call(remote: Remote, method: str, path: str, **how: Any) -> Any:
        if not path.endswith("/dead"):
            return {"dead": len(letters)}
        at = int(how["query"]["cursor"] or 0)
        if broken and at == 200:
            raise ConnectionError("gone")
        end = at + how["query"]["limit"]
        return {"messages": letters[at:end], "cursor": str(end) if end < len(letters) else None}

    monkeypatch.setattr(dead, "call", call)
    file = tmp_path / "out.jsonl"
    with pytest.raises(ConnectionError):
        dead.export("t", file)
    with file.open("a") as half:
        half.write('{"id": "cut off')
    with pytest.raises(BadRequest, match="topic t"):
        dead.export("other", file)
    broken = False
    dead.export("t", file)
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == [str(n) for n in range(250)]
    with pytest.raises(BadRequest, match="--restart"):
        dead.export("t", file)
    dead.export("t", file, restart=True)
    assert len(file.read_text().splitlines()) == 250


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("topic", "purge"), "deletes 2 scheduled, 0 ready messages of topic asked"),
        (("topic", "purge", "--state", "scheduled"), "deletes 2 scheduled messages of topic asked"),
        (("dead", "purge"), "deletes 0 dead messages of topic asked"),
        (("topic", "delete", "--force"), "its settings, and 2 scheduled, 0 ready, 0 leased, 0 dead messages"),
    ],
)
def test_commands_that_cannot_be_undone_ask_first(dev: Dev, words: tuple[str, ...], reported: str) -> None:
    """A terminal is asked, with the count; a script says --yes, or nothing happens."""
    for key in "ab":
        answer(dev, "msg", "put", "asked", "x", "--delay", "1h", "--key", key)
    command = (*words[:2], "asked", *words[2:])
    unasked = dev.run(*command)
    assert (unasked.returncode, unasked.stdout) == (2, "")
    assert reported in unasked.stderr
    assert "--yes" in unasked.stderr
    for reply, code in ((b"n\n", 1), (b"\n", 1), (b"y\n", 0)):
        assert answer(dev, "topic", "get", "asked")["scheduled"] == 2
        done, shown = on_a_terminal(dev, command, reply)
        assert done == code, shown
        assert reported in shown
    if words[0] == "topic":
        # The messages of one state are counted away in slices, soon after the answer.
        while (left := dev.run("topic", "get", "asked", "-o", "json")).returncode == 0:
            if not json.loads(left.stdout)["scheduled"]:
                break
    assert dev.run("topic", "delete", "asked", "--force", "--yes").returncode in (0, 3)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_on_a_terminal_breaks_no_word(dev: Dev, columns: int) -> None:
    """Narrow, each message becomes a block of lines; ids, times and keys are whole in any case."""
    tags = [word for n in range(6) for word in ("--tag", f"warehouse-{n}")]
    put = answer(dev, "msg", "put", "narrow", "x", "--delay", "1h", "--key", "customer-4711-order-0815", *tags)
    code, shown = on_a_terminal(dev, ("msg", "list", "narrow"), columns=columns)
    assert code == 0
    words = shown.split()
    assert {put["id"], put["deliver_at"], "customer-4711-order-0815", "scheduled"} <= set(words)
    assert {f"warehouse-{n}" for n in range(6)} <= {word.rstrip(",") for word in words}
    assert max(map(len, shown.splitlines())) <= columns
    for command in (("topic", "list"), ("cluster", "status"), ("cluster", "members", "list"), ("trace", put["id"])):
        code, shown = on_a_terminal(dev, command, columns=columns)
        assert code == 0
        assert max(map(len, shown.splitlines())) <= columns, shown


def test_bytes_of_a_message_do_not_steer_the_terminal(dev: Dev) -> None:
    answer(dev, "msg", "put", "rude", "x", "--delay", "1h", "--key", "\x1b[2J\x1b[31mred")
    assert "\x1b" not in dev.run("msg", "list", "rude").stdout


def test_a_verdict_says_what_a_message_waits_for(dev: Dev) -> None:
    def first_line(*words: str) -> str:
        return dev.run("trace", *words).stdout.partition("\n")[0]

    later = answer(dev, "msg", "put", "case", "x", "--delay", "2h", "--key", "later")
    assert first_line("--topic", "case", "--key", "later") == "due in 1 h 59 min"
    now = answer(dev, "msg", "put", "case", "x", "--key", "now")["id"]
    assert first_line(now).endswith(": no consumer has asked for its topic since the present leader took over")
    dev.run("msg", "receive", "case", "--tag", "nobody")
    assert first_line(now).endswith(": 1 message of its topic is ready; consumers: anonymous")
    for node in dev.nodes:
        shown = json.loads(dev.run("topic", "get", "case", "-s", node["http"], "-o", "json").stdout)
        assert [consumer["name"] for consumer in shown["consumers"]] == ["anonymous"]
    answer(dev, "topic", "pause", "case", "--reason", "stock-taking")
    assert first_line(now).endswith(": its topic is paused: stock-taking")
    assert first_line(later["id"]).endswith("; its topic is paused: stock-taking")
    answer(dev, "topic", "resume", "case")
    assert dev.run("msg", "receive", "case", "--keep").returncode == 0
    assert re.fullmatch(r"with consumer anonymous for \d+ m?s, attempt 1", first_line(now))
    answer(dev, "msg", "cancel", later["id"])
    assert re.fullmatch(r"cancelled \d+ \S+ ago", first_line(later["id"]))
    assert dev.run("trace", "--topic", "case").returncode == 2


def test_special_settings_are_in_the_lists(dev: Dev) -> None:
    answer(dev, "topic", "set", "sold-out", "--webhook", "http://127.0.0.1:9/x")
    answer(dev, "topic", "pause", "sold-out", "--reason", "no stock")
    row = next(line for line in dev.run("topic", "list").stdout.splitlines() if line.startswith("sold-out"))
    assert row.endswith("paused, webhook: no stock")
    leader = answer(dev, "cluster", "status")["leader"]
    other = next(node["name"] for node in dev.nodes if node["name"] != leader)
    answer(dev, "cluster", "drain", other)
    rows = {line.split()[0]: line.split()[2] for line in dev.run("cluster", "status").stdout.splitlines()[-3:]}
    answer(dev, "cluster", "drain", other, "--undo")
    assert rows == {node["name"]: "drained" if node["name"] == other else "ready" for node in dev.nodes}


def test_counts_of_messages_by_due_time(dev: Dev) -> None:
    for delay in ("90m", "90m", "5h"):
        answer(dev, "msg", "put", "calendar", "x", "--delay", delay)
    buckets = answer(dev, "topic", "due", "calendar")
    assert [bucket["count"] for bucket in buckets] == [2, 1]
    assert all(bucket["from"].endswith(":00:00.000Z") for bucket in buckets)
    assert sum(bucket["count"] for bucket in answer(dev, "topic", "due", "--step", "1d")) >= 3
    assert "█" in dev.run("topic", "due", "calendar", "--step", "30m").stdout
    for wrong in (("--step", "1x"), ("--step", "0h"), ("--from", "soon")):
        assert dev.run("topic", "due", "calendar", *wrong).returncode == 2


def test_a_verdict_names_the_consumer_that_stopped() -> None:
    due, asked, now = (f"2026-11-20T{time}:00.000Z" for time in ("03:00", "03:01", "03:12"))
    message = {"state": "ready", "deliver_at": due, "attempt": 0, "history": []}
    topic = {"ready": 1, "leased": 0, "consumers": [{"name": "w1", "asked_at": asked}]}
    nodes = [{"node": "n1", "state": "ready"}, {"node": "n2", "state": None}]
    said = verdict(message, topic, nodes, now)
    assert said == "overdue by 12 min: no consumer has asked in the last 11 min (w1 did before)"
    topic["consumers"][0] |= {"asked_at": "2026-11-20T03:11:50.000Z", "waiting": False}
    assert "in the last 10 s (w1 did before)" in verdict(message, topic, [], now)
    topic["consumers"][0]["waiting"] = True
    assert verdict(message, topic, [], now).endswith("1 message of its topic is ready; consumers: w1")
    crowd = {**topic, "consumers": [{**topic["consumers"][0], "name": f"w{n}"} for n in range(7)]}
    assert verdict(message, crowd, [], now).endswith("consumers: w0, w1, w2, w3, w4 and 2 more")
    assert verdict(message, topic, [*nodes, {"node": "n3", "state": "acked"}], now).endswith("DISAGREE (n3: acked)")
    assert verdict(message, {**topic, "concurrency": 2, "leased": 2}, nodes, now).endswith("as concurrency allows")


def test_consumers_that_are_remembered_are_bounded() -> None:
    askers = Askers()

    def ask(consumer: str, topics: tuple[str, ...], now_ms: int, node: str = "") -> None:
        askers.note(Poll(consumer, b"", topics, 1, 1, 1, lambda got, error: None, node=node), now_ms)

    for n in range(5_000):
        ask(f"c{n}", ("t", *(f"t{n}-{i}" for i in range(99))), n, "n2" if n % 2 else "")
    assert askers.of("t", most=2) == {"c4999": (4999, "n2"), "c4998": (4998, "")}
    assert len(askers._asked) == askers._names // 100 == 655
    ask("all", tuple(f"x{n}" for n in range(1 << 17)), 5_000)
    assert askers.of("x7") == {"all": (5_000, "")}
    assert askers.of("t") == {}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete(shell: str) -> None:
    script = hadelay("completion", shell).stdout
    assert "reschedule" in script
    assert "max-attempts" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=False).returncode == 0


def on_a_terminal(dev: Dev, words: tuple[str, ...], reply: bytes = b"", columns: int = 200) -> tuple[int, str]:
    """The exit code, and what a person sees who answers with `reply`."""
    ours, theirs = pty.openpty()
    env = environment(HADELAY_SERVERS=dev.servers, COLUMNS=str(columns))
    process = started(words, env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        os.write(ours, reply)
        while data := _read(ours):
            shown += data
        return process.wait(60), shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # EIO: the process at the other end closed it
        return b""


@pytest.mark.parametrize(
    ("mark", "size", "reported"),
    [
        ("", 10, "out.jsonl.cursor cannot be read"), ("[]", 10, "out.jsonl.cursor cannot be read"),
        ('{"topic": "t"}', 10, "out.jsonl.cursor cannot be read"),
        ('{"topic": "t", "cursor": "1", "bytes": 10, "count": 1}', 9, "out.jsonl is shorter than"),
    ],
)  # fmt: skip
def test_an_export_whose_files_were_changed_begins_anew_only_on_request(
    tmp_path: Path, mark: str, size: int, reported: str
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(bytes(size))
    file.with_name("out.jsonl.cursor").write_text(mark)
    with pytest.raises(BadRequest, match=reported):
        dead.export("t", file)


def test_a_token_for_https_is_not_sent_in_the_clear() -> None:
    there = ["http://n1:8400/", "https://n2:8400", ""]
    for given, token, asked in (
        (["https://n0"], "secret", ["https://n2:8400", "https://n0"]),
        (["https://n0"], "", ["http://n1:8400", "https://n2:8400", "https://n0"]),
        (["http://n0"], "secret", ["http://n1:8400", "https://n2:8400", "http://n0"]),
    ):
        assert reachable(there, given, token) == asked
