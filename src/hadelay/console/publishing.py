"""Publishes messages from pages: a test message to a topic, and a copy of an earlier message."""

from hadelay.api.publishrequest import BatchItem
from hadelay.api.service import Receipts, answered
from hadelay.api.text import check_new_topic, parse_id
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit
from hadelay.errors import Impossible
from hadelay.http.answers import Answer
from hadelay.model import SEPARATOR, encode_id
from hadelay.rules.access import need_read
from hadelay.rules.publishing import draft_of, due_time
from hadelay.server.service.part import once_begun

pages = Pages()


@pages.post("/console/topics/{topic}/publish")
async def publish(visit: Visit) -> Answer:
    """Publish a test message to the topic."""
    tags = [tag for tag in visit.text("tags").split(",") if tag.strip()]
    content_type, key = visit.text("content_type") or "text/plain", visit.text("key") or None
    item = BatchItem(visit.topic, content_type=content_type, key=key, tags=tags or None)
    return await _publish(visit, item, visit.raw("body").replace("\r\n", "\n").encode())


@pages.post("/console/messages/{id}/again")
async def again(visit: Visit) -> Answer:
    """Publish a new message with the body, type, tags, fields and group of an earlier message."""
    old = await visit.service.messages.describe(parse_id(visit.path["id"]), body=True, stale=visit.stale)
    need_read(visit.access, old.topic)
    if SEPARATOR in old.topic:
        raise Impossible("a copy of a subscription cannot be published again: publish the message that it is a copy of")
    key = visit.text("key") or None
    item = BatchItem(
        old.topic, content_type=old.content_type, key=key, tags=old.tags, meta=old.meta or None, group=old.group
    )
    return await _publish(visit, item, old.body or b"")


async def _publish(visit: Visit, item: BatchItem, body: bytes) -> Answer:
    """Publish a message after the delay of the form, and go to its page."""
    context = visit.call.context
    name = check_new_topic(item.topic, context.config.max_topic_bytes)
    visit.need("publish", name)
    if len(body) > context.config.max_body_bytes:
        raise Wrong("body", f"The body has {len(body):,} bytes; at most {context.config.max_body_bytes:,} are allowed.")
    times = due_time(context.max_delay_ms, visit.text("delay") or None, None)
    draft = draft_of(context.config, context.max_delay_ms, item, times, None, body)
    receipts: Receipts = await answered(lambda done: visit.service.publish([draft], None, done, visit.actor.token))
    if receipts.problems:
        raise receipts.problems[0]
    with once_begun():
        await visit.service.access.note("message.publish", name, visit.actor)
    words = "There was a pending message under this key." if receipts.duplicates else "Published."
    return visit.go(f"/console/messages/{encode_id(receipts.ids[0])}", words)
