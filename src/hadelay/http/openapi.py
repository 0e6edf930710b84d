"""Makes the OpenAPI 3.1 document from the declared routes and the types that validate requests."""

import re
import sys
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from math import ceil, floor
from typing import Any

import msgspec

from hadelay.api.base import Document, schema_hook
from hadelay.api.consuming import Received
from hadelay.api.publishoptions import HEADERS, OPTIONS
from hadelay.api.publishrequest import BatchItem, PublishQuery
from hadelay.codec.meta import OCTETS
from hadelay.http.answers import JSON, MSGPACK, PROBLEM, Problem
from hadelay.http.examples import ANSWERS, BODIES, PARAMETERS
from hadelay.http.routes import OPEN, Route
from hadelay.http.shapes import MEMBERS, members, needs_members
from hadelay.version import VERSION

_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "topic": {"pattern": r"^[A-Za-z0-9._-]{1,128}(~[A-Za-z0-9._-]{1,126})?$"},
    "subscription": {"pattern": r"^[A-Za-z0-9._-]{1,126}$"},
    "schedule": {"pattern": r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"},
    "id": {"pattern": r"^[0-9A-Fa-f][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{12}$"},
    "key": {"minLength": 1, "maxLength": 256},
    "group": {"minLength": 1, "maxLength": 128},
    "batch": {"pattern": r"^[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,127}$"},
    "token_id": {"pattern": "^[0-9a-f]{12}$"},
    "job": {"pattern": "^[0-9]{1,9}$"},
    "node": {"pattern": r"^[A-Za-z0-9._-]{1,64}$"},
    "hour": {"pattern": r"^(dead-)?[0-9]{10}$"},
    "file": {"pattern": "^(log|idx|dsp)$"},
    "snapshot": {"pattern": "^[0-9]+-[0-9a-f]{8}$"},
    "name": {"pattern": "^(names|state-[0-9]+|hours/.+)$"},
}
_REF = "#/components/schemas/{name}"
_PLAIN: dict[Any, tuple[str, dict[str, Any]]] = {
    bytes: ("application/octet-stream", {"type": "string", "format": "binary"}),
    str: ("text/plain", {"type": "string"}),
    dict: (JSON, {"type": "object"}),
}
_HEADERS = {HEADERS[name]: row.help for name, row in OPTIONS.items()}
_STANDARD_HEADERS = {
    "publish": ("Idempotency-Key",),
    "publish_batch": ("Idempotency-Key",),
    "trigger_schedule": ("Idempotency-Key",),
    "backfill_schedule": ("Idempotency-Key",),
    "receive": ("Accept-Body",),
    "receive_topics": ("Accept-Body",),
    "hour_file": ("Range",),
    "snapshot_file": ("Range",),
}
_HEADER_SCHEMAS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 255},
    "Accept-Body": {"enum": ["text"]},
}
#: Operation → type of its request body, for operations whose routes decode the body themselves.
_RAW_BODIES: dict[str, Any] = {"publish_batch": list[BatchItem]}
#: Operation that returns an id → operations that take this id.
_LINKS = {"publish": ("get_message", "cancel_message", "reschedule_message", "deliver_now")}
#: Description of the API. The text names the other forms of request bodies, because the document itself gives each body
#: only one form: generators of clients know only JSON and bytes.
_DESCRIPTION = (
    "Every request body in JSON may also be MessagePack (`Content-Type: application/msgpack`), and a batch also lines "
    "of JSON (`application/x-ndjson`). The payload of a publish has any media type, which its consumers get."
)
_ANSWER_HEADERS = {
    "Hadelay-Node": "The node that answers",
    "Hadelay-Leader": "The leader, where that node knows one",
    "Hadelay-Shard": "The shard that answers, if there are several (one shard map in several clusters)",
    "Hadelay-Direct": "URL of the leader of that shard, if the answer was forwarded",
    "Hadelay-Applied": "Of stale reads: the log index that the answer shows",
    "Retry-After": "Seconds, with refusals that are worth another try later",
}


def document(routes: Iterable[Route], *, tokens: bool = False) -> bytes:
    """The OpenAPI document as JSON. tokens: whether requests need tokens."""
    routes = list(routes)
    types: dict[Any, None] = {Problem: None}
    for route in routes:
        kinds = (route.body, _RAW_BODIES.get(route.name), *route.returns.values())
        types.update(dict.fromkeys(kind for kind in kinds if kind and kind not in _PLAIN))
    schemas, components = msgspec.json.schema_components(types, schema_hook=schema_hook, ref_template=_REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs, tokens)
    encoded = msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "hadelay",
                "version": VERSION,
                "summary": "Delay messages, delivered on time",
                "description": _DESCRIPTION,
            },
            "tags": [{"name": name, "description": text} for name, text in dict(map(_tag, routes)).items()],
            "paths": paths,
            "components": {
                "schemas": {name: _optional(name, schema) for name, schema in components.items()},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                "headers": {
                    name: {"description": text, "schema": {"type": "string"}} for name, text in _ANSWER_HEADERS.items()
                },
            },
        }
    )
    # Remove `str`, the type parameter of times, from the names of schemas: times in answers are always text.
    return encoded.replace(b"_str_", b"").replace(b"[str]", b"")


def _optional(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Adapt the schema of a type with default values. In a request, each default becomes a part of the member's
    description. In an answer that omits default values (api.base), such a member is never null."""
    kinds: list[type[msgspec.Struct]] = [Received, *_subclasses(Document)]
    kind = next((kind for kind in kinds if kind.__name__ == name.removesuffix("_str_")), None)
    if kind is None:
        if name in _REQUESTS:
            members(_REQUESTS[name], schema)
        for shown in schema.get("properties", {}).values():
            _default_in_words(shown)
        return schema
    if not kind.__struct_config__.omit_defaults:
        return schema
    for member in msgspec.structs.fields(kind):
        shown = schema["properties"][member.encode_name]
        if member.default is not msgspec.NODEFAULT:
            schema["properties"][member.encode_name] = _left_out(shown)
        elif member.default_factory is not msgspec.NODEFAULT:
            shown["default"] = member.default_factory()
    return schema


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """All subclasses in hadelay/api. Subclasses of these in the client are left out, because some have the same
    names."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("hadelay.api."):
            yield one
            yield from _subclasses(one)


#: Name of a type of requests, or of a part of requests → the type.
_REQUESTS = {kind.__name__: kind for kind in MEMBERS}


def _default_in_words(shown: dict[str, Any]) -> None:
    """Move the default of a request's member into its description: generators such as openapi-typescript take a member
    with a default for one that is always there, and demand it from callers."""
    default = shown.pop("default", None)
    if default not in (None, "", [], {}):
        words = f"Default: {default if isinstance(default, str) else msgspec.json.encode(default).decode()}"
        shown["description"] = f"{shown['description']}. {words}" if "description" in shown else words


def _operation(route: Route, refs: dict[Any, Any], tokens: bool) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.returns.items():
        answer = _response(status)
        if kind is not None:
            media, schema = _PLAIN.get(kind, (JSON, refs.get(kind)))
            answer["content"] = {media: {"schema": schema}}
            if media == JSON and kind is not dict:
                answer["content"][MSGPACK] = {"schema": schema}
            if kind in ANSWERS:
                answer["content"][media]["example"] = ANSWERS[kind]
        if status in (201, 307):
            answer["headers"]["Location"] = {"schema": {"type": "string"}}
        if status == 201 and route.name in _LINKS:
            answer["links"] = {
                name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in _LINKS[route.name]
            }
        responses[str(status)] = answer
    refused = {400, *route.errors}
    if route.body or route.raw_body:
        refused.update((408, 413, 415, 422))
    if route.method != "GET":
        # A change may find no leader (503), lose its leader half-way (504), or find the disk full (507).
        refused.update((503, 504, 507))
        refused.add(403)  # 403 refuses a change that a web page of another site sends through a browser
    if route.scope != OPEN:
        refused.update((401, 403))
    for status in sorted(refused):
        responses[str(status)] = _response(status) | {"content": {PROBLEM: {"schema": refs[Problem]}}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [_tag(route)[0]],
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": responses,
        "security": [],
    }
    if route.scope != OPEN:
        operation["description"] = f"Takes a token with the scope {route.scope}, where tokens are asked for."
        operation["security"] = [{"token": []}] if tokens else [{}, {"token": []}]
    kind = route.body or _RAW_BODIES.get(route.name)
    if kind:
        json = {"schema": refs[kind], "example": BODIES[kind]}
        operation["requestBody"] = {"content": {JSON: json}, "required": needs_members(kind)}
    elif route.raw_body:
        content = {"schema": {"type": "string", "format": "binary"}, "example": "pay order 4711"}
        operation["requestBody"] = {"content": {OCTETS: content}}
    return operation


def _tag(route: Route) -> tuple[str, str]:
    """Tag of a route's operation, and the tag's description: name and docstring of the module that declares the
    route."""
    module = route.handler.__module__
    about = (sys.modules[module].__doc__ or "").partition("\n\n")[0].removeprefix("Routes for ").replace("\n", " ")
    return module.rpartition(".")[2], about[:1].upper() + about[1:]


def _response(status: int) -> dict[str, Any]:
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in _ANSWER_HEADERS}
    return {"description": HTTPStatus(status).phrase, "headers": headers}


def _header_schema(name: str) -> dict[str, Any]:
    """Schema of a publish option in a header: the same as of its text in a query."""
    if name.endswith("*"):
        return {"type": "string", "pattern": "^[!-~]{0,1024}$"}
    shape = MEMBERS[PublishQuery].get(name[8:].lower().replace("-", "_"), {})
    text = shape["anyOf"][0] if "anyOf" in shape else shape
    # Leave out the format of times: generated clients cannot send a time in a header.
    return {"type": "string"} if "format" in text else {"type": "string"} | text


def _path_schema(route: Route, name: str) -> dict[str, Any]:
    """Schema of a path parameter. A subscription's name is excluded in publishes and in routes about subscriptions of a
    topic."""
    only_topics = name == "topic" and (route.name == "publish" or "{subscription}" in route.path)
    return {"pattern": "^[A-Za-z0-9._-]{1,128}$"} if only_topics else _PATH_SCHEMAS[name]


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"} | _path_schema(route, name)}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    if route.query:
        schema = msgspec.json.schema(route.query, schema_hook=schema_hook)["$defs"][route.query.__name__]
        members(route.query, schema)
        required = schema.get("required", ())
        found += [
            {"name": name, "in": "query", "required": name in required, "schema": _given(prop)}
            for name, prop in schema["properties"].items()
        ]
    found += [
        {"name": name, "in": "header", "description": _HEADERS[name], "schema": _header_schema(name)}
        for name in route.headers
    ]
    for name in _STANDARD_HEADERS.get(route.name, ()):
        found.append({"name": name, "in": "header", "schema": _HEADER_SCHEMAS.get(name, {"type": "string"})})
    for parameter in found:
        if parameter["name"] in PARAMETERS:
            parameter["example"] = PARAMETERS[parameter["name"]]
    return found


def _given(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of a query parameter, which is never null. Numbers are integers: clients write other large numbers as
    1e+16."""
    given = _left_out(schema) if schema.get("default", "") is None else schema
    whole = [
        {"type": "integer", "minimum": ceil(one["minimum"]), "maximum": floor(one["maximum"])}
        if one.get("type") == "number"
        else one
        for one in given.get("anyOf", ())
    ]
    return given | ({"anyOf": whole} if whole else {})


def _left_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of an optional member that is never null: removes null and the default."""
    bare = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    return bare | (options[0] if len(options) == 1 else {"anyOf": options} if options else {})
