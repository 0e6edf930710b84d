"""One webhook call: the request with its headers and signature, and the answer.

The headers follow Standard Webhooks 1.0 (standardwebhooks.com) and CloudEvents 1.0 in binary mode (HTTP binding 3.1);
docs/reference/webhooks.md lists them. hadelay.webhooks makes the signatures.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from hadelay.api.text import format_instant
from hadelay.codec.ackparts import CallReply
from hadelay.codec.meta import OCTETS, Meta
from hadelay.webhooks import signature

EVENT_TYPE = "hadelay.message"
ALERT_TYPE = "hadelay.messages.died"
#: Characters that are not percent-encoded in header values (CloudEvents HTTP 3.1.3.2): printable ASCII except space, ",
#: %.
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class CallRequest(NamedTuple):
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float
    method: str = "POST"
    #: Whether the receiver may see the client certificate that the configuration names.
    identified: bool = False
    #: Whether the caller wants the answer's content type, and the first MAX_REPLY bytes of its body.
    keeps: bool = False


class Reply(NamedTuple):
    #: HTTP status; 0: no answer came.
    status: int
    #: Reason why the call failed ("HTTP 503", "timeout", "connection refused", …); "" after a success.
    reason: str
    retry_after_ms: int | None
    seconds: float
    #: The receiver's answer, if the request asked to keep it.
    kept: CallReply | None = None


Done = Callable[[Reply], None]
#: Type of a function call(request, done) that makes a webhook call. It calls `done` exactly once, later, on the event
#: loop; but not after the sender was closed.
Call = Callable[[CallRequest, Done], None]


class Facts(NamedTuple):
    """Facts about a message that the headers of its webhook call contain."""

    id: str
    topic: str
    #: Source of the event, as CloudEvents defines it: `/{cluster id}/topics/{topic}`.
    source: str
    deliver_at: str  # due time, RFC 3339
    attempt: int
    uncounted: int  # number of earlier attempts that do not count towards the limit of attempts
    redelivered: bool
    meta: Meta
    #: Id of the published message, if this message is a copy for a subscription.
    published_id: str | None = None


def call_headers(
    facts: Facts, keys: Sequence[bytes], extra: Sequence[tuple[str, str]], now_ms: int, body: bytes
) -> dict[str, str]:
    """Headers of a webhook call about a message. extra: the headers set for the topic, which replace those set for the
    message; neither can replace a header of the cluster. Without keys, the call has no signature."""
    meta, named = facts.meta, {name.lower() for name, _ in extra}
    headers = {
        **_event(facts.id, facts.source, EVENT_TYPE, facts.deliver_at),
        "content-type": meta.ct or OCTETS,
        "hadelay-topic": facts.topic,
        "hadelay-deliver-at": facts.deliver_at,
        "hadelay-attempt": str(facts.attempt),
    }
    if facts.published_id is not None:
        headers["hadelay-published-id"] = facts.published_id
    if facts.uncounted:
        headers["hadelay-uncounted"] = str(facts.uncounted)
    if facts.redelivered:
        headers["hadelay-redelivered"] = "true"
    if meta.key is not None:
        headers["ce-subject"] = headers["hadelay-key"] = _escaped(meta.key)
    if meta.group is not None:
        headers["hadelay-group"] = _escaped(meta.group)
    if meta.batch is not None:
        headers["hadelay-batch"] = meta.batch
    if meta.tp is not None:
        headers["traceparent"] = meta.tp
    if meta.sch is not None:
        headers["hadelay-schedule"] = meta.sch
        headers["hadelay-occurrence"] = format_instant(meta.oc)
    if meta.tags:
        headers["hadelay-tags"] = ",".join(_escaped(tag) for tag in meta.tags)
    for name, value in meta.meta.items():
        headers[f"hadelay-meta-{quote(name, safe='')}"] = _escaped(value)
    headers = _signed(headers, keys, now_ms, body)
    own = {name: text for name, text in meta.fw.items() if name not in named} | dict(extra)
    return {name: text for name, text in own.items() if name.lower() not in headers} | headers


def alert_headers(alert_id: str, source: str, now_ms: int, keys: Sequence[bytes], body: bytes) -> dict[str, str]:
    """Headers of a call about dead letters."""
    headers = _event(alert_id, source, ALERT_TYPE, format_instant(now_ms)) | {"content-type": "application/json"}
    return _signed(headers, keys, now_ms, body)


def _event(event_id: str, source: str, kind: str, at: str) -> dict[str, str]:
    return {
        "webhook-id": event_id, "ce-specversion": "1.0", "ce-id": event_id, "ce-source": source, "ce-type": kind,
        "ce-time": at,
    }  # fmt: skip


def _signed(headers: dict[str, str], keys: Sequence[bytes], now_ms: int, body: bytes) -> dict[str, str]:
    timestamp_s = now_ms // 1000
    headers["webhook-timestamp"] = str(timestamp_s)
    if keys:
        headers["webhook-signature"] = signature(keys, headers["webhook-id"], timestamp_s, body)
    return headers


def _escaped(text: str) -> str:
    """Percent-encode a header value as CloudEvents requires."""
    return quote(text, safe=_SAFE)
