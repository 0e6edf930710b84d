"""A cluster of real processes, backed up under traffic and restored into others: one of one node, one of three."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest

from chaos.freeports import free_ports
from hadelay.cli.backup import restore as restore_node
from hadelay.cli.dev import Layout
from hadelay.cli.output import Printing
from hadelay.errors import NotFound
from hadelay.platform.disk import Disk, File
from hadelay.storage.backup import Archive, LocalBackups
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.tables import CHECKPOINT, ROW
from tests.system.cluster import Cluster, body_of, hadelay, until

_KEY = {"Idempotency_Key": "once"}


@dataclass
class Taken:
    """A backup, and what the cluster knew when it was made."""

    directory: Path
    #: What `backup create` said, the first time and the second.
    said: list[dict[str, Any]] = field(default_factory=list)
    #: Acknowledged before the backup began, by id: their bodies. All due in an hour.
    before: dict[str, str] = field(default_factory=dict)
    #: Acknowledged after it had ended; the lost cluster alone knows them.
    after: set[str] = field(default_factory=set)
    due: set[str] = field(default_factory=set)
    leased: dict[str, Any] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)
    #: Results of acks, by id: some of those in `acked`.
    results: dict[str, Any] = field(default_factory=dict)
    once: str = ""
    #: The two backups as a node of the cluster knows them, the newest first.
    known: list[dict[str, Any]] = field(default_factory=list)


def backups(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.ask(name, "GET", "/v1/cluster").json["backups"]
    return found


def create(cluster: Cluster, directory: Path, *words: object) -> dict[str, Any]:
    done = hadelay("backup", "create", directory, "-s", ",".join(cluster.urls.values()), "-o", "json", *words)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@contextmanager
def traffic(cluster: Cluster, found: dict[str, str]) -> Iterator[None]:
    """Publishes until the end, through every node; `found` are those acknowledged so far."""
    ended = threading.Event()

    def publish() -> None:
        n = 0
        while not ended.is_set():
            bodies = [f"{n}-{i}" for i in range(20)]
            ids = cluster.publish_many(cluster.names[n % 3], "later", bodies, delay="1h")
            found.update(zip(ids, bodies, strict=True))
            n += 1

    running = cluster.later(publish)
    try:
        yield
    finally:
        ended.set()
        running.result(30)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Taken:
    root = tmp_path_factory.mktemp("backup")
    taken = Taken(root / "backup")
    with Cluster(root / "lost") as cluster:
        name = cluster.names[0]
        taken.once = cluster.publish(name, "later", b"once", "?delay=1h&key=first", **_KEY)
        settled = cluster.publish_many(name, "due", [f"due {n}" for n in range(60)], delay="0s")
        got = cluster.drain("due", 60)
        assert cluster.settle(cluster.leader(), "ack", got[:10]) == ["acked"] * 10
        results = [{"n": n, "text": "x" * 20_000 * (n % 2)} for n in range(10)]
        assert cluster.settle(cluster.leader(), "ack", got[10:20], results=results) == ["acked"] * 10
        taken.results = {message["id"]: result for message, result in zip(got[10:20], results, strict=True)}
        assert cluster.settle(cluster.leader(), "nack", got[20:40], delay="0s") == ["nacked"] * 20
        assert cluster.settle(cluster.leader(), "extend", got[40:], lease="3s") == ["extended"] * 20
        taken.acked = {message["id"] for message in got[:20]}
        taken.due = {message["id"] for message in got[20:40]}
        taken.leased = {message["id"]: message for message in got[40:]}
        assert set(settled) == taken.acked | taken.due | taken.leased.keys()
        found: dict[str, str] = {}
        with traffic(cluster, found):
            until(lambda: len(found) > 200, "traffic")
            made = cluster.ask(name, "PUT", "/v1/schedules/yearly", {"topic": "reports", "cron": "@yearly"})
            assert made.status == 200, made
            taken.said.append(create(cluster, taken.directory))
            taken.before = dict(found)
            taken.said.append(create(cluster, taken.directory))
        for each in cluster.names:
            until(lambda each=each: len(backups(cluster, each)) == 2, f"{each} knows of the backups")
        taken.known = backups(cluster, name)
        taken.after = set(cluster.publish_many(name, "later", ["after"] * 500, delay="1h"))
    return taken


def restore(taken: Taken, directory: Path, nodes: int) -> Cluster:
    layout = Layout(id=f"restored-{nodes}", nodes=nodes, port_base=free_ports(2 * nodes), founded=1)
    directory.mkdir()
    layout.save(directory)
    for i, name in enumerate(layout.names()):
        (directory / f"{name}.toml").write_text(layout.toml(i, directory))
        done = hadelay("restore", taken.directory, directory / f"{name}.toml", "--set", "cluster.group=1")
        assert done.returncode == 0, done.stderr
    return Cluster(directory, nodes=nodes, settings=("cluster.group=1",))


def test_a_follower_was_copied_and_then_what_was_new(taken: Taken) -> None:
    first, second = taken.said
    assert second["index"] > first["index"]
    assert second["files"] - second["copied_files"] >= 0
    assert second["copied_bytes"] < second["bytes"]
    for said, known in zip(taken.said, reversed(taken.known), strict=True):
        assert (known["outcome"], int(known["bytes"])) == ("complete", said["bytes"])
        assert known["at"] >= said["time"], "a backup was made when it was opened, not when the last entry was applied"
        assert int(known["read_bytes"]) == said["copied_bytes"]
    done = hadelay("backup", "verify", taken.directory, "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["damaged"]) == (0, [])
    older = hadelay("backup", "verify", taken.directory, "--index", first["index"])
    assert (older.returncode, str(first["index"]) in older.stderr) == (0, True), older.stderr


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_restored_cluster_has_it_all(taken: Taken, tmp_path: Path, nodes: int) -> None:
    with restore(taken, tmp_path / "new", nodes) as cluster:
        name = cluster.names[-1]
        assert cluster.ask(name, "GET", "/v1/cluster").json["cluster_id"] == f"restored-{nodes}"
        schedule = cluster.ask(name, "GET", "/v1/schedules/yearly").json
        assert (schedule["state"], schedule["restored"], schedule["next"]) == ("paused", True, [])
        resumed = hadelay("schedule", "resume", "--restored", "--servers", ",".join(cluster.urls.values()))
        assert resumed.returncode == 0, resumed.stderr
        assert cluster.ask(name, "GET", "/v1/schedules/yearly").json["state"] == "active"
        # What waited waits, with its payload; nothing is early; what came after the backup is not there.
        for message_id, body in list(taken.before.items())[::7]:
            view = cluster.describe(name, message_id)
            assert (view["state"], body_of(view)) == ("scheduled", body.encode())
        listed = cluster.topic(name, "later")["scheduled"]
        assert listed >= len(taken.before) + 1
        assert all(cluster.ask(name, "GET", f"/v1/messages/{i}").status == 404 for i in list(taken.after)[::50])
        assert cluster.receive(cluster.leader(), "later", max=100, wait="0s") == []
        # What was owed is delivered; what was leased, when its lease is over; what was done is done.
        got = cluster.drain("due", 40)
        attempts = {message["id"]: message["attempt"] for message in got}
        assert attempts.keys() == taken.due | taken.leased.keys()
        assert len(got) == 40
        assert set(attempts.values()) == {2}
        assert cluster.settle(cluster.leader(), "ack", list(taken.leased.values())) == ["lease_lost"] * 20
        done = cluster.settle(cluster.leader(), "ack", got, results=list(range(40)))
        assert done == ["acked"] * 40
        # Results are read on every node: those of before, and new ones in the same hour.
        results = taken.results | {message["id"]: n for n, message in enumerate(got)}
        for node in cluster.names:
            assert {i: cluster.describe(node, i)["result"] for i in results} == results
        assert {"result" in cluster.describe(name, i) for i in taken.acked - taken.results.keys()} == {False}
        assert {cluster.describe(name, i)["state"] for i in sorted(taken.acked)} == {"acked"}
        # A producer that tries again is told what it was told; keys still name their messages.
        again = cluster.ask(
            name, "POST", "/v1/topics/later/messages?delay=1h&key=first", b"once", headers={"Idempotency-Key": "once"}
        )
        assert (again.json["id"], again.json["duplicate"]) == (taken.once, True)
        assert cluster.ask(name, "GET", "/v1/topics/later/keys/first").json["id"] == taken.once
        # No id that the lost cluster may have given out is given out again.
        new = cluster.publish_many(name, "later", ["new"] * 600, delay="1h")
        assert taken.after.isdisjoint(new)
        assert taken.before.keys().isdisjoint(new)
        # An old message moves, and keeps its id.
        moved = next(iter(taken.before))
        assert cluster.ask(name, "POST", f"/v1/messages/{moved}:deliver-now").status == 200
        (late,) = cluster.drain("later", 1)
        assert (late["id"], body_of(late)) == (moved, taken.before[moved].encode())
        assert cluster.settle(cluster.leader(), "ack", [late]) == ["acked"]
        assert cluster.describe(name, moved)["state"] == "acked"
        cluster.assert_identical()
        cluster.kill(name)
        cluster.restart(name)
        until(lambda: cluster.ask(name, "GET", f"/v1/messages/{moved}").status == 200, "the node is back")
        assert {i: cluster.describe(name, i)["result"] for i in results} == results


def test_refusals(taken: Taken, tmp_path: Path) -> None:
    ours = ("--set", "cluster.id=other", "--set", "cluster.group=1")
    node = tmp_path / "node"
    for settings in (("--set", "cluster.id=other"), ("--set", "cluster.group=1")):
        lost = json.loads(hadelay("backup", "verify", taken.directory, "-o", "json").stdout)["cluster_id"]
        same = ("--set", f"cluster.id={lost}") if "cluster.group=1" in settings else ()
        done = hadelay("restore", taken.directory, "--data-dir", node, *settings, *same)
        assert (done.returncode, "another cluster" in done.stderr) == (2, True), done.stderr
        assert not node.exists()
    founder = hadelay("restore", taken.directory, "--data-dir", node, *ours, "--set", "cluster.init=true")
    assert (founder.returncode, "cluster.init is true: remove it" in founder.stderr) == (2, True), founder.stderr
    assert not node.exists()
    assert hadelay("restore", taken.directory, "--data-dir", node, *ours).returncode == 0
    again = hadelay("restore", taken.directory, "--data-dir", node, *ours)
    assert (again.returncode, "is not empty" in again.stderr) == (2, True), again.stderr
    beside = hadelay("restore", taken.directory, "--data-dir", node, *ours, "--set", "cluster.group=2")
    assert (beside.returncode, "holds a node's data" in beside.stderr) == (2, True), beside.stderr
    nothing = hadelay("restore", tmp_path, "--data-dir", tmp_path / "empty", *ours)
    assert (nothing.returncode, "no backup" in nothing.stderr) == (3, True), nothing.stderr


def test_an_older_backup_is_restored_by_its_index(
    taken: Taken, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (said["index"] for said in taken.said)
    settings = ("cluster.id=other", "cluster.group=1")
    with pytest.raises(NotFound, match=f"no backup of index {second + 1}; choose one of {first}, {second}"):
        restore_node(str(taken.directory), data_dir=tmp_path / "none", index=second + 1, settings=settings)
    assert not (tmp_path / "none").exists()
    restore_node(
        str(taken.directory),
        data_dir=tmp_path / "node",
        index=first,
        settings=settings,
        printing=Printing(output="json"),
    )
    assert json.loads(capsys.readouterr().out)["index"] == first
    # The newer one has more of the same files.
    older, newer = (Archive(LocalBackups(Disk(), str(taken.directory))).read(index).files for index in (first, second))
    data = tmp_path / "node" / "g1"
    hours = {name: known.length for name, known in older.items() if name.startswith("hours/")}
    assert {name: (data / name).stat().st_size for name in hours} == hours
    assert any(newer[name].length > length for name, length in hours.items())
    state = LmdbBackend(str(data / "state.mdb"))
    assert msgpack.unpackb(state.get(CHECKPOINT, ROW) or b"")["index"] == first
    state.close()


@pytest.mark.parametrize(
    ("step", "words"), [("free", "has 0 free bytes"), ("pwrite", "No space"), ("sync_files", "No space")]
)
def test_a_disk_that_is_too_small_for_it_is_named(
    taken: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, words: str
) -> None:
    """Before anything is copied, while it is, and by a sync."""

    def full(*given: object) -> tuple[int, int]:
        if step == "free":
            return 0, 1 << 40
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = ("cluster.id=other", "cluster.group=1")
    with monkeypatch.context() as patch:
        patch.setattr(File if step == "pwrite" else Disk, step, full)
        with pytest.raises(OSError, match=f"{tmp_path}/node: .*{words}.* run the command again"):
            restore_node(str(taken.directory), data_dir=tmp_path / "node", settings=settings)
    restore_node(str(taken.directory), data_dir=tmp_path / "node", settings=settings)


def test_a_flipped_byte_is_named_and_never_restored(taken: Taken, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(taken.directory, copy)
    log = max(copy.glob("hours/*.log"), key=lambda path: path.stat().st_size)
    data = bytearray(log.read_bytes())
    data[1234] ^= 1
    log.write_bytes(data)
    done = hadelay("backup", "verify", copy, "-o", "json")
    (damage,) = json.loads(done.stdout)["damaged"]
    assert (done.returncode, damage["file"], damage["offset"]) == (1, f"hours/{log.name}", 0)
    ours = ("--set", "cluster.id=other", "--set", "cluster.group=1")
    node = tmp_path / "node"
    refused = hadelay("restore", copy, "--data-dir", node, *ours)
    assert (refused.returncode, log.name in refused.stderr) == (1, True), refused.stderr
    assert not (node / "g1" / "identity").exists()
    assert "Back up the running cluster into another directory" in done.stderr
    # The same directory takes the intact one.
    assert hadelay("restore", taken.directory, "--data-dir", node, *ours).returncode == 0


def test_a_cluster_never_goes_on_with_anothers_backup(taken: Taken, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(taken.directory, copy)
    with Cluster(tmp_path / "other", nodes=1) as cluster:
        cluster.publish("n1", "t", b"x", "?delay=1h")
        words = ("backup", "create", copy, "-s", cluster.urls["n1"])
        done = hadelay(*words)
        assert (done.returncode, "use another directory" in done.stderr) == (2, True), done.stderr
    gone = hadelay(*words)
    assert gone.returncode == 5, gone.stderr


def test_the_node_that_is_copied_dies(tmp_path: Path) -> None:
    directory = tmp_path / "backup"
    with Cluster(tmp_path / "cluster") as cluster:
        for _ in range(40):
            cluster.publish("n1", "t", bytes(100_000), "?delay=1h")
        urls = ",".join(cluster.urls.values())
        words = ("backup", "create", directory, "-s", urls, "--rate", "1MiB", "-o", "json")
        making = cluster.later(hadelay, *words)
        until(lambda: sum(path.stat().st_size for path in directory.glob("hours/*")) > 500_000, "it is under way")
        (copied,) = [name for name in cluster.names if list(cluster.data(name).glob("export/state-*"))]
        assert copied != cluster.leader()
        cluster.kill(copied)
        done = making.result(60)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["node"] != cluster.urls[copied]
        # What had come from the first was not asked for again.
        assert said["copied_bytes"] < said["bytes"] - 400_000
        assert hadelay("backup", "verify", directory).returncode == 0
