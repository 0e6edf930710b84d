"""No request holds the loop: what it may cost is bounded before it is decoded, and large ones work in slices."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bench.worst import JSON, MIB, MSGPACK, NDJSON
from bench.worst import batches as worst_batches
from hadelay.api.cluster import Hour, HourFileOut
from hadelay.errors import BadRequest, HadelayError
from hadelay.http import batches
from hadelay.http.app import ROUTES
from hadelay.http.bodies import SLICE, RequestTurns
from hadelay.model import hour_name
from tests.http.conftest import Make, Node

KINDS = (JSON, NDJSON, MSGPACK)


async def test_the_worst_batches_take_turns(make_node: Make) -> None:
    """Their work is done in slices of bounded size, whatever they are refused for."""
    node = await make_node(roomy=True)
    turns = node.server.turns
    for worst in worst_batches(5 * MIB):
        before = turns.given
        answer = await node.ask("POST", worst.path, worst.body, **{"Content-Type": worst.kind})
        assert answer.status == worst.status, (worst.name, answer.json)
        assert worst.words in answer.json.get("detail", ""), worst.name
        assert turns.largest <= SLICE, worst.name
        if worst.status == 200 and len(worst.body) > MIB:
            assert turns.given - before >= len(worst.body) // SLICE, worst.name


async def test_slices_of_all_requests_take_turns() -> None:
    """However many large requests there are, a pass of the loop has one slice of one of them."""
    turns, order, passes = RequestTurns(), list[tuple[int, int]](), 0

    async def request(name: int) -> None:
        for _ in range(3):
            await turns.next()
            order.append((passes, name))

    tasks = [asyncio.create_task(request(name)) for name in range(4)]
    while not all(task.done() for task in tasks):
        passes += 1
        await asyncio.sleep(0)
    assert len({at for at, _ in order}) == len(order) == 12
    assert [name for _, name in order] == [0, 1, 2, 3] * 3


async def test_a_cancelled_request_gives_its_turn_away() -> None:
    turns = RequestTurns()
    gone, stays = asyncio.create_task(turns.next()), asyncio.create_task(turns.next())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(stays, 10)


# ---- what is cut is what would be decoded at once


def _whole(data: bytes, kind: str) -> list[Any]:
    """What the batch is, decoded at once."""
    if kind == MSGPACK:
        return batches._light_msgpack(data, 1_000)
    return batches._light_json(data, 1_000, kind == NDJSON)


def _sliced(data: bytes, kind: str) -> list[Any]:
    return [item for some in batches.slices(data, kind, 1_000, MIB) for item in some.items]


def _shown(decode: Any, data: bytes, kind: str) -> Any:
    try:
        items = [msgspec.structs.asdict(item) for item in decode(data, kind)]
    except BadRequest as error:
        return error.detail
    return [item | {"body": bytes(body) if isinstance(body := item["body"], msgspec.Raw) else body} for item in items]


def _values(rng: random.Random) -> Any:
    text = "".join(rng.choice('ab"\\,[]{}\n é🙂') for _ in range(rng.randrange(20)))
    return rng.choice(
        [text, rng.randrange(9), [text, [], {}], {"a": {text: [1, text]}}, None, True, "\\" * rng.randrange(9)]
    )


def _batches(rng: random.Random, kind: str) -> Iterator[bytes]:
    items: list[Any] = [
        {"topic": "t", "body": _values(rng)} | ({"meta": {"a": str(_values(rng))}} if rng.random() < 0.3 else {})
        for _ in range(rng.randrange(12))
    ]
    if rng.random() < 0.2 and items:
        items[rng.randrange(len(items))] = rng.choice([{"topic": 1}, {}, 5, {"topic": "t", "no": 1}])
    if kind == MSGPACK:
        yield msgspec.msgpack.encode(items)
    elif kind == JSON:
        yield json.dumps(items, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
    else:
        yield rng.choice(["\n", "\r\n", "\n\n"]).join(json.dumps(item) for item in items).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_cut_anywhere_a_batch_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid or broken: the same items, or a refusal of both."""
    rng = random.Random(17)
    for name, value in (("_LIGHT", -1), ("_DECODE", 0), ("_ITEMS", 3)):
        monkeypatch.setattr(batches, name, value)
    monkeypatch.setattr(batches, "_passed", lambda items, work, *, last=False: iter([batches.Slice(items, work)]))
    for _ in range(400):
        monkeypatch.setattr(batches, "_CUT_JSON", rng.randrange(1, 40))
        monkeypatch.setattr(batches, "_CUT_MSGPACK", rng.randrange(1, 40))
        for data in _batches(rng, kind):
            found = bytearray(data)
            if rng.random() < 0.4 and found:
                place = rng.randrange(len(found))
                found[place : place + rng.randrange(2)] = rng.choice(
                    [b"", b",", b"]", b"{", b'"', b"\\", b"\xff", b"x", b"\n"]
                )
            data = bytes(found)
            if kind == MSGPACK and not data:
                continue
            whole, sliced = _shown(_whole, data, kind), _shown(_sliced, data, kind)
            assert isinstance(whole, str) == isinstance(sliced, str), (data, whole, sliced)
            assert isinstance(whole, str) or whole == sliced, data


@pytest.mark.parametrize("data", [b"[}", b'[{"topic":"t"}}', b'[{"topic":"t"},{"topic":"t"} } '])
def test_a_list_ends_with_its_own_bracket(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_LIGHT", -1)
    with pytest.raises(BadRequest, match="malformed"):
        _sliced(data, JSON)


def test_refusals_name_the_place_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"topic": "t", "body": "x" * 1_000} for _ in range(2_000)]
    for wrong, words in (({"topic": 1}, "body[1500].topic"), ({"topic": "t", "dealy": 1}, "$[1500]")):
        items[1_500] = wrong  # type: ignore[assignment]
        for kind, data in ((JSON, json.dumps(items).encode()), (MSGPACK, msgspec.msgpack.encode(items))):
            with pytest.raises(BadRequest) as refused:
                list(batches.slices(data, kind, 10_000, MIB))
            assert words in refused.value.detail


async def test_a_large_item_is_refused_in_its_place(roomy: Node) -> None:
    node = roomy
    items: list[Any] = [{"topic": "t", "body": "x" * 1_000} for _ in range(2_000)]
    items[7]["tags"] = ["a"] * 100_000
    for data, kind in ((json.dumps(items).encode(), JSON), (msgspec.msgpack.encode(items), MSGPACK)):
        answer = await node.ask("POST", "/v1/messages:batch", data, **{"Content-Type": kind})
        assert answer.status == 200, answer.json
        refused = [place for place, result in enumerate(answer.json["results"]) if "error" in result]
        assert refused == [7]
        assert answer.json["results"][7]["error"]["type"] == "too-large"
    assert len(node.service.published) == 2 * 1_999


async def test_hours_take_turns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two years of them were one turn of 260 ms."""

    async def hours() -> tuple[int, Iterator[Hour]]:
        file = HourFileOut(1, "64", "00000001")
        return 7, (Hour(hour_name(494_000 + n), True, False, file, file, file) for n in range(2_000))

    monkeypatch.setattr(node.service.files, "hours", hours)
    found = (await node.ask("GET", "/v1/hours")).json["hours"]
    assert len(found) == len({hour["hour"] for hour in found}) == 2_000
    assert node.server.turns.given >= 10
    assert node.server.turns.largest <= SLICE


# ---- all other routes


@pytest.mark.parametrize("route", [r for r in ROUTES.all if r.body is not None], ids=lambda route: route.name)
async def test_bodies_are_bounded(node: Node, route: Any) -> None:
    """Before anything is decoded: no member of these is a member of anything."""
    path = route.path.replace("{topic}", "t").replace("{id}", "0" * 13).replace("{key}", "k")
    for data, kind in (
        (b'{"a":[' + b"1," * (route.max_bytes // 2) + b"1]}", JSON),
        (b"\x81\xa1a" + b"\xdd" + route.max_bytes.to_bytes(4) + b"\xc0" * route.max_bytes, MSGPACK),
    ):
        answer = await node.ask(route.method, path, data, **{"Content-Type": kind})
        assert (answer.status, answer.json["type"]) == (413, "too-large"), answer.json
    #: A shard map pins up to 50,000 names.
    assert route.max_bytes <= (4 << 20 if route.name == "put_shards" else 512 << 10)


async def test_no_hook_runs_for_each_of_many_values(node: Node) -> None:
    steps = json.dumps({"backoff": [1] * 20_000}).encode()
    answer = await node.ask("PUT", "/v1/topics/t", steps, **{"Content-Type": JSON})
    assert (answer.status, answer.json["detail"]) == (400, "backoff: 20000 durations; at most 32, the last one repeats")
    wrong = await node.ask("PUT", "/v1/topics/t", b'{"backoff":["1s","soon"]}', **{"Content-Type": JSON})
    assert wrong.json["detail"].startswith("backoff[1]: 'soon' is not a duration")


async def test_repeated_input_is_shortened(node: Node) -> None:
    error = HadelayError("x" * 100_000)
    assert len(error.document()["detail"]) < 1_100
