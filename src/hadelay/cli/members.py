"""`hadelay cluster members`: commands list, add, remove, replace."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from hadelay.cli.output import Remote, note, show
from hadelay.cli.remote import call
from hadelay.errors import Conflict, HadelayError, NotFound, OutcomeUnknown
from hadelay.paths import segment

_COLUMNS = ("name", "role", "raft", "http", "lag", "version")
_LOOK_S = 0.5


def list_(*, remote: Remote = Remote()) -> None:
    """List the members of the cluster. A learner receives all data, but does not vote yet."""
    members = [{name: member.get(name) for name in _COLUMNS} for member in _members(remote).values()]
    show(members, remote, _COLUMNS)


def add(name: str, raft: str, /, *, wait: bool = False, remote: Remote = Remote()) -> None:
    """Add a node to the running cluster. The node copies the data from the others, and votes once it has caught up.

    Start the node before or after this command: with an empty data directory, without --init, and with [raft.peers]
    that names the members and the new node.

    Args:
        name: The new node's node.name.
        raft: host:port of its node link, as the other nodes reach it.
        wait: Wait until the node votes.
    """
    _add(remote, name, raft)
    if wait:
        _wait(remote, name)
    _say_how_many(remote)


def remove(name: str, /, *, remote: Remote = Remote()) -> None:
    """Remove a node from the running cluster. A leader first hands over leadership. Stop its process afterwards.

    Args:
        name: The node's node.name.
    """
    _remove(remote, name)
    _say_how_many(remote)


def replace(old: str, new: str, raft: str, /, *, remote: Remote = Remote()) -> None:
    """Add a node, wait until it votes, and remove another node. Run the command again to continue after a failure.

    Args:
        old: Name of the node to remove; the node may be dead.
        new: Name of the node to add.
        raft: host:port of the new node's node link, as the other nodes reach it.
    """
    members = _members(remote)
    if new in members:
        if members[new]["raft"] != raft:
            raise Conflict(f"{new} is a member already, at {members[new]['raft']}")
    elif old not in members:
        raise NotFound(f"there is no node {old!r}; choose one of {', '.join(members)}")
    else:
        _add(remote, new, raft)
    _wait(remote, new)
    if old in members:
        _remove(remote, old)
    _say_how_many(remote)


def _members(remote: Remote) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in call(remote, "GET", "/v1/cluster", needs="members")["members"]}


def _add(remote: Remote, name: str, raft: str) -> None:
    call(remote, "POST", "/v1/cluster/members", {"name": name, "raft": raft}, needs="name", timeout_s=30)
    note(f"{name} is a learner now")


def _remove(remote: Remote, name: str) -> None:
    call(remote, "DELETE", f"/v1/cluster/members/{segment(name)}", timeout_s=30)
    note(f"{name} is removed: stop its process")


def _wait(remote: Remote, name: str) -> None:
    """Wait until the node votes, without a timeout: copying the data may take long."""
    said = ""
    while True:
        try:
            member = _members(remote).get(name)
        except (HadelayError, OSError) as error:
            if isinstance(error, HadelayError) and not error.retryable:
                raise
            member = {"role": "unknown", "lag": ""}
        if member is None:
            raise OutcomeUnknown(f"{name} was removed while this command waited for it")
        if member["role"] in ("leader", "follower"):
            note(f"{name} votes")
            return
        text = f"{name} is {member['role']}"
        if text != said:
            note(f"{text}: waiting until it votes")
            said = text
        time.sleep(_LOOK_S)


def _say_how_many(remote: Remote) -> None:
    with suppress(HadelayError, OSError):  # the change is done, and the asked node may be the removed one
        voters = sum(member["role"] != "learner" for member in _members(remote).values())
        spare = (voters - 1) // 2
        loss = {0: "stops when one of them is lost", 1: "survives the loss of any one"}
        hint = f", as one of {voters - 1} does" if voters % 2 == 0 and voters > 2 else ""
        note(f"{voters} voters; the cluster {loss.get(spare, f'survives the loss of any {spare}')}{hint}")
