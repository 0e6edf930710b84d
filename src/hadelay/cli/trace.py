"""`hadelay trace`: the status of a message, the reason for it, and the message's history."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from hadelay.api.verdict import timeline, verdict
from hadelay.cli.msg import message_path
from hadelay.cli.output import MessageId, OfKey, OfTopic, Remote, Stale, emit_json, fields, say, table
from hadelay.cli.remote import call, call_member
from hadelay.client.paths import segment
from hadelay.errors import HadelayError
from hadelay.model import decode_id, hour_name, unpack_id
from hadelay.settings.kinds import shown_name
from hadelay.settings.topic import SETTINGS

_instant = datetime.fromisoformat
#: Topic settings that affect the delivery of a message.
_SETTINGS = [shown_name(name) for name, row in SETTINGS.items() if row.delivery]


def trace(
    id: MessageId = None,
    /,
    *,
    topic: OfTopic = None,
    key: OfKey = None,
    stale: Stale = False,
    remote: Remote = Remote(),
) -> int:
    """Show the status of a message and the reason for it, its history, the hours that it was filed under, and the view
    of each node. Exit code 1 if the nodes disagree."""
    query = {"stale": stale}
    message = call(remote, "GET", message_path(id, topic, key), needs="state", query=query)
    settings: dict[str, Any] = {}
    with suppress(HadelayError):  # the settings of a deleted topic are missing; the trace goes on without them
        settings = call(remote, "GET", f"/v1/topics/{segment(message['topic'])}", needs="scheduled", query=query)
    cluster = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": True})
    nodes = [_at(member, message, remote) for member in cluster["members"]]
    found = {
        "verdict": verdict(message, settings, nodes, cluster["time"]),
        "message": {name: value for name, value in message.items() if name != "history"},
        "timeline": list(timeline(message)),
        "places": list(_places(message)),
        "topic": {name: settings[name] for name in _SETTINGS if settings.get(name)},
        "nodes": nodes,
    }
    if remote.output == "json":
        emit_json(found)
    else:
        _tell(found)
    return 1 if any(node["state"] not in (None, message["state"]) for node in nodes) else 0


def _at(member: dict[str, Any], message: dict[str, Any], remote: Remote) -> dict[str, Any]:
    """A member's own view of the message, which may lag; on failure, `state` is None and `detail` has the error."""
    row = {"node": member["name"], "role": member["role"], "state": None, "events": None, "detail": ""}
    try:
        path = f"/v1/messages/{message['id']}"
        seen = call_member(remote, member, "GET", path, needs="state", query={"stale": True})
    except (HadelayError, OSError) as error:
        return row | {"detail": str(error).partition("\n")[0]}
    # Only the leader knows that a message is ready; on other nodes the message stays scheduled until it is leased.
    state = message["state"] if {seen["state"], message["state"]} == {"scheduled", "ready"} else seen["state"]
    return row | {"state": state, "events": len(seen["history"])}


def _places(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hours whose files have index entries of the message, oldest first."""
    _, hour, index = unpack_id(decode_id(message["id"]))
    yield {"hour": hour_name(hour), "entry": index, "as": "filed first"}
    for entry in message["history"]:
        if "to" in entry:
            yield {"hour": entry["to"], "entry": None, "as": f"filed anew: {entry['event']}"}


def _tell(found: dict[str, Any]) -> None:
    say(f"{found['verdict']}\n")
    fields(found["message"])
    say()
    table(_lines(found["timeline"]), ("at", "to_due", "what"))
    say()
    table(found["places"], ("hour", "entry", "as"))
    say()
    if found["topic"]:
        say(f"topic {found['message']['topic']}")
        fields({f"  {name}": value for name, value in found["topic"].items()})
        say()
    table(found["nodes"], ("node", "role", "state", "events", "detail"))


def _lines(timeline: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Table rows of the events, each with its time relative to the due time of its attempt."""
    due = next(entry["at"] for entry in timeline if entry["event"] == "due")
    for entry in timeline:
        due = entry.get("due_at", due)
        ms = round((_instant(entry["at"]) - _instant(due)).total_seconds() * 1000)
        words = [entry["event"], *(f"{word} {entry[name]}" for name, word in _WORDS.items() if entry.get(name))]
        yield {"at": entry["at"], "to_due": f"{ms:+,} ms" if ms else "", "what": ", ".join(words)}


_WORDS = {
    "attempt": "attempt", "consumer": "by", "node": "through", "reason": "because:", "old_deliver_at": "due",
    "new_deliver_at": "now due", "from": "from hour", "to": "to hour",
}  # fmt: skip
