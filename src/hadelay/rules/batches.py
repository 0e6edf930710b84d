"""Checks the keys of batches, and makes a batch's specification from a document of the API."""

import re

from hadelay.api.batches import ONS, OpenBatch
from hadelay.api.text import check_new_topic
from hadelay.codec.batches import MAX_BODY, MAX_LIFETIME_MS, MAX_META, Spec
from hadelay.codec.meta import mask_of
from hadelay.errors import BadRequest, TooLarge
from hadelay.model import SEPARATOR
from hadelay.rules.publishing import check_batch_key, check_positive, check_tags, pack_meta
from hadelay.settings.node import HttpConfig

#: Lifetime of a batch whose request names none, in ms.
_LIFETIME_MS = 7 * 86_400_000
_NUMBER = re.compile(r"[0-9]{1,19}")


def batch_to_open(
    limits: HttpConfig, max_delay_ms: int, document: OpenBatch, payload: tuple[bytes, str] | None
) -> tuple[str, Spec]:
    """Key and specification of a batch from a document of the API. payload: body and content type of the callback;
    None: its body is a document about the batch. Raises BadRequest, Impossible, TooLarge."""
    callback = document.callback
    topic = check_new_topic(callback.topic, limits.max_topic_bytes)
    if SEPARATOR in topic:
        raise BadRequest(f"callback.topic: {topic!r} is a subscription; name a topic")
    body, content_type = payload or (None, callback.content_type or "")
    if body is not None and len(body) > MAX_BODY:
        raise TooLarge(f"callback.body has {len(body)} bytes; at most {MAX_BODY} are allowed")
    lifetime_ms = _LIFETIME_MS if document.ttl is None else int(document.ttl)
    if not 0 < lifetime_ms <= MAX_LIFETIME_MS:
        raise BadRequest(f"ttl: must be more than 0, and at most {MAX_LIFETIME_MS // 86_400_000} days")
    delay_ms = 0 if callback.delay is None else int(callback.delay)
    if delay_ms:
        check_positive("callback.delay", delay_ms, max_delay_ms)
    ttl_ms = check_positive("callback.ttl", None if callback.ttl is None else int(callback.ttl), max_delay_ms)
    tags = check_tags(limits, callback.tags)
    meta = pack_meta(limits, content_type, callback.meta, tags=list(tags), ttl=ttl_ms)
    if len(meta) > MAX_META:
        raise TooLarge(f"callback: meta and tags have {len(meta)} bytes; at most {MAX_META} are allowed")
    spec = Spec(topic, ONS.index(document.on), delay_ms, ttl_ms, mask_of(tags), meta, body, lifetime_ms)
    return check_batch_key(document.key), spec


def cursor_of(text: str | None) -> int | None:
    """Number of the batch in a list's cursor; None without a cursor. Raises BadRequest."""
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise BadRequest("cursor: this is not a cursor from the previous page")
    return int(text)
