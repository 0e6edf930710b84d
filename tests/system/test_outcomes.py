"""Every outcome that a client can be told is told: those that /openapi.json declares, and those that a refusal names. A
new one makes this fail until it is reached here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from hadelay.http import openapi
from hadelay.http.app import ROUTES
from hadelay.model import State
from tests.system.cluster import Answer, Cluster, until

DOCUMENT: dict[str, Any] = msgspec.json.decode(openapi.document(ROUTES.all))
FIELDS = ("outcome", "state", "event")
BY_ID, BY_KEY = "message", "message_by_key"
_SETTLED = {"acked", "expired", "dead"}
_TOO_LATE = _SETTLED | {"leased", "partial"}
#: What a 409 of these names as `outcome`.
REFUSALS = {
    "publish": {"pending", "leased"},
    "publish_batch": {"pending", "leased"},
    **dict.fromkeys(("cancel_message", "cancel_message_by_key"), _TOO_LATE),
    **dict.fromkeys(("reschedule_message", "reschedule_message_by_key"), _TOO_LATE | {"cancelled", "moved"}),
    "deliver_now": _TOO_LATE | {"cancelled"},
    "put_topic": {"pending"},
    "put_subscription": {"running"},
    "delete_topic": {"pending", "scheduled"},
}
#: Of these routes every documented answer with one of these statuses is reached. (What is about nodes, files, tokens
#: and limits is tested where that is: test_refusals, test_groups, tests/security, tests/http.)
STATUSES = {"200", "201", "202", "204", "404", "409"}
ROUTES_OF_MESSAGES = {
    *("publish", "publish_batch", "get_message", "get_message_by_key", "cancel_message", "cancel_message_by_key"),
    *("reschedule_message", "reschedule_message_by_key", "deliver_now", "list_messages", "due", "topic_due"),
    *("receive", "receive_topics", "ack", "nack", "extend", "list_dead", "purge_dead", "redrive", "purge"),
    *("put_topic", "get_topic", "delete_topic", "pause_topic", "resume_topic", "list_topics", "put_subscription"),
}
#: Documented of a family of routes, and not of these: a topic that was never heard of is waited for.
NEVER = {("receive", "status", "404"), ("receive_topics", "status", "404"), ("publish", "status", "404")}


def declared() -> set[tuple[str, str, str]]:
    """(operation, field, value)"""
    found: set[tuple[str, str, str]] = set()
    for item in DOCUMENT["paths"].values():
        for operation in item.values():
            name = operation["operationId"]
            if name not in ROUTES_OF_MESSAGES:
                continue
            found |= {(name, "status", status) for status in operation["responses"] if status in STATUSES}
            for status, answer in operation["responses"].items():
                if status[0] == "2" and "content" in answer:
                    found |= {(name, field, value) for field, value in enums(answer["content"]["application/json"])}
            found |= {(name, "outcome", value) for value in REFUSALS.get(name, ())}
    # A history is the same however it is asked for; lists have none.
    return {one for one in found if one[1] != "event" or one[0] in ("get_message", "list_dead")} - NEVER


def enums(schema: Any, field: str = "") -> Iterator[tuple[str, str]]:
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if field in FIELDS:
        yield from ((field, str(value)) for value in schema.get("enum", ()))
    for name, part in schema.get("properties", {}).items():
        yield from enums(part, name)
    for part in (*schema.get("anyOf", ()), *([schema["items"]] if isinstance(schema.get("items"), dict) else ())):
        yield from enums(part, field)
    if "schema" in schema:
        yield from enums(schema["schema"], field)


class Seen:
    """Asks one node, and keeps what it was told."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.found = cluster, set[tuple[str, str, str]]()
        self.numbers = count()

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        name = ROUTES.find(method, path.partition("?")[0])[0].name
        answer = self.cluster.ask("n1", method, path, body)
        assert answer.status < 500, (method, path, answer)
        self.found.add((name, "status", str(answer.status)))
        if answer.body and "json" in answer.headers.get("content-type", ""):
            self._keep(name, answer.json)
        return answer

    def _keep(self, name: str, value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                self._keep(name, one)
        elif isinstance(value, dict):
            for field, one in value.items():
                if field in FIELDS and isinstance(one, str):
                    self.found.add((name, field, one))
                self._keep(name, one)

    def receive(self, topic: str, **options: Any) -> list[str]:
        """Leases."""
        answer = self.ask("POST", f"/v1/topics/{topic}/receive?redirect=false", {"wait": "10s", **options})
        return [message["lease"] for message in answer.json["messages"]]

    def message(self, state: str) -> tuple[str, str, str]:
        """(id, topic, key) of a new one in that state."""
        topic = f"{state}-{next(self.numbers)}"
        if state == "dead":
            self.ask("PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
        if state == "blocked":
            self.ask("PUT", f"/v1/topics/{topic}", {"group_concurrency": 1})
            self.ask("POST", f"/v1/topics/{topic}/messages?group=g&delay=1h", b"first of its group")
        query = {
            "scheduled": "&delay=1h",
            "blocked": "&group=g&delay=1h",
            "cancelled": "&delay=1h",
            "expired": "&ttl=1ms",
        }.get(state, "")
        found = self.ask("POST", f"/v1/topics/{topic}/messages?key=k{query}", b"x").json["id"]
        if state in ("leased", "acked", "dead"):
            leases = self.receive(topic, lease="10m")
            if state != "leased":
                self.ask("POST", f"/v1/leases:{'ack' if state == 'acked' else 'nack'}", {"leases": leases})
        if state == "cancelled":
            self.ask("DELETE", f"/v1/messages/{found}")
        until(lambda: self.ask("GET", f"/v1/messages/{found}").json["state"] == state, f"it is {state}")
        return found, topic, "k"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with Cluster(tmp_path_factory.mktemp("outcomes"), nodes=1, settings=["dispatch.job_step=1"]) as cluster:
        yield Seen(cluster)


def ask_of(state: str, seen: Seen) -> None:
    """Everything that can be asked about a message in that state."""
    for what in ("", "?body=true"):
        found, topic, key = seen.message(state)
        seen.ask("GET", f"/v1/messages/{found}{what}")
        assert seen.ask("GET", f"/v1/topics/{topic}/keys/{key}{what}").json["state"] == state
    listed = seen.ask("GET", f"/v1/topics/{topic}/messages?state={state}").json["messages"]
    assert [message["id"] for message in listed] == [found]
    for path in (f"/v1/messages/{found}", f"/v1/topics/{topic}/keys/{key}"):
        answer = seen.ask("PATCH", path, {"shift": "1h", "expected_deliver_at": "2020-01-01T00:00:00Z"})
        waits = state in ("scheduled", "ready", "blocked")
        assert (answer.status, answer.json["outcome"]) == (409, "moved" if waits else state)
    for method, body in (("PATCH", {"delay": "1h"}), ("DELETE", None)):
        for by_key in (False, True):
            found, topic, key = seen.message(state)
            path = f"/v1/topics/{topic}/keys/{key}" if by_key else f"/v1/messages/{found}"
            answer = seen.ask(method, path, body)
            again = seen.ask(method, path, body)
            assert again.status == answer.status
            refused = state not in ("scheduled", "ready", "blocked") and not (
                method == "DELETE" and state == "cancelled"
            )
            assert (answer.status, answer.json.get("outcome")) == (
                (409, state) if refused else (200, "cancelled" if method == "DELETE" else None)
            )
    found, topic, key = seen.message(state)
    seen.ask("POST", f"/v1/messages/{found}:deliver-now")
    found, topic, key = seen.message(state)
    outcome = seen.ask("POST", f"/v1/topics/{topic}/dead:redrive", {"ids": [found]}).json["results"][0]["outcome"]
    assert outcome == ("redriven" if state == "dead" else state)
    seen.ask("PATCH", f"/v1/messages/{found}", {"delay": "2h"})
    seen.ask("GET", f"/v1/messages/{found}")


def publish_under_taken_keys(seen: Seen) -> None:
    for state, mode in (("scheduled", "reject"), ("leased", "replace"), ("ready", "keep")):
        _, topic, key = seen.message(state)
        seen.ask("POST", f"/v1/topics/{topic}/messages?key={key}&on_conflict={mode}", b"x")
        item = {"topic": topic, "body": "x", "key": key, "on_conflict": mode}
        seen.ask("POST", "/v1/messages:batch", [item])
    dead, topic, key = seen.message("dead")
    seen.ask("POST", f"/v1/topics/{topic}/messages?key={key}&delay=1h", b"x")
    seen.ask("POST", f"/v1/topics/{topic}/dead:redrive", {"ids": [dead, "0" * 13]})


def settle_twice(seen: Seen) -> None:
    topic = "settled"
    for kind, more in (("nack", {}), ("extend", {"lease": "1m"}), ("ack", {})):
        found = seen.ask("POST", f"/v1/topics/{topic}/messages", b"x").json["id"]
        leases = seen.receive(topic)
        for lease in (*leases, *leases, "nonsense"):
            seen.ask("POST", f"/v1/leases:{kind}", {"leases": [lease], **more})
        seen.ask("POST", "/v1/leases:extend", {"leases": leases, "lease": "1m"})
        seen.ask("POST", "/v1/leases:nack", {"leases": leases})
        seen.ask("POST", "/v1/leases:ack", {"leases": leases})
        seen.ask("DELETE", f"/v1/messages/{found}")
    seen.ask("PUT", "/v1/topics/forgotten", {"max_attempts": 1})
    seen.ask("POST", "/v1/topics/forgotten/messages", b"x")
    seen.receive("forgotten", lease="500ms")
    letters = lambda: seen.ask("GET", "/v1/topics/forgotten/dead").json["messages"]  # noqa: E731
    until(letters, "its lease ran out, and it is dead")
    seen.ask("GET", f"/v1/messages/{letters()[0]['id']}")
    _, topic, _ = seen.message("dead")
    seen.ask("GET", f"/v1/topics/{topic}/dead")
    # A TTL is over at its time, whether or not the command that writes it down came by.
    found, _, _ = seen.message("expired")
    until(lambda: seen.ask("GET", f"/v1/messages/{found}").json["history"], "that it expired is written down")


def change_some_copies(seen: Seen) -> None:
    """The copy in the topic's own queue is leased, the copy for the subscription is not."""
    for n, (method, path, body) in enumerate((
        ("DELETE", "/v1/messages/{id}", None), ("DELETE", "/v1/topics/{topic}/keys/k", None),
        ("PATCH", "/v1/messages/{id}", {"delay": "1h"}), ("PATCH", "/v1/topics/{topic}/keys/k", {"delay": "1h"}),
        ("POST", "/v1/messages/{id}:deliver-now", None),
    )):  # fmt: skip
        topic = f"copied-{n}"
        seen.ask("PUT", f"/v1/topics/{topic}", {})
        seen.ask("PUT", f"/v1/topics/{topic}/subscriptions/billing", {})
        found = seen.ask("POST", f"/v1/topics/{topic}/messages?key=k", b"x").json["id"]
        seen.receive(topic, lease="10m")
        answer = seen.ask(method, path.format(id=found, topic=topic), body)
        changed = "cancelled" if method == "DELETE" else "rescheduled"
        assert (answer.status, answer.json["outcome"]) == (409, "partial")
        assert answer.json["outcomes"] == {topic: "leased", f"{topic}~billing": changed}


def topics_in_a_state_that_forbids_a_change(seen: Seen) -> None:
    seen.ask("POST", "/v1/topics/grouped/messages?group=g&delay=1h", b"x")
    seen.ask("PUT", "/v1/topics/grouped", {"group_concurrency": 1})
    seen.ask("POST", "/v1/messages:batch", [{"topic": "filled", "body": "x", "delay": "1h"}] * 1_000)
    for name in ("one", "two"):
        seen.ask("PUT", f"/v1/topics/filled/subscriptions/{name}", {"from": "pending"})
    seen.ask("PUT", "/v1/topics/never-was/subscriptions/one", {})
    seen.ask("PUT", "/v1/topics/planned", {})
    seen.cluster.ask("n1", "PUT", "/v1/schedules/nightly", {"topic": "planned", "cron": "0 3 * * *"})
    seen.ask("DELETE", "/v1/topics/planned")


def moved_by_a_job(seen: Seen) -> None:
    found, topic, _ = seen.message("scheduled")
    seen.ask("PUT", "/v1/topics/moved", {})
    begun = seen.cluster.ask(
        "n1", "POST", "/v1/jobs", {"action": "transfer", "filter": {"topic": topic}, "into": "moved"}
    )
    assert begun.status == 202, begun.json
    until(lambda: seen.ask("GET", f"/v1/messages/{found}").json["topic"] == "moved", "it was moved")


def topics_and_what_is_not_there(seen: Seen) -> None:
    seen.ask("POST", "/v1/receive?redirect=false", {"topics": ["settled"]})
    assert seen.ask("PUT", "/v1/topics/never-was~billing", {}).status == 404
    seen.ask("PUT", "/v1/topics/pushed", {"webhook": {"url": "http://127.0.0.1:9/"}})
    seen.ask("POST", "/v1/topics/pushed/receive?redirect=false", {})
    seen.ask("POST", "/v1/receive?redirect=false", {"topics": ["pushed"]})
    _, topic, _ = seen.message("scheduled")
    hour = "/due?from=2026-01-01T00:00:00Z&to=2026-01-01T01:00:00Z&step=60"
    for method, path, body in (
        ("POST", ":pause", None), ("POST", ":resume", None), ("POST", ":purge", {"states": ["dead"]}),
        ("POST", "/dead:redrive", {"all": True}), ("DELETE", "/dead", None), ("GET", "", None), ("GET", hour, None),
        ("GET", "/dead", None), ("GET", "/messages", None), ("DELETE", "", None), ("DELETE", "?force=true", None),
    ):  # fmt: skip
        for name in (topic, "never-was"):
            seen.ask(method, f"/v1/topics/{name}{path}", body)
    seen.ask("GET", f"/v1{hour}")
    seen.ask("GET", "/v1/topics")
    for path in ("/v1/messages/0000000000000", "/v1/topics/settled/keys/none"):
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"delay": 1})):
            assert seen.ask(method, path, body).status == 404
    assert seen.ask("POST", "/v1/messages/0000000000000:deliver-now").status == 404


def test_every_outcome_is_reported(seen: Seen) -> None:
    for state in State:
        ask_of(str(state), seen)
    publish_under_taken_keys(seen)
    settle_twice(seen)
    change_some_copies(seen)
    topics_in_a_state_that_forbids_a_change(seen)
    moved_by_a_job(seen)
    topics_and_what_is_not_there(seen)
    wanted = declared()
    assert len(wanted) > 100
    assert sorted(wanted - seen.found) == []
    # And nothing else.
    reported = {one for one in seen.found if one[1] == "outcome"}
    assert sorted(reported - wanted) == []
