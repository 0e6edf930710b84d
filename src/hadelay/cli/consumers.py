"""`hadelay consumers`: who consumes, with which leases, acks and failures."""

from typing import Any

from hadelay.cli.output import Remote, Stale, emit_json, say, table
from hadelay.cli.remote import call

_COLUMNS = ("consumer", "node", "asked", "topics", "leased", "acked_per_min", "last_error", "oldest_lease")
#: Limit of the topics that are named in one row of the table.
_NAMED = 3


def consumers(*, stale: Stale = False, remote: Remote = Remote()) -> None:
    """Show the consumers of all topics: those that polled since the present leader took over, have leases, or settled
    messages lately."""
    found = call(remote, "GET", "/v1/consumers", needs="consumers", query={"stale": stale})
    if remote.output == "json":
        emit_json(found)
        return
    table([_row(one) for one in found["consumers"]], _COLUMNS)
    if not found["complete"]:
        say("There are more consumers or leases than these.")


def _row(one: dict[str, Any]) -> dict[str, Any]:
    topics, failed, oldest = one["topics"], one.get("failed"), one.get("oldest")
    more = f" and {len(topics) - _NAMED} more" if len(topics) > _NAMED else ""
    return {
        "consumer": one["name"], "node": one.get("node"), "topics": ", ".join(topics[:_NAMED]) + more,
        "asked": "waits" if one.get("waiting") else one.get("asked_at"), "leased": one.get("leased", 0),
        "acked_per_min": one.get("acked", 0), "last_error": failed and f"{failed['reason']} ({failed['topic']})",
        "oldest_lease": oldest and f"{oldest['message']} since {oldest['since']}",
    }  # fmt: skip
