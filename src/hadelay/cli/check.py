"""`hadelay check`: compare the nodes' files with each other, or with their checksums; check whether a node may stop."""

import time
from typing import Any

from hadelay.cli.output import Remote, emit_json, note, show, table
from hadelay.cli.remote import call, call_member
from hadelay.cli.shards import Shards
from hadelay.errors import Conflict, HadelayError, NotFound, OutcomeUnknown


def replicas(*, timeout: float = 30, remote: Remote = Remote()) -> int:
    """Compare the lengths and checksums of all nodes' hour files at one applied index. Exit code 1 if they differ.

    Checksums are those of the written bytes; `hadelay inspect --verify FILE` finds later changes on a disk. The command
    repeats its requests until all nodes answer at the same index.

    Args:
        timeout: Limit of these attempts, in seconds.
    """
    answers = _same_index(timeout, remote)
    first = next(iter(answers.values()))
    index, files, differences = first["applied_index"], 3 * len(first["hours"]), _differences(answers)
    if remote.output == "json":
        emit_json({"applied_index": index, "nodes": list(answers), "files": files, "differences": differences})
    elif differences:
        table(differences, ("hour", "file", *answers))
    verdict = f"{len(differences)} of {files} files differ" if differences else f"{files} files, all identical"
    note(f"{len(answers)} nodes at applied index {index}: {verdict}")
    return 1 if differences else 0


def _same_index(timeout_s: float, remote: Remote) -> dict[str, Any]:
    """Answers of all members to GET /v1/hours by member name, all at the same applied index."""
    end = time.monotonic() + timeout_s
    while True:
        members = call(remote, "GET", "/v1/cluster", needs="members")["members"]
        # Try again if a member's address is unknown: a restarted node announces its address within a moment.
        if silent := [member["name"] for member in members if not member["http"]]:
            problem = f"the address of {', '.join(silent)} is unknown: check that it runs and is linked"
        else:
            answers = {
                member["name"]: call_member(remote, member, "GET", "/v1/hours", needs="hours", timeout_s=60)
                for member in members
            }
            indexes = {name: answer["applied_index"] for name, answer in answers.items()}
            if len(set(indexes.values())) == 1:
                return answers
            problem = f"no common applied index within {timeout_s:.0f} s: {indexes}; publish less, or raise --timeout"
        if time.monotonic() > end:
            raise OutcomeUnknown(problem)
        time.sleep(0.1 if silent else 0)


def _differences(answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows for the files that differ between nodes: length and checksum of the file on each node."""
    seen: dict[tuple[str, str], dict[str, str]] = {}
    for name, answer in answers.items():
        for hour in answer["hours"]:
            for kind in ("log", "idx", "dsp"):
                part = hour[kind]
                seen.setdefault((hour["hour"], kind), {})[name] = f"{part['bytes']} bytes, {part['crc32c']}"
    return [
        {"hour": hour, "file": kind, **{name: has.get(name, "missing") for name in answers}}
        for (hour, kind), has in sorted(seen.items())
        if len({has.get(name) for name in answers}) > 1
    ]


def files(*, now: bool = False, timeout: float = 3_600, remote: Remote = Remote()) -> int:
    """Show whether each node's files are sound. Exit code 1 unless all files of all nodes are.

    Each node compares the bytes of all its files with their checksums, again and again, and repairs damaged entries
    from other nodes. `hadelay check replicas` compares the nodes' checksums with each other, and reads no file.

    Args:
        now: Let each node compare all of its files now, at up to 32 MiB per second, and wait for it.
        timeout: Limit of this wait, in seconds.
    """
    members = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": True})["members"]
    end, begun = time.monotonic() + timeout, {} if not now else _patrols(members, remote, "POST")
    while True:
        found = _patrols(members, remote, "GET")
        if begun:  # a node that has restarted meanwhile has forgotten the request: send it again
            asked = {name: report.get("wanted", 0) for name, report in begun.items()}
            anew = [one for one in members if found[one["name"]].get("wanted", 0) < asked[one["name"]]]
            begun |= _patrols(anew, remote, "POST")
        left = [name for name, report in begun.items() if found[name].get("rounds", 0) < report.get("wanted", 0)]
        if not left:
            break
        if time.monotonic() > end:
            raise OutcomeUnknown(f"{', '.join(left)}: not all files were read within {timeout:.0f} s; raise --timeout")
        time.sleep(0.5)
    for report in found.values():
        report["sound"] = not report["problem"] and report["checked_at"] is not None and not report["damaged"]
    show(list(found.values()), remote, ("node", "sound", "checked_at", "repaired", "damaged", "problem"))
    return 0 if all(report["sound"] for report in found.values()) else 1


def _patrols(members: list[dict[str, Any]], remote: Remote, method: str) -> dict[str, dict[str, Any]]:
    """Reports of the members' patrols (checks of their files) by member name. `problem`: why a report is missing."""
    found = {}
    for member in members:
        try:
            found[member["name"]] = {**call_member(remote, member, method, "/v1/patrol", needs="rounds"), "problem": ""}
        except (HadelayError, OSError) as error:
            found[member["name"]] = {"node": member["name"], "checked_at": None, "damaged": [], "problem": str(error)}
    return found


def quorum(node: str | None = None, /, *, remote: Remote = Remote()) -> int:
    """Check whether a node may stop now, in each shard that has a node of this name. Exit code 1 if not.

    The command asks all other voters. A majority of all voters must see, without this node, a majority of voters that
    are linked, admitted and not far behind.

    Args:
        node: Name of the node. Default: check each node; exit code 1 if none may stop.
    """
    shards = Shards.named_by(remote, {}, stale=True).at
    rows, names = [], dict[str, bool]()
    for shard, at in sorted(shards.items()):
        members = call(at, "GET", "/v1/cluster", needs="members", query={"stale": True})["members"]
        for name in [member["name"] for member in members]:
            if node in (None, name):
                rows.append(({"shard": shard} if len(shards) > 1 else {}) | _without(name, members, at))
            names[name] = names.get(name, True) and (node not in (None, name) or rows[-1]["may_stop"])
    if node is not None and node not in names:
        raise NotFound(f"there is no node {node!r}; choose one of {', '.join(names)}")
    columns = ("node", "may_stop", "say_yes", "needed", "others")
    show(rows, remote, ("shard", *columns) if len(shards) > 1 else columns)
    return 0 if any(may_stop for name, may_stop in names.items() if node in (None, name)) else 1


def _without(name: str, members: list[dict[str, Any]], remote: Remote) -> dict[str, Any]:
    said = {}
    voters = [member for member in members if member["role"] != "learner"]
    for member in voters:
        if member["name"] != name:
            said[member["name"]] = _asked(name, member, remote)
    needed = len(voters) // 2 + 1
    yes = sum(answer == "yes" for answer in said.values())
    return {"node": name, "may_stop": yes >= needed, "say_yes": yes, "needed": needed, "others": said}


def _asked(name: str, member: dict[str, Any], remote: Remote) -> str:
    query = {"without": name}
    try:
        call_member(remote, member, "GET", "/v1/health/quorum", needs="needed", query=query, timeout_s=5)
    except Conflict as error:
        return f"no: sees {', '.join(error.extra['left']) or 'none'}"
    except (HadelayError, OSError) as error:
        return f"no answer: {error}"
    return "yes"
