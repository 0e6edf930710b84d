"""Reading from the nodes: only what they have committed, followers first, and another one when one fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.errors import DamagedFile
from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline import archive, lateness, reconcile, stores
from hadelay.pipeline.jobs import ArchiveOptions, JobOptions, ReconcileOptions
from hadelay.pipeline.schema import parse_options
from tests.ledger.world import World
from tests.pipeline.support import at_random, options, write
from tests.pipeline.test_batches import read


class Node:
    """What a node answers under /v1, from a world in memory. behind: files it does not have yet; apart: it cannot ask
    the leader how far the log is; dies_at: the file in the middle of which it is gone."""

    def __init__(self, world: World) -> None:
        self.files = {
            f"{hour_name(int(name.partition('.')[0]))}/{name.rpartition('.')[2]}": data
            for name, data in world.store.bytes_of().items()
        }
        self.world, self.asked, self.behind, self.members = world, list[str](), set[str](), list[dict[str, str]]()
        self.apart, self.dies_at = False, ""
        node = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                node.asked.append(self.path)
                status, body = node.answer(self.path, self.headers.get("Range", ""))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                dies = node.dies_at and self.path.endswith(node.dies_at)
                self.wfile.write(body[: len(body) // 2] if dies else body)
                self.close_connection = bool(dies)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, path: str, asked: str) -> tuple[int, bytes]:
        if path == "/v1/cluster" and self.apart:
            return 503, b"{}"
        if path == "/v1/cluster":
            return 200, json.dumps({"time": "2026-11-21T06:00:00.000Z", "members": self.members}).encode()
        if path == "/v1/names":
            kinds = ("topics", "consumers", "nodes", "reasons")
            names = [{name: n for n, name in enumerate(self.world.names.known.get(k, ()))} for k in range(1, 5)]
            return 200, json.dumps(dict(zip(kinds, names, strict=True))).encode()
        if path == "/v1/hours":
            return 200, json.dumps({"hours": [self.hour(name) for name in {f[:-4] for f in self.files}]}).encode()
        name = path.removeprefix("/v1/hours/")
        if name in self.behind:
            return 416, b"{}"
        first, last = asked.removeprefix("bytes=").split("-")
        return 206, self.files[name][int(first) : int(last) + 1]

    def hour(self, name: str) -> dict[str, Any]:
        sizes = {suffix: len(self.files[f"{name}/{suffix}"]) for suffix in ("log", "idx", "dsp")}
        entries = {"log": 0, "idx": sizes["idx"] // INDEX_SIZE, "dsp": sizes["dsp"] // DISPATCH_SIZE}
        crcs = {suffix: f"{crc32c(self.files[f'{name}/{suffix}']):08x}" for suffix in sizes}
        return {"hour": name} | {
            name: {"entries": entries[name], "bytes": str(sizes[name]), "crc32c": crcs[name]} for name in sizes
        }

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    world, _ = at_random(2)
    found = [Node(world) for _ in range(3)]
    for node in found:
        node.members = [
            {"name": f"n{n}", "http": other.url, "role": "leader" if n == 0 else "follower"}
            for n, other in enumerate(found)
        ]
    try:
        yield found
    finally:
        for node in found:
            node.stop()


def as_json(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["dead"], row["hour"], row.get("number", row["entry"])))


def test_the_nodes_show_what_the_files_do_and_the_leader_is_left_alone(nodes: list[Node], tmp_path: Path) -> None:
    world = nodes[0].world
    local = write(world, tmp_path)
    for kind, body in (("messages", "true"), ("events", "false")):
        remote = parse_options(
            {"endpoint": nodes[0].url, "kind": kind, "body": body, "batchRows": 5, "as_of": "1795262400000"}
        )
        expected = read(options(world, local, kind=kind, body=body, as_of="1795262400000"))
        assert as_json(read(remote)) == as_json(expected)
    assert {path.split("?")[0] for path in nodes[0].asked} == {"/v1/cluster"}
    assert all(any(path.endswith("/log") for path in node.asked) for node in nodes[1:])


def test_ranges_that_one_node_does_not_answer_or_have_are_read_from_another(nodes: list[Node]) -> None:
    given = parse_options({"endpoint": ",".join(node.url for node in nodes), "body": "true"})
    everything = as_json(read(given))
    nodes[1].behind = set(nodes[1].files)
    assert as_json(read(given)) == everything
    store = stores.open_store(given)
    listing = store.list()
    nodes[2].stop()
    parts = [part for files in listing.hours for part in reconcile.split(files, 1)]
    judged = [reconcile.judge(store, part, rule=reconcile.Rule(0, 0, 0, None)) for part in parts]
    assert len(judged) == len(listing.hours)
    nodes[0].behind = set(nodes[0].files)
    with pytest.raises(ConnectionError, match=r"no node has it: .*refused.*; .*status 416"):
        read(given)


def test_a_node_that_is_gone_in_the_middle_of_a_file_is_no_end_of_it(nodes: list[Node]) -> None:
    given = parse_options({"endpoint": nodes[0].url, "body": "true"})
    everything = as_json(read(given))
    for suffix in ("/log", "/idx", "/dsp"):
        nodes[1].dies_at = suffix
        nodes[1].asked.clear()
        assert as_json(read(given)) == everything
        assert any(path.endswith(suffix) for path in nodes[1].asked)


def test_a_replica_that_misses_hours_does_not_say_which_there_are(nodes: list[Node], tmp_path: Path) -> None:
    given = parse_options({"endpoint": nodes[0].url})
    before = reconcile.run(None, ReconcileOptions(given))
    newest = max(name.partition("/")[0] for name in nodes[1].files)
    nodes[1].apart, nodes[1].world = True, World()
    nodes[1].files = {name: data for name, data in nodes[1].files.items() if not name.startswith(newest)}
    assert reconcile.run(None, ReconcileOptions(given)) == before


def test_answers_of_nodes_are_verified(nodes: list[Node]) -> None:
    for node in nodes:
        for name, data in node.files.items():
            if name.endswith("/idx"):
                node.files[name] = bytes([data[0] ^ 1]) + data[1:]
    given = {"endpoint": nodes[0].url, "columns": "entry"}
    assert read(parse_options(given | {"verify": "false"}))
    for use in (read, lambda options: reconcile.run(None, ReconcileOptions(options))):
        with pytest.raises(DamagedFile, match="entry 0: the entry's CRC is wrong"):
            use(parse_options(given))


def test_reconciling_over_http_says_the_same(nodes: list[Node], tmp_path: Path) -> None:
    local = write(nodes[0].world, tmp_path)
    as_of = str(hour_from_name("2026112106") * 3_600_000)
    remote = parse_options({"endpoint": nodes[0].url, "as_of": as_of})
    here = options(nodes[0].world, local, as_of=as_of)
    assert reconcile.run(None, ReconcileOptions(remote)).table == reconcile.run(None, ReconcileOptions(here)).table


def test_an_empty_cluster_has_nothing_to_judge_and_nothing_to_archive(nodes: list[Node], tmp_path: Path) -> None:
    for node in nodes:
        node.files.clear()
    given = parse_options({"endpoint": nodes[0].url})
    assert read(given) == []
    summary = reconcile.run(None, ReconcileOptions(given))
    assert (summary.messages, summary.table, summary.failed) == (0, [], False)
    assert archive.run(None, ArchiveOptions(given, str(tmp_path / "out"))).hours == []
    assert lateness.run(None, JobOptions(given)).table == []
