"""`hadelay topic`: commands list, get, set, pause, resume, purge, delete. Redrive is in cli/dead.py."""

import time
from collections.abc import Iterable, Iterator, Sequence
from inspect import Parameter as Argument
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay.api.text import parse_duration, parse_instant
from hadelay.cli.output import (
    Partial,
    Remote,
    Several,
    Stale,
    Topic,
    Yes,
    confirm,
    note_missing,
    option,
    show,
    takes,
    with_shard,
)
from hadelay.cli.remote import call
from hadelay.client.paths import segment
from hadelay.errors import BadRequest, Conflict
from hadelay.model import SEPARATOR
from hadelay.settings.kinds import Kind, Part, shown_name
from hadelay.settings.topic import SETTINGS, Setting
from hadelay.words import span

_COLUMNS = ("topic", "scheduled", "ready", "leased", "retrying", "dead", "overdue", "late_p99_ms", "bytes", "state")
#: Default length and number of the buckets of `topic due`.
_STEP, _BUCKETS = "1h", 24
_BAR = 30


def list_(*, prefix: str = "", partial: Partial = False, remote: Remote = Remote()) -> None:
    """List all topics with their counts and states: paused, webhook.

    Args:
        prefix: Only topics whose names begin so.
    """
    query = {"prefix": prefix or None, "partial": partial}
    found = call(remote, "GET", "/v1/topics", needs="topics", query=query)
    topics = found["topics"]
    columns = with_shard(_COLUMNS, topics)
    show(topics if remote.output == "json" else [_row(topic) for topic in topics], remote, columns)
    note_missing(found)


def _row(topic: dict[str, Any]) -> dict[str, Any]:
    age_ms, lateness = topic["oldest_ready_age_ms"], topic["lateness"]
    state = [name for name in ("paused", "webhook") if topic.get(name)]
    state += [f"{topic[count]:,} {count}" for count in ("blocked", "dropped") if topic.get(count)]
    return {
        **topic,
        "retrying": topic.get("retrying", 0),
        "overdue": None if age_ms is None else span(age_ms),
        "late_p99_ms": lateness and lateness["p99_ms"],
        "state": ", ".join(state) + (f": {topic['paused_reason']}" if topic.get("paused_reason") else ""),
    }


def subscriptions(topic: Topic, /, *, remote: Remote = Remote()) -> None:
    """List the subscriptions of a topic. `topic set orders~billing` creates one, and changes its settings."""
    found = call(remote, "GET", f"/v1/topics/{segment(topic)}/subscriptions", needs="topics")["topics"]
    show(found if remote.output == "json" else [_row(one) for one in found], remote, (*_COLUMNS, "tags", "any_tags"))


def due(
    topic: str | None = None,
    /,
    *,
    start: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None,
    step: str = _STEP,
    stale: Stale = False,
    partial: Partial = False,
    remote: Remote = Remote(),
) -> None:
    """Count the messages that fall due per bucket of time, in one topic or in all.

    Args:
        topic: Name of the topic. Default: all topics.
        start: Earliest due time: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds. Default: now.
        to: End of the due times, exclusive. Default: 24 steps after the start.
        step: Length of a bucket: 1m, 1h, 1d. Buckets without messages are omitted.
    """
    path = "/v1/due" if topic is None else f"/v1/topics/{segment(topic)}/due"
    if not (step_ms := parse_duration("--step", step)):
        raise BadRequest(f"--step {step}: expected a length such as 1m, 1h or 1d")
    begin_ms = int(time.time() * 1000) // step_ms * step_ms if start is None else parse_instant("--from", start)
    end = str(begin_ms + _BUCKETS * step_ms) if to is None else to
    query = {"from": str(begin_ms), "to": end, "step": step, "stale": stale, "partial": partial}
    found = call(remote, "GET", path, needs="buckets", query=query)
    buckets = found["buckets"]
    if remote.output != "json":
        most = max((bucket["count"] for bucket in buckets), default=1)
        buckets = [{**bucket, "": "█" * max(1, round(_BAR * bucket["count"] / most))} for bucket in buckets]
    show(buckets, remote, ("from", "count", ""))
    note_missing(found)


def get(topic: Topic, /, *, remote: Remote = Remote()) -> None:
    """Show the configuration and counts of a topic."""
    show(call(remote, "GET", f"/v1/topics/{segment(topic)}", needs="scheduled"), remote)


_DEFAULT = "default"
#: Settings that `topic set` changes, by name of the option; each is a row of settings/topic.py.
_ROWS = {shown_name(name): row for name, row in SETTINGS.items() if row.option}
#: Kind of a field of a setting → type and default of its option; options of all other kinds take one text.
_PART_TYPES: dict[str, tuple[Any, Any]] = {"secrets": (Several, ()), "headers": (Several, ()), "flag": (bool, False)}


def _part_options(setting: str, row: Setting) -> dict[str, tuple[str, Part]]:
    """Options for the fields of a setting whose value is a map with a URL, besides the URL: name → (field, row)."""
    parts = row.kind.parts.items() if row.kind.name == "parts" else ()
    found = [(shown_name(name), part) for name, part in parts if part.stored and not part.required]
    return {part.option or f"{setting}_{name}": (name, part) for name, part in found}


def _options() -> Iterator[Argument]:
    for setting, row in _ROWS.items():
        yield option(setting, str | None, None, row.help)
        for name, (_, part) in _part_options(setting, row).items():
            yield option(name, *_PART_TYPES.get(part.kind.name, (str | None, None)), part.help)


@takes(_options())
def set_(
    topic: str,
    /,
    *,
    start: Annotated[Literal["now", "pending"], Parameter(name="--from")] = "now",
    remote: Remote = Remote(),
    **given: Any,
) -> None:
    """Create a topic, or change the given settings; the word `default` resets a setting.

    Args:
        topic: Name of the topic: at most 128 of A-Z a-z 0-9 . _ -; or of a subscription of a topic: orders~billing
        start: Messages that a new subscription gets: those published from now on, or also those pending in the topic.
    """
    document: dict[str, Any] = {}
    for setting, row in _ROWS.items():
        text, options = given.get(setting), _part_options(setting, row)
        parts = {part: _part(known.kind, given[name]) for name, (part, known) in options.items() if given.get(name)}
        if text is None and parts:
            raise BadRequest(f"--{setting} URL is missing: the other options of the {setting} need it")
        if text is not None:
            document[setting] = (
                _value(setting, row.kind, text) if not options or text == _DEFAULT else {"url": text, **parts}
            )
    path = f"/v1/topics/{segment(topic)}"
    if start == "pending":
        of, _, own = topic.partition(SEPARATOR)
        if not own:
            raise BadRequest(f"--from pending: {topic} is no subscription; name one, such as {topic}~billing")
        path, document["from"] = f"/v1/topics/{segment(of)}/subscriptions/{segment(own)}", start
    show(call(remote, "PUT", path, document, needs="scheduled"), remote)


def _part(kind: Kind, given: Any) -> Any:
    return dict(_pairs(given)) if kind.name == "headers" else list(given) if kind.name == "secrets" else given


def _value(name: str, kind: Kind, text: str) -> Any:
    """Value of a setting, or of a field of a setting, as the API takes it. name: name of the option, for errors."""
    if text == _DEFAULT:
        return None
    if kind.name == "backoff" and "=" in text:
        parts = {shown_name(part): known.kind for part, known in kind.parts.items()}
        return {
            part: _value(part, parts[part], said) if part in parts else said for part, said in _pairs(text.split(","))
        }
    if kind.name == "labels":
        return {label: said or None for label, said in _pairs(text.split(","))}
    if kind.name in ("backoff", "tags"):
        return text.split(",")
    if kind.name == "flag" and text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if kind.name == "number" else int(text) if kind.name == "integer" else text
    except ValueError:
        raise BadRequest(f"--{name.replace('_', '-')} {text}: expected a number, or {_DEFAULT}") from None


def _pairs(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadRequest(f"{text}: expected NAME=VALUE")
        yield name, value


def group(topic: Topic, group: str, /, *, remote: Remote = Remote()) -> None:
    """Show a message group: the messages whose turn it is, who has them since when, and how many wait behind them.

    Args:
        group: Name of the group.
    """
    found = call(remote, "GET", f"/v1/topics/{segment(topic)}/groups/{segment(group)}", needs="heads")
    show(found, remote)


def groups(topic: str = "", /, *, stale: Stale = False, remote: Remote = Remote()) -> None:
    """List message groups in which messages wait behind the first one, the longest wait first.

    Args:
        topic: Name of the topic. Default: all topics.
    """
    found = call(remote, "GET", "/v1/groups", needs="groups", query={"topic": topic or None, "stale": stale})
    columns = ("topic", "group", "blocked", "since", "message", "state", "attempt", "error")
    show(found if remote.output == "json" else found["groups"], remote, columns)


def pause(topic: Topic, /, *, reason: str | None = None, remote: Remote = Remote()) -> None:
    """Stop handing out messages of a topic. Publishing and current leases continue.

    Args:
        reason: Reason of the pause, shown with the topic.
    """
    document = {} if reason is None else {"reason": reason}
    show(call(remote, "POST", f"/v1/topics/{segment(topic)}:pause", document, needs="scheduled"), remote)


def resume(topic: Topic, /, *, remote: Remote = Remote()) -> None:
    """Hand out messages of a paused topic again; overdue ones at the topic's catch-up rate, if set."""
    show(call(remote, "POST", f"/v1/topics/{segment(topic)}:resume", {}, needs="scheduled"), remote)


#: Type of an option for states of messages; the help does not show its empty default.
_States = Annotated[tuple[Literal["scheduled", "ready", "dead"], ...], Parameter(show_default=False)]


def purge(
    topic: Topic,
    /,
    *,
    state: _States = (),
    yes: Yes = False,
    remote: Remote = Remote(),
) -> None:
    """Cancel the pending messages of a topic that are not leased. Shows their number and asks for confirmation.

    Args:
        state: scheduled, ready, or dead. May be repeated. Default: scheduled and ready.
    """
    document = {"states": state or ("scheduled", "ready")}
    if not yes:
        confirm(f"deletes {counted(remote, topic, document['states'])}")
    show(call(remote, "POST", f"/v1/topics/{segment(topic)}:purge", document, needs="states"), remote)


def counted(remote: Remote, topic: str, states: Iterable[str]) -> str:
    """Text with the number of a topic's messages in each of the given states. Blocked messages, which are also
    scheduled or ready, are counted separately."""
    found = call(remote, "GET", f"/v1/topics/{segment(topic)}", needs="scheduled")
    counts = [f"{found[state]:,} {state}" for state in states]
    waiting = {"scheduled", "ready"} & set(states)
    if waiting and found.get("blocked"):
        # Say "up to" for one state alone: the count of blocked messages does not tell how many of them are due.
        counts.append(f"{'up to ' if len(waiting) == 1 else ''}{found['blocked']:,} blocked")
    return f"{', '.join(counts)} messages of topic {topic}"


def delete(topic: Topic, /, *, force: bool = False, yes: Yes = False, remote: Remote = Remote()) -> None:
    """Delete a topic without pending messages. Shows the number of its messages and asks for confirmation.

    Args:
        force: Cancel pending messages.
    """
    if not yes:
        states = ("scheduled", "ready", "leased", "dead") if force else ("dead",)
        confirm(f"deletes topic {topic}, its settings, and {counted(remote, topic, states)}")
    try:
        call(remote, "DELETE", f"/v1/topics/{segment(topic)}", query={"force": force})
    except Conflict as error:
        raise error if force else Conflict(f"{error}: --force cancels them, and pauses schedules") from None
    show({"topic": topic, "deleted": True}, remote)
