"""`hadelay job`: commands cancel, reschedule, deliver, redrive, delete-dead, transfer, list, get, watch, stop."""

import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from hadelay.cli.output import Partial, Remote, Yes, confirm, note_missing, progress, show
from hadelay.cli.remote import call
from hadelay.errors import BadRequest

_COLUMNS = ("id", "state", "action", "topic", "progress", "done", "leased", "moved", "refused", "began_at", "by")
#: Pause between two requests for the state of a running job, in seconds.
_LOOK_S = 0.5
Pattern = Annotated[str, Parameter(help="Name of a topic, or a pattern such as 'orders-*'; '*' is all topics.")]
Retrying = Annotated[bool, Parameter(negative="", help="Only messages that wait after a failed attempt.")]
Number = Annotated[int, Parameter(help="Number of the job, as hadelay job list shows it.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of every command that begins a job."""

    tag: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    "Only messages with this tag. May be repeated: with all."
    key_prefix: Annotated[str, Parameter(show_default=False)] = ""
    "Only messages whose key begins with this text."
    group: Annotated[str, Parameter(show_default=False)] = ""
    "Only messages of this group."
    schedule: Annotated[str, Parameter(show_default=False)] = ""
    "Only messages that this schedule made."
    error: Annotated[str, Parameter(show_default=False)] = ""
    "Only dead letters, or messages that wait after a failed attempt, with this last error; a number is any number."
    id: Annotated[tuple[str, ...], Parameter(show_default=False)] = ()
    "Only the message with this id. May be repeated, up to 200 times."
    start: Annotated[str | None, Parameter(name="--from")] = None
    "Only messages due at this time or later: RFC 3339, or Unix ms."
    to: str | None = None
    "Only messages due before this time."
    rate: float | None = None
    "Limit of messages per second. Default: no limit."
    dry_run: bool = False
    "Count the messages, and change nothing."
    detach: bool = False
    "Begin the job and return; hadelay job watch shows how far it is."
    yes: Yes = False

    def document(self, action: str, topic: str, *, retrying: bool = False) -> dict[str, Any]:
        """Body of the requests that count a job's messages and that begin the job."""
        found: dict[str, Any] = {
            "topic": topic,
            "tags": list(self.tag),
            "key_prefix": self.key_prefix,
            "group": self.group,
        }
        found |= {"schedule": self.schedule, "ids": list(self.id), "error": self.error, "retrying": retrying}
        found |= {"from": self.start, "to": self.to}
        rate = {} if self.rate is None else {"rate": self.rate}
        return {"action": action, "filter": {name: value for name, value in found.items() if value}, **rate}


def cancel(topic: Pattern, /, *, retrying: Retrying = False, job: Job = Job(), remote: Remote = Remote()) -> None:
    """Cancel all waiting messages that a filter selects. Shows their number and asks for confirmation."""
    _run(remote, job, job.document("cancel", topic, retrying=retrying), "cancels")


def reschedule(
    topic: Pattern,
    /,
    *,
    shift: str | None = None,
    delay: str | None = None,
    deliver_at: str | None = None,
    retrying: Retrying = False,
    job: Job = Job(),
    remote: Remote = Remote(),
) -> None:
    """Make all waiting messages that a filter selects due at another time. Asks for confirmation.

    Args:
        shift: Move each due time by this: 1d later, or --shift=-90m for earlier times.
        delay: New due time of all, counted from the beginning of the job: 15m.
        deliver_at: New due time of all: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
    """
    given = {"shift": shift, "delay": delay, "deliver_at": deliver_at}
    change = {name: text for name, text in given.items() if text is not None}
    if len(change) != 1:
        raise BadRequest("give one of --shift, --delay and --deliver-at")
    _run(remote, job, job.document("reschedule", topic, retrying=retrying) | change, "reschedules")


def deliver(topic: Pattern, /, *, retrying: Retrying = False, job: Job = Job(), remote: Remote = Remote()) -> None:
    """Make all scheduled messages that a filter selects due now. Shows their number and asks for confirmation."""
    _run(remote, job, job.document("deliver_now", topic, retrying=retrying), "delivers")


def redrive(topic: Pattern, /, *, job: Job = Job(), remote: Remote = Remote()) -> None:
    """Make all dead letters that a filter selects due again; --from and --to mean the times of death."""
    _run(remote, job, job.document("redrive", topic), "redrives")


def delete_dead(topic: Pattern, /, *, job: Job = Job(), remote: Remote = Remote()) -> None:
    """Delete for good all dead letters that a filter selects. Shows their number and asks for confirmation.

    --from and --to mean the times of death."""
    _run(remote, job, job.document("delete_dead", topic), "deletes for good")


def transfer(
    topic: Pattern,
    /,
    *,
    into: str | None = None,
    retrying: Retrying = False,
    job: Job = Job(),
    remote: Remote = Remote(),
) -> None:
    """Move all waiting messages that a filter selects to another topic; or, if they came here as dead letters, back to
    the topics in which they died.

    Args:
        into: Topic that gets the messages. Default: each goes back to the topic whose dead_letter brought it here. With
            tokens, the default needs the scope publish for all topics.
    """
    change = {} if into is None else {"into": into}
    _run(remote, job, job.document("transfer", topic, retrying=retrying) | change, "moves")


def _run(remote: Remote, job: Job, document: dict[str, Any], verb: str) -> None:
    if job.dry_run or not job.yes:
        found = _counted(remote, document)
        if job.dry_run:
            show(found, remote)
            return
        confirm(f"{verb} {found['matched']:,} messages of {document['filter']['topic']}")
    begun = call(remote, "POST", "/v1/jobs", document | {"request_id": secrets.token_hex(16)}, needs="began_at")
    show(_row(begun if job.detach else _watched(remote, begun), remote), remote)


def _counted(remote: Remote, document: dict[str, Any]) -> dict[str, Any]:
    """Count the messages that a job would change, in several requests of about a second each; returns the sums."""
    found: dict[str, Any] = {"matched": 0, "leased": 0, "first": None, "last": None}
    cursor: dict[str, Any] = {}
    with progress(100) as update:
        while True:
            part = call(remote, "POST", "/v1/jobs:count", document | cursor, needs="matched")
            found["matched"] += part["matched"]
            found["leased"] += part["leased"]
            # Compare times as texts: in the API's answers all times are in UTC and equally long.
            found["first"] = min(filter(None, (found["first"], part["first"])), default=None)
            found["last"] = max(filter(None, (found["last"], part["last"])), default=None)
            update(completed=100 * part["progress"])
            if part["cursor"] is None:
                return found
            cursor = {"cursor": part["cursor"]}


def list_(*, partial: Partial = False, remote: Remote = Remote()) -> None:
    """List running jobs and the latest ended ones, oldest first."""
    found = call(remote, "GET", "/v1/jobs", needs="jobs", query={"partial": partial})
    show([_row(job, remote) for job in found["jobs"]], remote, _COLUMNS)
    note_missing(found)


def get(number: Number, /, *, remote: Remote = Remote()) -> None:
    """Show a job: its filter, how far it is, and what it did."""
    show(call(remote, "GET", f"/v1/jobs/{number}", needs="began_at"), remote)


def watch(number: Number, /, *, remote: Remote = Remote()) -> None:
    """Show a progress bar until a job has ended, and then what it did. Ctrl-C leaves the job running."""
    job = call(remote, "GET", f"/v1/jobs/{number}", needs="began_at")
    show(_row(_watched(remote, job), remote), remote)


def stop(number: Number, /, *, remote: Remote = Remote()) -> None:
    """Stop a job. Messages that the job changed stay changed."""
    show(call(remote, "DELETE", f"/v1/jobs/{number}", needs="began_at"), remote)


def _watched(remote: Remote, job: dict[str, Any]) -> dict[str, Any]:
    """Wait, with a progress bar, until the job has ended; returns the ended job."""
    with progress(100) as update:
        while job["ended_at"] is None:
            update(completed=100 * job["progress"])
            time.sleep(_LOOK_S)
            job = call(remote, "GET", f"/v1/jobs/{job['id']}", needs="began_at")
    return job


def _row(job: dict[str, Any], remote: Remote) -> dict[str, Any]:
    if remote.output == "json":
        return job
    return {**job, "topic": job["filter"]["topic"], "progress": f"{job['progress']:.0%}"}
