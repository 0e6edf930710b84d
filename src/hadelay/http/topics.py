"""Routes for topics, and histograms of due messages."""

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import msgspec

from hadelay.api.base import Nothing
from hadelay.api.messages import ReadQuery
from hadelay.api.text import check_topic
from hadelay.api.topics import (
    Bucket,
    Buckets,
    DeleteTopicQuery,
    DueQuery,
    Group,
    Groups,
    GroupsQuery,
    Pause,
    PutSubscription,
    Topics,
    TopicsQuery,
)
from hadelay.api.topicsettings import PutTopic, Topic
from hadelay.errors import BadRequest
from hadelay.http import merging
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.receipts import INSTANT_CHARS, instants_text
from hadelay.http.routes import Routes
from hadelay.model import SEPARATOR
from hadelay.rules.publishing import check_group
from hadelay.rules.topics import check_topic_to_set, settings_to_put

routes = Routes()


class _Named(msgspec.Struct):
    """Member of a topic by which lists of topics are sorted."""

    topic: str


class _Waiting(msgspec.Struct):
    """Members of a message group by which lists of groups are sorted: the longest wait first, then most blocked
    messages."""

    since: str | None
    blocked: int

    @property
    def order(self) -> tuple[bool, str, int]:
        return self.since is None, self.since or "", -self.blocked


_TOPICS = merging.Rows("topics", _Named, lambda row: row.topic)
_GROUPS = merging.Rows("groups", _Waiting, lambda row: row.order)
#: Limit of message groups in an answer, which has those with the longest waits.
_MAX_GROUPS = 100


async def _groups_of_all(call: Call, lists: merging.Lists) -> dict[str, Any]:
    complete = all(call.decode(one["complete"], bool) for one in lists.values())
    return {**await _GROUPS.whole(_MAX_GROUPS)(call, lists), "complete": complete}


async def _groups(call: Call) -> Answer:
    if call.query.topic is None or call.router is None:
        return await merging.merged(_groups_of_all)(call)
    return await merging.at(call, call.router.owner(call.query.topic))


async def _sums(call: Call, lists: merging.Lists) -> dict[str, Any]:
    counts = Counter[str]()
    for one in lists.values():
        counts.update({bucket.start: bucket.count for bucket in call.decode(one["buckets"], list[Bucket[str]])})
    return {"buckets": [Bucket(*interval) for interval in sorted(counts.items())]}


_MAX_BUCKETS = 10_000
#: Limit of topics encoded before other requests have their turn.
_TOPICS_AT_ONCE = 200
_SECOND, _MINUTE = 1_000, 60_000
#: Longest range, in ms, of a histogram of one topic whose step is no whole number of minutes: such a histogram looks at
#: each entry of the range's hours.
_FINE_MS = 2 * 3_600_000


@routes.add("PUT", "/v1/topics/{topic}", body=PutTopic, returns={200: Topic[str]}, errors=(404, 409, 429))
async def put_topic(call: Call) -> Answer:
    """Create a topic, or change the named settings"""
    name = check_topic_to_set(call.path["topic"], call.context.config.max_topic_bytes)
    # Creating a subscription gives access to all messages of its topic, so the token needs the scope `admin` for the
    # topic.
    subscribes = call.access.may("admin", name.partition(SEPARATOR)[0])
    return call.answer(await call.service.topics.put_topic(name, _settings(call), call.actor, subscribes=subscribes))


def _settings(call: Call) -> dict[str, Any]:
    return settings_to_put(call.access, call.body, call.context.config.max_topic_bytes)


_SUBSCRIPTIONS = "/v1/topics/{topic}/subscriptions"
_SUBSCRIPTION = _SUBSCRIPTIONS + "/{subscription}"


def _subscription(call: Call) -> str:
    """Name of the topic that is the subscription, such as orders~billing."""
    name = f"{call.topic}{SEPARATOR}{call.path['subscription']}"
    return check_topic(name, call.context.config.max_topic_bytes)


@routes.add("PUT", _SUBSCRIPTION, body=PutSubscription, returns={200: Topic[str]}, errors=(404, 409, 422, 429))
async def put_subscription(call: Call) -> Answer:
    """Create a subscription, which gets a copy of each message published from now on, or change its settings"""
    name, settings = _subscription(call), _settings(call)
    pending = settings.pop("from") == "pending"
    return call.answer(await call.service.topics.put_topic(name, settings, call.actor, pending=pending))


@routes.add("GET", _SUBSCRIPTION, query=ReadQuery, returns={200: Topic[str]}, errors=(404, 503), scope="read")
async def get_subscription(call: Call) -> Answer:
    """One subscription, with the numbers of its messages; it is a topic such as orders~billing"""
    return call.answer(await call.service.topics.get_topic(_subscription(call), stale=call.query.stale))


@routes.add("GET", _SUBSCRIPTIONS, query=ReadQuery, returns={200: Topics}, errors=(404, 503), scope="read")
async def list_subscriptions(call: Call) -> Answer:
    """The subscriptions of a topic, with the numbers of their messages"""
    return call.answer(Topics(await call.service.topics.list_subscriptions(call.topic, stale=call.query.stale)))


@routes.add("DELETE", _SUBSCRIPTION, query=DeleteTopicQuery, returns={204: None}, errors=(404, 409, 429))
async def delete_subscription(call: Call) -> Answer:
    """Delete a subscription; with force, cancel its pending messages"""
    await call.service.topics.delete_topic(_subscription(call), force=call.query.force, by=call.actor)
    return NOTHING


@routes.add("POST", "/v1/topics/{topic}:pause", body=Pause, returns={200: Topic[str]}, errors=(404,))
async def pause_topic(call: Call) -> Answer:
    """Stop hand-outs of the topic; publishing and present leases go on"""
    return await _change(call, {"paused": True, "paused_reason": call.body.reason})


@routes.add("POST", "/v1/topics/{topic}:resume", body=Nothing, returns={200: Topic[str]}, errors=(404,))
async def resume_topic(call: Call) -> Answer:
    """Resume hand-outs; messages that fell due meanwhile follow the topic's catch-up rate, if set"""
    return await _change(call, {"paused": None, "paused_reason": None})


async def _change(call: Call, config: dict[str, Any]) -> Answer:
    """Change settings of an existing topic; NotFound for a mistyped name, which must not create a topic. If the topic
    is deleted between the check and the change, the change creates it again, empty."""
    name, door = call.topic, call.service.topics
    await door.get_topic(name, stale=False)
    return call.answer(await door.put_topic(name, config, call.actor, subscribes=False))


@routes.add("GET", "/v1/topics/{topic}", query=ReadQuery, returns={200: Topic[str]}, errors=(404, 503), scope="read")
async def get_topic(call: Call) -> Answer:
    """One topic, with the numbers of its messages"""
    return call.answer(await call.service.topics.get_topic(call.topic, stale=call.query.stale))


@routes.add(
    "GET",
    "/v1/topics/{topic}/groups/{group}",
    query=ReadQuery,
    returns={200: Group[str]},
    errors=(404, 503),
    scope="read",
)
async def get_group(call: Call) -> Answer:
    """A message group: the messages whose turn it is, and how many wait behind them"""
    group = check_group(call.path["group"])
    return call.answer(await call.service.topics.get_group(call.topic, group, stale=call.query.stale))


@routes.add(
    "GET",
    "/v1/groups",
    query=GroupsQuery,
    returns={200: Groups[str]},
    errors=(404, 503),
    scope="read",
    own_topics=True,
    shards=_groups,
)
async def list_groups(call: Call) -> Answer:
    """Message groups in which messages wait, those with the longest wait first"""
    topic, may = call.query.topic, partial(call.access.may, "read")
    if topic is not None:
        call.access.need("read", check_topic(topic))
    return call.answer(await call.service.groups.list_groups(topic, may=may, stale=call.query.stale))


@routes.add(
    "GET",
    "/v1/topics",
    query=TopicsQuery,
    returns={200: Topics},
    errors=(503,),
    scope="read",
    own_topics=True,
    shards=merging.merged(_TOPICS.whole()),
)
async def list_topics(call: Call) -> Answer:
    """All topics that the token may read, with the numbers of their messages"""
    found = await call.service.topics.list_topics(stale=call.query.stale, prefix=call.query.prefix)
    topics: list[Any] = []
    for first in range(0, len(found), _TOPICS_AT_ONCE):
        few = found[first : first + _TOPICS_AT_ONCE]
        topics += [msgspec.Raw(call.encode(topic)) for topic in few if call.access.may("read", topic.topic)]
        await asyncio.sleep(0)
    return call.answer(Topics(topics))


@routes.add("DELETE", "/v1/topics/{topic}", query=DeleteTopicQuery, returns={204: None}, errors=(404, 409, 429))
async def delete_topic(call: Call) -> Answer:
    """Delete a topic; with force, cancel its pending messages"""
    await call.service.topics.delete_topic(call.topic, force=call.query.force, by=call.actor)
    return NOTHING


@routes.add(
    "GET",
    "/v1/due",
    query=DueQuery,
    returns={200: Buckets[str]},
    errors=(422, 503),
    scope="read",
    shards=merging.merged(_sums),
)
async def due(call: Call) -> Answer:
    """Number of due messages per interval, over all topics"""
    return call.answer(Buckets(await _due(call, None)))


@routes.add(
    "GET", "/v1/topics/{topic}/due", query=DueQuery, returns={200: Buckets[str]}, errors=(404, 422, 503), scope="read"
)
async def topic_due(call: Call) -> Answer:
    """Number of due messages per interval, of one topic"""
    return call.answer(Buckets(await _due(call, call.topic)))


async def _due(call: Call, topic: str | None) -> list[Bucket[str]]:
    start, end, step = int(call.query.from_), int(call.query.to), int(call.query.step)
    if step < _SECOND or step % _SECOND:
        raise BadRequest(f"step: must be a positive multiple of {_SECOND} ms, not {step} ms")
    if topic is not None and step % _MINUTE and end - start > _FINE_MS:
        raise BadRequest(f"step: {step} ms is no whole minute: for one topic, the range is at most two hours then")
    if end <= start:
        raise BadRequest("to: must be after from")
    if -((start - end) // step) > _MAX_BUCKETS:
        raise BadRequest(f"more than {_MAX_BUCKETS} buckets: choose a longer step or a shorter range")
    times, counts = await call.service.topics.due(topic, start, end, step, stale=call.query.stale)
    # Format all times in one call: for thousands of buckets, this takes a tenth of the time of single calls.
    text = instants_text(times).tobytes().decode()
    starts = [text[at : at + INSTANT_CHARS] for at in range(0, len(text), INSTANT_CHARS)]
    return [Bucket(start, count) for start, count in zip(starts, counts, strict=True)]
