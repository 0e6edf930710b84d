"""The options of a publish are one table (api/publishoptions.py): every other place that names options is made from it,
and the places that judge values know all of them."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hadelay.api.publishoptions import HEADERS, OPTIONS
from hadelay.api.publishrequest import BatchItem, PublishQuery, UsualItem
from hadelay.cli import msg
from hadelay.client import Put, wire
from hadelay.codec.meta import unpack
from hadelay.http import options
from hadelay.http.batches import slices
from hadelay.http.publish import _Drafts
from hadelay.model import Draft
from hadelay.pipeline import schema
from hadelay.settings.node import HttpConfig
from hadelay.tasks.task import Options as TaskOptions
from tests.docs.planting import planted

CONFIG, DAY_MS = HttpConfig(), 86_400_000
#: A value of each option as a batch item has it, and options that it needs.
VALUES: dict[str, Any] = {
    "delay": "5s", "deliver_at": "2026-11-20T18:00:00Z", "key": "k", "group": "g", "batch": "b",
    "on_conflict": "reject",
    "max_wait": "1h", "unique_for": "1h", "tags": ["a", "b"], "ttl": "1h", "callback": "https://x.example/",
    "on_success": "done", "on_failure": "failed", "forward": {"x-own": "1"}, "meta": {"own": "1"},
    "content_type": "text/html", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "idempotency_key": "i",
}  # fmt: skip
NEEDED = {
    "on_conflict": {"key": "k"},
    "unique_for": {"key": "k"},
    "max_wait": {"key": "k", "on_conflict": "replace"},
}
PLANT = """
import inspect, json, sys
from hadelay.api import publishoptions
from tests.docs.planting import Written

publishoptions.OPTIONS["planted"] = publishoptions.Option(publishoptions._duration(1, 60_000), "Planted help.")
publishoptions.HEADERS["planted"] = "Hadelay-Planted"
sys.meta_path.insert(0, Written())
import msgspec
from hadelay import client
from hadelay.api.publishrequest import BatchItem, PublishQuery, UsualItem
from hadelay.cli import msg
from hadelay.client import wire
from hadelay.http import openapi, options, publish
from hadelay.http.app import ROUTES
from hadelay.pipeline import schema

document = json.loads(openapi.document(ROUTES.all))
item = document["components"]["schemas"]["BatchItem"]["properties"]["planted"]
single = [one for one in document["paths"]["/v1/topics/{topic}/messages"]["post"]["parameters"]
          if "planted" in one["name"].lower()]
put = client.Put(topic="t", planted="5s")
print(json.dumps({
    "query": "planted" in PublishQuery.__struct_fields__, "header": "Hadelay-Planted" in options.HEADERS,
    "taken": options._KNOWN_QUERY.count("planted"),
    "usual": "planted" in UsualItem.__struct_fields__,
    "fast path": [publish._is_usual(BatchItem("t", planted=value)) for value in (None, "5s")],
    "no options": [publish._has_no_options(BatchItem("t", planted=value)) for value in (None, "5s")],
    "schema": [item["description"][:13], item["anyOf"][1]],
    "document": sorted((one["in"], one["name"]) for one in single),
    "client": str(client.PutOptions.__annotations__["planted"]), "item": wire.options_of(put),
    "headers": wire.headers_of(wire.options_of(put)),
    "docstring": "    planted: Planted help." in client.AsyncClient.put.__doc__,
    "command": inspect.signature(msg.put).parameters["planted"].annotation.__metadata__[0].help,
    "column": schema.PUBLISHED["planted"].type,
}))
"""


class Access:
    def need(self, right: str, topic: str) -> None:
        """Every topic is allowed."""


def draft_in_batch(**fields: Any) -> Draft:
    """Draft of an item that is not the first of its topic, as most are not."""
    data = msgspec.msgpack.encode([{"topic": "t", "body": b"x"}, {"topic": "t", "body": b"x", **fields}])
    context = SimpleNamespace(config=CONFIG, max_delay_ms=730 * DAY_MS)
    call: Any = SimpleNamespace(context=context, access=Access(), request=SimpleNamespace(headers={}))
    built = _Drafts(call)
    for some in slices(data, "application/msgpack", 10, 1_000):
        built.add(some.items)
    assert not built.problems
    return built.drafts[1]


def test_planted_option_is_in_every_place() -> None:
    found = planted(PLANT)
    assert found.pop("client").startswith("str | float | datetime.timedelta | None")
    assert found == {
        "query": True, "header": True, "taken": 1, "usual": False, "fast path": [True, False],
        "no options": [True, False], "schema": ["Planted help.", {"type": "number", "minimum": 0.001, "maximum": 60.0}],
        "document": [["header", "Hadelay-Planted"], ["query", "planted"]], "item": {"planted": "5s"},
        "headers": {"Hadelay-Planted": "5s"}, "docstring": True, "command": "Planted help.",
        "column": "STRING|BIGINT|DOUBLE",
    }  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_of_a_batch_item_is_dropped(name: str) -> None:
    more = NEEDED.get(name, {})
    draft = draft_in_batch(**more, **{name: VALUES[name]})
    assert draft != draft_in_batch(**more)
    if kept := OPTIONS[name].meta:
        value = getattr(unpack(draft.meta), kept)
        assert value == (3_600_000 if name == "ttl" else VALUES[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_single_publish_takes_the_option_from_header_and_query(name: str) -> None:
    fields = {**NEEDED.get(name, {}), name: VALUES[name]}
    headers = dict[str, str]()
    for option, value in fields.items():
        if isinstance(value, dict):
            headers |= {HEADERS[option].replace("*", own): text for own, text in value.items()}
        else:
            headers[HEADERS[option]] = ",".join(value) if isinstance(value, list) else value
    lines = [(header.encode(), text.encode()) for header, text in headers.items()]
    template = options.parse_head(CONFIG, 730 * DAY_MS, "t", "", lines)
    expected = draft_in_batch(**fields)
    idem = None if template.idempotency_key is None else template.idempotency_key
    assert msgspec.structs.replace(template.with_body(b"x"), idem=idem) == expected
    if OPTIONS[name].query:
        query = "&".join(f"{header[8:].lower().replace('-', '_')}={text}" for header, text in headers.items())
        assert options.parse_head(CONFIG, 730 * DAY_MS, "t", query, []).with_body(b"x") == expected


@pytest.mark.parametrize("name", OPTIONS)
def test_client_sends_the_option(name: str) -> None:
    put = Put(topic="t", **{OPTIONS[name].put or name: VALUES[name]})
    (items,) = wire.batches([put])
    assert items == [{"topic": "t", "body": b"", name: VALUES[name]}]


def test_command_and_columns_have_the_options() -> None:
    assert signature(msg.put).parameters.keys() >= msg._OPTIONS.keys()
    assert OPTIONS.keys() - {"traceparent"} == schema.PUBLISHED.keys() - {"topic", "body"}


def test_options_of_tasks_are_options_of_a_publish() -> None:
    assert TaskOptions.__annotations__.keys() <= {row.put or name for name, row in OPTIONS.items()}


def test_every_option_has_help() -> None:
    assert [name for name, row in OPTIONS.items() if not row.help.endswith(".")] == []
    assert set(PublishQuery.__struct_fields__) < set(OPTIONS) < set(BatchItem.__struct_fields__)
    assert UsualItem.__struct_fields__ == ("topic", "body", *(name for name, row in OPTIONS.items() if row.usual))
