"""The pages Topics and Topic."""

from typing import Any

import msgspec

from hadelay.api.base import decode_hook
from hadelay.api.publishing import BatchItem
from hadelay.api.service import ListRequest, Receipts, answered
from hadelay.api.settings import settings_in
from hadelay.api.text import LARGEST_MS, check_new_topic, check_topic
from hadelay.api.topics import PutTopic, Topic
from hadelay.api.verdict import waits_for
from hadelay.console.dead import check_typed
from hadelay.console.messages import TONES, now
from hadelay.console.samples import last_point
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, NotFound, TooLarge
from hadelay.http.answers import Answer
from hadelay.http.decoding import decoded
from hadelay.http.options import draft_of, when
from hadelay.model import FIRST, SEPARATOR, State, encode_id
from hadelay.server.service.overview import CHOICES, ORDERS, TopicCounts
from hadelay.server.service.part import once_begun
from hadelay.server.webhooks.queues import Health
from hadelay.settings.topic import CALLBACK_SETTINGS, COPY_SETTINGS, FAN_OUT_SETTINGS, SETTINGS, shown_name
from hadelay.words import span

pages = Pages()

#: Number of topics per page, and maximum number of pages: topics beyond are found only by a search.
_PAGE, _PAGES = 50, 40
#: Number of ready messages that the page of a topic shows without leasing them.
_PEEK = 5
#: (tone, sentence) in place of why messages wait, without a leader.
_NOBODY_KNOWS = "off", "Nobody knows what is ready: there is no leader."
#: Age of a topic's oldest ready message, in ms, from which on its consumers, or its webhook's receiver, are too slow.
_SLOW_MS = 10_000
#: Topic settings that the page Topic can change; it only shows the others, which `hadelay topic set` changes.
_IN_FORM = (
    "lease_ms", "max_attempts", "backoff", "ttl_ms", "rate", "catch_up_rate", "concurrency",
    "group_concurrency", "group_rate", "publish_rate", "max_messages", "max_bytes", "dead_letter", "dead_retention_ms",
    "retention_ms", "on_success", "on_failure",
)  # fmt: skip


@pages.get("/console/topics")
async def overview(visit: Visit) -> Answer:
    """The table of topics. The node searches, filters, sorts and pages."""
    text, order, choice = (visit.query.get(name, "") for name in ("q", "sort", "show"))
    order, choice = order if order in ORDERS else "name", choice if choice in CHOICES else "all"
    page = min(whole(visit.query.get("page", ""), 5) or 0, _PAGES - 1)
    text = text.strip()[:128]
    found, count = await visit.service.overview.find_topics(
        text, order, page * _PAGE, _PAGE, choice=choice, may=lambda name: visit.may("read", name), stale=visit.stale
    )
    values: dict[str, Any] = {
        "topics": found, "count": count, "page": page, "pages": min(_PAGES, -(-count // _PAGE)), "q": text,
        "sort": order, "show": choice, "choices": list(CHOICES), "first": page * _PAGE + 1,
    }  # fmt: skip
    if visit.partial:
        return visit.part("topics.html", **values)
    return visit.page("topics.html", active="topics", title="Topics", **values)


@pages.get("/console/topics/{topic}")
async def show(visit: Visit) -> Answer:
    """One topic: counts, charts, consumers, settings."""
    visit.need("read", visit.topic)
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    visit.site.sampler.looked_at(visit.topic)
    shown = msgspec.to_builtins(topic)
    peek, _ = await visit.service.messages.list_messages(
        visit.topic, ListRequest(frozenset((State.READY,)), 0, LARGEST_MS, (), FIRST, _PEEK), stale=visit.stale
    )
    settings = [(shown_name(name), SETTINGS[name].help, _written(shown.get(shown_name(name)))) for name in _IN_FORM]
    of, separator, _ = visit.topic.partition(SEPARATOR)
    found = [] if separator else await visit.service.topics.list_subscriptions(visit.topic, stale=visit.stale)
    values = {
        **await consumers(visit, topic), "topic": topic, "settings": settings, "shown": shown, "peek": peek,
        "tones": TONES, "now": now(visit), "of": of if separator else "",
        "subscriptions": [(one, _unlike_defaults(one)) for one in found], "others": _others(shown, bool(separator)),
    }  # fmt: skip
    return visit.page("topic.html", active="topics", title=visit.topic, **values)


@pages.get("/console/topics/{topic}/group")
async def group(visit: Visit) -> Answer:
    """A message group of the topic: its first messages, and how many wait behind them."""
    visit.need("read", visit.topic)
    wanted, found, problem = visit.query.get("q", "").strip(), None, ""
    if wanted:
        try:
            found = await visit.service.topics.get_group(visit.topic, wanted, stale=visit.stale)
        except NotFound as error:
            problem = error.detail
    values: dict[str, Any] = {"topic": visit.topic, "wanted": wanted, "group": found, "problem": problem}
    return visit.page("group.html", active="topics", title=f"Groups of {visit.topic}", tones=TONES, **values)


@pages.live("/console/live/topics/{topic}")
def live(visit: Visit) -> tuple[str, Any]:
    visit.need("read", visit.topic)

    visit.site.sampler.looked_at(visit.topic)

    async def frame() -> dict[str, Any]:
        topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
        values = {**await consumers(visit, topic), "topic": topic, "shown": msgspec.to_builtins(topic)}
        html = {part: visit.render(f"{part}.html", values) for part in ("counts", "consumers")}
        return {"html": html, "point": last_point(visit.site.sampler.topic_charts(visit.topic))}

    return f"topic {visit.topic}", frame


async def consumers(visit: Visit, topic: Topic[str]) -> dict[str, Any]:
    """Consumers of the topic: those that recently sent a receive, that have leased messages, or acked in the last
    minute."""
    holders, complete = await visit.service.overview.holders(topic.topic)
    rows: dict[str, dict[str, Any]] = {
        one.name: {"name": one.name, "asked_at": one.asked_at, "node": one.node, "waiting": one.waiting}
        for one in topic.consumers or ()
    }
    for holder in holders[:50]:
        row = rows.setdefault(holder.consumer, {"name": holder.consumer})
        row |= {"leased": holder.leased, "since_ms": holder.since_ms}
    acks = sorted((await visit.service.overview.acks(topic.topic)).items(), key=lambda item: -item[1])
    for consumer, number in acks[:50]:
        rows.setdefault(consumer, {"name": consumer})["acked"] = number
    minute = visit.site.sampler.per_minute(topic.topic)
    return {
        "consumers": list(rows.values()), "all_grants": complete, "now_ms": visit.service.access.now_ms(),
        "minute": minute, "receiver": receiver(topic, minute), "health": _health(visit, topic),
        "waits": _NOBODY_KNOWS if visit.stale else waits(topic, now(visit)),
    }  # fmt: skip


def waits(topic: Topic[str], at: str) -> tuple[str, str]:
    """(tone, sentence): whether messages of the topic wait at the time `at`, and why."""
    late_ms = topic.oldest_ready_age_ms
    if topic.ready and late_ms is not None:
        why = waits_for(msgspec.to_builtins(topic), at)
        return (
            "warn" if late_ms >= _SLOW_MS else "good",
            f"The oldest ready message is overdue by {span(late_ms)}: {why}.",
        )
    if topic.blocked:
        return "good", f"No message is ready; {topic.blocked:,} wait behind other messages of their groups."
    return "good", "No message is ready: nothing waits."


def receiver(topic: Topic[str], minute: TopicCounts | None) -> tuple[str, str]:
    """(tone, sentence) about the receiver of a topic's webhook; empty without a webhook."""
    late_ms = topic.oldest_ready_age_ms or 0
    if topic.webhook is None:
        return "", ""
    if topic.paused:
        return "off", "The topic is paused: the receiver is not called."
    if minute is None:
        return "off", "Figures about the receiver come after two samples, in some seconds."
    words = f"In the last minute the receiver took {minute.acked:,} messages, and {minute.died:,} became dead letters."
    if topic.ready and late_ms >= _SLOW_MS:
        words += f" {topic.ready:,} wait, the oldest for {span(late_ms)}."
        return ("warn" if minute.acked and not minute.died else "bad"), words
    return ("bad" if minute.died else "good"), words


def _health(visit: Visit, topic: Topic[str]) -> list[tuple[str, str]]:
    """(tone, sentence) about the calls to a topic's webhook; empty without a webhook."""
    if topic.webhook is None:
        return []
    leader, found = visit.service.leader_name, visit.service.overview.receiver(topic.topic)
    if found is not None:
        return health(found, visit.service.access.now_ms())
    if leader is None or leader == visit.service.node:
        return [("off", "This node does not know the answers to the calls yet.")]
    return [("off", f"{leader} leads and makes the calls: the page of this topic on {leader} has their answers.")]


def health(found: Health, now_ms: int) -> list[tuple[str, str]]:
    """(tone, sentence) about the answers of a webhook's receiver, the present state first."""
    if not found.calls:
        return [("off", "No call was answered since this node leads, or since the URL was set.")]
    last = f"HTTP {found.status}" if found.status else "no answer"
    words = [("good", f"The last call succeeded: {last}.")]
    if found.failed:
        calls = "call has" if found.failed == 1 else "calls in a row have"
        failing = span(max(0, now_ms - found.failing_since_ms))
        words = [("bad", f"{found.failed:,} {calls} failed, for {failing}. The last one: {last}.")]
    if found.error:
        words.append(("off", f"Last error: {found.error[:200]}, {span(max(0, now_ms - found.error_at_ms))} ago."))
    since = "since this node leads, or since the URL was set"
    return [*words, ("off", f"Calls {since}: {found.calls:,}; retries among them: {found.retries:,}.")]


def _written(value: Any) -> str:
    """Text of a setting's value, as shown and typed in the form."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ",".join(f"{name}={one}" for name, one in value.items() if one is not None)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _others(shown: dict[str, Any], subscription: bool) -> list[tuple[str, str, str]]:
    """(name, help, value as text) of the settings that the form does not have, parts of a setting one by one; "" for a
    default."""
    found, skipped = list[tuple[str, str, str]](), FAN_OUT_SETTINGS if subscription else COPY_SETTINGS
    for name in (name for name in SETTINGS if name not in (*_IN_FORM, *skipped)):
        value, help = shown.get(shown_name(name)), SETTINGS[name].help
        parts = value.items() if isinstance(value, dict) else [("", value)]
        rows = [(f"{shown_name(name)}.{part}" if part else shown_name(name), one) for part, one in parts]
        found += [(part, help, str(one).lower() if isinstance(one, bool) else _written(one)) for part, one in rows]
    return found


def _unlike_defaults(topic: Topic[str]) -> list[tuple[str, str]]:
    """Settings of a topic that are set, as text."""
    shown = msgspec.to_builtins(topic)
    written = ((name, _written(shown.get(name))) for name in map(shown_name, SETTINGS) if name != "webhook")
    url = [] if topic.webhook is None else [("webhook", str(shown["webhook"].get("url")))]
    return [*((name, text) for name, text in written if text), *url]


def _read(name: str, text: str) -> Any:
    if not text:
        return None
    if name == "backoff":
        parts = [part.strip() for part in text.split(",")]
        return dict(part.partition("=")[::2] for part in parts) if "=" in text else parts
    return text


@pages.post("/console/topics/{topic}/settings")
async def change(visit: Visit) -> Answer:
    """Change the settings that the user changed in the form; the types of the API check the values."""
    name, limit = visit.topic, visit.call.context.config.max_topic_bytes
    (check_topic if SEPARATOR in name else check_new_topic)(name, limit)
    visit.need("admin", name)
    wanted = {
        shown_name(field): _read(field, visit.text(shown_name(field)))
        for field in _IN_FORM
        if visit.text(shown_name(field)) != visit.text(f"was_{shown_name(field)}")
    }
    if not wanted:
        return visit.go(f"/console/topics/{name}", "No setting was changed.")
    put = decoded(lambda: msgspec.convert(wanted, PutTopic, strict=False, dec_hook=decode_hook), PutTopic)
    settings = settings_in(put)
    for setting in ("dead_letter", *CALLBACK_SETTINGS):
        topic = settings.get(setting)
        if topic is not None and (setting, topic) != ("dead_letter", "keep"):
            visit.need("publish", topic)
    await visit.service.topics.get_topic(name, stale=visit.stale)
    await visit.service.topics.put_topic(name, settings, visit.actor, subscribes=False)
    return visit.go(f"/console/topics/{name}", f"Changed: {', '.join(wanted)}.")


async def _pause(visit: Visit, config: dict[str, Any], notice: str) -> Answer:
    visit.need("admin", visit.topic)
    await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    await visit.service.topics.put_topic(visit.topic, config, visit.actor, subscribes=False)
    return visit.go(f"/console/topics/{visit.topic}", notice)


@pages.post("/console/topics/{topic}/pause")
async def pause(visit: Visit) -> Answer:
    config = {"paused": True, "paused_reason": visit.text("reason") or None}
    return await _pause(visit, config, "Paused: messages are kept, and none is handed out.")


@pages.post("/console/topics/{topic}/resume")
async def resume(visit: Visit) -> Answer:
    return await _pause(visit, {"paused": None, "paused_reason": None}, "Resumed: messages are handed out again.")


@pages.post("/console/topics/{topic}/purge")
async def purge(visit: Visit) -> Answer:
    """Cancel scheduled and ready messages, also blocked ones. As a confirmation, the user has to type their number."""
    visit.need("admin", visit.topic)
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    states: list[str] = [state for state in ("scheduled", "ready") if state in visit.texts("state")]
    if not states:
        raise BadRequest("choose the messages to purge: scheduled, ready, or both")
    check_typed(visit.text("typed"), visit.text("shown"), topic.scheduled + topic.ready + topic.blocked)
    await visit.service.messages.purge(visit.topic, states, visit.actor)
    return visit.go(f"/console/topics/{visit.topic}", f"Purged: {' and '.join(states)} messages are cancelled.")


@pages.post("/console/topics/{topic}/publish")
async def publish(visit: Visit) -> Answer:
    """Publish a test message."""
    context = visit.call.context
    name = check_new_topic(visit.topic, context.config.max_topic_bytes)
    visit.need("publish", name)
    body = visit.raw("body").replace("\r\n", "\n").encode()
    if len(body) > context.config.max_body_bytes:
        raise TooLarge(f"a body of {len(body)} bytes; at most {context.config.max_body_bytes} are allowed")
    tags = [tag for tag in visit.text("tags").split(",") if tag.strip()]
    item = BatchItem(
        name, content_type=visit.text("content_type") or "text/plain", key=visit.text("key") or None, tags=tags or None
    )
    times = when(context.max_delay_ms, visit.text("delay") or None, None)
    draft = draft_of(context.config, context.max_delay_ms, item, times, None, body)
    receipts: Receipts = await answered(lambda done: visit.service.publish([draft], None, done))
    if receipts.problems:
        raise receipts.problems[0]
    with once_begun():
        await visit.service.access.note("message.publish", name, visit.actor)
    again = "There was a pending message under this key." if receipts.duplicates else "Published."
    return visit.go(f"/console/messages/{encode_id(receipts.ids[0])}", again)
