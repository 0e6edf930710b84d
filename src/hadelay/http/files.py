"""Routes for this node's files: hour files, and snapshots for backups."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from hadelay.api.cluster import Hours, Names, Patrol, ReleaseQuery, Snapshot
from hadelay.api.service import HOUR_FILES
from hadelay.errors import BadRequest, HadelayError, NotFound
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.bodies import ITEM
from hadelay.http.call import Call
from hadelay.http.routes import Routes
from hadelay.model import hour_from_name

routes = Routes()


@routes.add("GET", "/v1/hours", returns={200: Hours})
async def hours(call: Call) -> Answer:
    """This node's hour files: committed entries, bytes and checksums, all at one applied index"""
    (applied_index, rows), turns = await call.service.files.hours(), call.context.turns
    found: list[Any] = []
    while some := [msgspec.Raw(call.encode(hour)) for hour in islice(rows, _HOURS)]:
        found += some
        turns.count(ITEM * len(some))
        await turns.next()
    return call.answer(Hours(str(applied_index), found))


@routes.add("GET", "/v1/patrol", returns={200: Patrol})
async def patrol(call: Call) -> Answer:
    """What this node found when it compared its files with their checksums"""
    return call.answer(call.service.files.patrol())


@routes.add("POST", "/v1/patrol", returns={202: Patrol})
async def patrol_now(call: Call) -> Answer:
    """Compare all files of this node with their checksums now; complete once `rounds` reaches the answer's `wanted`"""
    return call.answer(call.service.files.patrol(now=True), 202)


#: Limit of hours encoded before other requests have their turn.
_HOURS = 200
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
#: Limit of bytes read at a time, so that other requests have their turn.
_CHUNK = 256 << 10
_LIKE_AN_HOUR = re.compile("(dead-)?[0-9]{10}")


@routes.add("GET", "/v1/hours/{hour}/{file}", returns={200: bytes, 206: bytes}, errors=(404, 416))
async def hour_file(call: Call) -> web.StreamResponse:
    """Committed bytes of one file of an hour; supports Range"""
    file = call.path["file"]
    if file not in HOUR_FILES:
        raise NotFound(f"unknown file {file[:20]!r}: an hour has the files log, idx and dsp")
    try:
        hour = hour_from_name(call.path["hour"])
    except ValueError as error:
        raise (NotFound if _LIKE_AN_HOUR.fullmatch(call.path["hour"]) else BadRequest)(str(error)) from None
    door = call.service.files
    length = await door.hour_file_length(hour, file)
    return await _send(call, length, partial(door.read_hour_file, hour, file))


async def _send(call: Call, length: int, read: Callable[[int, int], Awaitable[bytes]]) -> web.StreamResponse:
    """Send the requested range of a file of `length` bytes; read(offset, size) returns its bytes."""
    request = call.request
    start, end = _range(request.headers.get("Range"), length)
    is_part = (start, end) != (0, length)
    response = web.StreamResponse(status=206 if is_part else 200)
    response.content_type = "application/octet-stream"
    response.content_length = end - start
    response.headers["Accept-Ranges"] = "bytes"
    if is_part:
        response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{length}"
    call.context.add_headers(response.headers)
    await response.prepare(request)
    if request.method != "HEAD":
        for at in range(start, end, _CHUNK):
            await response.write(await read(at, min(_CHUNK, end - at)))
    await response.write_eof()
    return response


class RangeNotSatisfiable(HadelayError):
    type, title, http_status = "range-not-satisfiable", "Range not satisfiable", 416


def _range(header: str | None, length: int) -> tuple[int, int]:
    """Range [start, end) of a Range header with a single range; any other header means the whole file (RFC 9110)."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-":
        return 0, length
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1, length) if last else length
    else:
        start, end = max(length - int(last), 0), length
    if start >= length or end <= start:
        raise RangeNotSatisfiable(f"the Range is outside of the file, which has {length} committed bytes")
    return start, end


@routes.add("POST", "/v1/snapshots", returns={201: Snapshot}, errors=(503,))
async def open_snapshot(call: Call) -> Answer:
    """Open a checkpoint of everything committed so far, to copy file by file from this node"""
    snapshot = await call.service.files.open_snapshot()
    return call.answer(snapshot, 201, {"Location": f"/v1/snapshots/{snapshot.id}"})


@routes.add("GET", "/v1/snapshots/{snapshot}/{name}", returns={200: bytes, 206: bytes}, errors=(404, 416))
async def snapshot_file(call: Call) -> web.StreamResponse:
    """One file of a snapshot, its name percent-encoded; supports Range"""
    door, snapshot, name = call.service.files, call.path["snapshot"], call.path["name"]
    length = await door.snapshot_file_length(snapshot, name)
    return await _send(call, length, partial(door.read_snapshot, snapshot, name))


@routes.add("DELETE", "/v1/snapshots/{snapshot}", query=ReleaseQuery, returns={204: None})
async def release_snapshot(call: Call) -> Answer:
    """Release a snapshot; it is released by itself after a minute without reads"""
    await call.service.files.release_snapshot(call.path["snapshot"], complete=call.query.complete)
    return NOTHING


@routes.add("GET", "/v1/names", returns={200: Names}, errors=(503,), scope="read")
async def names(call: Call) -> Answer:
    """Names of topics, consumers and nodes, with the numbers that the files have in place of them"""
    return call.answer(await call.service.files.names())
