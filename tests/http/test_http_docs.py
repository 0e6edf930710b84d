"""The reference pages against what they describe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import hadelay.client.transport
import hadelay.http.files
from hadelay.client import AsyncClient
from hadelay.errors import HadelayError
from hadelay.http.app import ROUTES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def kinds(kind: type[HadelayError] = HadelayError) -> Iterator[type[HadelayError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__.startswith("hadelay."):
            yield from kinds(child)


def test_every_problem_type_is_listed() -> None:
    assert hadelay.client.transport
    assert hadelay.http.files
    text = (REFERENCE / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", text, re.M))
    for kind in kinds():
        assert f"`{kind.type}`" in text, kind
        if kind.type in rows:
            assert int(rows[kind.type]) == kind.http_status, kind


def test_every_route_is_described() -> None:
    text = (REFERENCE / "http.md").read_text()
    for route in ROUTES.all:
        path = route.path.replace("{file}", "{log,idx,dsp}")
        assert path in text or path.removesuffix("/{topic}") in text or path == "/openapi.json", path


def test_every_method_of_the_client_is_described() -> None:
    text = (REFERENCE / "client.md").read_text()
    for name in dir(AsyncClient):
        if not name.startswith("_") and name not in ("close", "consumer"):
            assert f"{name}(" in text, name
