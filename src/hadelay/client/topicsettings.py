"""Settings of topics as arguments of `put_topic`. Made by `make docs` from the rows of settings/topic.py:
change those instead."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from hadelay.client.types import Delay

__all__ = ["Alert", "Backoff", "TopicSettings", "Webhook"]


class Backoff(TypedDict, total=False):
    """Retry n waits min × factor^(n−1), at most max, plus a random part of up to `jitter` of this wait."""

    min: Delay
    max: Delay
    factor: float
    jitter: float


class Webhook(TypedDict, total=False):
    """URL that a topic's messages are pushed to, with options. Secrets that are left out stay as they are."""

    url: str
    #: The only secret, in place of `secrets`.
    secret: str
    #: Secrets that sign webhook calls, the newest first: whsec_…. Unchanged if left out; answers mask them.
    secrets: Sequence[str]
    #: Timeout of a webhook call: 15s.
    timeout: Delay
    #: Extra headers of webhook calls: NAME=VALUE. Answers mask the values; a masked value keeps the stored one, unless
    #: the URL has another scheme, host or port.
    headers: Mapping[str, str]
    #: Whether messages may set a webhook URL of their own (`callback`).
    allow_per_message: bool
    #: HTTP method of webhook calls: POST, PUT, PATCH, or without a body GET, DELETE. Default: POST.
    method: Literal["POST", "PUT", "PATCH", "GET", "DELETE"]


class Alert(TypedDict, total=False):
    """URL to notify of a topic's new dead letters."""

    url: str
    #: Secret that signs alerts. Unchanged if left out.
    secret: str


class TopicSettings(TypedDict, total=False):
    """Settings of `put_topic`. Omitted settings are unchanged; None resets a setting."""

    #: Default lease of the topic's consumers: 30s, 5m.
    lease: Delay | None
    #: Attempts before a message becomes a dead letter; 0: no limit. Default: 84.
    max_attempts: int | None
    #: Waits before retry 1, 2, …: 1s,10s,5m; the last one repeats. Or exponential: min=1s,max=1h,factor=2,jitter=0.1,
    #: the default: 84 attempts then last at least 72 hours.
    backoff: Sequence[Delay] | Backoff | None
    #: keep, or the topic that dead letters move to.
    dead_letter: str | None
    #: Retention of dead letters.
    dead_retention: Delay | None
    #: Limit of messages handed out per second.
    rate: float | None
    #: Limit of messages published per second.
    publish_rate: float | None
    #: Limit per second of messages that fell due in an outage or a pause.
    catch_up_rate: float | None
    #: Limit of leased messages.
    concurrency: int | None
    #: Limit of messages of one group that are handed out at once, in due order; 1: strictly one at a time.
    group_concurrency: int | None
    #: Limit per second of messages of one group that are handed out, evenly spaced: 1: one per second. Needs
    #: group_concurrency.
    group_rate: float | None
    #: Limit of pending messages.
    max_messages: int | None
    #: Limit of pending messages, in bytes.
    max_bytes: int | None
    #: Delay of messages that are published without `delay` and `deliver_at`.
    delay: Delay | None
    #: Time after which a message expires, counted from its due time.
    ttl: Delay | None
    #: Retention of settled messages.
    retention: Delay | None
    #: URL that messages are pushed to. All settings of a webhook are replaced together.
    webhook: Webhook | None
    #: URL to notify when messages become dead letters.
    alert: Alert | None
    #: Stop handing out messages; publishing continues.
    paused: bool | None
    #: The mode that this topic relies on: refused unless it is the nodes' `dispatch.sync` (commit or interval).
    dispatch_sync: Literal["commit", "interval"] | None
    #: With subscriptions: false keeps in the topic's own queue only what no subscription gets.
    own_queue: bool | None
    #: Subscription: tags that a message must all have.
    tags: Sequence[str] | None
    #: Subscription: tags of which a message must have one at least.
    any_tags: Sequence[str] | None
    #: Subscription at its max_messages or max_bytes: refuse publishes, or drop its copies and count them.
    on_full: Literal["refuse", "drop"] | None
    #: Own names and values of the topic, such as owner=payments; null removes a name.
    labels: Mapping[str, str | None] | None
    #: Delete the topic some time after it was unused for this long: no message (dead ones too), consumer, webhook,
    #: schedule or subscription, and no other topic's dead_letter or callbacks.
    expires_after: Delay | None
    #: Topic for a message about each acked message: the answer of the webhook's receiver, or the ack's result.
    on_success: str | None
    #: Topic for a message about each message that becomes a dead letter, with the errors of its attempts.
    on_failure: str | None
