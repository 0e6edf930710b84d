"""`hadelay cluster`: commands status, transfer, drain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadelay.cli.output import Remote, Stale, emit_json, fields, show, table
from hadelay.cli.remote import call, call_member
from hadelay.errors import HadelayError

_MEMBERS = ("name", "role", "state", "http", "raft", "lag", "version", "feature_level", "clock_skew_ms")
#: Timeout of a readiness request, in seconds.
_READY_S = 3.0


def status(*, stale: Stale = False, remote: Remote = Remote()) -> None:
    """Show members, leader, lag, and the dispatch cursor."""
    found = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": stale})
    if remote.output == "json":
        emit_json(found)
        return
    members = found.pop("members")
    fields(found)
    print()
    table([{**member, "state": state_of(remote, member)} for member in members], _MEMBERS)


def state_of(remote: Remote, member: Mapping[str, Any]) -> str:
    """State of a node: "ready", the failed readiness checks, or "no answer"."""
    try:
        call_member(remote, member, "GET", "/readyz?verbose", needs="status", timeout_s=_READY_S)
    except (HadelayError, OSError) as error:
        checks = getattr(error, "extra", {}).get("checks", [])
        return ", ".join(check["name"] for check in checks if not check["ok"]) or "no answer"
    return "ready"


def transfer(to: str | None = None, /, *, remote: Remote = Remote()) -> None:
    """Transfer leadership without a gap in the hand-outs.

    Args:
        to: Name of the new leader. Default: the follower with the smallest lag.
    """
    wish = {} if to is None else {"to": to}
    show(call(remote, "POST", "/v1/cluster:transfer-leader", wish, needs="leader", timeout_s=30), remote)


def drain(node: str, /, *, undo: bool = False, remote: Remote = Remote()) -> None:
    """Take a node out of traffic until --undo or a restart: the node gives up leadership and refuses publishes and
    polls. It still answers acks and reads, and remains a replica.

    Args:
        node: Name of the node.
        undo: Put the node back into traffic.
    """
    wish = {"node": node, "undo": undo}
    show(call(remote, "POST", "/v1/cluster:drain", wish, needs="drained", timeout_s=30), remote)
