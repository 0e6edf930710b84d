"""The pages Topics and Topic."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from hadelay.api.attention import Row
from hadelay.api.service import ListRequest
from hadelay.api.text import LARGEST_MS
from hadelay.api.topicsettings import Topic
from hadelay.api.verdict import waits_for
from hadelay.console.alarms import WORDS, badges
from hadelay.console.dead import check_typed
from hadelay.console.messages import TONES, now
from hadelay.console.problems import Wrong
from hadelay.console.samples import last_point
from hadelay.console.topicsettings import facts, rows
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import NotFound
from hadelay.http.answers import Answer
from hadelay.model import FIRST, SEPARATOR, State
from hadelay.server.service.overview import CHOICES, ORDERS, TopicCounts
from hadelay.server.webhooks.queues import Health
from hadelay.words import span

pages = Pages()

#: Number of topics per page, and maximum number of pages: topics beyond are found only by a search.
_PAGE, _PAGES = 50, 40
#: Number of ready messages that the page of a topic shows without leasing them.
_PEEK = 5
#: (tone, sentence) without a leader, in place of the reason why messages wait. A tone is the severity of a sentence:
#: bad, warn, good, or off for a sentence that is neither good nor bad.
_NOBODY_KNOWS = "off", "Nobody knows what is ready: there is no leader."
#: Age of a topic's oldest ready message, in ms, from which on its consumers, or its webhook's receiver, are too slow.
_SLOW_MS = 10_000


@pages.get("/console/topics")
async def overview(visit: Visit) -> Answer:
    """The table of topics. The node searches, filters, sorts and pages."""
    text, order, choice, page = _asked(visit)
    found, count = await _find(visit)
    values: dict[str, Any] = {
        "topics": found, "count": count, "page": page, "pages": min(_PAGES, -(-count // _PAGE)), "q": text,
        "sort": order, "show": choice, "choices": list(CHOICES), "first": page * _PAGE + 1,
        "creates": visit.access.rights.may_somewhere("admin"), **await _badges(visit),
    }  # fmt: skip
    if visit.partial:
        return visit.part("topics.html", **values)
    return visit.page("topics.html", active="topics", title="Topics", **values)


def _asked(visit: Visit) -> tuple[str, str, str, int]:
    """Query of a table of topics: (searched text, sort order, filter, page number)."""
    text, order, choice = (visit.query.get(name, "") for name in ("q", "sort", "show"))
    order, choice = order if order in ORDERS else "name", choice if choice in CHOICES else "all"
    return text.strip()[:128], order, choice, min(whole(visit.query.get("page", ""), 5) or 0, _PAGES - 1)


async def _find(visit: Visit) -> tuple[list[Topic[str]], int]:
    text, order, choice, page = _asked(visit)
    return await visit.service.overview.find_topics(
        text, order, page * _PAGE, _PAGE, choice=choice, may=lambda name: visit.may("read", name), stale=visit.stale
    )


async def _badges(visit: Visit) -> dict[str, Any]:
    return {"badges": badges(await visit.site.report(visit)), "words": WORDS}


@pages.live("/console/live/topics")
def live_rows(visit: Visit) -> tuple[str, Any]:
    """Stream of a table of topics: rows of the topics that the page showed first, in the same order."""
    names = list[str]()

    async def frame() -> dict[str, Any]:
        if names:
            found = await visit.service.overview.topics_of(names, stale=visit.stale)
        else:
            found, _ = await _find(visit)
            names.extend(topic.topic for topic in found)
        shared = await _badges(visit)
        rows = {f"row-{topic.topic}": visit.render("topic_row.html", {"topic": topic, **shared}) for topic in found}
        return {"html": rows}

    return f"topics {_asked(visit)} {visit.sees}", frame


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
    settings, maps = rows(topic, visit.call.context.config)
    of, separator, _ = visit.topic.partition(SEPARATOR)
    found = [] if separator else await visit.service.topics.list_subscriptions(visit.topic, stale=visit.stale)
    values = {
        **await consumers(visit, topic), "topic": topic, "settings": settings, "shown": shown, "peek": peek,
        "maps": maps, "facts": facts(topic), "opened": visit.query.get("open", ""),
        "tones": TONES, "now": now(visit), "of": of if separator else "",
        "subscriptions": [(one, _unlike_defaults(one)) for one in found],
    }  # fmt: skip
    return visit.page("topic.html", active="topics", title=visit.topic, **values)


@pages.get("/console/topics/{topic}/group")
async def group(visit: Visit) -> Answer:
    """A message group of the topic, its first messages and how many wait; or all groups, stuck ones first."""
    visit.need("read", visit.topic)
    wanted, found, problem, groups = visit.query.get("q", "").strip(), None, None, None
    if wanted:
        try:
            found = await visit.service.topics.get_group(visit.topic, wanted, stale=visit.stale)
        except NotFound as error:
            problem = visit.problem_of(error)
    if found is None:
        may = partial(visit.may, "read")
        groups = await visit.service.groups.list_groups(visit.topic, may=may, stale=visit.stale)
    values: dict[str, Any] = {
        "topic": visit.topic, "wanted": wanted, "group": found, "problem": problem, "groups": groups,
        "now_ms": visit.service.access.now_ms(),
    }  # fmt: skip
    return visit.page("group.html", active="topics", title=f"Groups of {visit.topic}", tones=TONES, **values)


@pages.get("/console/groups")
async def all_groups(visit: Visit) -> Answer:
    """Message groups of all topics, stuck ones first."""
    groups = await visit.service.groups.list_groups(None, may=partial(visit.may, "read"), stale=visit.stale)
    now_ms = visit.service.access.now_ms()
    return visit.page("groups.html", active="groups", title="Message groups", groups=groups, topic="", now_ms=now_ms)


@pages.live("/console/live/topics/{topic}")
def live(visit: Visit) -> tuple[str, Any]:
    visit.need("read", visit.topic)

    visit.site.sampler.looked_at(visit.topic)

    async def frame() -> dict[str, Any]:
        topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
        values = {**await consumers(visit, topic), "topic": topic, "shown": msgspec.to_builtins(topic)}
        html = {part: visit.render(f"{part}.html", values) for part in ("counts", "consumers")}
        state = "paused" if topic.paused else "running"
        return {"html": html, "state": state, "point": last_point(visit.site.sampler.topic_charts(visit.topic))}

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
    minute, report = visit.site.sampler.per_minute(topic.topic), await visit.site.report(visit)
    problems = [row for row in report.rows if row.topic == topic.topic] if report is not None else []
    fails = any(row.kind == "receiver" for row in problems)
    return {
        "consumers": list(rows.values()), "all_grants": complete, "now_ms": visit.service.access.now_ms(),
        "minute": minute, "receiver": receiver(topic, minute, fails=fails), "health": _health(visit, topic),
        "asks": await _leader_page(visit) if topic.webhook is not None else "",
        "said": [_NOBODY_KNOWS] if visit.stale else said(topic, problems, now(visit)),
    }  # fmt: skip


async def _leader_page(visit: Visit) -> str:
    """Address of the topic's page on the leader, which calls the webhooks and so knows the answers to these calls; ""
    on the leader, and without a leader."""
    leader = visit.service.leader_name
    if leader is None or leader == visit.service.node:
        return ""
    members = (await visit.service.cluster.view(stale=True)).members
    home = next((member.http for member in members if member.name == leader), "")
    return f"{home}/console/topics/{visit.topic}" if home else ""


def said(topic: Topic[str], problems: Sequence[Row[str]], at: str) -> list[tuple[str, str]]:
    """(tone, sentence) about the topic at the time `at`, tone being the severity: its problems, its retries, and
    whether messages wait. No tone is "good" while there are problems or retries."""
    found = [(row.severity, row.sentence) for row in problems]
    if topic.retrying:
        many = "message waits" if topic.retrying == 1 else "messages wait"
        found.append(("warn", f"{topic.retrying:,} {many} for another attempt after a failed one."))
    tone, words = waits(topic, at)
    return [*found, ("off" if found and tone == "good" else tone, words)]


def waits(topic: Topic[str], at: str) -> tuple[str, str]:
    """(tone, sentence), tone being the severity: whether messages of the topic wait at the time `at`, and why."""
    late_ms = topic.oldest_ready_age_ms
    if topic.paused and not topic.ready:
        return "off", "The topic is paused: what falls due waits."
    if topic.ready and late_ms is not None:
        why = waits_for(msgspec.to_builtins(topic), at)
        return (
            "warn" if late_ms >= _SLOW_MS else "good",
            f"The oldest ready message is overdue by {span(late_ms)}: {why}.",
        )
    if topic.blocked:
        return "good", f"No message is ready; {topic.blocked:,} wait behind other messages of their groups."
    return "good", "No message is ready."


def receiver(topic: Topic[str], minute: TopicCounts | None, *, fails: bool = False) -> tuple[str, str]:
    """(tone, sentence) about the receiver of a topic's webhook, tone being the severity; empty without a webhook.
    fails: whether the report of problems says that the receiver fails."""
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
        return ("warn" if minute.acked and not minute.died and not fails else "bad"), words
    good = "warn" if topic.retrying else "good"
    return ("bad" if minute.died or fails else good), words


def _health(visit: Visit, topic: Topic[str]) -> list[tuple[str, str]]:
    """(tone, sentence) about the calls to a topic's webhook, tone being the severity; empty without a webhook."""
    if topic.webhook is None:
        return []
    leader, found = visit.service.leader_name, visit.service.overview.receiver(topic.topic)
    if found is not None:
        return health(found, visit.service.access.now_ms())
    if leader is None or leader == visit.service.node:
        return [("off", "This node does not know the answers to the calls yet.")]
    return [("off", f"{leader} leads and makes the calls: open its page for their answers.")]


def health(found: Health, now_ms: int) -> list[tuple[str, str]]:
    """(tone, sentence) about the answers of a webhook's receiver, the present state first; tone being the severity."""
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


def _unlike_defaults(topic: Topic[str]) -> list[tuple[str, str]]:
    """(name, text) of the settings of a topic that are set; of a webhook only the URL."""
    return [(name, text) for name, _, text in facts(topic) if "." not in name or name == "webhook.url"]


async def _pause(visit: Visit, config: dict[str, Any], notice: str) -> Answer:
    visit.need("admin", visit.topic)
    await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    await visit.service.topics.put_topic(visit.topic, config, visit.actor, subscribes=False)
    return visit.go(f"/console/topics/{visit.topic}", notice)


@pages.post("/console/topics/{topic}/pause")
async def pause(visit: Visit) -> Answer:
    config = {"paused": True, "paused_reason": visit.text("reason") or None}
    return await _pause(visit, config, "")  # no notice, because the page shows that the topic is paused


@pages.post("/console/topics/{topic}/resume")
async def resume(visit: Visit) -> Answer:
    return await _pause(visit, {"paused": None, "paused_reason": None}, "Resumed: messages are handed out again.")


@pages.post("/console/topics/{topic}/purge")
async def purge(visit: Visit) -> Answer:
    """Cancel scheduled and ready messages, also blocked ones, after the person typed their number."""
    visit.need("admin", visit.topic)
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    states: list[str] = [state for state in ("scheduled", "ready") if state in visit.texts("state")]
    if not states:
        raise Wrong("state", "Choose the messages to purge: scheduled, ready, or both.")
    check_typed(visit.text("typed"), visit.text("shown"), topic.scheduled + topic.ready + topic.blocked)
    await visit.service.messages.purge(visit.topic, states, visit.actor)
    return visit.go(f"/console/topics/{visit.topic}", f"Purged: {' and '.join(states)} messages are cancelled.")
