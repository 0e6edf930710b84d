"""Directories, ports and configurations that a node must not start with: it says why, and touches nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

import msgpack
import pytest

from chaos.freeports import free_ports
from hadelay.codec.checksums import crc32c
from tests.system.cluster import Cluster, ask, end, hadelay, ready_line, spawn, until


def digest(directory: Path) -> dict[str, bytes]:
    """Every file of a directory, but for locks, which are taken and given back."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """What a cluster of one left behind: its directory is copied by whoever wants to spoil it."""
    with Cluster(tmp_path_factory.mktemp("ended") / "cluster", nodes=1) as cluster:
        cluster.publish("n1", "kept", query="?delay=1h")
    return cluster


@pytest.fixture
def left(ended: Cluster, tmp_path: Path) -> Path:
    shutil.copytree(ended.directory / "n1", tmp_path / "n1")
    return tmp_path / "n1"


def serve(directory: Path, *settings: str, cluster_id: str | None = None, name: str = "n1") -> tuple[str, ...]:
    base = free_ports(2)
    options = (
        f"node.data_dir={directory}",
        f"node.name={name}",
        f"http.listen=127.0.0.1:{base}",
        f"raft.listen=127.0.0.1:{base + 1}",
        *([f"cluster.id={cluster_id}"] if cluster_id else []),
        *settings,
    )
    return ("serve", *(word for option in options for word in ("--set", option)), "-o", "json")


def refused(*words: str, code: int | None = None) -> str:
    """1: systemd tries again (cluster/systemd/hadelay.service), 2: it does not."""
    done = hadelay(*words, timeout=30)
    assert done.returncode != 0, "it started and ended again"
    assert code in (None, done.returncode), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def cluster_id(ended: Cluster) -> str:
    line = next(line for line in (ended.directory / "n1.toml").read_text().splitlines() if line.startswith("id = "))
    return line.split('"')[1]


def test_data_of_another_cluster_is_refused(left: Path, ended: Cluster) -> None:
    before = digest(left)
    said = refused(*serve(left, cluster_id="strangers"))
    assert cluster_id(ended) in said
    assert "strangers" in said
    assert str(left) in said
    assert digest(left) == before


def test_data_of_another_node_is_refused(left: Path, ended: Cluster) -> None:
    before = digest(left)
    said = refused(*serve(left, cluster_id=cluster_id(ended), name="n9"))
    assert "n9" in said
    assert str(left) in said
    assert digest(left) == before


def test_data_of_a_newer_format_is_refused(left: Path, ended: Cluster) -> None:
    path = left / "g0" / "identity"
    data = path.read_bytes()
    found = msgpack.unpackb(data[12:])
    found["format_version"] += 1
    body = msgpack.packb(found)
    path.write_bytes(data[:4] + len(body).to_bytes(4, "little") + crc32c(body).to_bytes(4, "little") + body)
    before = digest(left)
    said = refused(*serve(left, cluster_id=cluster_id(ended)))
    assert "format version 2" in said
    assert "use a newer one" in said
    assert digest(left) == before


def test_a_damaged_one_of_several_is_filled_by_all_the_others(left: Path, ended: Cluster) -> None:
    """Not by those that were moved away at the same time."""
    (left / "g0" / "identity").write_bytes(b"")
    peers = "raft.peers=n1=127.0.0.1:1,n2=127.0.0.1:2"
    said = refused(*serve(left, peers, cluster_id=cluster_id(ended)), code=1)
    assert f"Move {left} away and start it again; the other nodes, which must all run, fill it" in said


def test_an_empty_one_does_not_found_a_cluster_by_itself(tmp_path: Path) -> None:
    config = tmp_path / "n1.toml"
    base = free_ports(2)
    config.write_text(
        f'[node]\ndata_dir = "{tmp_path}/data"\n[http]\nlisten = "127.0.0.1:{base}"\n'
        f'[raft]\nlisten = "127.0.0.1:{base + 1}"\n'
    )
    said = refused("serve", str(config))
    assert "--init" in said
    assert "is empty" in said


def test_two_nodes_on_one_directory(left: Path, ended: Cluster, tmp_path: Path) -> None:
    errors = tmp_path / "first.err"
    first = spawn(*serve(left, cluster_id=cluster_id(ended)), errors=errors)
    try:
        ready_line(first, errors)
        until((left / "raft" / "g0" / "spare").exists, "the first one has its reserve")
        before = set(digest(left))  # names: the first one goes on writing; a second one would begin a segment
        base = free_ports(16) + 8
        options = (f"http.listen=127.0.0.1:{base}", f"raft.listen=127.0.0.1:{base + 1}")
        said = refused(*serve(left, *options, cluster_id=cluster_id(ended)), code=1)
        assert "another node runs in" in said
        assert str(left) in said
        assert first.poll() is None
        assert set(digest(left)) == before
        # Another journal directory does not make it another node.
        said = refused(*serve(left, *options, f"node.journal_dir={tmp_path}/other", cluster_id=cluster_id(ended)))
        assert "another node runs in" in said
        assert set(digest(left)) == before
    finally:
        end(first)


@pytest.mark.parametrize("key", ["http.listen", "raft.listen"])
def test_a_port_in_use(left: Path, ended: Cluster, key: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        peers = (f"raft.peers=n1={address},n2=127.0.0.1:1",)  # a node alone has no links
        said = refused(*serve(left, f"{key}={address}", *peers, cluster_id=cluster_id(ended)), code=1)
    assert key in said
    assert address in said
    assert "in use" in said


@pytest.mark.parametrize("key", ["http.listen", "raft.listen"])
def test_an_address_that_is_not_there_yet(left: Path, ended: Cluster, key: str) -> None:
    """As after a restart of the machine, whose network comes up later."""
    address = "203.0.113.7:8400"
    peers, advertise = f"raft.peers=n1={address},n2=203.0.113.8:8400", "http.advertise=http://203.0.113.7:8401"
    settings = (f"{key}={address}", peers, advertise, "security.insecure=true")
    said = refused(*serve(left, *settings, cluster_id=cluster_id(ended)), code=1)
    assert key in said
    assert address in said


@pytest.mark.parametrize(
    ("peer", "advertise", "added", "said"),
    [
        ("10.77.0.1:1", "", "10.77.0.2:1", "sent to n1 at http://127.0.0.1:"),
        ("10.77.0.1:1", "http://localhost:1", "n2.internal:1", "sent to n1 at http://localhost:1, and other machines"),
        ("10.77.0.1:1", "http://10.77.0.1:1", "127.0.0.1:1", "127.0.0.1: other machines, such as that of n1,"),
        ("127.0.0.1:2", "http://10.77.0.1:1", "10.77.0.2:1", "n2 could not reach n1 at 127.0.0.1:2"),
        ("127.0.0.1:2", "", "[::]:1", "other nodes cannot reach '[::]:1'"),
    ],
)
def test_a_member_that_would_not_be_found_or_not_find_others_is_not_added(
    tmp_path: Path, peer: str, advertise: str, added: str, said: str
) -> None:
    """What a node refuses at its start, when another one joins it."""
    directory, errors = tmp_path / "n1", tmp_path / "err"
    settings = (f"raft.peers=n1={peer}", f"http.advertise={advertise}", "cluster.init=true")
    words = serve(directory, *settings)
    (listen,) = (word.partition("=")[2] for word in words if word.startswith("http.listen="))
    node = spawn(*words, errors=errors)
    try:
        ready_line(node, errors)
        answer = ask(f"http://{listen}", "POST", "/v1/cluster/members", {"name": "n2", "raft": added})
    finally:
        end(node)
    assert answer.status in (400, 409), answer
    assert said in answer.json["detail"]


def test_a_typo_in_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "n1.toml"
    config.write_text('[node]\nname = "n1"\n\n[http]\nlissten = "127.0.0.1:1"\n')
    said = refused("serve", str(config), code=2)
    assert "line 5" in said or ":5" in said
    assert "http.lissten" in said
    assert "listen" in said
    assert not (tmp_path / "hadelay-data").exists()


def test_a_limit_that_makes_no_sense(tmp_path: Path) -> None:
    config = tmp_path / "n1.toml"
    config.write_text('[raft]\nheartbeat_ms = "a while"\nelection_min_ms = 3\n')
    said = refused("serve", str(config))
    assert "raft.heartbeat_ms" in said
    assert "2" in said


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("")
        target = tmp_path / "file" / "data"  # root may write anywhere but below a file
    else:
        target = tmp_path / "closed" / "data"
        target.parent.mkdir(mode=0o500)
    said = refused(*serve(target, "cluster.init=true"))
    assert str(target.parent) in said


def test_signals_end_a_node_in_order(left: Path, ended: Cluster, tmp_path: Path) -> None:
    errors = tmp_path / "err"
    node = spawn(*serve(left, cluster_id=cluster_id(ended)), errors=errors)
    try:
        ready_line(node, errors)
        node.terminate()
        assert node.wait(20) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("it does not end")
    finally:
        end(node)
    assert "stopped" in errors.read_text()
