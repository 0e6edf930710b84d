"""ListSchedules: first the recurring schedules by name, then the messages of one-time schedules by topic and due time.

With several shards, the list of one follows on that of another, by their indexes.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from hadelay.api.service import ListRequest
from hadelay.api.text import LARGEST_MS
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Run
from hadelay.aws.scheduler.documents import TAG, Name, State, names_of, stored_name
from hadelay.aws.scheduler.groups import need_group
from hadelay.aws.scheduler.protocol import Document, invalid, operations
from hadelay.aws.scheduler.schedules import Row, found_of, head
from hadelay.http.forwarding.forwarder import Destination
from hadelay.model import FIRST, PENDING, SEPARATOR

#: Limit of schedules on a page, and limit of topics that are searched for one page.
_PAGE, _TOPICS = 100, 50


class ListSchedules(Document):
    schedule_group: Name | None = None
    name_prefix: Name | None = None
    state: State | None = None
    next_token: Annotated[str, Meta(min_length=1, max_length=2_048)] | None = None
    max_results: Annotated[int, Meta(ge=1, le=_PAGE)] = _PAGE


class _Position(msgspec.Struct, array_like=True):
    """Position at which a page begins. If `topic` is None: after the recurring schedule `name`. Otherwise: in this
    topic, after the message (due_ms, id)."""

    name: str = ""
    topic: str | None = None
    due_ms: int = FIRST[0]
    id: int = FIRST[1]
    #: Shard in whose list the position is; None without a shard map.
    shard: int | None = None


async def _shard_after_shard(run: Run, ask: Ask, document: ListSchedules) -> Any:
    """A page over all shards: the shards' lists, one after the other. A shard's page that does not fit whole is left
    for the next request, because only the shard knows positions within its page. A shard that gets a position in
    another shard's list begins its own list."""
    others: dict[int | None, Destination | None] = {to.shard: to for to in ask.router.others()}
    shards = dict(sorted((others | {ask.router.here: None}).items(), key=lambda item: item[0] or 0))
    begin = next(iter(shards)) if document.next_token is None else _decoded(document.next_token).shard
    if begin not in shards:
        raise _no_token()
    found = list[Any]()
    for shard, to in list(shards.items())[list(shards).index(begin) :]:
        page = await (run(ask, document) if to is None else ask.part(to))
        if len(found) + len(page["Schedules"]) > document.max_results:
            return {"Schedules": found, "NextToken": _encoded(_Position(shard=shard))}
        found += page["Schedules"]
        if "NextToken" in page:
            return page | {"Schedules": found}
    return {"Schedules": found}


@operations.add("GET /schedules", ListSchedules, over=_shard_after_shard)
async def list_schedules(ask: Ask, document: ListSchedules) -> Any:
    if document.schedule_group is not None:
        await need_group(ask, document.schedule_group)
    here = ask.router.here
    at = _Position(shard=here) if document.next_token is None else _decoded(document.next_token)
    rows, behind = await _rows(ask, document, at if at.shard == here else _Position())
    answer: dict[str, Any] = {"Schedules": [one for row in rows for one in _summary(document, row)]}
    return answer if behind is None else answer | {"NextToken": _encoded(replace(behind, shard=here))}


async def _rows(ask: Ask, document: ListSchedules, at: _Position) -> tuple[list[Row], _Position | None]:
    """Schedules and messages that follow a position, and the position after the last of them; None at the end of the
    list."""
    rows, most = list[Row](), document.max_results
    if at.topic is None:
        group, prefix = document.schedule_group, document.name_prefix or ""
        begins = stored_name("").removesuffix(SEPARATOR) if group is None else stored_name(group, prefix)
        may_read = partial(ask.access.may, "read")
        page = await ask.service.schedules.page(begins, at.name, most, stale=False, may=may_read)
        rows += page.schedules
        if page.cursor is not None:
            return rows, _Position(page.cursor)
    topics = [
        name
        for name in sorted(await ask.service.topics.all_settings())
        if name >= (at.topic or "") and SEPARATOR not in name and ask.access.may("read", name)
    ]
    for looked, topic in enumerate(topics):
        if len(rows) == most or looked == _TOPICS:
            return rows, _Position(topic=topic)
        after = (at.due_ms, at.id) if topic == at.topic else FIRST
        request = ListRequest(PENDING, 0, LARGEST_MS, (TAG,), after, most - len(rows))
        messages, behind = await ask.service.messages.list_messages(topic, request, stale=True)
        rows += messages
        if behind is not None:
            return rows, _Position("", topic, *behind)
    return rows, None


def _summary(document: ListSchedules, row: Row) -> list[dict[str, Any]]:
    """List with the summary of the row's schedule; empty for a row that no AWS SDK has made, and for a schedule that
    the request's filters exclude."""
    found = found_of(row)
    names = None if found is None else names_of(found.stored)
    if found is None or names is None or not found.exists:
        return []
    group, name = names
    if document.schedule_group not in (None, group) or not name.startswith(document.name_prefix or ""):
        return []
    if document.state not in (None, found.state):
        return []
    return [head(found, group, name) | {"Target": {"Arn": found.kept.target.arn}}]


def _encoded(position: _Position) -> str:
    """Encode a position as a NextToken, which the client returns for the next page."""
    return urlsafe_b64encode(msgspec.json.encode(position)).decode()


def _decoded(token: str) -> _Position:
    try:
        position = msgspec.json.decode(urlsafe_b64decode(token), type=_Position)
    except (ValueError, msgspec.MsgspecError):
        raise _no_token() from None
    if not -1 <= position.due_ms < LARGEST_MS or not 0 <= position.id < 1 << 64:
        raise _no_token()
    return position


def _no_token() -> AwsError:
    return invalid("NextToken: this is no token from a list: leave it out to begin again")
