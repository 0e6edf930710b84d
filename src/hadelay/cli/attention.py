"""`hadelay attention`: what needs attention, with the commands to run next."""

from hadelay.cli.output import Remote, emit_json, say, table
from hadelay.cli.remote import call

_COLUMNS = ("severity", "since", "problem", "next")


def attention(*, remote: Remote = Remote()) -> int:
    """Show what needs attention, the worst first: failing receivers, stuck groups, topics that nobody consumes, dead
    letters, schedules, members. Exit code 1 if there is anything."""
    found = call(remote, "GET", "/v1/attention", needs="rows")
    if remote.output == "json":
        emit_json(found)
    elif not found["rows"]:
        say(f"All is well in {found['cluster_id']}: nothing needs attention.")
    else:
        rows = [
            {**row, "problem": row["sentence"], "next": "; ".join(action["command"] for action in row["actions"])}
            for row in found["rows"]
        ]
        table(rows, _COLUMNS)
        for kind, count in found["more"].items():
            say(f"{count:,} more of the kind {kind}")
    return 1 if found["rows"] else 0
