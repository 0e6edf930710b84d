"""Topics, histograms, the cluster and its files: everything that is asked for now and then."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from hadelay.errors import BadRequest, HadelayError, NotFound
from hadelay.http import types
from hadelay.http.routes import Call, Routes
from hadelay.http.settings import settings_in, settings_out
from hadelay.http.turns import ITEM
from hadelay.http.values import DOTS, INSTANT_CHARS, check_new_topic, format_instant, instants_text
from hadelay.model import hour_from_name, hour_name
from hadelay.server.api import HOUR_FILES, HourFile, HourView, TopicView

routes = Routes()

_MAX_BUCKETS = 10_000
#: Of a list of all topics, between two turns of others.
_TOPICS_AT_ONCE = 200
_SECOND, _MINUTE = 1_000, 60_000


# ---- topics


@routes.add("PUT", "/v1/topics/{topic}", body=types.PutTopic, returns={200: types.Topic}, errors=(429,))
async def put_topic(call: Call) -> web.Response:
    """Make a topic, or change what is named"""
    name = check_new_topic(call.path["topic"], call.server.config.max_topic_bytes)
    return call.reply(_topic_out(await call.service.put_topic(name, _settings(call))))


@routes.add("POST", "/v1/topics/{topic}:pause", body=types.Pause, returns={200: types.Topic}, errors=(404,))
async def pause_topic(call: Call) -> web.Response:
    """Hand out nothing more of the topic; publishing goes on, and so do running leases"""
    return await _change(call, {"paused": True, "paused_reason": call.body.reason})


@routes.add("POST", "/v1/topics/{topic}:resume", body=types.Nothing, returns={200: types.Topic}, errors=(404,))
async def resume_topic(call: Call) -> web.Response:
    """Hand out again, what fell due meanwhile at the topic's catch-up rate if it has one"""
    return await _change(call, {"paused": None, "paused_reason": None})


def _settings(call: Call) -> dict[str, Any]:
    settings = settings_in(call.body)
    dead_letter = settings.get("dead_letter")
    if dead_letter not in (None, "keep"):
        # Or whoever administers one topic could publish to any.
        call.access.need("publish", dead_letter)
        if dead_letter in DOTS:
            check_new_topic(dead_letter, call.server.config.max_topic_bytes)
    return settings


async def _change(call: Call, config: dict[str, Any]) -> web.Response:
    """Settings of a topic that is there: a name that was mistyped makes none."""
    name, service = call.topic, call.service
    await service.get_topic(name, stale=False)
    return call.reply(_topic_out(await service.put_topic(name, config)))


@routes.add(
    "GET", "/v1/topics/{topic}", query=types.ReadQuery, returns={200: types.Topic}, errors=(404, 503), scope="read"
)
async def get_topic(call: Call) -> web.Response:
    """One topic with its counts"""
    view = await call.server.service.get_topic(call.topic, stale=call.query.stale)
    return call.reply(_topic_out(view))


@routes.add(
    "GET",
    "/v1/topics",
    query=types.ReadQuery,
    returns={200: types.Topics},
    errors=(503,),
    scope="read",
    own_topics=True,
)
async def list_topics(call: Call) -> web.Response:
    """All topics that the token may read, with their counts"""
    views = await call.server.service.list_topics(stale=call.query.stale)
    encode = msgspec.msgpack.encode if call.wants_msgpack() else msgspec.json.encode
    topics: list[Any] = []
    for first in range(0, len(views), _TOPICS_AT_ONCE):
        few = views[first : first + _TOPICS_AT_ONCE]
        topics += [msgspec.Raw(encode(_topic_out(view))) for view in few if call.access.may("read", view.name)]
        await asyncio.sleep(0)
    return call.reply(types.Topics(topics))


@routes.add(
    "DELETE",
    "/v1/topics/{topic}",
    query=types.DeleteTopicQuery,
    returns={204: None},
    errors=(404, 409, 429),
)
async def delete_topic(call: Call) -> web.Response:
    """Delete a topic; with force, cancel what is pending in it"""
    await call.service.delete_topic(call.topic, force=call.query.force)
    return web.Response(status=204)


def _topic_out(view: TopicView) -> types.Topic:
    return types.Topic(
        view.name,
        view.scheduled,
        view.ready,
        view.leased,
        view.dead,
        view.oldest_ready_age_ms,
        view.bytes,
        types.Lateness(*view.lateness) if view.lateness else None,
        consumers=UNSET
        if view.consumers is None
        else [types.Consumer(name, format_instant(at_ms)) for name, at_ms in view.consumers],
        **settings_out(view.config),
    )


# ---- histograms of what is due


@routes.add("GET", "/v1/due", query=types.DueQuery, returns={200: types.Buckets}, errors=(422, 503), scope="read")
async def due(call: Call) -> web.Response:
    """How many messages are due when, over all topics"""
    return await _due(call, None, _SECOND)


@routes.add(
    "GET",
    "/v1/topics/{topic}/due",
    query=types.DueQuery,
    returns={200: types.Buckets},
    errors=(404, 422, 503),
    scope="read",
)
async def topic_due(call: Call) -> web.Response:
    """How many messages of a topic are due when"""
    return await _due(call, call.topic, _MINUTE)


async def _due(call: Call, topic: str | None, unit_ms: int) -> web.Response:
    start, end, step = int(call.query.from_), int(call.query.to), int(call.query.step)
    if step < unit_ms or step % unit_ms:
        raise BadRequest(f"step: {step} ms; here it is a multiple of {unit_ms} ms")
    if end <= start:
        raise BadRequest("to: must be after from")
    if -((start - end) // step) > _MAX_BUCKETS:
        raise BadRequest(f"more than {_MAX_BUCKETS} buckets: choose a longer step or a shorter range")
    times, counts = await call.server.service.due(topic, start, end, step, stale=call.query.stale)
    # Thousands of minutes: as one text, a tenth of the time.
    text = instants_text(times).tobytes().decode()
    starts = [text[at : at + INSTANT_CHARS] for at in range(0, len(text), INSTANT_CHARS)]
    found = [types.Bucket(start, count) for start, count in zip(starts, counts, strict=True)]
    return call.reply(types.Buckets(found))


# ---- the cluster


@routes.add("GET", "/v1/cluster", query=types.ReadQuery, returns={200: types.Cluster}, errors=(503,), scope="read")
async def cluster(call: Call) -> web.Response:
    """Members, leader, cluster time and the dispatch cursor"""
    view = await call.server.service.cluster(stale=call.query.stale)
    cursor = view.dispatch
    members = [
        types.Member(
            m.name, m.http, m.raft, m.role, str(m.applied_index), m.lag, m.version, m.feature_level, m.clock_skew_ms
        )
        for m in view.members
    ]
    body = types.Cluster(
        cluster_id=view.cluster_id,
        feature_level=view.feature_level,
        leader=view.leader,
        term=view.term,
        applied_index=str(view.applied_index),
        time=format_instant(view.time_ms),
        dispatch=types.Dispatch(hour_name(cursor.hour), cursor.second, cursor.local_index, cursor.sync),
        members=members,
    )
    return call.reply(body)


@routes.add(
    "POST",
    "/v1/cluster:transfer-leader",
    body=types.Transfer,
    returns={200: types.Transferred},
    errors=(404, 409),
)
async def transfer_leader(call: Call) -> web.Response:
    """Hand leadership to the node named, or to the one that has most"""
    return call.reply(types.Transferred(await call.service.transfer(call.body.to)))


@routes.add("POST", "/v1/cluster:drain", body=types.Drain, returns={200: types.Drained}, errors=(404, 409, 503, 504))
async def drain(call: Call) -> web.Response:
    """Hand over what a node leads, and have it take no publishes and polls until that is undone, or it restarts"""
    await call.service.drain(call.body.node, call.body.undo)
    return call.reply(types.Drained(call.body.node, not call.body.undo))


@routes.add(
    "POST", "/v1/cluster/members", body=types.AddMember, returns={201: types.AddedMember}, errors=(409, 429, 503)
)
async def add_member(call: Call) -> web.Response:
    """Add a node: it fills itself from the others, and votes once it has caught up"""
    name, raft = call.body.name, call.body.raft
    await call.service.add_member(name, raft)
    return call.reply(types.AddedMember(name, raft, "learner"), 201)


@routes.add("DELETE", "/v1/cluster/members/{node}", returns={204: None}, errors=(404, 409, 503))
async def remove_member(call: Call) -> web.Response:
    """Remove a node; if it leads, another one does first"""
    await call.service.remove_member(call.path["node"])
    return web.Response(status=204)


@routes.add("GET", "/v1/hours", returns={200: types.Hours})
async def hours(call: Call) -> web.Response:
    """This node's hour files: committed entries, bytes and checksums, all at one applied index"""
    view, turns = await call.server.service.hours(), call.server.turns
    encode = msgspec.msgpack.encode if call.wants_msgpack() else msgspec.json.encode
    found: list[Any] = []
    while some := [msgspec.Raw(encode(_hour(h))) for h in islice(view.hours, _HOURS)]:
        found += some
        turns.count(ITEM * len(some))
        await turns.next()
    return call.reply(types.Hours(str(view.applied_index), found))


#: Hours that become a part of the answer in one slice.
_HOURS = 200


def _hour(h: HourView) -> types.Hour:
    files = {name: types.HourFileOut(n, str(size), f"{crc:08x}") for name, (n, size, crc) in h.files.items()}
    return types.Hour(hour=hour_name(h.hour), sealed=h.sealed, mapped=h.mapped, **files)


_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
#: Read at a time, between what else the node does.
_CHUNK = 256 << 10


@routes.add("GET", "/v1/hours/{hour}/{file}", returns={200: bytes, 206: bytes}, errors=(404, 416))
async def hour_file(call: Call) -> web.StreamResponse:
    """The committed bytes of one file of an hour; Range is understood"""
    file = call.path["file"]
    if file not in HOUR_FILES:
        raise NotFound(f"an hour has the files log, idx and dsp, not {file[:20]!r}")
    try:
        hour = hour_from_name(call.path["hour"])
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return await _send_hour_file(call, hour, file)


async def _send_hour_file(call: Call, hour: int, file: HourFile) -> web.StreamResponse:
    service = call.server.service
    length = await service.hour_file_length(hour, file)
    return await _send(call, length, lambda at, size: service.read_hour_file(hour, file, at, size))


async def _send(call: Call, length: int, read: Callable[[int, int], Awaitable[bytes]]) -> web.StreamResponse:
    """Those of `length` bytes that are asked for, by read(offset, size)."""
    request = call.request
    start, end = _range(request.headers.get("Range"), length)
    partial = (start, end) != (0, length)
    response = web.StreamResponse(status=206 if partial else 200)
    response.content_type = "application/octet-stream"
    response.content_length = end - start
    response.headers["Accept-Ranges"] = "bytes"
    if partial:
        response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{length}"
    call.server.add_headers(response.headers)
    await response.prepare(request)
    if request.method != "HEAD":
        for at in range(start, end, _CHUNK):
            await response.write(await read(at, min(_CHUNK, end - at)))
    await response.write_eof()
    return response


class RangeNotSatisfiable(HadelayError):
    type, title, http_status = "range-not-satisfiable", "Range not satisfiable", 416


def _range(header: str | None, length: int) -> tuple[int, int]:
    """[start, end) of the one range asked for; what is not such a range is the whole file, as RFC 9110 has it."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-":
        return 0, length
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1, length) if last else length
    else:
        start, end = max(length - int(last), 0), length
    if start >= length or end <= start:
        raise RangeNotSatisfiable(f"the file has {length} committed bytes")
    return start, end


# ---- snapshots, for backups


@routes.add("POST", "/v1/snapshots", returns={201: types.Snapshot}, errors=(503,))
async def open_snapshot(call: Call) -> web.Response:
    """Hold a checkpoint of everything committed so far, to be copied file by file from this node"""
    view = await call.server.service.open_snapshot()
    body = types.Snapshot(
        id=view.id,
        cluster_id=view.cluster_id,
        group=view.group,
        index=str(view.index),
        term=view.term,
        feature_level=view.feature_level,
        time=format_instant(view.time_ms),
        files=[types.SnapshotFileOut(file.name, str(file.length), f"{file.crc:08x}") for file in view.files],
    )
    return call.reply(body, 201, {"Location": f"/v1/snapshots/{view.id}"})


@routes.add(
    "GET", "/v1/snapshots/{snapshot}/{name}", returns={200: bytes, 206: bytes}, errors=(404, 416),
)  # fmt: skip
async def snapshot_file(call: Call) -> web.StreamResponse:
    """One file of a snapshot, its name percent-encoded; Range is understood"""
    service, snapshot, name = call.server.service, call.path["snapshot"], call.path["name"]
    length = await service.snapshot_file_length(snapshot, name)
    return await _send(call, length, lambda at, size: service.read_snapshot(snapshot, name, at, size))


@routes.add("DELETE", "/v1/snapshots/{snapshot}", returns={204: None})
async def release_snapshot(call: Call) -> web.Response:
    """Let a snapshot's files go; one that nobody reads for a minute goes by itself"""
    await call.server.service.release_snapshot(call.path["snapshot"])
    return web.Response(status=204)


@routes.add("GET", "/v1/names", returns={200: types.Names}, errors=(503,), scope="read")
async def names(call: Call) -> web.Response:
    """The numbers that stand for topics, consumers and nodes in the files"""
    return call.reply(types.Names(**await call.server.service.names()))
