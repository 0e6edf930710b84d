"""The command line against a real cluster: results on stdout, the rest on stderr, and the documented exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from chaos.freeports import free_ports
from hadelay.cli import dev as dev_command
from hadelay.cli import output
from hadelay.cli.app import COMMANDS, run
from hadelay.cli.output import Printing, cell, fields, note, say, table
from hadelay.codec.formats import INDEX
from hadelay.version import VERSION
from tests.cli.support import Dev, cluster, environment, hadelay, start
from tests.system.cluster import alive

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with cluster(tmp_path_factory.mktemp("dev")) as running:
        yield running


def test_the_version_is_printed_without_the_tree() -> None:
    done = hadelay("--version")
    assert (done.returncode, done.stdout) == (0, f"{VERSION}\n")
    code = "import sys; from hadelay.__main__ import main; sys.argv = ['hadelay', '--version']; main(); "
    heavy = ("numpy", "cyclopts", "rich", "aiohttp", "hadelay.codec", "hadelay.ledger")
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == f"{VERSION}\n[]\n"


def test_help_lists_every_command() -> None:
    done = hadelay("--help")
    assert done.returncode == 0
    for word in ("serve", "dev", "msg", "topic", "cluster", "inspect", "check", "config", "bench"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "words", [["frobnicate"], ["msg", "put"], ["dev", "--nodes", "three"], ["msg", "get"], ["top", "--topics", "-1"]]
)
def test_usage_errors_end_with_2(words: list[str]) -> None:
    done = hadelay(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("msg", "put", "t", "x", "--at", "5"), "Unknown option: --at. Did you mean --deliver-at?"),
        (("msg", "put", "t", "x", "--in", "5m"), "Did you mean --delay?"),
        (("topic", "set", "t", "--max-retries", "3"), "Did you mean --max-attempts?"),
        (("msg", "lst"), "hadelay msg --help"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(words: tuple[str, ...], said: str) -> None:
    done = hadelay(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "╭" not in done.stderr


def test_nobody_there_ends_with_5() -> None:
    done = hadelay("topic", "list", "--servers", "http://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (5, "")
    assert "hadelay dev" in done.stderr


def test_a_message_from_put_to_ack(dev: Dev) -> None:
    receipt = json.loads(dev.run("msg", "put", "cli", "hello", "--delay", "50ms", "-o", "json").stdout)
    received = json.loads(dev.run("msg", "receive", "cli", "--wait", "10s", "-o", "json").stdout)
    assert received["id"] == receipt["id"]
    reported = dev.run("msg", "get", receipt["id"])
    assert reported.returncode == 0
    assert "acked" in reported.stdout
    assert dev.run("msg", "get", receipt["id"], "--body").stdout == "hello"
    assert dev.run("msg", "get", receipt["id"], "--wait", "0.1").stdout == reported.stdout
    empty = dev.run("msg", "receive", "cli")
    assert (empty.returncode, empty.stdout) == (3, "")


@pytest.mark.parametrize(
    "words",
    [
        "msg receive ordres", "topic get ordres", "topic pause ordres", "topic purge ordres -y", "dead list ordres",
        "topic delete ordres -y", "job cancel ordres -y", "msg get --topic ordres --key k",
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_is_answered_with_a_similar_one(dev: Dev, words: str) -> None:
    dev.run("topic", "set", "orders")
    done = dev.run(*words.split())
    assert (done.returncode, done.stdout) == (3, "")
    assert "Did you mean orders?" in done.stderr


def test_names_that_are_not_mistyped_are_not_answered_with_others(dev: Dev) -> None:
    dev.run("topic", "set", "orders~billing")
    dev.run("schedule", "set", "nightly", "orders", "x", "--every", "1h")
    assert "Did you mean orders~billing?" in dev.run("topic", "get", "orders~biling").stderr
    assert "Did you mean nightly?" in dev.run("schedule", "get", "nihgtly").stderr
    for words in (("topic", "get", "zzz"), ("msg", "get", "--topic", "orders", "--key", "k"), ("schedule", "get", "z")):
        assert "Did you mean" not in dev.run(*words).stderr
    assert dev.run("msg", "receive", "orders").stderr == "nothing is due\n"


def test_put_from_stdin_and_with_meta(dev: Dev) -> None:
    done = dev.run("msg", "put", "cli2", "--meta", "Trace=abc", "-o", "json", stdin=b"\x00\xff raw")
    id = json.loads(done.stdout)["id"]
    message = json.loads(dev.run("msg", "receive", "cli2", "--wait", "10s", "-o", "json").stdout)
    assert message["id"] == id
    assert {key.lower(): value for key, value in message["meta"].items()} == {"trace": "abc"}


def test_the_same_key_twice_is_one_message(dev: Dev) -> None:
    words = ("msg", "put", "cli3", "x", "--delay", "1h", "--idempotency-key", "k1", "-o", "json")
    first, second = json.loads(dev.run(*words).stdout), json.loads(dev.run(*words).stdout)
    assert first["id"] == second["id"]
    assert second["duplicate"] is True


def test_cancel_and_its_refusals(dev: Dev) -> None:
    id = json.loads(dev.run("msg", "put", "cli4", "x", "--delay", "1h", "-o", "json").stdout)["id"]
    assert dev.run("msg", "cancel", id).returncode == 0
    assert dev.run("msg", "cancel", id).returncode == 0
    assert dev.run("msg", "cancel", "0000000000000").returncode == 3
    assert dev.run("msg", "cancel", "nonsense").returncode == 2
    both = dev.run("msg", "cancel", id, "0000000000000", "-o", "json")
    assert both.returncode == 1
    assert [row["outcome"] for row in json.loads(both.stdout)] == ["cancelled", "not-found"]


def test_refused_ends_with_1(dev: Dev) -> None:
    done = dev.run("msg", "put", "cli5", "x", "--delay", "800d")
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_delay" in done.stderr or "later" in done.stderr or "delay" in done.stderr


def test_topics(dev: Dev) -> None:
    assert dev.run("topic", "set", "tidy", "--lease", "5s").returncode == 0
    assert json.loads(dev.run("topic", "get", "tidy", "-o", "json").stdout)["lease"] == "5s"
    assert "tidy" in dev.run("topic", "list").stdout
    assert "tidy" in dev.run("topic", "list", "--prefix", "ti").stdout
    assert "tidy" not in dev.run("topic", "list", "--prefix", "id").stdout
    dev.run("msg", "put", "tidy", "x", "--delay", "1h")
    refused = dev.run("topic", "delete", "tidy", "--yes")
    assert (refused.returncode, "--force" in refused.stderr) == (1, True)
    assert dev.run("topic", "delete", "tidy", "--force", "--yes").returncode == 0
    assert dev.run("topic", "get", "tidy").returncode == 3


def test_cluster_status_and_transfer(dev: Dev) -> None:
    status = json.loads(dev.run("cluster", "status", "-o", "json").stdout)
    assert {member["name"] for member in status["members"]} == {"n1", "n2", "n3"}
    to = next(name for name in ("n1", "n2", "n3") if name != status["leader"])
    assert json.loads(dev.run("cluster", "transfer", to, "-o", "json").stdout) == {"leader": to}
    assert dev.run("cluster", "status").stdout.count("follower") == 2


def test_replicas_are_identical(dev: Dev) -> None:
    dev.run("msg", "put", "replicas", "x", "--delay", "3h")
    done = dev.run("check", "replicas", "-o", "json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["differences"] == []
    assert "all identical" in done.stderr


def test_inspect_reads_every_kind_of_file(dev: Dev) -> None:
    dev.run("msg", "put", "inspect-me", "look at this", "--delay", "200ms")
    dev.run("msg", "receive", "inspect-me", "--wait", "10s")
    # A read that is not stale waits until this node has applied what was committed: then the ack is in its files.
    assert dev.run("topic", "get", "inspect-me", "-s", dev.nodes[0]["http"]).returncode == 0
    node = dev.directory / "n1"
    kinds = {path.suffix or path.name: path for path in node.rglob("*") if path.is_file() and path.stat().st_size}
    # Other tests have left hours of their own: this one's is the last that somebody wrote to.
    kinds[".dsp"] = max(node.rglob("*.dsp"), key=lambda path: path.stat().st_mtime_ns)
    seen = {}
    for kind in (".log", ".idx", ".dsp", ".seg", "names", "identity", ".mdb"):
        done = hadelay("inspect", kinds[kind], "-o", "json")
        assert done.returncode == 0, done.stderr
        seen[kind] = [json.loads(line) for line in done.stdout.splitlines()]
        assert hadelay("inspect", kinds[kind], "--verify").returncode == 0
    assert {"acked", "leased"} <= {row["event"] for row in seen[".dsp"]}
    assert "inspect-me" in {row["name"] for row in seen["names"]}
    assert seen["identity"][0]["node"] == "n1"
    assert hadelay("inspect", kinds[".idx"], "--limit", 1).returncode == 0


def test_inspect_says_where_a_byte_is_wrong(dev: Dev, tmp_path: Path) -> None:
    source = next(path for path in (dev.directory / "n1").rglob("*.idx") if path.stat().st_size)
    damaged = tmp_path / source.name
    data = bytearray(source.read_bytes())
    data[17] ^= 1
    damaged.write_bytes(data)
    done = hadelay("inspect", damaged, "--verify", "-o", "json")
    assert done.returncode == 1
    assert "CRC" in json.loads(done.stdout.splitlines()[0])["damage"]


def test_inspect_shows_a_damaged_time_as_a_number(dev: Dev, tmp_path: Path) -> None:
    source = next(path for path in (dev.directory / "n1").rglob("*.idx") if path.stat().st_size)
    damaged = tmp_path / source.name
    rows = np.frombuffer(source.read_bytes(), INDEX, 1).copy()
    rows["deliver_at_ms"] = 1 << 60
    damaged.write_bytes(rows.tobytes())
    done = hadelay("inspect", damaged)
    assert (done.returncode, str(1 << 60) in done.stdout, "CRC" in done.stdout) == (1, True, True), done.stderr


def test_inspect_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    assert hadelay("inspect", tmp_path / "x.txt").returncode == 2
    assert hadelay("inspect", tmp_path / "nothing").returncode == 3
    (tmp_path / "copy.heads").write_bytes(bytes(64))
    done = hadelay("inspect", tmp_path / "copy.heads")
    assert (done.returncode, "copy.heads: " in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_bench_on_a_running_cluster(dev: Dev) -> None:
    done = dev.run("bench", "--count", 500, "--delay", "100ms", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["acked"] == 500


def test_config_check(tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text('[node]\nname = "n7"\n')
    done = hadelay("config", "check", tmp_path / "n.toml")
    assert done.returncode == 0
    assert "n7" in done.stdout
    (tmp_path / "n.toml").write_text('[node]\nnane = "n7"\n')
    done = hadelay("config", "check", tmp_path / "n.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "n.toml:2: node.nane: unknown key; did you mean node.name?" in done.stderr


def test_dev_reports_a_death_starts_it_again_and_ends_clean(tmp_path: Path) -> None:
    with (tmp_path / "err").open("wb") as errors, cluster(tmp_path / "d", errors=errors) as dev:
        base = int(dev.nodes[0]["http"].rpartition(":")[2])
        for i, node in enumerate(dev.nodes):
            assert node["name"] == f"n{i + 1}"
            assert node["http"] == f"http://127.0.0.1:{base + i}"
            assert node["raft"] == f"127.0.0.1:{base + 3 + i}"
        victim = dev.nodes[1]
        os.kill(victim["pid"], signal.SIGKILL)
        died = dev.line()["died"]
        assert (died["name"], died["pid"], died["exit_code"]) == ("n2", victim["pid"], -signal.SIGKILL)
        assert dev.run("msg", "put", "after", "x").returncode == 0
        again = start(dev.directory, "--start", "n2")
        assert again.nodes[0]["name"] == "n2"
        assert again.nodes[0]["pid"] == again.process.pid
        assert dev.run("check", "replicas").returncode == 0
        assert dev.end(signal.SIGINT) == 0
        # What another terminal started ends there; dev says so.
        assert "n2 still runs at 127.0.0.1:" in (tmp_path / "err").read_text()
        assert "n1 still runs" not in (tmp_path / "err").read_text()
        assert again.end(signal.SIGINT) == 0
        for node in dev.nodes:
            assert not Path(f"/proc/{node['pid']}").exists()
        # And the same data again, by the same command.
        dev = start(dev.directory)
        assert dev.run("msg", "receive", "after", "--wait", "10s").returncode == 0
        assert dev.end() == 0


def test_nodes_end_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    with cluster(tmp_path / "d") as dev:
        dev.end(signal.SIGKILL)
        end = time.monotonic() + 30
        while any(alive(node["pid"]) for node in dev.nodes):
            assert time.monotonic() < end, "a node outlived its supervisor"


def test_dev_refuses_in_words(tmp_path: Path) -> None:
    with cluster(tmp_path / "d", "--nodes", 1) as dev:
        port = dev.nodes[0]["http"].rpartition(":")[2]
        taken = hadelay("dev", "--data-dir", tmp_path / "e", "--port-base", port)
        assert taken.returncode == 1
        assert "another --port-base" in taken.stderr
        other = hadelay("dev", "--data-dir", tmp_path / "d", "--nodes", 3)
        assert other.returncode == 1
        assert "holds a cluster of 1 nodes" in other.stderr
    assert hadelay("dev", "--data-dir", tmp_path / "nowhere", "--start", "n1").returncode == 3
    assert hadelay("dev", "--data-dir", tmp_path / "d", "--start", "n9").returncode == 3


def test_dev_says_why_a_node_did_not_start(tmp_path: Path) -> None:
    done = hadelay("dev", "--data-dir", tmp_path, "--port-base", 1024, "--set", "http.max_tags=-1")
    assert done.returncode == 1
    assert "max_tags" in done.stderr
    assert "must be at least" in done.stderr


def test_serve_with_nothing_is_a_node_on_loopback(tmp_path: Path) -> None:
    port = free_ports(2)
    variables = {"HADELAY_HTTP__LISTEN": f"127.0.0.1:{port}", "HADELAY_RAFT__LISTEN": f"127.0.0.1:{port + 1}"}
    with subprocess.Popen(
        [sys.executable, "-m", "hadelay", "serve", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(**variables),
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        url = ready["nodes"][0]["http"]
        assert hadelay("msg", "put", "alone", "x", "--servers", url).returncode == 0
        assert hadelay("msg", "receive", "alone", "--wait", "10s", "--servers", url).returncode == 0
        second = subprocess.run(
            [sys.executable, "-m", "hadelay", "serve"],
            capture_output=True,
            env=environment(HADELAY_HTTP__LISTEN="127.0.0.1:0", HADELAY_RAFT__LISTEN=f"127.0.0.1:{free_ports(1)}"),
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
        assert second.returncode == 1
        assert b"another node runs in" in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    (identity,) = tmp_path.rglob("g0/identity")
    identity.write_bytes(b"")
    damaged = subprocess.run(
        [sys.executable, "-m", "hadelay", "serve"],
        capture_output=True, env=environment(**variables), cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert damaged.returncode == 1
    assert b"identity, offset 0: the file ends too early" in damaged.stderr
    assert b"Move hadelay-data away" in damaged.stderr
    assert b"restore a backup" in damaged.stderr


def test_numbers_that_name_a_thing_are_not_grouped() -> None:
    assert cell({"applied_index": 1997, "messages": 1997}) == "applied_index=1997 messages=1,997"
    assert cell({"cursor": {"term": 1001}}) == "cursor=term=1001"


def test_a_cluster_on_other_ports_says_how_commands_find_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for port, said in ((8400, ""), (9100, "export HADELAY_SERVERS=http://127.0.0.1:9100,http://127.0.0.1:9101")):
        layout = dev_command.Layout(id="dev-1", nodes=2, port_base=port)
        cluster = dev_command._Cluster(layout, tmp_path, Printing())
        cluster.processes = dict.fromkeys(layout.names(), SimpleNamespace(pid=1))  # type: ignore[arg-type]
        cluster._greet()
        printed = "".join(capsys.readouterr())
        assert said in printed
        assert ("HADELAY_SERVERS" in printed) == bool(said)


def test_dev_says_how_much_disk_a_node_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = dev_command._Cluster(dev_command.Layout(id="dev-1", nodes=2, port_base=9100), tmp_path, Printing())
    for name in ("n1", "n2"):
        cluster.processes[name] = SimpleNamespace(pid=1)  # type: ignore[assignment]
        (tmp_path / name / "raft").mkdir(parents=True)
        (tmp_path / name / "raft" / "journal").write_bytes(bytes(33_500_000))
    cluster._greet()
    assert "now 33 MB per node" in capsys.readouterr().err


def test_no_help_shows_an_empty_default(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        run([*command.path.split(), "--help"])
        shown = capsys.readouterr().out
        assert "Usage" in shown
        assert "default: ()" not in shown.replace("\n", " ")


#: Escape sequences, a bell, a C1 control, and marks that turn the direction of writing.
HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202eb\u2066c\u200b"


@pytest.mark.parametrize(
    "show", [
        lambda: fields({HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: 1}]}}), lambda: table([{HOSTILE: HOSTILE}], (HOSTILE,)),
        lambda: say(f"{HOSTILE}\n{HOSTILE}"), lambda: note(HOSTILE),
        lambda: run(["msg", HOSTILE]), lambda: run(["msg", "put", "t", "x", "--servers", f"http://{HOSTILE}"]),
    ],
)  # fmt: skip
def test_a_terminal_gets_no_control_characters(show: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    show()
    printed = "".join(capsys.readouterr())
    assert printed
    assert printed.replace("\n", "").isprintable()


def test_commands_print_through_what_cleans() -> None:
    """All that a command prints for people goes through say() and note(); completion prints a script of cyclopts."""
    folder = Path(output.__file__).parent
    calls = [
        f"{path.name}: {line.strip()}"
        for path in sorted(folder.glob("*.py")) if path.name != "output.py"
        for line in path.read_text().splitlines() if re.search(r"(?<![\w.])print\(|sys\.std(out|err)\.write", line)
    ]  # fmt: skip
    assert calls == ["app.py: print(build().generate_completion(shell=shell))"]
