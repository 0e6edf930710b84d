"""A wrong byte in every kind of file: mended from a peer when it is read, or refused with file and offset; and what a
crash leaves behind is cut off without a word."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster import Cluster, body_of, until

TOPIC = "rot"
BODY = b"all of this has to come back " * 4


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ mask]))
        os.fsync(file.fileno())


def byte(path: Path, offset: int) -> int:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(1)[0]


@pytest.fixture(scope="module")
def rotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Checkpoints every second, so that files are what the checkpoint says."""
    directory = tmp_path_factory.mktemp("rotten")
    settings = ("storage.checkpoint_interval_ms=1s", "raft.segment_bytes=8MiB")
    with Cluster(directory, settings=settings) as cluster:
        for n in range(20):
            cluster.publish(cluster.names[n % 3], TOPIC, BODY, query="?delay=1h")
        got = [cluster.publish("n1", "events") for _ in range(5)]
        cluster.settle("n1", "ack", cluster.drain("events", len(got)))
        yield cluster


@pytest.fixture(scope="module")
def down(rotten: Cluster) -> Iterator[str]:
    """A follower that was killed; tests spoil its files and put them back, and at the end it starts as it was."""
    name = rotten.followers()[0]
    checkpointed(rotten, name)
    rotten.kill(name)
    yield name
    rotten.restart(name)
    rotten.assert_identical()


@contextlib.contextmanager
def spoiled(path: Path) -> Iterator[Path]:
    whole = path.read_bytes()
    try:
        yield path
    finally:
        path.write_bytes(whole)


def checkpointed(cluster: Cluster, name: str) -> None:
    """Everything so far is part of a durable checkpoint of that node."""
    count = cluster.metric(name, "checkpoints_total")
    cluster.publish(cluster.leader(), "tick")
    until(lambda: cluster.metric(name, "checkpoints_total") > count, "a checkpoint")


def place(cluster: Cluster, topic: str) -> tuple[str, dict[str, Any]]:
    """The id of a message that was published now, and the hour it lies in, as named in the files."""
    sent = cluster.publish(cluster.leader(), topic, BODY, query="?delay=1h")
    at = cluster.describe(cluster.leader(), sent)["deliver_at"]
    return sent, {"hour": at[:13].replace("-", "").replace("T", "")}


def hours(cluster: Cluster, name: str, suffix: str) -> list[Path]:
    return sorted((cluster.data(name) / "hours").glob(f"*.{suffix}"))


# --- hour files ------------------------------------------------------------------------------------------------------


def test_a_record_is_mended_when_it_is_handed_out(rotten: Cluster) -> None:
    leader = rotten.leader()
    sent = rotten.publish(leader, "mend", BODY, query="?delay=1500ms")
    path = next(p for p in hours(rotten, leader, "log") if BODY in p.read_bytes() and _holds(rotten, leader, sent, p))
    offset = path.read_bytes().rindex(BODY) + 7
    flip(path, offset)
    [message] = rotten.receive(leader, "mend", wait="10s")
    assert (message["id"], body_of(message)) == (sent, BODY)
    assert byte(path, offset) == BODY[7]
    rotten.assert_identical()


def _holds(cluster: Cluster, name: str, sent: str, path: Path) -> bool:
    at = cluster.describe(name, sent)["deliver_at"]
    return path.stem == at[:13].replace("-", "").replace("T", "")


def test_a_record_is_mended_when_it_is_read(rotten: Cluster) -> None:
    sent, where = place(rotten, TOPIC)
    node = rotten.followers()[1]
    path = rotten.data(node) / "hours" / f"{where['hour']}.log"
    until(lambda: path.read_bytes().count(BODY) >= 21, "it is applied there")
    offset = path.read_bytes().rindex(BODY) + 7
    flip(path, offset)
    answer = until(
        lambda: (a := rotten.ask(node, "GET", f"/v1/messages/{sent}?body=true&stale=true")).status == 200 and a, "200"
    )
    assert body_of(answer.json) == BODY
    assert byte(path, offset) == BODY[7]
    rotten.assert_identical()


def test_an_index_entry_is_mended_when_its_second_comes(rotten: Cluster) -> None:
    """The chain of a second that is walked on the leader has a broken link."""
    leader = rotten.leader()
    ids = [rotten.publish(leader, "chain", query="?delay=11s") for _ in range(5)]
    at = rotten.describe(leader, ids[2])["deliver_at"]
    path = rotten.data(leader) / "hours" / f"{at[:13].replace('-', '').replace('T', '')}.idx"
    entries = int(next(h for h in rotten.hours(leader)["hours"] if h["hour"] == path.stem)["idx"]["entries"])
    for n in range(entries - 4, entries - 1):
        flip(path, n * 64 + 52)
    got = rotten.drain("chain", len(ids), seconds=40)
    assert sorted(m["id"] for m in got) == sorted(ids)
    assert max(m["late_ms"] for m in got) < 2_000, "the repair was in time"
    assert rotten.metric(leader, "sweeper_found_messages_total") == 0
    rotten.assert_identical()


def test_an_event_is_mended_when_it_is_read(rotten: Cluster) -> None:
    sent = rotten.publish("n1", "history")
    rotten.settle("n1", "ack", rotten.drain("history", 1))
    node = rotten.followers()[0]
    before = rotten.describe(node, sent)["history"]
    at = rotten.describe(node, sent)["deliver_at"]
    path = rotten.data(node) / "hours" / f"{at[:13].replace('-', '').replace('T', '')}.dsp"
    flip(path, path.stat().st_size - 32 + 16)
    answer = until(
        lambda: (a := rotten.ask(node, "GET", f"/v1/messages/{sent}?stale=true")).status == 200 and a, "its history"
    )
    assert answer.json["history"] == before
    rotten.assert_identical()


def test_bytes_that_a_crash_left_behind_are_cut(rotten: Cluster) -> None:
    """Bytes beyond the checkpoint count for nothing; the journal has them, and itself may end within a record."""
    name = rotten.followers()[0]
    checkpointed(rotten, name)
    rotten.kill(name)
    for suffix in ("log", "idx", "dsp"):
        for path in hours(rotten, name, suffix):
            with open(path, "ab") as file:
                file.write(b"\x17" * 41)
    names = rotten.data(name) / "names"
    whole = names.read_bytes()
    names.write_bytes(whole + b"\x01\x00\x07")
    segment = newest(rotten, name)
    data = segment.read_bytes()
    with open(segment, "r+b") as file:  # the beginning of some record, and zeroes from there on
        file.seek(len(data.rstrip(b"\0")))
        file.write(b"\x07" * 19)
    rotten.restart(name)
    assert names.read_bytes() == whole
    rotten.assert_identical()


def test_heads_are_a_cache(rotten: Cluster) -> None:
    name = rotten.followers()[0]
    rotten.kill(name)
    for path in hours(rotten, name, "heads"):
        for offset in range(0, path.stat().st_size, 997):
            flip(path, offset)
    rotten.restart(name)
    rotten.assert_identical()


# --- what a node does not start with: it names file and offset -------------------------------------------------------


def newest(cluster: Cluster, name: str) -> Path:
    return max(cluster.journal(name).glob("*.seg"))


@pytest.mark.parametrize("suffix", ["log", "idx", "dsp"])
def test_an_hour_file_that_lost_its_end(rotten: Cluster, down: str, suffix: str) -> None:
    path = next(p for p in hours(rotten, down, suffix) if p.stat().st_size)
    with spoiled(path):
        os.truncate(path, 10)  # space is allocated ahead: what counts may end long before the file does
        said = rotten.refused(down)
        assert f"{path}, offset 10" in said, said


def test_names(rotten: Cluster, down: str) -> None:
    with spoiled(rotten.data(down) / "names") as path:
        flip(path, path.stat().st_size - 2)
        said = rotten.refused(down)
        assert f"{path}, offset" in said, said


def test_identity(rotten: Cluster, down: str) -> None:
    with spoiled(rotten.data(down) / "identity") as path:
        flip(path, 20)
        said = rotten.refused(down)
        assert f"{path}, offset 0" in said, said


@pytest.mark.parametrize("part", ["header", "record"])
def test_journal(rotten: Cluster, down: str, part: str) -> None:
    """A record that was synced, or the header of what follows: not the end of a crash, since zeroes do not follow."""
    found = sorted(rotten.journal(down).glob("*.seg"))
    segment = found[0] if part == "header" else next(p for p in found if BODY in p.read_bytes())
    with spoiled(segment) as path:
        flip(path, 12 if part == "header" else path.read_bytes().index(BODY) + 3)
        said = rotten.refused(down)
        assert str(rotten.journal(down)) in said, said
        assert "offset" in said, said


@pytest.mark.parametrize("part", ["meta", "values", "end"])
def test_the_tables(rotten: Cluster, down: str, part: str) -> None:
    """state.mdb holds the checkpoint: a node that cannot read it, or not all of it, must not go on from there."""
    with spoiled(rotten.data(down) / "state.mdb") as path:
        size = path.stat().st_size
        if part == "end":
            os.truncate(path, 8192)  # all but what LMDB looks at first: what it lost besides may have been free
        elif part == "meta":
            for page in (0, 4096):
                flip(path, page + 16)
        else:  # in every page but the two that LMDB looks at first
            for offset in range(8192, size, 512):
                flip(path, offset + 200, 0xFF)
        said = rotten.refused(down)
        assert f"{path}, offset" in said, said
