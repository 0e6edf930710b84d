"""`hadelay story`: everything the cluster knows about one message, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from hadelay.cli.output import Remote, emit_json, fields, table
from hadelay.cli.remote import call, call_member, segment
from hadelay.errors import HadelayError
from hadelay.model import decode_id, hour_name, unpack_id

#: What a topic is asked for, of its settings: what decides about a message.
_SETTINGS = (
    "lease", "max_attempts", "backoff", "dead_letter", "ttl", "rate", "concurrency", "catch_up_rate", "paused",
    "paused_reason", "webhook",
)  # fmt: skip


def story(id: str, /, *, stale: bool = False, remote: Remote = Remote()) -> int:
    """Everything the cluster knows about one message: what it is, what happened to it and when, where it lies, and
    whether all nodes say the same. Ends with 1 if they do not.

    Parameters
    ----------
    id
        The 13 characters that publishing gave.
    stale
        What the asked node knows; works without a leader.
    """
    query = {"stale": "true"} if stale else {}
    message = call(remote, "GET", f"/v1/messages/{segment(id)}", needs="state", query=query)
    topic = _tried(remote, f"/v1/topics/{segment(message['topic'])}", query)
    members = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": "true"})["members"]
    nodes = [_at(member, message, remote) for member in members]
    found = {
        "message": {name: value for name, value in message.items() if name != "history"},
        "timeline": list(_timeline(message)),
        "places": list(_places(message)),
        "topic": {name: topic[name] for name in _SETTINGS if topic.get(name)},
        "nodes": nodes,
    }
    if remote.output == "json":
        emit_json(found)
    else:
        _tell(found)
    return 1 if any(node["state"] not in (None, message["state"]) for node in nodes) else 0


def _tried(remote: Remote, path: str, query: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = call(remote, "GET", path, needs="scheduled", query=query)
    except HadelayError:
        return {}  # deleted; the message is still told of
    return found


def _at(member: dict[str, Any], message: dict[str, Any], remote: Remote) -> dict[str, Any]:
    """What one node says by itself; state None: nothing, and why. A follower may be a moment behind."""
    row = {"node": member["name"], "role": member["role"], "state": None, "events": None, "detail": ""}
    try:
        path = f"/v1/messages/{message['id']}"
        seen = call_member(remote, member, "GET", path, needs="state", query={"stale": "true"})
    except (HadelayError, OSError) as error:
        return row | {"detail": str(error).partition("\n")[0]}
    # Only the leader knows what is ready: to the others it is scheduled until somebody has it.
    state = message["state"] if {seen["state"], message["state"]} == {"scheduled", "ready"} else seen["state"]
    return row | {"state": state, "events": len(seen["history"])}


def _timeline(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What happened, with when it fell due (for the first time, and now) where that belongs."""
    due = {"at": message["deliver_at"], "event": "due"}
    happened = [{"at": message["published_at"], "event": "published"}, *message["history"]]
    order = {"published": 0, "due": 1}
    for entry in sorted([*happened, due], key=lambda entry: (_instant(entry["at"]), order.get(entry["event"], 2))):
        yield {name: value for name, value in entry.items() if value is not None}


def _places(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hours whose files have something of it, the first of them first."""
    _, hour, index = unpack_id(decode_id(message["id"]))
    yield {"hour": hour_name(hour), "entry": index, "as": "filed first"}
    for entry in message["history"]:
        if "to" in entry:
            yield {"hour": entry["to"], "entry": None, "as": f"filed anew: {entry['event']}"}


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _tell(found: dict[str, Any]) -> None:
    fields(found["message"])
    print()
    start = _instant(found["message"]["deliver_at"])
    table([_line(entry, start) for entry in found["timeline"]], ("at", "to_due", "what"))
    table(found["places"], ("hour", "entry", "as"))
    if found["topic"]:
        print(f"topic {found['message']['topic']}")
        fields({f"  {name}": value for name, value in found["topic"].items()})
    table(found["nodes"], ("node", "role", "state", "events", "detail"))


def _line(entry: dict[str, Any], due: datetime) -> dict[str, Any]:
    words = [entry["event"]]
    words += [f"attempt {entry['attempt']}"] if entry.get("attempt") else []
    words += [f"{word} {entry[name]}" for name, word in _WORDS.items() if entry.get(name)]
    ms = round((_instant(entry["at"]) - due).total_seconds() * 1000)
    return {"at": entry["at"], "to_due": f"{ms:+,} ms" if ms else "", "what": ", ".join(words)}


_WORDS = {"consumer": "by", "node": "through", "reason": "because:", "from": "from hour", "to": "to hour"}
