"""Settings of topics in requests and answers. Made by `make docs` from the rows of settings/topic.py: change
those instead."""

from typing import Annotated, Generic, Literal

from msgspec import UNSET, UnsetType

from hadelay.api.base import At, Document, Duration, Request, words
from hadelay.api.topicstatus import TopicStatus


class Backoff(Request):
    """Retry n waits min × factor^(n−1), at most max, plus a random part of up to `jitter` of this wait."""

    min: Duration
    max: Duration
    factor: float | UnsetType = UNSET
    jitter: float | UnsetType = UNSET


class BackoffOut(Document, frozen=True):
    min: str
    max: str
    factor: float | None = None
    jitter: float | None = None


class Webhook(Request):
    """URL that a topic's messages are pushed to, with options. Secrets that are left out stay as they are."""

    url: str
    #: The only secret, in place of `secrets`.
    secret: str | UnsetType = UNSET
    #: Secrets that sign webhook calls, the newest first: whsec_…. Unchanged if left out; answers mask them.
    secrets: list[str] | UnsetType = UNSET
    #: Timeout of a webhook call: 15s.
    timeout: Duration | UnsetType = UNSET
    #: Extra headers of webhook calls: NAME=VALUE. Answers mask the values; a masked value keeps the stored one, unless
    #: the URL has another scheme, host or port.
    headers: dict[str, str] | UnsetType = UNSET
    #: Whether messages may set a webhook URL of their own (`callback`).
    allow_per_message: bool | UnsetType = UNSET
    #: HTTP method of webhook calls: POST, PUT, PATCH, or without a body GET, DELETE. Default: POST.
    method: Literal["POST", "PUT", "PATCH", "GET", "DELETE"] | UnsetType = UNSET


class WebhookOut(Document, frozen=True):
    url: str
    secrets: list[str] | None = None
    timeout: str | None = None
    headers: dict[str, str] | None = None
    allow_per_message: bool | None = None
    method: Annotated[str, words("POST", "PUT", "PATCH", "GET", "DELETE")] | None = None


class Alert(Request):
    """URL to notify of a topic's new dead letters."""

    url: str
    #: Secret that signs alerts. Unchanged if left out.
    secret: str | UnsetType = UNSET


class AlertOut(Document, frozen=True):
    url: str
    secret: str | None = None


class PutTopic(Request):
    """Settings to change; null resets a setting."""

    #: Default lease of the topic's consumers: 30s, 5m.
    lease: Duration | UnsetType | None = UNSET
    #: Attempts before a message becomes a dead letter; 0: no limit. Default: 84.
    max_attempts: int | UnsetType | None = UNSET
    #: Waits before retry 1, 2, …: 1s,10s,5m; the last one repeats. Or exponential: min=1s,max=1h,factor=2,jitter=0.1,
    #: the default: 84 attempts then last at least 72 hours.
    backoff: list[str | int | float] | Backoff | UnsetType | None = UNSET
    #: keep, or the topic that dead letters move to.
    dead_letter: str | UnsetType | None = UNSET
    #: Retention of dead letters.
    dead_retention: Duration | UnsetType | None = UNSET
    #: Limit of messages handed out per second.
    rate: float | UnsetType | None = UNSET
    #: Limit of messages published per second.
    publish_rate: float | UnsetType | None = UNSET
    #: Limit per second of messages that fell due in an outage or a pause.
    catch_up_rate: float | UnsetType | None = UNSET
    #: Limit of leased messages.
    concurrency: int | UnsetType | None = UNSET
    #: Limit of messages of one group that are handed out at once, in due order; 1: strictly one at a time.
    group_concurrency: int | UnsetType | None = UNSET
    #: Limit per second of messages of one group that are handed out, evenly spaced: 1: one per second. Needs
    #: group_concurrency.
    group_rate: float | UnsetType | None = UNSET
    #: Limit of pending messages.
    max_messages: int | UnsetType | None = UNSET
    #: Limit of pending messages, in bytes.
    max_bytes: int | UnsetType | None = UNSET
    #: Delay of messages that are published without `delay` and `deliver_at`.
    delay: Duration | UnsetType | None = UNSET
    #: Time after which a message expires, counted from its due time.
    ttl: Duration | UnsetType | None = UNSET
    #: Retention of settled messages.
    retention: Duration | UnsetType | None = UNSET
    #: URL that messages are pushed to. All settings of a webhook are replaced together.
    webhook: Webhook | UnsetType | None = UNSET
    #: URL to notify when messages become dead letters.
    alert: Alert | UnsetType | None = UNSET
    #: Stop handing out messages; publishing continues.
    paused: bool | UnsetType | None = UNSET
    #: The mode that this topic relies on: refused unless it is the nodes' `dispatch.sync` (commit or interval).
    dispatch_sync: Literal["commit", "interval"] | UnsetType | None = UNSET
    #: With subscriptions: false keeps in the topic's own queue only what no subscription gets.
    own_queue: bool | UnsetType | None = UNSET
    #: Subscription: tags that a message must all have.
    tags: list[str] | UnsetType | None = UNSET
    #: Subscription: tags of which a message must have one at least.
    any_tags: list[str] | UnsetType | None = UNSET
    #: Subscription at its max_messages or max_bytes: refuse publishes, or drop its copies and count them.
    on_full: Literal["refuse", "drop"] | UnsetType | None = UNSET
    #: Own names and values of the topic, such as owner=payments; null removes a name.
    labels: dict[str, str | None] | UnsetType | None = UNSET
    #: Delete the topic some time after it was unused for this long: no message (dead ones too), consumer, webhook,
    #: schedule or subscription, and no other topic's dead_letter or callbacks.
    expires_after: Duration | UnsetType | None = UNSET
    #: Topic for a message about each acked message: the answer of the webhook's receiver, or the ack's result.
    on_success: str | UnsetType | None = UNSET
    #: Topic for a message about each message that becomes a dead letter, with the errors of its attempts.
    on_failure: str | UnsetType | None = UNSET


class Topic(TopicStatus[At], Generic[At], frozen=True):
    """A topic: its messages, and the settings that were set."""

    lease: str | None = None
    max_attempts: int | None = None
    backoff: list[str] | BackoffOut | None = None
    dead_letter: str | None = None
    dead_retention: str | None = None
    rate: float | None = None
    publish_rate: float | None = None
    catch_up_rate: float | None = None
    concurrency: int | None = None
    group_concurrency: int | None = None
    group_rate: float | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    delay: str | None = None
    ttl: str | None = None
    retention: str | None = None
    webhook: WebhookOut | None = None
    alert: AlertOut | None = None
    paused: bool | None = None
    paused_reason: str | None = None
    dispatch_sync: Annotated[str, words("commit", "interval")] | None = None
    own_queue: bool | None = None
    tags: list[str] | None = None
    any_tags: list[str] | None = None
    on_full: Annotated[str, words("refuse", "drop")] | None = None
    labels: dict[str, str] | None = None
    expires_after: str | None = None
    on_success: str | None = None
    on_failure: str | None = None
