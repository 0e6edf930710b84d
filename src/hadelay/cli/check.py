"""`hadelay check replicas`: every node's files, compared at one applied index."""

from __future__ import annotations

import time
from typing import Any

from hadelay.cli.output import Remote, emit_json, note, table
from hadelay.cli.remote import call
from hadelay.errors import OutcomeUnknown


def replicas(*, timeout: float = 30, remote: Remote | None = None) -> int:
    """Compare every node's hour files by length and checksum, at one applied index. Ends with 1 when they differ.

    While messages are published the nodes are asked again until their answers are of the same index.

    Parameters
    ----------
    timeout
        Seconds to keep trying for that.
    """
    remote = remote or Remote()
    members = call(remote, "GET", "/v1/cluster")["members"]
    nodes = {member["name"]: Remote(servers=member["http"], output=remote.output) for member in members}
    answers = _same_index(nodes, timeout)
    index = next(iter(answers.values()))["applied_index"]
    differences = _differences(answers)
    files = sum(3 for hour in next(iter(answers.values()))["hours"])
    if remote.output == "json":
        emit_json({"applied_index": index, "nodes": list(answers), "files": files, "differences": differences})
    elif differences:
        table(differences, ("hour", "file", *answers))
    note(f"{len(answers)} nodes at applied index {index}: " + _verdict(files, len(differences)))
    return 1 if differences else 0


def _verdict(files: int, different: int) -> str:
    return f"{different} of {files} files differ" if different else f"{files} files, all identical"


def _same_index(nodes: dict[str, Remote], timeout_s: float) -> dict[str, Any]:
    end = time.monotonic() + timeout_s
    while True:
        answers = {name: call(node, "GET", "/v1/hours", timeout_s=60) for name, node in nodes.items()}
        indexes = {name: answer["applied_index"] for name, answer in answers.items()}
        if len(set(indexes.values())) == 1:
            return answers
        if time.monotonic() > end:
            raise OutcomeUnknown(
                f"no common applied index within {timeout_s:.0f} s: {indexes}; publish less, or ask again"
            )


def _differences(answers: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per file that is not the same everywhere: what each node has of it."""
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
