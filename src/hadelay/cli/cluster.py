"""`hadelay cluster`: commands status, transfer, drain; `hadelay cluster members`: list, add, remove, replace."""

import hashlib
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hadelay.cli.output import Printing, Remote, Several, Stale, emit_json, fields, note, say, show, table
from hadelay.cli.remote import call, call_member
from hadelay.client.paths import segment
from hadelay.errors import Conflict, HadelayError, NotFound, OutcomeUnknown

_MEMBERS = ("name", "role", "state", "http", "raft", "lag", "version", "feature_level", "clock_skew_ms")
_TERMS = ("term", "leader", "since", "why", "overdue", "leases", "lag_ms")
_BACKUPS = ("at", "node", "bytes", "read_bytes", "outcome")
#: Number of the latest Raft terms that `cluster status` shows.
_SHOWN = 5
_LISTED = ("name", "role", "raft", "http", "lag", "version")
_TOKENS = ("id", "name", "scopes", "created_at", "expires_at", "expired", "aws")
_TRAIL = ("number", "at", "token", "action", "target", "outcome", "node")
#: Pause between two requests for the state of a new member, in seconds.
_LOOK_S = 0.5
#: Timeout of a readiness request, in seconds.
_READY_S = 3.0


def status(*, stale: Stale = False, remote: Remote = Remote()) -> None:
    """Show members, leader, lag, the dispatch cursor, why leadership changed, and the last backups."""
    found = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": stale})
    if remote.output == "json":
        emit_json(found)
        return
    members = [{**_in_words(member), "state": state_of(remote, member)} for member in found.pop("members")]
    terms = [{**term, **(term.pop("took_over", None) or {})} for term in found.pop("terms", [])[:_SHOWN]]
    backups = found.pop("backups", [])
    fields(found)
    for rows, columns in ((terms, _TERMS), (backups, _BACKUPS), (members, _MEMBERS)):
        if rows:
            say()
            table(rows, columns)


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
    document = {} if to is None else {"to": to}
    show(call(remote, "POST", "/v1/cluster:transfer-leader", document, needs="leader", timeout_s=30), remote)


def drain(node: str, /, *, undo: bool = False, remote: Remote = Remote()) -> None:
    """Take a node out of traffic until --undo or a restart: the node gives up leadership and refuses publishes and
    polls. It still answers acks and reads, and remains a replica.

    Args:
        node: Name of the node.
        undo: Put the node back into traffic.
    """
    document = {"node": node, "undo": undo}
    show(call(remote, "POST", "/v1/cluster:drain", document, needs="drained", timeout_s=30), remote)


def list_members(*, remote: Remote = Remote()) -> None:
    """List the members of the cluster. A learner receives all data, but does not vote yet."""
    members = _members(remote).values()
    if remote.output == "json":
        rows = [{name: member.get(name, False) for name in (*_LISTED, "drained")} for member in members]
        emit_json(rows)
    else:
        table(map(_in_words, members), _LISTED)


def _in_words(member: dict[str, Any]) -> dict[str, Any]:
    """The member as a row of a table, in which the role of a drained member ends in "drained"."""
    return {**member, "role": f"{member['role']}, drained"} if member.get("drained") else member


def add_member(name: str, raft: str, /, *, wait: bool = False, remote: Remote = Remote()) -> None:
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


def remove_member(name: str, /, *, remote: Remote = Remote()) -> None:
    """Remove a node from the running cluster. A leader first hands over leadership. Stop its process afterwards.

    Args:
        name: The node's node.name.
    """
    _remove(remote, name)
    _say_how_many(remote)


def replace_member(old: str, new: str, raft: str, /, *, remote: Remote = Remote()) -> None:
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
            member = {"role": "unknown"}
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
    with suppress(HadelayError, OSError):  # ignore errors of this request: the member change itself has succeeded
        voters = sum(member["role"] != "learner" for member in _members(remote).values())
        spare = (voters - 1) // 2
        loss = {0: "stops when one of them is lost", 1: "survives the loss of any one"}
        hint = f", as one of {voters - 1} does" if voters % 2 == 0 and voters > 2 else ""
        note(f"{voters} voters; the cluster {loss.get(spare, f'survives the loss of any {spare}')}{hint}")


def bootstrap(*, printing: Printing = Printing()) -> None:
    """Create the bootstrap token, which can only create the first token with the scope admin, and its hash.

    The command does not use the network. The hash goes into a node's configuration, so only operators who can change
    the configuration can create the first token.
    """
    # Same token format as in http/access.py, which the command line does not import.
    token = "hadelay_" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    show({"token": token, "security.bootstrap_token_hash": digest}, printing)
    note("Put the hash into the configuration of a node, under [security], and start the node. Then use the token:")
    note("  HADELAY_TOKEN=… hadelay token create admin --scope admin")


def create_token(
    name: str,
    /,
    *,
    scope: Several,
    lifetime: str | None = None,
    aws: bool = False,
    remote: Remote = Remote(),
) -> None:
    """Create a token and print it. The token cannot be shown again.

    Args:
        name: Name of the owner, for the audit trail and for refusals. Names need not be unique.
        scope: publish, consume, read or admin, for all topics; or limited to topics, as publish:orders-*. Repeatable.
        lifetime: Time until the token expires: 90d, 12h. Default: valid until revoked.
        aws: Also print a secret access key, with which AWS SDKs sign their requests. The access key id is the token's
            id.
    """
    document = {"name": name, "scopes": scope} | ({} if lifetime is None else {"lifetime": lifetime})
    made = call(remote, "POST", "/v1/tokens", document | ({"aws": True} if aws else {}), needs="token")
    show(made, remote)
    if aws:
        note(f"For AWS SDKs: AWS_ACCESS_KEY_ID is {made['id']}, AWS_SECRET_ACCESS_KEY is the aws_secret above.")


def list_tokens(*, remote: Remote = Remote()) -> None:
    """List tokens and their scopes."""
    show(call(remote, "GET", "/v1/tokens", needs="tokens")["tokens"], remote, _TOKENS)


def revoke_token(token_id: str, /, *, remote: Remote = Remote()) -> None:
    """Revoke a token: all requests with it are refused.

    Args:
        token_id: Id of the token, from `hadelay token list`.
    """
    call(remote, "DELETE", f"/v1/tokens/{segment(token_id)}")
    show({"id": token_id, "revoked": True}, remote)


def audit(*, after: int = 0, limit: int = 1_000, remote: Remote = Remote()) -> None:
    """Show the audit trail: requests that need the scope admin, with token and outcome.

    Args:
        after: Only entries with a higher number.
        limit: Limit of entries, oldest first.
    """
    query = {"after": after, "limit": limit}
    show(call(remote, "GET", "/v1/audit", needs="entries", query=query)["entries"], remote, _TRAIL)
