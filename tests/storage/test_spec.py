"""docs/spec/on-disk-format.md: every example in it is what the code writes, byte by byte, and inspect reads it.

After a change of format: `python tests/storage/test_spec.py` writes the examples anew.
"""

from __future__ import annotations

import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from support import Loop, checkpoint

from hadelay.codec import formats as f
from hadelay.codec.checksums import crc32c
from hadelay.model import HOUR_MS, NONE32, Event, encode_id, hour_from_name
from hadelay.platform.disk import Disk
from hadelay.storage.headsfile import encode_heads
from hadelay.storage.identity import Identity
from hadelay.storage.inspect import inspect
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.names import NODE, TOPIC
from hadelay.storage.store import Storage
from hadelay.storage.tables import CHECKPOINT, HOURS, ROW

SPEC = Path(__file__).parents[2] / "docs/spec/on-disk-format.md"
HOUR = hour_from_name("2026112018")
AT = HOUR * HOUR_MS + 90_500  # 18:01:30.500
META, BODY = msgpack.packb({"ct": "text/plain"}), b"hello"


def write(directory: str) -> None:
    """Two messages for the same second of one hour; the first is handed out and acked. One checkpoint."""
    loop = Loop()
    storage = Storage(Disk(), directory, loop, Identity("demo", 1, "n1"))
    storage.hours.set_clock(HOUR)
    rows, headers = np.zeros(2, f.INDEX), np.zeros(2, f.RECORD)
    rows["deliver_at_ms"], rows["second"] = [AT, AT + 200], 90
    rows["size"] = f.RECORD_SIZE + len(META + BODY)
    headers["meta_size"], headers["body_size"] = len(META), len(BODY)
    headers["deliver_at_ms"], headers["published_at_ms"] = rows["deliver_at_ms"], AT - 60_000
    headers["payload_crc"] = crc32c(META + BODY)
    storage.names.register(NODE, "n1")
    rows["topic"] = headers["topic"] = storage.names.register(TOPIC, "orders")
    blob = (bytes(f.RECORD_SIZE) + META + BODY) * 2
    storage.hours.append(HOUR, rows, bytearray(blob), headers)
    events = np.zeros(2, f.DISPATCH)
    events["previous"], events["event"] = [NONE32, 0], [Event.LEASED, Event.ACKED]
    events["other_hour"], events["attempt"] = NONE32, 1
    events["at_ms"] = [AT + 2, AT + 40]
    storage.hours.append_events(HOUR, events)
    checkpoint(storage, loop, 5)
    storage.hours.written_minutes(HOUR)
    derived = storage.hours._heads.get(HOUR, 2)  # as if it had enough entries to be worth a file
    Path(directory, "hours/2026112018.heads").write_bytes(encode_heads(HOUR, derived))
    storage.close()


def lines(parts: list[tuple[str, bytes, Any]], at: int = 0) -> Iterator[str]:
    for name, data, value in parts:
        for i in range(0, len(data), 8):
            note = f"  {name}" + (f" = {value}" if value is not None else "") if i == 0 else ""
            yield f"{at + i:04x}  {data[i : i + 8].hex(' '):<23}{note}".rstrip()
        at += len(data)


def fields(dtype: np.dtype[Any], data: bytes) -> list[tuple[str, bytes, Any]]:
    parts = []
    row = np.frombuffer(data, dtype, 1)[0]
    for name in dtype.names or ():
        kind, offset = dtype.fields[name][:2]  # type: ignore[index]
        value = row[name].item()
        shown = f"{value:#x}" if name.endswith("crc") or name in ("magic", "tag_mask") else value
        shown = {"first_id": encode_id(value)}.get(name, "none" if value == NONE32 else shown)
        parts.append((name, data[offset : offset + kind.itemsize], shown))
    return parts


def examples(directory: str) -> dict[str, str]:
    read = {p.name: p.read_bytes() for p in Path(directory).rglob("*") if p.is_file()}
    log, idx, dsp, heads = (read[f"2026112018.{suffix}"] for suffix in ("log", "idx", "dsp", "heads"))
    body_at = f.RECORD_SIZE + len(META)
    record = [*fields(f.RECORD, log), ("meta", log[f.RECORD_SIZE : body_at], {"ct": "text/plain"})]
    found = {
        "log": lines([*record, ("body", log[body_at : body_at + len(BODY)], "hello")]),
        "idx": lines(fields(f.INDEX, idx[64:]), 64),
        "dsp": lines(fields(f.DISPATCH, dsp[32:]), 32),
    }
    head_at = f.HEADS.itemsize + 90 * 8
    counters_at = f.HEADS.itemsize + 3600 * 8
    found["heads"] = iter([
        *lines(fields(f.HEADS, heads)),
        "…",
        *lines([("head of second 90", heads[head_at : head_at + 8], "last 1, count 2")], head_at),
        "…",
        *lines(fields(f.COUNTER, heads[counters_at:]), counters_at),
    ])  # fmt: skip
    names = read["names"]
    found["names"] = lines([*fields(f.NAME, names), ("name", names[12:14], "n1")])
    identity = read["identity"]
    magic, size, crc = struct.unpack_from("<4sII", identity)
    found["identity"] = lines([
        ("magic", identity[:4], magic.decode()),
        ("size", identity[4:8], size),
        ("crc", identity[8:12], f"{crc:#x}"),
        ("map", identity[12:], msgpack.unpackb(identity[12:])),
    ])  # fmt: skip
    backend = LmdbBackend(f"{directory}/state.mdb")
    key, value = backend.scan(HOURS, b"", 1)[0]
    found["hour-row"] = lines([("key: hour, big-endian", key, HOUR), *fields(f.HOUR_ROW, value)])
    row = backend.get(CHECKPOINT, ROW) or b""
    found["checkpoint-row"] = lines([("map", row, msgpack.unpackb(row))])
    backend.close()
    return {name: "\n".join(found[name]) + "\n" for name in found}


BLOCK = re.compile(r"<!-- example: ([a-z-]+) -->\n```\n(.*?)```\n", re.S)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("spec"))
    write(path)
    return path


def test_the_examples_are_what_is_written(directory: str) -> None:
    assert dict(BLOCK.findall(SPEC.read_text())) == examples(directory)


@pytest.mark.parametrize("dtype", [f.INDEX, f.DISPATCH, f.RECORD, f.NAME, f.HEADS, f.HEAD, f.COUNTER, f.HOUR_ROW])
def test_the_tables_name_every_field_where_it_is(dtype: np.dtype[Any]) -> None:
    text = SPEC.read_text()
    for name in dtype.names or ():
        kind, offset = dtype.fields[name][:2]  # type: ignore[index]
        sign = {"i": "i", "u": "u"}[kind.kind]
        assert re.search(rf"^\| {offset} \| {sign}{kind.itemsize * 8} \| `{name}` \|", text, re.M), (name, offset)


def test_inspect_prints_what_was_written(directory: str) -> None:
    hours = f"{directory}/hours/2026112018"
    first, second = inspect(f"{hours}.log")
    assert first | {"offset": 0, "body": b"hello", "meta": {"ct": "text/plain"}, "topic": 0} == first
    assert second["offset"] == first["size"]
    rows = list(inspect(f"{hours}.idx"))
    assert [(row["n"], row["pre"], row["local"], row["second"]) for row in rows] == [(0, None, 0, 90), (1, 0, 1, 90)]
    assert [row["event"] for row in inspect(f"{hours}.dsp")] == ["leased", "acked"]
    assert {"second": 90, "last": 1, "count": 2} in list(inspect(f"{hours}.heads"))
    assert [(row["kind"], row["name"]) for row in inspect(f"{directory}/names")] == [
        ("node", "n1"),
        ("topic", "orders"),
    ]
    assert next(inspect(f"{directory}/identity"))["cluster_id"] == "demo"
    tables = list(inspect(f"{directory}/state.mdb"))
    assert next(row for row in tables if row["table"] == "hours")["entries"] == 2
    assert not [row for path in Path(directory).rglob("*.*") for row in _rows(path) if "damage" in row]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [] if path.name.endswith("-lock") else list(inspect(str(path)))


@pytest.mark.parametrize("name", ["log", "idx", "dsp", "heads", "names", "identity"])
def test_inspect_says_where_a_byte_is_wrong(directory: str, name: str, tmp_path: Path) -> None:
    source = Path(directory, name) if name in ("names", "identity") else Path(directory, f"hours/2026112018.{name}")
    data = bytearray(source.read_bytes())
    data[-3] ^= 64
    path = tmp_path / source.name
    path.write_bytes(data)
    rows = list(inspect(str(path)))
    assert "damage" in rows[-1]
    path.write_bytes(data[: len(data) - 7])
    assert "damage" in list(inspect(str(path)))[-1]


def rewrite() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write(directory)
        found = examples(directory)
    text = BLOCK.sub(lambda m: f"<!-- example: {m[1]} -->\n```\n{found[m[1]]}```\n", SPEC.read_text())
    SPEC.write_text(text)


if __name__ == "__main__":
    rewrite()
