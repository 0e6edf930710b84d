"""`hadelay cluster`: status, transfer, drain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadelay.cli.output import Remote, emit_json, fields, show, table
from hadelay.cli.remote import call, call_member
from hadelay.errors import HadelayError

_MEMBERS = ("name", "role", "state", "http", "raft", "lag", "version", "feature_level", "clock_skew_ms")
#: Timeout of the question whether a node is ready.
_READY_S = 3.0


def status(*, stale: bool = False, remote: Remote = Remote()) -> None:
    """Members, leader, lag, and the dispatch cursor.

    Parameters
    ----------
    stale
        What the asked node believes; works without a leader.
    """
    found = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": "true" if stale else None})
    if remote.output == "json":
        emit_json(found)
        return
    members = found.pop("members")
    fields(found)
    print()
    table([{**member, "state": state_of(remote, member)} for member in members], _MEMBERS)


def state_of(remote: Remote, member: Mapping[str, Any]) -> str:
    """What a node says of itself: ready, drained, or what else keeps it from serving."""
    try:
        call_member(remote, member, "GET", "/readyz?verbose", needs="status", timeout_s=_READY_S)
    except (HadelayError, OSError) as error:
        checks = getattr(error, "extra", {}).get("checks", [])
        return ", ".join(check["name"] for check in checks if not check["ok"]) or "no answer"
    return "ready"


def transfer(to: str | None = None, /, *, remote: Remote = Remote()) -> None:
    """Hand leadership over, without a gap in the hand-outs.

    Parameters
    ----------
    to
        A node's name; without it, the follower that has most.
    """
    wish = {} if to is None else {"to": to}
    show(call(remote, "POST", "/v1/cluster:transfer-leader", wish, needs="leader", timeout_s=30), remote)


def drain(node: str, /, *, undo: bool = False, remote: Remote = Remote()) -> None:
    """Take a node out of traffic: another one leads, and it takes no publishes and polls until that is undone, or it
    restarts. Acks and reads are answered, and it goes on as a replica.

    Parameters
    ----------
    node
        Its name.
    undo
        Back into traffic.
    """
    wish = {"node": node, "undo": undo}
    show(call(remote, "POST", "/v1/cluster:drain", wish, needs="drained", timeout_s=30), remote)
