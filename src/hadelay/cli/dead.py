"""`hadelay dead`: commands list, redrive, export, purge; `hadelay topic redrive`."""

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from hadelay.cli.output import PAGE, Limit, Remote, Topic, Yes, confirm, json_line, note, progress, show, show_pages
from hadelay.cli.remote import call
from hadelay.cli.topic import counted
from hadelay.client.paths import segment
from hadelay.errors import BadRequest

_COLUMNS = ("id", "died_at", "attempt", "reason", "key", "tags", "size")
#: Page size of an export, in messages: small, because a payload may have 1 MiB.
_EXPORTED = 100


def list_(topic: Topic, /, *, limit: Limit = 100, remote: Remote = Remote()) -> None:
    """List the dead letters of a topic by time of death, with the reason of the last failure. As JSON, a line each."""
    show_pages(lambda size, cursor: _page(remote, topic, size, cursor), limit, remote, _COLUMNS, _with_reason)


def _with_reason(letter: dict[str, Any]) -> dict[str, Any]:
    last = letter["errors"][-1] if letter["errors"] else {}
    return {**letter, "reason": last.get("reason") or last.get("event")}


def _page(remote: Remote, topic: str, limit: int, cursor: str | None, body: bool = False) -> Any:
    query = {"limit": limit, "cursor": cursor, "body": body}
    return call(remote, "GET", f"/v1/topics/{segment(topic)}/dead", needs="messages", query=query, timeout_s=60)


def redrive(topic: Topic, /, *ids: str, remote: Remote = Remote()) -> int:
    """Make dead letters due again, with attempts counted from 0. Exit code 1 if an id is not a dead letter.

    Args:
        ids: Ids of dead letters. `hadelay topic redrive` redrives all of a topic.
    """
    if not ids:
        raise BadRequest("give at least one id; `hadelay topic redrive` redrives all of a topic")
    results: list[dict[str, Any]] = []
    for at in range(0, len(ids), PAGE):
        results += _redrive(remote, topic, {"ids": ids[at : at + PAGE]}, "results")["results"]
    show(results, remote, ("id", "outcome"))
    return 0 if all(result["outcome"] == "redriven" for result in results) else 1


def redrive_all(topic: Topic, /, *, rate: float | None = None, remote: Remote = Remote()) -> None:
    """Start to make all dead letters of a topic due again, and print their number.

    Args:
        rate: Messages per second. Default: no limit.
    """
    document: dict[str, Any] = {"all": True} | ({} if rate is None else {"rate": rate})
    show(_redrive(remote, topic, document, "redriving"), remote)


def _redrive(remote: Remote, topic: str, document: dict[str, Any], needs: str) -> Any:
    return call(remote, "POST", f"/v1/topics/{segment(topic)}/dead:redrive", document, needs=needs)


def purge(topic: Topic, /, *, yes: Yes = False, remote: Remote = Remote()) -> None:
    """Delete the dead letters that a topic has now. Shows their number and asks for confirmation."""
    if not yes:
        confirm(f"deletes {counted(remote, topic, ('dead',))}")
    call(remote, "DELETE", f"/v1/topics/{segment(topic)}/dead")
    show({"topic": topic, "purged": ["dead"]}, remote)


def export(topic: Topic, file: Path | None = None, /, *, restart: bool = False, remote: Remote = Remote()) -> None:
    """Write the dead letters of a topic as JSON, a line each, with payloads and errors.

    Run the command again to continue an interrupted export to a file. FILE.cursor keeps the position until the export
    is complete.

    Args:
        file: Target file. Default: standard output.
        restart: Start over, and overwrite FILE.
    """
    if file is None:
        _export(remote, topic, sys.stdout.buffer, None, None, 0)
        return
    mark = file.with_name(file.name + ".cursor")
    cursor, size, done = _resume(mark, topic, restart, file)
    with open(file, "r+b" if size else "wb") as out:
        # Cut off the dead letters written to the file after the last saved cursor: they are fetched again.
        out.truncate(size)
        out.seek(size)
        count = _export(remote, topic, out, mark, cursor, done)
    mark.unlink(missing_ok=True)
    note(f"{count:,} dead letters in {file}")


def _resume(mark: Path, topic: str, restart: bool, file: Path) -> tuple[str | None, int, int]:
    """State of an interrupted export: (cursor, complete bytes of FILE, number of dead letters in those bytes)."""
    if restart or not mark.exists():
        if file.exists() and not restart:
            raise BadRequest(f"{file} exists, but not from an interrupted export: --restart overwrites it")
        return None, 0, 0
    try:
        known = json.loads(mark.read_text())
        of, cursor, size, count = known["topic"], known["cursor"], known["bytes"], known["count"]
    except (ValueError, KeyError, TypeError):
        raise BadRequest(f"{mark} cannot be read: --restart exports {file} from the beginning") from None
    if of != topic:
        raise BadRequest(f"{file} is an export of topic {of}: use another file, or --restart")
    if not file.exists() or file.stat().st_size < size:
        raise BadRequest(f"{file} is shorter than {mark} says: --restart exports it from the beginning")
    return cursor, size, count


def _export(remote: Remote, topic: str, out: BinaryIO, mark: Path | None, cursor: str | None, done: int) -> int:
    total = call(remote, "GET", f"/v1/topics/{segment(topic)}", needs="dead")["dead"]
    with progress(total, done) as update:
        while True:
            page = _page(remote, topic, _EXPORTED, cursor, body=True)
            for letter in page["messages"]:
                out.write(json_line(letter))
            out.flush()
            done += len(page["messages"])
            cursor = page["cursor"]
            update(completed=done, total=max(total, done))
            if cursor is None:
                return done
            if mark is not None:
                os.fsync(out.fileno())
                known = {"topic": topic, "cursor": cursor, "bytes": out.tell(), "count": done}
                part = mark.with_name(mark.name + ".part")
                part.write_text(json.dumps(known))
                os.replace(part, mark)
