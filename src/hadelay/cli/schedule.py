"""`hadelay schedule`: commands set, get, list, pause, resume, trigger, backfill, preview, delete."""

import base64
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay.cli.output import (
    PAGE,
    Limit,
    Partial,
    Remote,
    Several,
    Stale,
    Yes,
    confirm,
    emit_bytes,
    emit_json,
    fields,
    note,
    show,
    show_pages,
    table,
)
from hadelay.cli.remote import call
from hadelay.client.paths import segment
from hadelay.errors import BadRequest, Forbidden

_COLUMNS = ("schedule", "topic", "state", "times", "next", "made", "missed")
_OCCURRENCES = ("at", "id", "state", "manual")

Name = Annotated[str, Parameter(help="Name of the schedule: at most 160 of A-Z a-z 0-9 . _ ~ -")]
Cron = Annotated[
    str | None,
    Parameter(
        help="Five fields (minute hour day month weekday), six with seconds in front, or @hourly, @daily, @weekly, "
        "@monthly, @yearly."
    ),
]
Every = Annotated[str | None, Parameter(help="Interval instead of --cron: 30s, 15m, 1d; counted from --start.")]
At = Annotated[tuple[str, ...], Parameter(help="Time instead of --cron. May be repeated.", show_default=False)]
Timezone = Annotated[str | None, Parameter(help="Time zone of --cron: Europe/Vienna. Default: UTC.")]
Start = Annotated[str | None, Parameter(help="No occurrence before this time.")]
End = Annotated[str | None, Parameter(help="No occurrence after this time.")]


def _path(name: str) -> str:
    return f"/v1/schedules/{segment(name)}"


def _present(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, ())}


def set_(
    name: Name, topic: str, body: str | None = None, /, *, cron: Cron = None, every: Every = None, at: At = (),
    timezone: Timezone = None, start: Start = None, end: End = None, max_occurrences: int | None = None,
    jitter: str | None = None, catch_up: Literal["one", "none", "all"] = "one", catch_up_window: str | None = None,
    overlap: Literal["allow", "skip", "wait"] = "allow", paused: bool = False,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"))] = None, content_type: str | None = None,
    tag: Several = (), meta: Several = (), ttl: str | None = None, group: str | None = None,
    version: int | None = None,    remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Create a schedule, or replace it as a whole. An identical schedule is not changed.

    Args:
        topic: Topic of the messages.
        body: Payload of each message. Default: empty.
        max_occurrences: Number of messages after which the schedule is finished.
        jitter: Each message is due up to so much later: 30s, at most 1h.
        catch_up: Occurrences missed in an outage: make the last one, none, or all.
        catch_up_window: Do not catch up older occurrences. Default: 7d.
        overlap: While the message before is pending: allow the next one, skip it, or let one wait for its end.
        paused: Create or leave the schedule paused. Without it, the state stays; a new schedule is active.
        file: Read the payload from a file.
        content_type: Content type of the messages.
        tag: Tag that consumers can filter by. May be repeated.
        meta: NAME=VALUE, stored with each message. May be repeated.
        ttl: Time after which a message expires, counted from its due time.
        group: Message group of the messages.
        version: Version that the schedule must have; 0: there must be none.
    """
    if body is not None and file is not None:
        raise BadRequest("give either a body or --file, not both")
    payload = body.encode() if body is not None else file.read_bytes() if file else b""
    pairs = [pair.partition("=") for pair in meta]
    if wrong := [pair for pair, (name_, equals, _) in zip(meta, pairs, strict=True) if not (name_ and equals)]:
        raise BadRequest(f"--meta {wrong[0]}: expected NAME=VALUE")
    document = _present(
        topic=topic, cron=cron, every=every, at=at, timezone=timezone, start=start, end=end,
        max_occurrences=max_occurrences, jitter=jitter, catch_up=catch_up, catch_up_window=catch_up_window,
        overlap=overlap, paused=paused or None, body_base64=base64.b64encode(payload).decode(),
        content_type=content_type or ("text/plain; charset=utf-8" if body else None), tags=tag,
        meta={name_: value for name_, _, value in pairs}, ttl=ttl, group=group,
    )  # fmt: skip
    found = call(remote, "PUT", _path(name), document, needs="schedule", query={"version": version})
    for warning in found.get("warnings") or () if remote.output != "json" else ():
        note(warning)
    show(found, remote)


def get(name: Name, /, *, body: bool = False, stale: Stale = False, remote: Remote = Remote()) -> None:
    """Show a schedule: its settings, its next occurrences, and the states of its last messages.

    Args:
        body: Print only the payload, as bytes; with -o json, add the payload.
    """
    found = call(remote, "GET", _path(name), needs="schedule", query={"body": body, "stale": stale})
    if remote.output == "json":
        emit_json(found)
    elif body:
        emit_bytes(base64.b64decode(found.get("body_base64") or ""))
    else:
        last = found.pop("last", None) or []
        fields(found)
        if last:
            table(last, _OCCURRENCES)


def list_(prefix: str = "", /, *, limit: Limit = 100, partial: Partial = False, remote: Remote = Remote()) -> None:
    """List schedules by name. As JSON, a line each.

    Args:
        prefix: Only schedules whose names begin so.
    """

    def page(size: int, cursor: str | None) -> Any:
        query = {"prefix": prefix, "limit": size, "cursor": cursor, "partial": partial}
        found = call(remote, "GET", "/v1/schedules", needs="schedules", query=query)
        return {**found, "messages": found["schedules"]}

    show_pages(page, limit, remote, _COLUMNS)


def pause(name: Name, /, *, remote: Remote = Remote()) -> None:
    """Make no occurrences until the schedule is resumed. Messages that are not due yet are cancelled."""
    show(call(remote, "POST", f"{_path(name)}:pause", {}, needs="schedule"), remote)


def resume(name: str | None = None, /, *, restored: bool = False, remote: Remote = Remote()) -> None:
    """Resume a schedule from now on; occurrences that fell into the pause are not made.

    Args:
        name: Name of the schedule.
        restored: Resume all schedules that are paused because the cluster was restored from a backup.
    """
    if (name is None) != restored:
        raise BadRequest("give the name of a schedule, or --restored")
    names = [name] if name is not None else list(_restored(remote))
    results = [call(remote, "POST", f"{_path(one)}:resume", {}, needs="schedule") for one in names]
    show(results if restored else results[0], remote, _COLUMNS)


def _restored(remote: Remote) -> Iterator[str]:
    cursor: str | None = None
    while True:
        query = {"limit": PAGE, "cursor": cursor}
        found = call(remote, "GET", "/v1/schedules", needs="schedules", query=query)
        yield from (schedule["schedule"] for schedule in found["schedules"] if schedule.get("restored"))
        cursor = found["cursor"]
        if cursor is None:
            return


def trigger(name: Name, /, *, idempotency_key: str | None = None, remote: Remote = Remote()) -> None:
    """Make one occurrence, due now.

    Args:
        idempotency_key: Key that makes a repetition of this command harmless. Default: a random key.
    """
    show(_keyed(remote, f"{_path(name)}:trigger", {}, "id", idempotency_key), remote)


def backfill(
    name: Name, /, *, start: Annotated[str, Parameter(name="--from")], to: str, idempotency_key: str | None = None,
    remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Make the past occurrences of a range due now, at most 1,000. Occurrences made before are made again.

    Args:
        start: Begin of the range: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
        to: End of the range, exclusive.
        idempotency_key: Key that makes a repetition of this command harmless. Default: a random key.
    """
    document = {"from": start, "to": to}
    results = _keyed(remote, f"{_path(name)}:backfill", document, "results", idempotency_key)["results"]
    show(results, remote, ("id", "deliver_at", "duplicate"))


def _keyed(remote: Remote, path: str, document: dict[str, Any], needs: str, key: str | None) -> Any:
    headers = {"Idempotency-Key": secrets.token_hex(16) if key is None else key}
    return call(remote, "POST", path, document, needs=needs, headers=headers)


def preview(
    *, cron: Cron = None, every: Every = None, at: At = (), timezone: Timezone = None, start: Start = None,
    end: End = None, count: int = 10, after: str | None = None, remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Show the next times of a pattern, with UTC offsets and what clock changes do to it. Creates nothing.

    Args:
        count: Number of times.
        after: Time after which to begin. Default: now.
    """
    document = _present(
        cron=cron, every=every, at=at, timezone=timezone, start=start, end=end, count=count, after=after
    )
    found = call(remote, "POST", "/v1/schedules:preview", document, needs="next")
    if remote.output == "json":
        emit_json(found)
        return
    table(found["next"], ("at", "local"))
    for text in (found["times"], *found["warnings"]):
        note(text)


def delete(name: Name, /, *, yes: Yes = False, remote: Remote = Remote()) -> None:
    """Delete a schedule. Messages that are not due yet are cancelled."""
    # Read the schedule first, so that a wrong name is an error: DELETE succeeds for any name. A token with the scope
    # publish, but not read, may delete schedules without this check.
    with suppress(Forbidden):
        call(remote, "GET", _path(name), needs="schedule")
    if not yes:
        confirm(f"deletes schedule {name} and cancels its messages that are not due yet")
    call(remote, "DELETE", _path(name))
    show({"schedule": name, "deleted": True}, remote)
