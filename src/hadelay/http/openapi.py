"""OpenAPI 3.1 from the declared routes: the types that validate requests are the ones described."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from hadelay.http.options import HEADERS
from hadelay.http.problems import CONTENT_TYPE, Problem
from hadelay.http.routes import JSON, MSGPACK, Route
from hadelay.http.types import schema_hook
from hadelay.version import VERSION

_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "topic": {"pattern": r"^[A-Za-z0-9._-]{1,128}$"},
    "id": {"pattern": r"^[0-9A-Fa-f][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{12}$"},
    "key": {"minLength": 1, "maxLength": 256},
    "hour": {"pattern": r"^(dead-)?[0-9]{10}$"},
    "file": {"pattern": "^(log|idx|dsp)$"},
}
_REF = "#/components/schemas/{name}"
_PLAIN: dict[Any, tuple[str, dict[str, Any]]] = {
    bytes: ("application/octet-stream", {"type": "string", "format": "binary"}),
    str: ("text/plain", {"type": "string"}),
    dict: (JSON, {"type": "object"}),
}
_HEADERS = {
    name: f"As the query parameter {name[8:].lower().replace('-', '_')}" for name in HEADERS if not name.endswith("*")
}


def document(routes: Iterable[Route]) -> bytes:
    routes = list(routes)
    types: dict[Any, None] = {Problem: None}
    for route in routes:
        types.update(dict.fromkeys(t for t in (route.body, *route.returns.values()) if t and t not in _PLAIN))
    schemas, components = msgspec.json.schema_components(types, schema_hook=schema_hook, ref_template=_REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "hadelay", "version": VERSION, "summary": "Delay messages, delivered on time"},
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.returns.items():
        responses[str(status)] = {"description": "ok" if status < 300 else "the leader is elsewhere"}
        if kind is not None:
            media, schema = _PLAIN.get(kind, (JSON, refs.get(kind)))
            responses[str(status)]["content"] = {media: {"schema": schema}}
    for status in sorted({400, *route.errors}):
        responses[str(status)] = {
            "description": "refused",
            "content": {CONTENT_TYPE: {"schema": refs[Problem]}},
        }
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": (route.handler.__doc__ or "").partition("\n")[0],
        "parameters": _parameters(route),
        "responses": responses,
    }
    if route.body:
        content = {"schema": refs[route.body]}
        operation["requestBody"] = {"content": {JSON: content, MSGPACK: content}}
    elif route.raw_body:
        operation["requestBody"] = {"content": {media: {} for media in route.raw_body}}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"} | _PATH_SCHEMAS[name]}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    if route.query:
        schema = msgspec.json.schema(route.query, schema_hook=schema_hook)["$defs"][route.query.__name__]
        required = schema.get("required", ())
        found += [
            {"name": name, "in": "query", "required": name in required, "schema": prop}
            for name, prop in schema["properties"].items()
        ]
    for name, text in _HEADERS.items():
        if name.lower().encode() in route.headers:
            found.append({"name": name, "in": "header", "description": text, "schema": {"type": "string"}})
    return found
