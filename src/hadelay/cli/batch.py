"""`hadelay batch`: commands open, get, list, seal, cancel, failures, watch."""

import base64
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay.cli.output import Limit, Remote, Several, Stale, progress, show, show_pages
from hadelay.cli.remote import call
from hadelay.client.paths import segment
from hadelay.errors import BadRequest

_COLUMNS = ("batch", "state", "on", "topic", "joined", "pending", "acked", "dead", "expired", "cancelled")
_FAILURES = ("at", "id", "outcome")
#: Pause between two requests for the state of a batch, in seconds.
_LOOK_S = 1.0

Key = Annotated[str, Parameter(help="Key of the batch: at most 128 of A-Z a-z 0-9 . _ ~ -")]


def _path(key: str) -> str:
    return f"/v1/batches/{segment(key)}"


def open_(
    key: Key,
    topic: str,
    body: str | None = None,
    /,
    *,
    on: Literal["complete", "success", "death"] = "complete",
    ttl: str | None = None,
    delay: str | None = None,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"))] = None,
    content_type: str | None = None,
    tag: Several = (),
    message_ttl: str | None = None,
    remote: Remote = Remote(),
) -> None:
    """Open a batch: messages join with `hadelay msg put --batch KEY`. An identical batch is not changed.

    Args:
        topic: Topic of the callback, which is published once all members are settled.
        body: Payload of the callback. Default: a JSON document with the counts of the batch.
        on: Publish the callback in any case; if every member was acked; or if a member died.
        ttl: An unfinished batch expires after this time, without a callback. Default: 7d.
        delay: Delay of the callback.
        file: Read the payload from a file.
        content_type: Content type of the callback.
        tag: Tag of the callback. May be repeated.
        message_ttl: Time after which the callback expires, counted from its due time.
    """
    if body is not None and file is not None:
        raise BadRequest("give either a body or --file, not both")
    data = body.encode() if body is not None else file.read_bytes() if file is not None else None
    kind = content_type or ("text/plain; charset=utf-8" if body is not None else None)
    given = {"topic": topic, "delay": delay, "ttl": message_ttl, "content_type": kind, "tags": list(tag) or None}
    given["body_base64"] = None if data is None else base64.b64encode(data).decode()
    callback = {name: value for name, value in given.items() if value is not None}
    document: dict[str, Any] = {"key": key, "on": on, "callback": callback} | ({"ttl": ttl} if ttl else {})
    show(call(remote, "POST", "/v1/batches", document, needs="batch"), remote)


def get(key: Key, /, *, stale: Stale = False, remote: Remote = Remote()) -> None:
    """Show a batch: its members by outcome, and its callback."""
    show(call(remote, "GET", _path(key), needs="batch", query={"stale": stale}), remote)


def list_(*, limit: Limit = 100, remote: Remote = Remote()) -> None:
    """List batches, the newest first. As JSON, a line each."""

    def page(size: int, cursor: str | None) -> Any:
        found = call(remote, "GET", "/v1/batches", needs="batches", query={"limit": size, "cursor": cursor})
        return {"messages": found["batches"], "cursor": found["cursor"]}

    show_pages(page, limit, remote, _COLUMNS)


def seal(key: Key, /, *, remote: Remote = Remote()) -> None:
    """Let no further message join a batch. The batch ends with its last member."""
    show(call(remote, "POST", f"{_path(key)}:seal", {}, needs="batch"), remote)


def cancel(key: Key, /, *, remote: Remote = Remote()) -> None:
    """Seal a batch, and begin to cancel its members that wait. Leased members go on."""
    show(call(remote, "POST", f"{_path(key)}:cancel", {}, needs="batch"), remote)


def failures(key: Key, /, *, limit: Limit = 100, remote: Remote = Remote()) -> None:
    """List the first 1,000 members of a batch that died, expired or were cancelled. As JSON, a line each."""

    def page(size: int, cursor: str | None) -> Any:
        query = {"limit": size, "cursor": cursor}
        found = call(remote, "GET", f"{_path(key)}/failures", needs="failures", query=query)
        return {"messages": found["failures"], "cursor": found["cursor"]}

    show_pages(page, limit, remote, _FAILURES)


def watch(key: Key, /, *, remote: Remote = Remote()) -> None:
    """Show a progress bar until a batch has ended, and then its counts. Ctrl-C leaves the batch running."""
    found = call(remote, "GET", _path(key), needs="batch")
    with progress(100) as update:
        while found.get("ended_at") is None:
            update(completed=100 * found["progress"])
            time.sleep(_LOOK_S)
            found = call(remote, "GET", _path(key), needs="batch")
    show(found, remote)
