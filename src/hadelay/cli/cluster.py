"""`hadelay cluster`: status, transfer, drain."""

from __future__ import annotations

from hadelay.cli.output import Remote, emit_json, fields, show, table
from hadelay.cli.remote import call

_MEMBERS = ("name", "role", "http", "raft", "applied_index", "lag", "version", "feature_level", "clock_skew_ms")


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
    table(members, _MEMBERS)


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
