"""/openapi.json is valid, and a real node does what it says: requests made from it (and broken ones) get no 5xx, no
undocumented status, and answers that fit their schemas; alone, and in sequences that use what earlier answers gave.

Hypothesis chooses without chance (`derandomize`), so a run that fails fails again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.strategies import from_regex
from openapi_spec_validator import validate
from schemathesis.config import SchemathesisConfig

from hadelay.api.base import decode_hook
from hadelay.api.text import parse_duration
from hadelay.api.topicsettings import PutTopic
from hadelay.http import openapi
from hadelay.http.app import ROUTES
from hadelay.http.shapes import MEMBERS, durations
from tests.cli.support import cluster
from tests.scale import size

CHECKS = (
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.response_headers_conformance,
)
DOCUMENT: dict[str, Any] = msgspec.json.decode(openapi.document(ROUTES.all))
for operation in [one for path in DOCUMENT["paths"].values() for one in path.values()]:
    # The document describes in words which other forms a body may have.
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        content["application/msgpack"] = {"schema": content["application/json"]["schema"]}
    if operation["operationId"] == "publish_batch":
        content["application/x-ndjson"] = {"schema": content["application/json"]["schema"]}
#: A node alone cannot hand over, so many snapshots are not held at once, and a node that is about to be a shard creates
#: no topics: 503, as documented.
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=SchemathesisConfig(seed=1)).exclude(
    operation_id=["transfer_leader", "open_snapshot", "put_shards"]
)


@schemathesis.serializer("application/msgpack")
def to_msgpack(_: Any, value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # a number that only JSON can write
        return b"\xc1"


@schemathesis.serializer("application/x-ndjson")
def to_lines(_: Any, value: Any) -> bytes:
    return b"\n".join(msgspec.json.encode(item) for item in (value if isinstance(value, list) else [value]))


@schemathesis.deserializer("application/msgpack")
def from_msgpack(_: Any, response: schemathesis.Response) -> Any:
    return msgspec.msgpack.decode(response.content)


BOUNDED = settings(
    derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # Polls that would wait are refused: this is not about patience.
    directory = tmp_path_factory.mktemp("fuzz")
    with cluster(directory, "--nodes", "1", "--set", "http.max_wait_ms=20ms") as dev:
        yield dev.nodes[0]["http"]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """A connection that stays open, without a look at proxies in the environment for each request."""
    with requests.Session() as kept:
        kept.trust_env = False
        yield kept


def test_the_document_is_openapi() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1.")


def test_every_operation_has_a_tag_and_examples_that_its_types_take() -> None:
    tags = {tag["name"] for tag in DOCUMENT["tags"] if tag["description"]}
    for route in ROUTES.all:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        (tag,) = operation["tags"]
        assert tag in tags
        examples = [one["example"] for one in operation["parameters"] if "example" in one]
        bodies = [one["example"] for one in operation.get("requestBody", {}).get("content", {}).values()
                  if "example" in one]  # fmt: skip
        assert bool(bodies) == ("requestBody" in operation), route.name
        if route.body:
            assert isinstance(msgspec.convert(bodies[0], route.body, dec_hook=decode_hook, str_keys=True), route.body)
        answers = [
            (kind, body["example"])
            for status, kind in route.returns.items()
            for body in operation["responses"][str(status)].get("content", {}).values()
            if "example" in body
        ]
        for kind, answer in answers:
            read = msgspec.convert(answer, kind, str_keys=True)
            assert answer == msgspec.json.decode(msgspec.json.encode(read))
        assert examples or bodies or answers, route.name


def test_the_document_has_every_route() -> None:
    described = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == {(route.method, route.path) for route in ROUTES.all}


@pytest.mark.processes
@SCHEMA.parametrize()
@settings(BOUNDED, max_examples=size(4, 8))
def test_single_requests(case: schemathesis.Case, url: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=url, session=session, checks=CHECKS, timeout=10)


#: Refusals of requests whose parts contradict each other, or depend on settings of the node, on other requests or on a
#: grammar, such as that of times in headers: JSON Schema does not say that. No range, length or type of one member is
#: among them, but limits in bytes: JSON Schema counts characters.
_TOGETHER = re.compile(
    r"cursor: |after: |given twice|contradict|must be after from|more than \d+ buckets|too long; wait at most 20 ms|"
    r"is only allowed with|is not allowed with|takes (one of|no) shift|error: only for dead letters|retrying: |"
    r"leases: give a result|dead: a dead message has no|a setting of (subscriptions|topics)|no whole minute|"
    r"cron: |timezone: |deliver_at: '.*' is not a time|0 < min|expected a whole number|printable text|1 to 128 bytes"
)


#: Besides those that change the members: names and addresses of nodes are checked by the cluster.
OPERATIONS = [result.ok() for result in SCHEMA.exclude(operation_id=["add_member", "drain"]).get_all_operations()]


@pytest.mark.processes
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.definition.raw["operationId"])
def test_requests_that_fit_the_document_are_taken(operation: Any, url: str, session: requests.Session) -> None:
    """Ranges, lengths and patterns of the document are those of the checks."""

    @settings(BOUNDED, max_examples=size(4, 8))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
    def ask(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, session=session, timeout=10)
        if answer.status_code == 400:
            detail = answer.json()["detail"]
            assert _TOGETHER.search(detail), (
                f"{detail}: {case.body!r} {case.query} {case.path_parameters} {case.headers}"
            )

    ask()


@pytest.mark.processes
def test_the_limits_of_the_document_are_those_of_the_checks(url: str, session: requests.Session) -> None:
    """Of each setting of a topic: the lowest and the highest value are taken, and values beyond are refused."""
    tried = 0
    for name, shape in MEMBERS[PutTopic].items():
        for one in shape.get("anyOf", [shape]):
            for keyword, beyond in (("minimum", -1), ("maximum", 1)):
                if keyword not in one:
                    continue
                tried += 1
                more = {"group_concurrency": 1} if name == "group_rate" else {}
                for value, status in ((one[keyword], 200), (one[keyword] + beyond, 400)):
                    answer = session.put(f"{url}/v1/topics/limits", json={**more, name: value}, timeout=10)
                    assert answer.status_code == status, f"{name}: {value}: {answer.text}"
    assert tried > 20


@pytest.mark.parametrize(
    ("least", "most"), [(0, 0), (1, 10), (1, 43_200_000), (3_600_000, 315_360_000_000), (0, 60_000)]
)
def test_patterns_of_durations_keep_to_the_limits(least: int, most: int) -> None:
    (text, _) = durations(least, most)["anyOf"]

    @settings(BOUNDED, max_examples=100)
    @given(found=from_regex(text["pattern"], fullmatch=True))
    def keeps(found: str) -> None:
        assert least <= parse_duration("x", found) <= most

    keeps()
    for known in ("1s", "30s", "5m", "90m", "1h30m", "12h", "7d", "250ms", "45"):
        if 100 * least <= parse_duration("x", known) < most and most > 1_000_000:
            assert re.fullmatch(text["pattern"], known), known


@pytest.mark.processes
def test_sequences(url: str) -> None:
    wrong: list[BaseException] = []

    class Sequences(SCHEMA.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
            return {"base_url": url, "timeout": 10}

        def validate_response(self, response: Any, case: schemathesis.Case, **how: Any) -> None:
            try:
                case.validate_response(response, checks=CHECKS)
            except BaseException as failure:
                wrong.append(failure)
                raise

    # What a node answers depends on the time, and with it which step can follow: then Hypothesis, which tries parts of
    # earlier sequences again, gives up. That is no fault of an answer; those are in `wrong`.
    with suppress(FlakyStrategyDefinition):
        Sequences.run(settings=settings(BOUNDED, max_examples=size(6, 15), stateful_step_count=6))
    if wrong:
        raise wrong[0]
