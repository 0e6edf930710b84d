"""Settings of topics and their defaults. HTTP, command line, reference and validation read one table, `TopicSettings`;
a test compares the client's typed dict with it.

A topic's `config` is the map of the settings that were set, replicated unchanged (TOPIC_PUT); `TopicSettings` adds the
defaults. Times are in ms, rates in messages per second. Apply always validates every value again.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from hadelay.model import MAX_RATE
from hadelay.settings.cluster import Settings
from hadelay.settings.urls import origin_of, url_problem
from hadelay.version import FIRST_LEVEL, RETRY_DEFAULTS

_SECOND, _HOUR, _DAY = 1_000, 3_600_000, 86_400_000
MAX_BACKOFF_STEPS = 32
#: Limit of signing secrets: the newest, and older ones that receivers may still use.
MAX_SECRETS = 4
MAX_HEADERS = 16
#: Limits of group_rate: a new leader waits for an interval, and the clock counts milliseconds.
MIN_GROUP_RATE, MAX_GROUP_RATE = 0.01, 1000
#: Limit of the header fields that a message has for its own webhook calls, in bytes of names and values.
MAX_FORWARD = 2 << 10
#: HTTP methods of webhook calls, and those of them that send no body.
METHODS, BODILESS = ("POST", "PUT", "PATCH", "GET", "DELETE"), ("GET", "DELETE")
#: Limits of the tag filter of a subscription: number of tags in each of its lists, and bytes of a tag.
MAX_FILTER_TAGS, MAX_TAG_BYTES = 16, 256
TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
#: Headers that the webhook sender, or HTTP itself, sets.
_OWN_HEADERS = re.compile(r"(webhook-|ce-)|(host|content-length|content-type|transfer-encoding|connection|te|upgrade)$")


#: Function that checks a setting: returns "" for a valid value, else the error text, a description of valid values.
Check = Callable[[Any, Settings], str]


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential backoff: retry n (from 1) waits min × factor^(n−1), at most max, plus or minus a random part of up to
    `jitter` of this wait."""

    min_ms: int
    max_ms: int
    factor: float = 2.0
    jitter: float = 0.1
    #: Jitter lengthens waits; False: shortens waits, for topics with the defaults of the first feature level.
    longer: bool = False


@dataclass(frozen=True, slots=True)
class Webhook:
    url: str
    secrets: tuple[str, ...] = ()
    timeout_ms: int = 15 * _SECOND
    headers: tuple[tuple[str, str], ...] = ()
    #: Messages may set their own URL.
    allow_per_message: bool = False
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Alert:
    url: str
    secret: str = ""


def _must(fine: Callable[[Any, Settings], bool], expected: str) -> Check:
    """Make a Check from a predicate. expected: error text; {!r} in the text stands for the invalid value."""
    return lambda value, settings: "" if fine(value, settings) else expected.format(value)


def _integer(least: int, most: int, what: str) -> Check:
    return _must(
        lambda value, _: type(value) is int and least <= value <= most, f"{what}, {least} to {most}, not {{!r}}"
    )


def _duration(least_ms: int, most: int | str) -> Check:
    """Make a Check of a duration in ms. most: the maximum in ms, or the name of a limit in Settings."""

    def check(value: Any, settings: Settings) -> str:
        most_ms = most if isinstance(most, int) else getattr(settings, most)
        fine = type(value) is int and least_ms <= value <= most_ms
        return "" if fine else f"{value!r} ms; at least {least_ms} ms and at most {most_ms} ms"

    return check


_rate = _must(
    lambda value, _: type(value) in (int, float) and math.isfinite(value) and 0 < value <= MAX_RATE,
    f"messages per second, more than 0 and at most {MAX_RATE}, not {{!r}}; to stop a topic, pause it",
)
_group_rate = _must(
    lambda value, _: type(value) in (int, float) and MIN_GROUP_RATE <= value <= MAX_GROUP_RATE,
    f"messages of a group per second, {MIN_GROUP_RATE} to {MAX_GROUP_RATE}, not {{!r}}",
)
_flag = _must(lambda value, _: type(value) is bool, "true or false, not {!r}")
_sync = _must(lambda value, _: value in ("commit", "interval"), "commit or interval, not {!r}")
_defaults = _must(
    lambda value, _: type(value) is int and value in DEFAULTS_OF,
    f"{FIRST_LEVEL} or {RETRY_DEFAULTS}, a feature level that changed the defaults of topics, not {{!r}}",
)
_reason = _must(lambda value, _: isinstance(value, str) and len(value.encode()) <= 256, "text of at most 256 bytes")
_dead_letter = _must(
    lambda value, _: isinstance(value, str) and TOPIC_NAME.fullmatch(value) is not None,
    '"keep", or the name of another topic (A-Z a-z 0-9 . _ -), not {!r}',
)


_topic = _must(
    lambda value, _: isinstance(value, str) and TOPIC_NAME.fullmatch(value) is not None,
    "the name of a topic (A-Z a-z 0-9 . _ -), not {!r}",
)


def _tags(value: Any, settings: Settings) -> str:
    if not isinstance(value, list) or len(value) > MAX_FILTER_TAGS:
        return f"a list of at most {MAX_FILTER_TAGS} tags"
    fine = all(isinstance(tag, str) and 0 < len(tag.encode(errors="surrogatepass")) <= MAX_TAG_BYTES for tag in value)
    return "" if fine else f"each tag is text of 1 to {MAX_TAG_BYTES} bytes"


def _backoff(value: Any, settings: Settings) -> str:
    longest = settings.max_delay_ms
    if isinstance(value, list):
        if not 0 < len(value) <= MAX_BACKOFF_STEPS:
            return f"1 to {MAX_BACKOFF_STEPS} durations; the last one repeats"
        fine = all(type(ms) is int and 0 <= ms <= longest for ms in value)
        return "" if fine else f"each wait is at least 0 and at most {longest} ms"
    if not isinstance(value, dict):
        return "a list of durations, or {min, max, factor, jitter}"
    if not {"min_ms", "max_ms"} <= value.keys() <= {"min_ms", "max_ms", "factor", "jitter"}:
        return "min and max, optionally factor and jitter"
    least, most = value["min_ms"], value["max_ms"]
    if not (type(least) is type(most) is int and 0 < least <= most <= longest):
        return f"0 < min ≤ max ≤ {longest} ms, not {least!r} and {most!r}"
    factor, jitter = value.get("factor", 2.0), value.get("jitter", 0.1)
    if type(factor) not in (int, float) or not 1 <= factor <= 100:
        return f"factor: 1 to 100, not {factor!r}"
    if type(jitter) not in (int, float) or not 0 <= jitter <= 1:
        return f"jitter: the random part of a wait, 0 to 1, not {jitter!r}"
    return ""


#: Text that replaces the masked characters of a secret.
MASK = "****"


def mask_secret(secret: str) -> str:
    """A secret with only its last characters: enough to recognise it, useless for signing."""
    return f"{secret[:6] if secret.startswith('whsec_') else ''}{MASK}{secret[-4:]}"


def mask_header(value: str) -> str:
    """A masked header value, which may be a secret (Authorization); a long value keeps its last 4 characters."""
    return MASK + (value[-4:] if len(value) >= 16 else "")


def _part(known: dict[str, Check]) -> Check:
    def check(value: Any, settings: Settings) -> str:
        if not isinstance(value, dict):
            return f"a map of {', '.join(shown_name(name) for name in known)}"
        if "url" not in value:
            return "url is missing"
        for name, one in value.items():
            if name not in known:
                return f"unknown field {name!r}"
            if wrong := known[name](one, settings):
                return f"{shown_name(name)}: {wrong}"
        return ""

    return check


def _secrets(value: Any, settings: Settings) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_SECRETS:
        return f"a list of 1 to {MAX_SECRETS} secrets, the newest first"
    return next((wrong for secret in value if (wrong := _one_secret(secret, settings))), "")


def _one_secret(value: Any, settings: Settings) -> str:
    if isinstance(value, str) and MASK in value:
        return "the secret is masked, as GET shows it: leave secrets out to keep them"
    fine = isinstance(value, str) and 16 <= len(value) <= 256 and value.isascii() and value.isprintable()
    return "" if fine else "a secret is 16 to 256 printable characters"


def _headers(value: Any, settings: Settings) -> str:
    if not isinstance(value, dict) or len(value) > MAX_HEADERS:
        return f"a map of at most {MAX_HEADERS} names and values"
    return fields_problem(value)


def fields_problem(fields: dict[Any, Any]) -> str:
    """Error text for header fields that webhook calls cannot carry; "" for valid fields."""
    for name, text in fields.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            return f"{name!r} is not a valid header name"
        if _OWN_HEADERS.match(name.lower()):
            return f"{name} is set by hadelay itself: leave it out"
        if not isinstance(text, str) or len(text) > 1_024 or not text.isascii() or not (text.isprintable() or not text):
            return f"{name}: at most 1024 printable ASCII characters"
    return ""


WEBHOOK: dict[str, Check] = {
    "url": url_problem, "secrets": _secrets, "timeout_ms": _duration(100, 600 * _SECOND), "headers": _headers,
    "allow_per_message": _flag,
    "method": _must(lambda value, _: value in METHODS, f"{', '.join(METHODS)}, not {{!r}}"),
}  # fmt: skip
ALERT: dict[str, Check] = {"url": url_problem, "secret": _one_secret}


class Setting(NamedTuple):
    #: Description of the setting, for the command line and the reference.
    help: str
    check: Check


def _set(default: Any, help: str, check: Check) -> Any:
    return field(default=default, metadata={"setting": Setting(help, check)})


_HELP_ATTEMPTS = (
    "Attempts before a message becomes a dead letter; 0: no limit. Default of topics created at feature level 3 or "
    "later: 84."
)
_HELP_BACKOFF = (
    "Waits before retry 1, 2, …: 1s,10s,5m; the last one repeats. Or exponential: min=1s,max=1h,factor=2,jitter=0.1, "
    "the default of topics created at feature level 3 or later: 84 attempts then last at least 72 hours."
)
_HELP_DEFAULTS = "Feature level of the topic's defaults: 3, or 1 for older topics."
_HELP_TAGS = "Subscription: tags that a message must all have."
_HELP_ANY_TAGS = "Subscription: tags of which a message must have one at least."
_HELP_ON_FULL = "Subscription at its max_messages or max_bytes: refuse publishes, or drop its copies and count them."
_HELP_OWN_QUEUE = "With subscriptions: false keeps in the topic's own queue only what no subscription gets."
_HELP_EXPIRES = (
    "Delete the topic some time after it was unused for this long: no message (dead ones too), consumer, webhook, "
    "schedule or subscription, and no other topic's dead_letter or callbacks."
)
_HELP_SUCCESS = (
    "Topic for a message about each acked message: the answer of the webhook's receiver, or the ack's result."
)
_HELP_FAILURE = "Topic for a message about each message that becomes a dead letter, with the errors of its attempts."
_HELP_GROUP_RATE = (
    "Limit per second of messages of one group that are handed out, evenly spaced: 1: one per second. Needs "
    "group_concurrency."
)
_HELP_WEBHOOK = "URL that messages are pushed to. All settings of a webhook are replaced together."


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """All settings of a topic; the API's names have no `_ms`. None: no limit, unless a comment says otherwise."""

    #: None: the node's `http.default_lease_ms`.
    lease_ms: int | None = _set(None, "Default lease of the topic's consumers: 30s, 5m.", _duration(1, "max_lease_ms"))
    max_attempts: int = _set(0, _HELP_ATTEMPTS, _integer(0, 65_534, "hand-outs, 0 for no limit"))
    #: Empty: retry at once.
    backoff: tuple[int, ...] | Exponential = _set((), _HELP_BACKOFF, _backoff)
    dead_letter: str = _set("keep", "keep, or the topic that dead letters move to.", _dead_letter)
    dead_retention_ms: int = _set(30 * _DAY, "Retention of dead letters.", _duration(_HOUR, 3_650 * _DAY))
    rate: float | None = _set(None, "Limit of messages handed out per second.", _rate)
    publish_rate: float | None = _set(None, "Limit of messages published per second.", _rate)
    catch_up_rate: float | None = _set(
        None, "Limit per second of messages that fell due in an outage or a pause.", _rate
    )
    concurrency: int | None = _set(
        None, "Limit of leased messages.", _integer(1, 1_000_000, "unacked messages at once")
    )  # fmt: skip
    max_messages: int | None = _set(None, "Limit of pending messages.", _integer(1, 2**53, "pending messages"))
    max_bytes: int | None = _set(
        None, "Limit of pending messages, in bytes.", _integer(1, 2**53, "bytes of pending messages")
    )
    #: None: messages do not expire.
    ttl_ms: int | None = _set(
        None, "Time after which a message expires, counted from its due time.", _duration(1, "max_delay_ms")
    )
    retention_ms: int = _set(_DAY, "Retention of settled messages.", _duration(0, 730 * _DAY))
    webhook: Webhook | None = _set(None, _HELP_WEBHOOK, _part(WEBHOOK))
    alert: Alert | None = _set(None, "URL to notify when messages become dead letters.", _part(ALERT))
    group_concurrency: int | None = _set(
        None, "Limit of messages of one group that are handed out at once, in due order; 1: strictly one at a time.",
        _integer(1, 32, "messages of a group at once"),
    )  # fmt: skip
    paused: bool = _set(False, "Stop handing out messages; publishing continues.", _flag)
    paused_reason: str = _set("", "Reason of the pause, shown with the topic.", _reason)
    #: None: the node's `dispatch.sync`.
    dispatch_sync: str | None = _set(None, "commit or interval: whether hand-outs wait for replication.", _sync)
    defaults: int = _set(FIRST_LEVEL, _HELP_DEFAULTS, _defaults)
    own_queue: bool = _set(True, _HELP_OWN_QUEUE, _flag)
    tags: tuple[str, ...] = _set((), _HELP_TAGS, _tags)
    any_tags: tuple[str, ...] = _set((), _HELP_ANY_TAGS, _tags)
    on_full: str = _set(
        "refuse", _HELP_ON_FULL, _must(lambda value, _: value in ("refuse", "drop"), "refuse or drop, not {!r}")
    )
    #: None: the topic stays until it is deleted.
    expires_after_ms: int | None = _set(None, _HELP_EXPIRES, _duration(60 * _SECOND, 3_650 * _DAY))
    on_success: str | None = _set(None, _HELP_SUCCESS, _topic)
    on_failure: str | None = _set(None, _HELP_FAILURE, _topic)
    group_rate: float | None = _set(None, _HELP_GROUP_RATE, _group_rate)


#: Description and check of each setting, by field name.
SETTINGS: dict[str, Setting] = {field.name: field.metadata["setting"] for field in fields(TopicSettings)}
#: Default retries, long enough for a receiver's outage of a weekend: the 83 waits add up to at least 72 hours.
_RETRIES = TopicSettings(
    max_attempts=84, backoff=Exponential(_SECOND, _HOUR, factor=2.0, jitter=0.1, longer=True), defaults=RETRY_DEFAULTS
)
#: Defaults, by the feature level of the cluster when the topic was created.
DEFAULTS_OF: dict[int, TopicSettings] = {FIRST_LEVEL: TopicSettings(), RETRY_DEFAULTS: _RETRIES}
#: Newest feature level with its own defaults.
NEWEST_DEFAULTS = max(DEFAULTS_OF)
#: Minimum wait between two webhook calls for one message, whatever the topic or the receiver asks for.
WEBHOOK_FLOOR_MS = _SECOND


#: Settings of message groups, which need the feature level SCHEDULER_LEVEL.
GROUP_SETTINGS = ("group_concurrency",)
#: Settings of message groups that need the feature level GROUP_RATE_LEVEL.
GROUP_RATE_SETTINGS = ("group_rate",)
#: Settings of callbacks, which need the feature level CALLBACKS_LEVEL.
CALLBACK_SETTINGS = ("on_success", "on_failure")


#: Settings of subscriptions, and of topics that are none; they need the feature level SUBSCRIPTION_LEVEL.
COPY_SETTINGS, FAN_OUT_SETTINGS = ("tags", "any_tags", "on_full"), ("own_queue", "expires_after_ms")


def group_problem(settings: TopicSettings) -> str:
    """Error text for settings of message groups that contradict other settings; "" if none does."""
    if settings.group_concurrency == 1 and not settings.max_attempts:
        return "group_concurrency: 1 needs max_attempts: a message that always fails would stop its group for ever"
    if settings.group_rate is not None and settings.group_concurrency is None:
        return "group_rate needs group_concurrency, which limits how many messages of a group are in memory: set both"
    return ""


def shown_name(name: str) -> str:
    """Name in the API of a setting, or of a field of a setting."""
    return name.removesuffix("_ms")


def problem(config: Any, settings: Settings) -> str:
    """Error text for an invalid map of settings; "" for a valid one. The value None resets a setting."""
    if not isinstance(config, dict):
        return "the settings of a topic must be a map"
    for name, value in config.items():
        known = SETTINGS.get(name)
        if known is None:
            return f"unknown topic setting {name!r}"
        if value is not None and (wrong := known.check(value, settings)):
            return f"{shown_name(name)}: {wrong}"
    return ""


def merged(before: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The settings `before`, changed by `config`. Webhook and alert secrets that `config` omits stay."""
    after = {**before, **config}
    for name, part in (("webhook", "secrets"), ("alert", "secret")):
        new, old = config.get(name), before.get(name)
        if new is not None and old is not None and part not in new and part in old:
            after[name] = {**new, part: old[part]}
    return {name: after[name] for name in sorted(after) if after[name] is not None}


def unmasked(before: dict[str, Any], config: dict[str, Any], *, any_origin: bool = False) -> tuple[dict[str, Any], str]:
    """Replace masked webhook headers in `config` by their old values; returns (config, error text). Call this before
    `merged`. For a URL of another origin, masked headers are dropped: a user who may set the URL must not receive the
    old values. any_origin: keep the masked headers in this case too, as before feature level 3."""
    webhook = config.get("webhook")
    if not isinstance(webhook, dict) or not has_masked_headers(config):
        return config, ""
    old = before.get("webhook") or {}
    known, stays = old.get("headers", {}), any_origin or origin_of(old.get("url", "")) == origin_of(webhook["url"])
    headers = {}
    for name, text in webhook["headers"].items():
        if MASK in text:
            if not stays:
                continue
            if name not in known or mask_header(known[name]) != text:
                return config, f"webhook: headers: {name}: a masked value, but not of this header: send it in full"
            text = known[name]
        headers[name] = text
    return {**config, "webhook": {**webhook, "headers": headers}}, ""


def has_masked_headers(config: dict[str, Any]) -> bool:
    webhook = config.get("webhook")
    headers = webhook.get("headers") if isinstance(webhook, dict) else None
    return isinstance(headers, dict) and any(isinstance(text, str) and MASK in text for text in headers.values())


def settings_of(config: dict[str, Any]) -> TopicSettings:
    """All settings of a topic: a valid `config`, completed by the defaults."""
    defaults = DEFAULTS_OF[config.get("defaults", FIRST_LEVEL)]
    if not config.keys() - {"defaults"}:
        return defaults
    values = dict(config)
    if (backoff := values.get("backoff")) is not None:
        longer = defaults.defaults >= RETRY_DEFAULTS
        values["backoff"] = Exponential(**backoff, longer=longer) if isinstance(backoff, dict) else tuple(backoff)
    if (webhook := values.get("webhook")) is not None:
        secrets, headers = tuple(webhook.get("secrets", ())), tuple(sorted(webhook.get("headers", {}).items()))
        values["webhook"] = Webhook(**{**webhook, "secrets": secrets, "headers": headers})
    for name in ("tags", "any_tags"):
        if name in values:
            values[name] = tuple(values[name])
    if (alert := values.get("alert")) is not None:
        values["alert"] = Alert(**alert)
    return replace(defaults, **values)


def with_defaults(config: dict[str, Any], level: int) -> tuple[dict[str, Any], str]:
    """Fill in the newest defaults if `config` has `defaults` None; returns (config, error text). `defaults` needs a
    cluster of feature level RETRY_DEFAULTS or later."""
    if "defaults" not in config:
        return config, ""
    if level < RETRY_DEFAULTS:
        return config, "defaults: upgrade every node first (feature_level of GET /v1/cluster)"
    return {**config, "defaults": newest_defaults(level)} if config["defaults"] is None else config, ""


def newest_defaults(level: int) -> int:
    """Feature level whose defaults apply to a topic that is created in a cluster of this level."""
    return max(brought for brought in DEFAULTS_OF if brought <= level)
