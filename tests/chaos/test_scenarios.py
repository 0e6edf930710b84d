"""Scenario and cluster files: every mistake is refused before anything starts, with its line and key."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Thread

import pytest

from chaos import scenario, tools
from chaos.__main__ import MISTAKE, UNREAD, main
from chaos.cluster import GivenCluster
from chaos.scenario import KINDS, Mistake, rounds
from chaos.sim.failpoints import POINTS

FAULT = '[[faults]]\nkind = "kill"\n'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("seconds = 5\nseed = \n", 2, "not TOML"),
        ("second = 5", 1, "did you mean seconds"),
        ('seconds = "long"', 1, "seconds: Expected"),
        ("[load]\nrate = 5\nratio = 1", 3, "'ratio' is unknown; did you mean rate"),
        ("[load]\n\nrate = 0", 3, "load.rate"),
        ("[load]\ndelay_s = [3.0, 1.0]", 2, "[least, most]"),
        (f'{FAULT}\n[[faults]]\nkind = "kil"', 5, "faults[1].kind: 'kil' is unknown; did you mean kill"),
        (f"{FAULT}{FAULT}sceonds = 3", 5, "did you mean seconds"),
        (f"{FAULT}ms = 3", 3, "kill takes no amount"),
        ('[[faults]]\nkind = "loss"\nms = 3', 3, "loss takes percent"),
        ('[[faults]]\nkind = "wipe"\ntarget = "all"', 3, "breaks what no cluster promises"),
        ('[[faults]]\nkind = "crash"', 2, "a crash is `at` a point"),
        (f'{FAULT}at = "journal.sync:after"', 3, "a crash is `at` a point"),
        ('[[faults]]\nkind = "crash"\nat = "journal.sinc:after"', 3, "did you mean journal.sync:after"),
        (
            '[[faults]]\nkind = "crash"\nat = "journal.reset:after"\ntarget = "all"',
            4,
            "breaks what no cluster promises",
        ),
        ('[[faults]]\nkind = "crash"\nat = "each"\ntarget = "all"', 4, "breaks what no cluster promises"),
        ('[rotation]\nkinds = ["any"]\n[[rotation.also]]\nkind = "crash"\nat = "each"', 5, "'each' is unknown"),
        ('[rotation]\nkinds = ["any", "kll"]', 2, "did you mean kill"),
        ('[rotation]\nkinds = ["any"]\ntargets = ["leder"]', 3, "did you mean leader"),
        ('[rotation]\nkinds = ["any"]\n[[rotation.also]]\nkind = "wipe"\ntarget = "all"', 5, "breaks what no"),
        ("[cluster]\nnodes = 12", 2, "1 to 9"),
        ("[watch]\nevery_s = 0.0", 2, "at least 0.1"),
        ("[cluster]\nshards = 5", 2, "1 to 4"),
        ('[cluster]\nshards = 2\n[rotation]\nkinds = ["any"]', 2, "several shards cannot have the fault any"),
        (f"[cluster]\nshards = 2\n{FAULT.replace('kill', 'cut')}", 2, "cannot have the fault cut"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(Mistake) as caught:
        scenario.load(path)
    assert words in str(caught.value)
    assert f"mine.toml:{line}:" in str(caught.value) or f"line {line}" in str(caught.value)


def test_a_node_that_is_not_there_and_a_scenario_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'{FAULT}target = "n7"')
    assert main(["run", str(path), "--dir", str(tmp_path / "out")]) == MISTAKE
    assert "'n7' is unknown" in capsys.readouterr().err
    assert main(["run", "smock"]) == MISTAKE
    assert "smoke" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == MISTAKE


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda command: None)
    monkeypatch.setattr(tools.os, "geteuid", lambda: 1000)
    tools.missing.cache_clear()
    try:
        with pytest.raises(Mistake) as caught:
            tools.usable({"cut", "slow-sync", "kill"})
        for words in ("cut: run it as root", "apt-get install nftables", "slow-sync: cc is not installed"):
            assert words in str(caught.value)
        assert tools.usable({"any"}) == {
            "kill", "stop", "pause", "wipe", "transfer", "rot", "old-copy", "crash", "starve", "few-files",
        }  # fmt: skip
    finally:
        tools.missing.cache_clear()


def test_a_cluster_file_without_the_commands_a_fault_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[nodes.n1]\nhttp = "http://127.0.0.1:1"\nkill = "true"\n')
    assert main(["run", "smoke", "--cluster", str(path), "--dir", str(tmp_path / "out")]) == MISTAKE
    assert "cluster.toml:1: nodes.n1: kill needs start" in capsys.readouterr().err
    path.write_text('[nodes.n1]\nhttp = "http://127.0.0.1:1"\nkil = "true"\n')
    assert main(["run", "smoke", "--cluster", str(path)]) == MISTAKE
    assert "cluster.toml:3: nodes.n1.kil: 'kil' is unknown; did you mean kill?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nodes]\n", "cluster.toml: the file names no nodes"),
        ('[nodes.n1]\nhttp = "10.0.0.1:8400"\n', "cluster.toml:2: nodes.n1.http: '10.0.0.1:8400': expected a URL"),
        (
            '[nodes.n1]\nhttp = "http://a:1"\nstart = "true"\nkill = "ssh \'n1"\n',
            "cluster.toml:4: nodes.n1.kill: No closing quotation",
        ),
    ],
)
def test_a_mistake_in_a_cluster_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(Mistake) as caught:
        GivenCluster(path)
    assert words in str(caught.value)


def test_a_command_of_a_cluster_file_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[nodes.n1]\nhttp = "http://a:1"\nkill = "no-such-command"\nstop = "sleep 9"\npause = "false"\n')
    cluster = GivenCluster(path)
    monkeypatch.setattr("chaos.cluster._COMMAND_S", 0.05)
    for what, words in {"kill": "No such file", "stop": "did not end within", "pause": "exit code 1"}.items():
        with pytest.raises(Mistake, match=words):
            cluster.do(what, "n1")


class Elsewhere(BaseHTTPRequestHandler):
    """What is at an address of a cluster file: first it wants a token, and then it is no node."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_a_listener_is_asked_with_the_token_and_has_to_be_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.toml"
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        path.write_text(f'[nodes.n1]\nhttp = "http://127.0.0.1:{server.server_port}"\n')
        for token, words in {"": "answers 401 .*HADELAY_TOKEN", "secret": "is not a hadelay node"}.items():
            monkeypatch.setenv("HADELAY_TOKEN", token)
            with pytest.raises(Mistake, match=words):
                GivenCluster(path).up()
        server.shutdown()
    with pytest.raises(Mistake, match="does not answer"):
        GivenCluster(path).up()


def test_a_seed_draws_the_same_rounds_and_a_rotation_leaves_no_kind_out() -> None:
    hour = scenario.load(scenario.find("hour"))
    first = list(islice(rounds(hour, 5, list(KINDS)), 30))
    assert first == list(islice(rounds(hour, 5, list(KINDS)), 30))
    assert first != list(islice(rounds(hour, 6, list(KINDS)), 30))
    faults = [fault for _, together in first for fault in together]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert not any(fault.few and fault.target in ("majority", "all") for fault in faults)
    assert not any(KINDS[fault.kind].alone and len(together) > 1 for _, together in first for fault in together)


def test_each_crash_point_is_one_crash() -> None:
    found = list(rounds(scenario.load(scenario.find("crash-points")), 5, list(KINDS)))
    assert [len(together) for _, together in found] == [1] * len(POINTS)
    assert {together[0].at for _, together in found} == set(POINTS)
    assert all(together[0].target == "random" for _, together in found)


def test_a_mutation_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "calm", "--mutation", "five_ms_erly", "--dir", str(tmp_path)]) == MISTAKE
    assert "did you mean five_ms_early" in capsys.readouterr().err
    assert main(["mutations", "none"]) == MISTAKE


def test_scenarios_of_the_package_and_of_the_how_to_are_in_order(tmp_path: Path) -> None:
    for path in scenario.HERE.glob("*.toml"):
        assert scenario.load(path).title
    page = (scenario.HERE.parents[1] / "docs/howto/chaos.md").read_text()
    shown = re.findall(r"^```toml (scenario|cluster)\n(.*?)^```$", page, re.M | re.S)
    assert len(shown) == 4
    for kind, text in shown:
        path = tmp_path / "shown.toml"
        path.write_text(text)
        if kind == "scenario":
            scenario.load(path)
        else:
            assert GivenCluster(path).kinds({"any"}) == {"kill", "stop", "pause", "transfer"}
    assert all(f"`{kind}`" in page for kind in KINDS)


def test_a_reader_that_goes_away_is_no_broken_promise() -> None:
    """The pipe is closed at the other end before anything is written."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "chaos", "list"], stdout=nobody, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (UNREAD, "")
