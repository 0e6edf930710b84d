"""The requests that would hold a node's event loop longest, of every route: as large as may be, and of the worst form.

Shared by tests, which count the work, and by the row `worst`, which times it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

JSON, NDJSON, MSGPACK = "application/json", "application/x-ndjson", "application/msgpack"
MIB = 1 << 20
BATCH = "/v1/messages:batch"


class Worst(NamedTuple):
    name: str
    method: str
    path: str
    kind: str
    body: bytes
    #: What it is answered, and what the refusal's detail says.
    status: int
    words: str = ""


def _repeated(before: str, unit: str, after: str, size: int) -> bytes:
    return (before + unit * ((size - len(before) - len(after)) // len(unit)) + after).encode()


def _payloads(payload: str, size: int) -> bytes:
    """Items that have it, as many as fit."""
    item = '{"topic":"t","delay":"1h","body":' + payload + "}"
    return ("[" + ",".join([item] * (size // len(item))) + "]").encode()


_FULL = {
    "topic": "t", "delay": "1h", "on_conflict": "replace", "max_wait": "2h", "tags": ["a", "b"], "meta": {"a": "b"},
    "ttl": "5m", "content_type": "text/plain", "body": "x" * 100,
}  # fmt: skip


def _all_options(size: int) -> list[dict[str, Any]]:
    return [_FULL | {"key": f"k{n}", "idempotency_key": f"i{n}"} for n in range(size // 1_600)]


def _wrong_values(size: int) -> bytes:
    items = [{"topic": "t", "delay": f"x{n}", "body": "x" * 1_500} for n in range(size // 1_700)]
    return json.dumps(items).encode()


def _nothings(size: int) -> bytes:
    """One payload of MessagePack."""
    many = size - 100
    return b"\x91\x82\xa5topic\xa1t\xa4body\xdd" + many.to_bytes(4, "big") + b"\xc0" * many


def _structures(size: int) -> bytes:
    item = {"topic": "t", "delay": 3600, "body": {f"k{n}": n for n in range(100)}}
    return msgspec.msgpack.encode([item] * (size // 1_800))


#: name → (media type, body of at most so many bytes, status, words)
_BATCHES: dict[str, tuple[str, Callable[[int], bytes], int, str]] = {
    "objects": (JSON, lambda size: _repeated("[{}", ",{}", "]", size), 413, "a batch has at most"),
    "numbers": (JSON, lambda size: _repeated("[1", ",1", "]", size), 413, "a batch has at most"),
    "lines": (NDJSON, lambda size: b"{}\n" * (size // 3), 413, "a batch has at most"),
    "values in a line": (NDJSON, lambda size: b"{} " * MIB, 400, "trailing"),
    "empty lines": (NDJSON, lambda size: b"\n" * size, 200, ""),
    "nested": (JSON, lambda size: b"[" * size, 400, "nested"),
    "not closed": (JSON, lambda size: b'["' + b"x" * (size - 2), 400, "truncated"),
    "spaces": (JSON, lambda size: b" " * (size - 2) + b"[]", 200, ""),
    "tags": (JSON, lambda size: _repeated('[{"topic":"t","tags":["a"', ',"a"', "]}]", size // 3), 200, ""),
    "meta": (JSON, lambda size: _repeated('[{"topic":"t","meta":{"a":""', ',"a":""', "}}]", size // 3), 200, ""),
    "members": (JSON, lambda size: _repeated('[{"topic":"t"', ',"key":""', "}]", size // 3), 413, "at most 32"),
    "payloads of numbers": (JSON, lambda size: _payloads("[" + "1," * 524_000 + "1]", size), 200, ""),
    "payloads of text": (JSON, lambda size: _payloads('"' + "x" * 1_048_000 + '"', size), 200, ""),
    "payload of escapes": (JSON, lambda size: _payloads('"' + r"\u0001" * 600_000 + '"', 4 * MIB), 200, ""),
    "all options": (JSON, lambda size: json.dumps(_all_options(size)).encode(), 200, ""),
    "all options, msgpack": (MSGPACK, lambda size: msgspec.msgpack.encode(_all_options(size)), 200, ""),
    "wrong values": (JSON, _wrong_values, 200, ""),
    "nothings": (MSGPACK, _nothings, 200, ""),
    "claims": (MSGPACK, lambda size: b"\xdd\xff\xff\xff\xff" + b"\x80" * (size // 16), 413, "a batch has at most"),
    "structures": (MSGPACK, _structures, 200, ""),
}


def batches(size: int = 16 * MIB) -> Iterator[Worst]:
    """size: limit of a batch."""
    for name, (kind, body, status, words) in _BATCHES.items():
        yield Worst(f"batch: {name}", "POST", BATCH, kind, body(size), status, words)


def _bodies(path: str, method: str, name: str, member: str, value: Any, *, times: int, status: int) -> Iterator[Worst]:
    """The same list, a member of a small request, as JSON and as MessagePack."""
    for kind, encode in ((JSON, msgspec.json.encode), (MSGPACK, msgspec.msgpack.encode)):
        yield Worst(f"{name}, {kind.partition('/')[2]}", method, path, kind, encode({member: [value] * times}), status)


def others() -> Iterator[Worst]:
    """Of topic t, which has messages."""
    lease = "0" * 29
    for verb in ("ack", "nack"):
        yield from _bodies(f"/v1/leases:{verb}", "POST", f"{verb} of 10,000", "leases", lease, times=10_000, status=200)
        yield from _bodies(f"/v1/leases:{verb}", "POST", f"{verb} of nothing", "leases", "", times=100_000, status=400)
    extend = {"leases": [lease] * 10_000, "lease": "1m"}
    yield Worst("extend of 10,000", "POST", "/v1/leases:extend", JSON, json.dumps(extend).encode(), 200)
    topics = [f"t{n}".ljust(128, "x") for n in range(1_000)]
    tags = [f"tag{n}".ljust(64, "x") for n in range(16)]
    query = {"topics": topics, "tags": tags, "any_tags": [tag[::-1] for tag in tags], "wait": "10ms"}
    yield Worst("receive of 1,000 topics", "POST", "/v1/receive", JSON, json.dumps(query).encode(), 200)
    yield from _bodies("/v1/receive", "POST", "receive of empty names", "topics", "", times=80_000, status=400)
    yield from _bodies("/v1/topics/t/receive", "POST", "receive of tags", "tags", "a", times=15_000, status=200)
    yield from _bodies("/v1/topics/t", "PUT", "backoff", "backoff", 1, times=30_000, status=400)
    yield from _bodies("/v1/topics/t/dead:redrive", "POST", "redrive", "ids", "0" * 13, times=1_000, status=202)
    yield from _bodies("/v1/topics/t:purge", "POST", "purge", "states", "dead", times=8_000, status=202)
    for path, member in (
        ("/v1/topics/t:pause", "reason"), ("/v1/cluster:drain", "node"), ("/v1/cluster:transfer-leader", "to"),
    ):  # fmt: skip
        status = 404 if member == "node" else 400
        yield Worst(f"a long {member}", "POST", path, JSON, json.dumps({member: "x" * 60_000}).encode(), status)
    yield Worst("a long field", "POST", "/v1/leases:ack", JSON, json.dumps({"x" * 60_000: 1}).encode(), 400)
    yield Worst(
        "a long number", "POST", "/v1/leases:extend", JSON, b'{"leases":[],"lease":' + b"1" * 60_000 + b"}", 400
    )
    for path in ("/v1/leases:ack", "/v1/topics/t:purge", "/v1/tokens", "/v1/cluster/members"):
        yield Worst(f"nested, {path}", "POST", path, JSON, b'{"a":' + b"[" * 60_000, 400)
        yield Worst(f"too large, {path}", "POST", path, JSON, b"[" * MIB, 413)
    yield from _questions()


def _questions() -> Iterator[Worst]:
    for name, path, status in (
        ("the longest page", "/v1/topics/t/messages?limit=1000&state=all", 200),
        ("a page of tags", "/v1/topics/t/messages?limit=1000&tag=" + ",".join(f"a{n}" for n in range(16)), 200),
        ("dead letters with bodies", "/v1/topics/t/dead?limit=1000&body=true", 200),
        ("10,000 buckets", "/v1/due?from=1800000000000&to=1800010000000&step=1", 200),
        ("10,000 buckets of a topic", "/v1/topics/t/due?from=1800000000000&to=1800600000000&step=60", 200),
        ("parameters", "/v1/topics?" + "&".join(f"a{n}=1" for n in range(1_000)), 400),
        ("the same parameter", "/v1/topics?" + "&".join(["stale=1"] * 900), 400),
        ("tags of a page", "/v1/topics/t/messages?tag=" + ",".join(f"a{n}" for n in range(1_200)), 400),
        ("all topics", "/v1/topics", 200), ("names", "/v1/names", 200), ("hours", "/v1/hours", 200),
        ("metrics", "/metrics", 200), ("the description", "/openapi.json", 200), ("audit", "/v1/audit?limit=1000", 200),
    ):  # fmt: skip
        yield Worst(name, "GET", path, "", b"", status)
