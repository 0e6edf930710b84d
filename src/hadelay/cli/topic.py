"""`hadelay topic`: commands list, get, set, pause, resume, purge, delete. Redrive is in cli/dead.py."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay.api.text import format_duration, parse_duration, parse_instant
from hadelay.cli.output import Remote, Several, Stale, Topic, Yes, confirm, option, show, takes
from hadelay.cli.remote import call
from hadelay.errors import BadRequest, Conflict, NotFound
from hadelay.model import SEPARATOR
from hadelay.paths import segment
from hadelay.settings.topic import DEFAULTS_OF, NEWEST_DEFAULTS, SETTINGS, Exponential, TopicSettings, shown_name
from hadelay.version import FIRST_LEVEL
from hadelay.words import span

_COLUMNS = ("topic", "scheduled", "ready", "leased", "dead", "overdue", "late_p99_ms", "bytes", "state")
#: Default length and number of the buckets of `topic due`.
_STEP, _BUCKETS = "1h", 24
_BAR = 30


def list_(*, prefix: str = "", remote: Remote = Remote()) -> None:
    """List all topics with their counts and states: paused, webhook.

    Args:
        prefix: Only topics whose names begin so.
    """
    topics = call(remote, "GET", "/v1/topics", needs="topics", query={"prefix": prefix or None})["topics"]
    show(topics if remote.output == "json" else [_row(topic) for topic in topics], remote, _COLUMNS)


def _row(topic: dict[str, Any]) -> dict[str, Any]:
    age_ms, lateness = topic["oldest_ready_age_ms"], topic["lateness"]
    state = [name for name in ("paused", "webhook") if topic.get(name)]
    state += [f"{topic[count]:,} {count}" for count in ("blocked", "dropped") if topic.get(count)]
    return {
        **topic,
        "overdue": None if age_ms is None else span(age_ms),
        "late_p99_ms": lateness and lateness["p99_ms"],
        "state": ", ".join(state) + (f": {topic['paused_reason']}" if topic.get("paused_reason") else ""),
    }


def subscriptions(topic: Topic, /, *, remote: Remote = Remote()) -> None:
    """List the subscriptions of a topic. `topic set orders~billing` creates one, and changes its settings."""
    found = call(remote, "GET", f"/v1/topics/{segment(topic)}/subscriptions", needs="topics")["topics"]
    show(found if remote.output == "json" else [_row(one) for one in found], remote, (*_COLUMNS, "tags", "any_tags"))


def due(
    topic: str | None = None, /, *, start: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None, step: str = _STEP, stale: Stale = False, remote: Remote = Remote(),
) -> None:  # fmt: skip
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
    query = {"from": str(begin_ms), "to": end, "step": step, "stale": stale}
    buckets = call(remote, "GET", path, needs="buckets", query=query)["buckets"]
    if remote.output != "json":
        most = max((bucket["count"] for bucket in buckets), default=1)
        buckets = [{**bucket, "": "█" * max(1, round(_BAR * bucket["count"] / most))} for bucket in buckets]
    show(buckets, remote, ("from", "count", ""))


def get(topic: Topic, /, *, remote: Remote = Remote()) -> None:
    """Show the configuration and counts of a topic."""
    show(call(remote, "GET", f"/v1/topics/{segment(topic)}", needs="scheduled"), remote)


#: Topic settings that have commands or options of their own.
_OTHERS = ("webhook", "alert", "paused", "paused_reason")
_DEFAULT = "default"


@takes(
    option(shown_name(name), str | None, None, known.help) for name, known in SETTINGS.items() if name not in _OTHERS
)
def set_(
    topic: str, /, *,
    webhook: Annotated[str | None, Parameter(help=SETTINGS["webhook"].help)] = None,
    webhook_secret: Several = (), webhook_timeout: str | None = None, webhook_header: Several = (),
    allow_per_message: bool = False, webhook_method: str | None = None,
    alert: Annotated[str | None, Parameter(help=SETTINGS["alert"].help)] = None,
    alert_secret: str | None = None,
    start: Annotated[Literal["now", "pending"], Parameter(name="--from")] = "now",
    remote: Remote = Remote(), **given: str | None,
) -> None:  # fmt: skip
    """Create a topic, or change the given settings; the word `default` resets a setting.

    Args:
        topic: Name of the topic: at most 128 of A-Z a-z 0-9 . _ -; or of a subscription of a topic: orders~billing
        webhook_secret: Secret that signs webhook calls: whsec_…. May be repeated, the newest first. Default: unchanged.
        webhook_timeout: Timeout of a webhook call: 15s.
        webhook_header: NAME=VALUE, an extra header of webhook calls. May be repeated.
        allow_per_message: Messages may set their own webhook URL.
        webhook_method: HTTP method of webhook calls: POST, PUT, PATCH, or without a body GET, DELETE. Default: POST.
        alert_secret: Secret that signs alerts. Default: unchanged.
        start: Messages that a new subscription gets: those published from now on, or also those pending in the topic.
    """
    wish: dict[str, Any] = {name: _setting(name, text) for name, text in given.items() if text is not None}
    hook: dict[str, Any] = {
        "secrets": list(webhook_secret), "timeout": webhook_timeout, "headers": dict(_pairs(webhook_header)),
        "allow_per_message": allow_per_message, "method": webhook_method,
    }  # fmt: skip
    for name, url, parts in (("webhook", webhook, hook), ("alert", alert, {"secret": alert_secret})):
        said = {part: value for part, value in parts.items() if value}
        if url is None and said:
            raise BadRequest(f"--{name} URL is missing: the other options of the {name} need it")
        if url is not None:
            wish[name] = None if url == _DEFAULT else {"url": url, **said}
    path = f"/v1/topics/{segment(topic)}"
    if start == "pending":
        of, _, own = topic.partition(SEPARATOR)
        if not own:
            raise BadRequest(f"--from pending: {topic} is no subscription; name one, such as {topic}~billing")
        path, wish["from"] = f"/v1/topics/{segment(of)}/subscriptions/{segment(own)}", start
    show(call(remote, "PUT", path, wish, needs="scheduled"), remote)


def _setting(name: str, text: str) -> Any:
    if text == _DEFAULT:
        return None
    if name == "backoff" and "=" in text:
        return {part: _setting(part, value) for part, value in _pairs(text.split(","))}
    if name in ("backoff", "tags", "any_tags"):
        return text.split(",")
    if name == "own_queue" and text in ("true", "false"):
        return text == "true"
    kind = _NUMBERS.get(name, "")
    try:
        return float(text) if "float" in kind else int(text) if "int" in kind else text
    except ValueError:
        raise BadRequest(f"--{name.replace('_', '-')} {text}: expected a number, or {_DEFAULT}") from None


#: Type of each topic setting that is not a duration; durations are text in the API.
_NUMBERS = {
    field.name: str(field.type) for field in (*fields(TopicSettings), *fields(Exponential)) if field.name[-3:] != "_ms"
}


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


def pause(topic: Topic, /, *, reason: str | None = None, remote: Remote = Remote()) -> None:
    """Stop handing out messages of a topic. Publishing and current leases continue.

    Args:
        reason: Reason of the pause, shown with the topic.
    """
    wish = {} if reason is None else {"reason": reason}
    show(call(remote, "POST", f"/v1/topics/{segment(topic)}:pause", wish, needs="scheduled"), remote)


def resume(topic: Topic, /, *, remote: Remote = Remote()) -> None:
    """Hand out messages of a paused topic again; overdue ones at the topic's catch-up rate, if set."""
    show(call(remote, "POST", f"/v1/topics/{segment(topic)}:resume", {}, needs="scheduled"), remote)


def purge(
    topic: Topic, /, *, state: tuple[Literal["scheduled", "ready", "dead"], ...] = (), yes: Yes = False,
    remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Cancel the pending messages of a topic that are not leased. Shows their number and asks for confirmation.

    Args:
        state: scheduled, ready, or dead. May be repeated. Default: scheduled and ready.
    """
    wish = {"states": state or ("scheduled", "ready")}
    if not yes:
        confirm(f"deletes {counted(remote, topic, wish['states'])}")
    show(call(remote, "POST", f"/v1/topics/{segment(topic)}:purge", wish, needs="states"), remote)


def counted(remote: Remote, topic: str, states: Iterable[str]) -> str:
    """Text with the number of a topic's messages in each of the given states. Blocked messages, which are scheduled or
    ready, too, are named apart."""
    found = call(remote, "GET", f"/v1/topics/{segment(topic)}", needs="scheduled")
    counts = [f"{found[state]:,} {state}" for state in states]
    waiting = {"scheduled", "ready"} & set(states)
    if waiting and found.get("blocked"):
        # The count of blocked messages does not tell how many of them are due.
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


def defaults(topics: tuple[str, ...] = (), /, *, convert: bool = False, remote: Remote = Remote()) -> None:
    """Show the defaults of topics, and the retries of failed messages.

    A topic keeps the defaults of the feature level at which it was created.

    Args:
        topics: Names of topics. Default: all topics.
        convert: Give topics with older defaults the newest ones. Explicit settings stay.
    """
    known = call(remote, "GET", "/v1/topics", needs="topics")["topics"]
    if unknown := set(topics) - {topic["topic"] for topic in known}:
        raise NotFound(f"there is no topic {', '.join(sorted(unknown))}")
    wanted = [topic for topic in known if not topics or topic["topic"] in topics]
    for n, topic in enumerate(wanted if convert else ()):
        if topic.get("defaults", FIRST_LEVEL) < NEWEST_DEFAULTS:
            path = f"/v1/topics/{segment(topic['topic'])}"
            wanted[n] = call(remote, "PUT", path, {"defaults": None}, needs="scheduled")
    show(list(map(_retries, wanted)), remote, ("topic", "defaults", "max_attempts", "backoff"))


def _retries(topic: dict[str, Any]) -> dict[str, Any]:
    """Attempts and backoff of a topic: explicit settings, else its defaults."""
    level = topic.get("defaults", FIRST_LEVEL)
    of = DEFAULTS_OF.get(level, DEFAULTS_OF[NEWEST_DEFAULTS])
    default = {"topic": topic["topic"], "defaults": level, "max_attempts": of.max_attempts, "backoff": _backoff(of)}
    return default | {name: topic[name] for name in default if name in topic}


def _backoff(settings: TopicSettings) -> Any:
    of = settings.backoff
    if not isinstance(of, Exponential):
        return list(of)
    least, most = format_duration(of.min_ms), format_duration(of.max_ms)
    return {"min": least, "max": most, "factor": of.factor, "jitter": of.jitter}
