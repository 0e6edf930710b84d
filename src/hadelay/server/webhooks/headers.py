"""What a call says about its message: Standard Webhooks, CloudEvents 1.0 in binary mode (HTTP binding 3.1), and what a
pulled message has as fields. docs/reference/webhooks.md lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

from hadelay.api.text import format_instant
from hadelay.codec.meta import OCTETS, Meta
from hadelay.server.webhooks.signing import signature

EVENT_TYPE = "hadelay.message"
ALERT_TYPE = "hadelay.messages.died"
#: CloudEvents HTTP binding 3.1.3.2: printable ASCII but for space, quote and percent stays as it is.
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class Facts(NamedTuple):
    """One message, as it is called about."""

    id: str
    topic: str
    #: Where it comes from: `/{cluster id}/topics/{topic}`.
    source: str
    deliver_at: str  # RFC 3339
    attempt: int
    redelivered: bool
    meta: Meta


def call_headers(
    facts: Facts, keys: Sequence[bytes], extra: Sequence[tuple[str, str]], now_ms: int, body: bytes
) -> dict[str, str]:
    """`extra`: the topic's own headers. Without keys there is no signature."""
    meta = facts.meta
    headers = {
        **dict(extra),
        **_envelope(facts.id, facts.source, EVENT_TYPE, facts.deliver_at, keys, now_ms, body),
        "content-type": meta.ct or OCTETS,
        "hadelay-topic": facts.topic,
        "hadelay-deliver-at": facts.deliver_at,
        "hadelay-attempt": str(facts.attempt),
    }
    if facts.redelivered:
        headers["hadelay-redelivered"] = "true"
    if meta.key is not None:
        headers["ce-subject"] = headers["hadelay-key"] = escaped(meta.key)
    if meta.tp is not None:
        headers["traceparent"] = meta.tp
    if meta.tags:
        headers["hadelay-tags"] = ",".join(escaped(tag) for tag in meta.tags)
    for name, value in meta.meta.items():
        headers[f"hadelay-meta-{quote(name, safe='')}"] = escaped(value)
    return headers


def alert_headers(alert_id: str, source: str, now_ms: int, keys: Sequence[bytes], body: bytes) -> dict[str, str]:
    """Of a call that says that messages of a topic died."""
    headers = _envelope(alert_id, source, ALERT_TYPE, format_instant(now_ms), keys, now_ms, body)
    return {**headers, "content-type": "application/json"}


def _envelope(
    event_id: str, source: str, kind: str, at: str, keys: Sequence[bytes], now_ms: int, body: bytes
) -> dict[str, str]:
    timestamp_s = now_ms // 1000
    headers = {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp_s),
        "ce-specversion": "1.0",
        "ce-id": event_id,
        "ce-source": source,
        "ce-type": kind,
        "ce-time": at,
    }
    if keys:
        headers["webhook-signature"] = signature(keys, event_id, timestamp_s, body)
    return headers


def escaped(text: str) -> str:
    """Percent-encoded as CloudEvents does it: what is no printable ASCII, and space, quote and percent."""
    return quote(text, safe=_SAFE)
