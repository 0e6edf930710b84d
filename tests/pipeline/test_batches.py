"""The reader: what it shows is what the files say, no more than is committed, and damage has a name."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.records import decode_record
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.model import HOUR_MS, encode_id, hour_name
from hadelay.pipeline import arrow, batches, stores
from hadelay.pipeline.hourfiles import find_damage
from hadelay.pipeline.schema import KINDS, Options, parse_options
from hadelay.platform.disk import Disk
from hadelay.storage.inspect import inspect
from tests.ledger.test_subscriptions import subscribed
from tests.ledger.world import START_HOUR, START_MS, World
from tests.pipeline.support import MINUTE, SECOND, at_random, message, options, write
from tests.storage import support as storage_support

NAME = hour_name(START_HOUR)


def read(options: Options) -> list[dict[str, Any]]:
    store = stores.open_store(options)
    listing = stores.listing(store, options)
    columns = options.projection()
    parts = [
        batch for split in batches.splits(listing, options) for batch in batches.read(store, options, columns, split)
    ]
    table = pa.Table.from_batches(parts, batches.schema(options.kind, columns))
    assert not any(table[name].null_count for name in columns if not KINDS[options.kind][name].null)
    return table.to_pylist()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, list[int], Path]:
    world, ids = at_random(1)
    return world, ids, write(world, tmp_path_factory.mktemp("busy"))


def test_every_field_of_a_message(tmp_path: Path) -> None:
    world = World()
    own = {"group": "7", "sch": "daily", "oc": START_MS + SECOND, "fw": {"x-a": "1"}, "os": "done", "of": "failed"}
    world.ids(message("orders", MINUTE, b"hello", ct="text/plain", key="k", tags=["a", "b"], meta={"x": "y"}, **own))
    world.ids(message("orders", MINUTE, b""))
    first, second = read(options(world, write(world, tmp_path), body="true", verify="true"))
    assert first == {
        "id": encode_id(START_HOUR << 32), "first_id": START_HOUR << 32, "published_id": None,
        "hour": 2026112018, "dead": False, "entry": 0, "topic": "orders", "subscription": None, "generation": 0,
        "deliver_at": datetime.fromtimestamp((START_MS + MINUTE) / 1000, UTC),
        "attempt": 0, "flags": 0, "tag_mask": 0, "size": first["size"], "state": "scheduled",
        "published_at": datetime.fromtimestamp(START_MS / 1000, UTC), "content_type": "text/plain", "key": "k",
        "tags": ["a", "b"], "meta": [("x", "y")], "group": "7", "schedule": "daily", "occurrence": _at(SECOND),
        "forward": [("x-a", "1")], "on_success": "done", "on_failure": "failed", "batch": None,
        "body": b"hello",
    }  # fmt: skip
    assert {second[name] for name in ("group", "schedule", "occurrence", "forward", "on_success")} == {None}
    assert (second["content_type"], second["key"], second["tags"], second["meta"], second["body"]) == (
        "application/octet-stream", None, [], [], b"",
    )  # fmt: skip


def test_messages_and_events_are_those_that_inspect_shows(busy: tuple[World, list[int], Path]) -> None:
    world, _, directory = busy
    messages, events = [], []
    for path in sorted((directory / "hours").iterdir()):
        rows = [{"path": path.stem} | row for row in inspect(str(path))]
        messages += rows if path.suffix == ".idx" else []
        events += rows if path.suffix == ".dsp" else []

    def hour(row: dict[str, Any]) -> str:
        return f"dead-{row['hour']}" if row["dead"] else str(row["hour"])

    def millis(at: datetime) -> int:
        return round(at.timestamp() * 1000)

    found = read(options(world, directory))
    assert [(hour(m), m["entry"], m["id"], millis(m["deliver_at"]), m["attempt"], m["size"]) for m in found] == [
        (m["path"], m["n"], m["first_id"], m["deliver_at_ms"], m["attempt"], m["size"]) for m in messages
    ]
    found = read(options(world, directory, kind="events", splitRows=7, batchRows=3))
    shown = [(hour(e), e["number"], e["entry"], e["event"], millis(e["at"]), e["other_entry"]) for e in found]
    assert shown == [(e["path"], e["n"], e["index"], e["event"], e["at_ms"], e.get("other_index")) for e in events]
    assert {e["reason"] for e in found if e["event"] == "nacked"} == {"why"}
    first_ids = {(hour(m), m["entry"]): m["id"] for m in read(options(world, directory))}
    assert all(e["id"] == first_ids[hour(e), e["entry"]] for e in found)
    dispatched = read(options(world, directory, kind="dispatches", columns="hour,number"))
    settled = read(options(world, directory, kind="settlements", columns="hour,number"))
    assert len(dispatched) == sum(e["event"] == "leased" for e in found)
    assert len(dispatched) + len(settled) == len(found)


def test_a_message_has_one_entry_that_has_not_moved_and_its_state_is_the_messages(
    busy: tuple[World, list[int], Path],
) -> None:
    world, ids, directory = busy
    found = read(options(world, directory, columns="first_id,state"))
    states = {m["first_id"]: m["state"] for m in found if m["state"] != "moved"}
    assert states == dict(zip(ids, world.states(*ids), strict=True))
    assert len(states) == sum(m["state"] != "moved" for m in found)
    assert {"moved", "acked", "cancelled", "dead"} <= {m["state"] for m in found}


def test_bodies_are_the_messages_own_whatever_the_batches_are(busy: tuple[World, list[int], Path]) -> None:
    world, _, directory = busy
    expected = []
    for hour in world.store.hours():
        for row in world.store.index_view(hour):
            record = world.store.record(hour, int(row["offset"]), int(row["size"]))
            expected.append((int(row["index"]), decode_record(record).body))
    for rows in (1, 5, 1000):
        found = read(options(world, directory, columns="body,entry", batchRows=rows))
        assert [(m["entry"], m["body"]) for m in found] == expected


@pytest.mark.parametrize("bits", [4, 30])
def test_pieces_of_a_log_come_in_any_order_size_and_place(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_BUFFER_BITS", bits)  # of buffers that begin every 16 bytes, as of those of a GiB
    data = np.arange(100, dtype=np.uint8)
    starts, sizes = np.array([3, 99, 0, 60, 3, 15, 100, 88, 16]), np.array([12, 1, 100, 13, 12, 0, 0, 12, 20])
    pieces = arrow.binaries(data, starts, sizes).to_pylist()
    assert pieces == [data.tobytes()[a : a + n] for a, n in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("rows", [1, 4, 7, 10, 40])
def test_even_splits_are_equal_and_no_larger_than_asked_for(rows: int, busy: tuple[World, list[int], Path]) -> None:
    world, _, directory = busy
    given = options(world, directory, splitRows=rows)
    listing = stores.listing(stores.open_store(given), given)
    for files in listing.hours:
        whole = listing._replace(hours=[files])
        plain, even = batches.splits(whole, given), batches.splits(whole, given, even=True)
        covered = [entry for split in even for entry in range(split.start, split.stop)]
        assert covered == list(range(files.entries))
        sizes = [split.stop - split.start for split in even]
        assert max(sizes, default=0) <= rows
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        assert len(even) == len(plain) or len(even) % 2 == 0 or len(even) == files.entries


def _at(ms: int) -> datetime:
    return datetime.fromtimestamp((START_MS + ms) / 1000, UTC)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topics", ["b", "a, no such topic", "no such topic"])
def test_rows_are_of_the_topics_asked_for(kind: str, topics: str, busy: tuple[World, list[int], Path]) -> None:
    world, _, directory = busy
    everything = read(options(world, directory, kind=kind))
    expected = [row for row in everything if row["topic"] in topics.split(", ")]
    assert read(options(world, directory, kind=kind, topics=topics)) == expected
    assert len(expected) < len(everything)
    assert bool(expected) == (topics != "no such topic")


def test_rows_are_of_the_hours_asked_for(busy: tuple[World, list[int], Path]) -> None:
    world, _, directory = busy
    everything = read(options(world, directory))
    for given in ({"hour_from": "2026112020"}, {"hour_to": "2026112019"}, {"dead": "false"}):
        (name,) = given
        holds = {"hour_from": lambda row: row["hour"] >= 2026112020, "hour_to": lambda row: row["hour"] <= 2026112019}
        expected = [row for row in everything if holds.get(name, lambda row: not row["dead"])(row)]
        assert read(options(world, directory, **given)) == expected
        assert 0 < len(expected) < len(everything)


# ---- what is committed, what is torn, what is damaged


def small(directory: Path) -> World:
    world = World()
    ids = world.ids(*[message("t", MINUTE, b"body %d" % n) for n in range(3)])
    world.now = MINUTE
    world.ack(world.lease(*ids[:2]))
    write(world, directory)
    return world


def test_copies_for_subscriptions_are_messages_with_the_body_of_the_published_one(tmp_path: Path) -> None:
    """Also in the hour to which a retry took a copy, together with the record."""
    world = World()
    subscribed(world, "billing", "mail")
    ids = world.ids(*[message("orders", 0, b"body %d" % n) for n in range(3)])
    world.ack(world.lease(ids[0]))
    world.nack(world.lease(ids[1] + 2), delay_ms=2 * HOUR_MS)
    write(world, tmp_path)
    found = read(options(world, tmp_path, body="true", verify="true"))
    assert {m["topic"] for m in found} == {"orders"}
    queues = sorted((m["subscription"] or "", m["body"]) for m in found if m["state"] != "moved")
    assert queues == sorted((own, b"body %d" % n) for own in ("", "billing", "mail") for n in range(3))
    assert len({m["id"] for m in found}) == 9
    # Each copy names the message that was published, and nothing else does.
    named = {(m["published_id"], m["body"]) for m in found if m["subscription"]}
    assert named == {(encode_id(published), b"body %d" % n) for n, published in enumerate(ids)}
    assert {m["published_id"] for m in found if not m["subscription"]} == {None}
    events = read(options(world, tmp_path, kind="events"))
    queue_of = {(m["hour"], m["entry"]): (m["topic"], m["subscription"]) for m in found}
    assert all((e["topic"], e["subscription"]) == queue_of[e["hour"], e["entry"]] for e in events)
    # A topic is asked for with its subscriptions, a subscription by itself.
    assert read(options(world, tmp_path, topics="orders", body="true", verify="true")) == found
    of_mail = read(options(world, tmp_path, topics="orders~mail", columns="subscription"))
    assert [m["subscription"] for m in of_mail] == ["mail"] * 4
    given = options(world, tmp_path)
    store = stores.open_store(given)
    for files in stores.listing(store, given).hours:
        assert find_damage(store, files, "log") is None


def test_zeroes_behind_the_end_are_nothing(tmp_path: Path) -> None:
    world = small(tmp_path)
    for suffix in ("idx", "dsp", "log"):
        with open(tmp_path / "hours" / f"{NAME}.{suffix}", "ab") as file:
            file.write(bytes(10_000))
    assert len(read(options(world, tmp_path, body="true"))) == 3
    assert len(read(options(world, tmp_path, kind="events"))) == 4


@pytest.mark.parametrize(("suffix", "kind", "left"), [("idx", "messages", 2), ("dsp", "events", 3)])
def test_an_end_that_is_cut_off_is_named_or_left_out(suffix: str, kind: str, left: int, tmp_path: Path) -> None:
    world = small(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.{suffix}"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedFile, match=rf"{NAME}\.{suffix}.*hour {NAME}, (entry|event) {left}: .*cut off"):
        read(options(world, tmp_path, kind=kind))
    assert len(read(options(world, tmp_path, kind=kind, onTorn="skip"))) == left


def test_a_wrong_byte_is_named_or_left_out(tmp_path: Path) -> None:
    world = small(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.log"
    data = bytearray(path.read_bytes())
    data[data.index(b"body 1")] ^= 1
    path.write_bytes(data)
    assert len(read(options(world, tmp_path, body="true", verify="false"))) == 3
    with pytest.raises(DamagedFile, match=f"hour {NAME}, entry 1: the record's payload CRC"):
        read(options(world, tmp_path, body="true"))
    found = read(options(world, tmp_path, body="true", onTorn="skip"))
    assert [m["body"] for m in found] == [b"body 0", b"body 2"]


def test_a_record_that_is_not_there_is_named_or_left_out(tmp_path: Path) -> None:
    world = small(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.log"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=f"hour {NAME}, entry 2: its record"):
        read(options(world, tmp_path, body="true"))
    assert len(read(options(world, tmp_path, body="true", onTorn="skip"))) == 2
    assert len(read(options(world, tmp_path, columns="id,state"))) == 3


def test_nothing_behind_a_checkpoint_counts_and_nothing_before_it_may_be_missing(tmp_path: Path) -> None:
    loop = storage_support.Loop()
    storage = storage_support.open_storage(Disk(), str(tmp_path / "g3"), loop)
    hour = storage_support.NOW
    storage.hours.append(*storage_support.messages(hour, sizes=[10] * 4))
    storage_support.checkpoint(storage, loop, 1)
    storage.hours.append(*storage_support.messages(hour, sizes=[10] * 3))
    storage.names.register(1, "t")
    storage.close()  # as a process that is killed
    given = parse_options({"path": str(tmp_path), "columns": "entry"})
    assert [m["entry"] for m in read(given)] == [0, 1, 2, 3]
    path = tmp_path / "g3" / "hours" / f"{hour_name(hour)}.idx"
    path.write_bytes(path.read_bytes()[: 3 * 64 + 10])
    with pytest.raises(DamagedFile, match=f"hour {hour_name(hour)}, entry 3: the file ends here, but has 4 rows"):
        read(given)
    skipping = parse_options({"path": str(tmp_path), "columns": "entry", "onTorn": "skip"})
    assert [m["entry"] for m in read(skipping)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "path .* endpoint"),
        ({"path": "/x", "endpoint": "http://y"}, "set either the option path"),
        ({"path": "/x", "kind": "letters"}, "messages, dispatches"),
        ({"path": "/x", "colums": "id"}, "no option colums; the options are .*columns"),
        ({"path": "/x", "columns": "id,boddy"}, "'boddy' is unknown; choose from"),
        ({"path": "/x", "splitRows": "many"}, "splitRows must be a whole number"),
        ({"path": "/x", "batchRows": "0"}, "at least 1"),
        ({"path": "/x", "verify": "perhaps"}, "true, false"),
        ({"path": "/x", "hourFrom": "20261301"}, "yyyymmddHH"),
        ({"path": "/x", "listing": "abc"}, "Listing.encode"),
    ],
)
def test_wrong_options_are_refused_in_words(given: dict[str, str], said: str, tmp_path: Path) -> None:
    write(World(), tmp_path)
    given = {key: str(tmp_path) if value == "/x" and "endpoint" not in given else value for key, value in given.items()}
    with pytest.raises(BadRequest, match=said):
        read(parse_options(given))


def test_a_directory_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such directory"):
        read(parse_options({"path": str(tmp_path / "x")}))
    with pytest.raises(NotFound, match="no directory hours/"):
        read(parse_options({"path": str(tmp_path)}))


def test_an_empty_directory_has_no_rows(tmp_path: Path) -> None:
    assert read(parse_options({"root": str(write(World(), tmp_path))})) == []


def test_a_message_of_a_deleted_topic_keeps_its_name(tmp_path: Path) -> None:
    world = World()
    world.ids(message("gone", SECOND))
    world.one(commands.encode_topic_delete("gone", force=True))
    while not world.maintain(Job.SWEEP).done:
        pass
    (found,) = read(options(world, write(world, tmp_path), columns="topic,state"))
    assert found == {"topic": "gone", "state": "cancelled"}


def test_a_blocked_message_is_shown_as_scheduled_or_ready(tmp_path: Path) -> None:
    """Hour files do not have the bit; the description of the column says so."""
    world = World()
    world.one(commands.encode_topic_put("t", {"group_concurrency": 1}))
    due, later = (replace(message("t", at, group="g"), group=7) for at in (SECOND, MINUTE))
    assert world.states(*world.ids(due, due, later)) == ["scheduled", "blocked", "blocked"]
    world.now = 2 * SECOND
    found = read(options(world, write(world, tmp_path), columns="state"))
    assert [row["state"] for row in found] == ["ready", "ready", "scheduled"]
    assert "A blocked message is scheduled or ready here" in KINDS["messages"]["state"].doc
