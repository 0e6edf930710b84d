"""The settings of topics: one row for each setting, which is the setting's only declaration.

Read from the rows: the checks and refusals of apply, the documents of PUT and GET (hadelay/api/topicsettings.py), the
client's types (hadelay/client/topicsettings.py), the JSON Schema, the options of `hadelay topic set`, the console's
form, `hadelay trace`, and the reference. `make docs` writes the two modules and the reference.

A topic's `config` is the map of the settings that were set, replicated unchanged (TOPIC_PUT); `TopicSettings` adds the
defaults. Times are in ms, rates in messages per second. Apply always validates every value again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from hadelay.model import MAX_RATE
from hadelay.settings.cluster import Settings
from hadelay.settings.kinds import (
    FLAG,
    HEADERS,
    LABELS,
    MASK,
    MAX_LABELS,
    SECRET,
    SECRETS,
    TAGS,
    URL,
    Kind,
    Part,
    backoff,
    choice,
    duration,
    integer,
    number,
    parts,
    shown_name,
    text,
    topic,
)
from hadelay.settings.urls import origin_of
from hadelay.version import FIRST_LEVEL

_SECOND, _HOUR, _DAY = 1_000, 3_600_000, 86_400_000
#: HTTP methods of webhook calls, and those of them that send no body.
METHODS, BODILESS = ("POST", "PUT", "PATCH", "GET", "DELETE"), ("GET", "DELETE")


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential backoff: retry n (from 1) waits min × factor^(n−1), at most max, plus a random part of up to `jitter`
    of this wait."""

    min_ms: int
    max_ms: int
    factor: float = 2.0
    jitter: float = 0.1


@dataclass(frozen=True, slots=True)
class Webhook:
    url: str
    secrets: tuple[str, ...] = ()
    timeout_ms: int = 15 * _SECOND
    headers: tuple[tuple[str, str], ...] = ()
    #: Whether messages may set a webhook URL of their own.
    allow_per_message: bool = False
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Alert:
    url: str
    secret: str = ""


def _backoff_of(stored: Any) -> tuple[int, ...] | Exponential:
    return Exponential(**stored) if isinstance(stored, dict) else tuple(stored)


def _webhook_of(stored: dict[str, Any]) -> Webhook:
    headers = tuple(sorted(stored.get("headers", {}).items()))
    return Webhook(**{**stored, "secrets": tuple(stored.get("secrets", ())), "headers": headers})


_WEBHOOK = parts(
    "Webhook",
    "URL that a topic's messages are pushed to, with options. Secrets that are left out stay as they are.",
    {
        "url": Part(URL, required=True),
        "secret": Part(SECRET, "The only secret, in place of `secrets`.", stored=False),
        "secrets": Part(
            SECRETS,
            "Secrets that sign webhook calls, the newest first: whsec_…. Unchanged if left out; answers mask them.",
            option="webhook_secret",
        ),
        "timeout_ms": Part(duration(100, 600 * _SECOND), "Timeout of a webhook call: 15s."),
        "headers": Part(
            HEADERS,
            "Extra headers of webhook calls: NAME=VALUE. Answers mask the values; a masked value keeps the stored one, "
            "unless the URL has another scheme, host or port.",
            option="webhook_header",
        ),
        "allow_per_message": Part(
            FLAG, "Whether messages may set a webhook URL of their own (`callback`).", option="allow_per_message"
        ),
        "method": Part(
            choice(*METHODS),
            "HTTP method of webhook calls: POST, PUT, PATCH, or without a body GET, DELETE. Default: POST.",
        ),
    },
    _webhook_of,
)  # fmt: skip
_ALERT = parts(
    "Alert", "URL to notify of a topic's new dead letters.",
    {
        "url": Part(URL, required=True),
        "secret": Part(SECRET, "Secret that signs alerts. Unchanged if left out."),
    },
    lambda stored: Alert(**stored),
)  # fmt: skip
_RATE = number(0, MAX_RATE, "messages per second", "; to stop a topic, pause it")


class Setting(NamedTuple):
    """Everything that is declared about a setting, except its default."""

    kind: Kind
    #: Description of the setting for users.
    help: str
    #: File under src/hadelay that acts on the setting.
    owner: str
    #: Kind of queue that has the setting; "": both.
    of: Literal["", "topics", "subscriptions"]
    #: Whether the setting decides when a pending message is handed out, and what happens after a failure: `hadelay
    #: trace` shows it.
    delivery: bool
    #: Whether the console's form of all settings changes the setting; a setting that is a map has a form of its own.
    form: bool
    #: Whether `hadelay topic set` and PUT change the setting.
    option: bool
    put: bool
    #: Feature level that the setting needs: until the cluster has switched to that level, apply refuses the setting on
    #: every node, even on nodes that know it.
    level: int


def _set(
    default: Any, kind: Kind, help: str, owner: str, *, of: Literal["", "topics", "subscriptions"] = "",
    delivery: bool = False, form: bool = False, option: bool = True, put: bool = True, level: int = FIRST_LEVEL,
) -> Any:  # fmt: skip
    row = Setting(kind, help, owner, of, delivery, form, option, put, level)
    return field(default=default, metadata={"setting": row})


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """All settings of a topic; the API's names have no `_ms`. None: no limit, unless a comment says otherwise."""

    #: None: the node's `http.default_lease_ms` holds.
    lease_ms: int | None = _set(
        None, duration(1, "max_lease_ms"), "Default lease of the topic's consumers: 30s, 5m.",
        "server/service/consuming.py", delivery=True, form=True,
    )  # fmt: skip
    #: Default retries are long enough for a receiver's outage of a weekend: the 83 waits last at least 72 hours.
    max_attempts: int = _set(
        84, integer(0, 65_534, "hand-outs, 0 for no limit"),
        "Attempts before a message becomes a dead letter; 0: no limit. Default: 84.",
        "ledger/leases/settling.py", delivery=True, form=True,
    )  # fmt: skip
    backoff: tuple[int, ...] | Exponential = _set(
        Exponential(_SECOND, _HOUR), backoff(_backoff_of),
        "Waits before retry 1, 2, …: 1s,10s,5m; the last one repeats. Or exponential: "
        "min=1s,max=1h,factor=2,jitter=0.1, the default: 84 attempts then last at least 72 hours.",
        "ledger/leases/settling.py", delivery=True, form=True,
    )  # fmt: skip
    dead_letter: str = _set(
        "keep", topic('"keep", or the name of another topic', "keep"),
        "keep, or the topic that dead letters move to.",
        "ledger/leases/dead.py", delivery=True, form=True,
    )  # fmt: skip
    dead_retention_ms: int = _set(
        30 * _DAY, duration(_HOUR, 3_650 * _DAY), "Retention of dead letters.", "ledger/leases/dead.py", form=True
    )
    rate: float | None = _set(
        None, _RATE, "Limit of messages handed out per second.", "ledger/limits/flow.py", delivery=True, form=True
    )
    publish_rate: float | None = _set(
        None, _RATE, "Limit of messages published per second.", "ledger/limits/quotas.py", of="topics", form=True
    )
    catch_up_rate: float | None = _set(
        None, _RATE, "Limit per second of messages that fell due in an outage or a pause.",
        "ledger/limits/flow.py", delivery=True, form=True,
    )  # fmt: skip
    concurrency: int | None = _set(
        None, integer(1, 1_000_000, "unacked messages at once"), "Limit of leased messages.",
        "ledger/limits/flow.py", delivery=True, form=True,
    )  # fmt: skip
    group_concurrency: int | None = _set(
        None, integer(1, 32, "messages of a group at once"),
        "Limit of messages of one group that are handed out at once, in due order; 1: strictly one at a time.",
        "ledger/groups/messagegroups.py", delivery=True, form=True,
    )  # fmt: skip
    #: Limits of the rate: a new leader first waits for the time between two messages, which is therefore at most 100 s;
    #: and it is at least 1 ms, as the clock counts milliseconds.
    group_rate: float | None = _set(
        None, number(0.01, 1000, "messages of a group per second"),
        "Limit per second of messages of one group that are handed out, evenly spaced: 1: one per second. Needs "
        "group_concurrency.",
        "handout/windows.py", delivery=True, form=True,
    )  # fmt: skip
    max_messages: int | None = _set(
        None, integer(1, 2**53, "pending messages"), "Limit of pending messages.", "ledger/limits/quotas.py", form=True
    )
    max_bytes: int | None = _set(
        None, integer(1, 2**53, "bytes of pending messages"), "Limit of pending messages, in bytes.",
        "ledger/limits/quotas.py", form=True,
    )  # fmt: skip
    delay_ms: int = _set(
        0, duration(0, "max_delay_ms"), "Delay of messages that are published without `delay` and `deliver_at`.",
        "ledger/messages/publish.py", of="topics", form=True,
    )  # fmt: skip
    #: None: messages do not expire.
    ttl_ms: int | None = _set(
        None, duration(1, "max_delay_ms"), "Time after which a message expires, counted from its due time.",
        "ledger/messages/publish.py", delivery=True, form=True,
    )  # fmt: skip
    retention_ms: int = _set(
        _DAY, duration(0, 730 * _DAY), "Retention of settled messages.", "server/delivery/maintenance.py", form=True
    )
    webhook: Webhook | None = _set(
        None, _WEBHOOK, "URL that messages are pushed to. All settings of a webhook are replaced together.",
        "server/webhooks/queues.py", delivery=True,
    )  # fmt: skip
    alert: Alert | None = _set(
        None, _ALERT, "URL to notify when messages become dead letters.", "server/webhooks/alerts.py"
    )
    paused: bool = _set(
        False,
        FLAG,
        "Stop handing out messages; publishing continues.",
        "ledger/limits/flow.py",
        delivery=True,
        option=False,
    )
    paused_reason: str = _set(
        "", text(256), "Reason of the pause, shown with the topic.",
        "cli/topic.py", delivery=True, option=False, put=False,
    )  # fmt: skip
    #: None: the topic works in the mode of the node's `dispatch.sync`.
    dispatch_sync: str | None = _set(
        None, choice("commit", "interval"),
        "The mode that this topic relies on: refused unless it is the nodes' `dispatch.sync` (commit or interval).",
        "server/service/topics.py",
    )  # fmt: skip
    own_queue: bool = _set(
        True, FLAG, "With subscriptions: false keeps in the topic's own queue only what no subscription gets.",
        "ledger/messages/subscriptions.py", of="topics", form=True,
    )  # fmt: skip
    tags: tuple[str, ...] = _set(
        (),
        TAGS,
        "Subscription: tags that a message must all have.",
        "ledger/topics/topics.py",
        of="subscriptions",
        form=True,
    )
    any_tags: tuple[str, ...] = _set(
        (), TAGS, "Subscription: tags of which a message must have one at least.",
        "ledger/topics/topics.py", of="subscriptions", form=True,
    )  # fmt: skip
    on_full: str = _set(
        "refuse", choice("refuse", "drop"),
        "Subscription at its max_messages or max_bytes: refuse publishes, or drop its copies and count them.",
        "ledger/limits/quotas.py", of="subscriptions", form=True,
    )  # fmt: skip
    #: Labels: names and values for people and programs, without effect on the topic.
    labels: tuple[tuple[str, str], ...] = _set(
        (), LABELS, "Own names and values of the topic, such as owner=payments; null removes a name.",
        "settings/topic.py",
    )  # fmt: skip
    #: None: the topic stays until it is deleted.
    expires_after_ms: int | None = _set(
        None, duration(60 * _SECOND, 3_650 * _DAY),
        "Delete the topic some time after it was unused for this long: no message (dead ones too), consumer, webhook, "
        "schedule or subscription, and no other topic's dead_letter or callbacks.",
        "ledger/topics/topicexpiry.py", of="topics", form=True,
    )  # fmt: skip
    on_success: str | None = _set(
        None, topic(),
        "Topic for a message about each acked message: the answer of the webhook's receiver, or the ack's result.",
        "ledger/leases/callbacks.py", form=True,
    )  # fmt: skip
    on_failure: str | None = _set(
        None, topic(),
        "Topic for a message about each message that becomes a dead letter, with the errors of its attempts.",
        "ledger/leases/callbacks.py", form=True,
    )  # fmt: skip


#: Declaration of each setting, by its field name in TopicSettings.
SETTINGS: dict[str, Setting] = {field.name: field.metadata["setting"] for field in fields(TopicSettings)}
#: Settings of a topic whose owner set nothing.
DEFAULTS = TopicSettings()
#: Minimum wait between two webhook calls for one message, whatever the topic or the receiver asks for.
WEBHOOK_FLOOR_MS = _SECOND


def topics_named(config: dict[str, Any]) -> Iterator[str]:
    """Topics that get messages of the topic with these settings: dead letters and callbacks."""
    for name, row in SETTINGS.items():
        if row.kind.name == "topic" and (named := config.get(name)) is not None and named not in row.kind.choices:
            yield named


def mask_secret(secret: str) -> str:
    """Mask a secret except its last characters: they are enough to recognise it, and useless for signing."""
    return f"{secret[:6] if secret.startswith('whsec_') else ''}{MASK}{secret[-4:]}"


def mask_header(value: str) -> str:
    """Mask a header value, which may be a secret (Authorization); a long value keeps its last 4 characters."""
    return MASK + (value[-4:] if len(value) >= 16 else "")


def contradiction(settings: TopicSettings) -> str:
    """Error text for settings that contradict each other, or are too many together; "" if none do."""
    if len(settings.labels) > MAX_LABELS:
        return f"labels: {len(settings.labels)} with those that the topic has; at most {MAX_LABELS} are allowed"
    if settings.group_concurrency == 1 and not settings.max_attempts:
        return "group_concurrency: 1 needs max_attempts: a message that always fails would stop its group for ever"
    if settings.group_rate is not None and settings.group_concurrency is None:
        return "group_rate needs group_concurrency, which limits how many messages of a group are in memory: set both"
    return ""


def problem(config: Any, settings: Settings) -> str:
    """Error text for an invalid map of settings; "" for a valid one. The value None resets a setting."""
    if not isinstance(config, dict):
        return "the settings of a topic must be a map"
    for name, value in config.items():
        known = SETTINGS.get(name)
        if known is None:
            return f"unknown topic setting {name!r}"
        if value is not None and (wrong := known.kind.check(value, settings)):
            return f"{shown_name(name)}: {wrong}"
    return ""


def newer_setting(config: dict[str, Any], level: int) -> str:
    """Name in the API of a setting in `config` that needs a higher feature level than this; "" if there is none."""
    for name, value in config.items():
        row = SETTINGS[name]
        if row.level > level:
            return shown_name(name)
        for part, known in row.kind.parts.items():
            if known.level > level and isinstance(value, dict) and part in value:
                return f"{shown_name(name)}: {shown_name(part)}"
    return ""


def foreign_setting(config: dict[str, Any], of: Literal["topics", "subscriptions"]) -> str:
    """Error text for a setting in `config` that queues of this kind do not have; "" if there is none."""
    for name, value in config.items():
        if value is not None and SETTINGS[name].of not in ("", of):
            return f"{shown_name(name)}: a setting of {SETTINGS[name].of}, not of {of}"
    return ""


def merged(before: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The settings `before`, changed by `config`. Labels, and webhook and alert secrets, that `config` omits stay."""
    after = {**before, **config}
    if config.get("labels") is not None:
        labels = before.get("labels", {}) | config["labels"]
        after["labels"] = {name: labels[name] for name in sorted(labels) if labels[name] is not None} or None
    for name, part in (("webhook", "secrets"), ("alert", "secret")):
        new, old = config.get(name), before.get(name)
        if new is not None and old is not None and part not in new and part in old:
            after[name] = {**new, part: old[part]}
    return {name: after[name] for name in sorted(after) if after[name] is not None}


def unmasked(before: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Replace masked webhook headers in `config` by their old values; returns (config, error text). Call this before
    `merged`. For a URL of another origin, masked headers are dropped: a user who may set the URL must not receive the
    old values."""
    webhook = config.get("webhook")
    if not isinstance(webhook, dict) or not _has_masked_headers(config):
        return config, ""
    old = before.get("webhook") or {}
    known, stays = old.get("headers", {}), origin_of(old.get("url", "")) == origin_of(webhook["url"])
    headers = {}
    for name, value in webhook["headers"].items():
        if MASK in value and not stays:
            continue
        if MASK in value and (name not in known or mask_header(known[name]) != value):
            return config, f"webhook: headers: {name}: a masked value, but not of this header: send it in full"
        headers[name] = known[name] if MASK in value else value
    return {**config, "webhook": {**webhook, "headers": headers}}, ""


def _has_masked_headers(config: dict[str, Any]) -> bool:
    webhook = config.get("webhook")
    headers = webhook.get("headers") if isinstance(webhook, dict) else None
    return isinstance(headers, dict) and any(isinstance(value, str) and MASK in value for value in headers.values())


def settings_of(config: dict[str, Any]) -> TopicSettings:
    """All settings of a topic: a valid `config`, completed by the defaults."""
    if not config:
        return DEFAULTS
    values = {}
    for name, stored in config.items():
        read = SETTINGS[name].kind.read
        values[name] = stored if read is None else read(stored)
    return replace(DEFAULTS, **values)
