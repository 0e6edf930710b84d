"""ListSchedules: first the schedules of ours by name, then the messages of one-time schedules by topic and due time.

With several shards, the list of one follows on that of another. The shard that has the groups comes first, so that a
list of an unknown group is refused.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import partial
from http import HTTPStatus
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
from hadelay.aws.scheduler.groups import need_group, shard_of_groups
from hadelay.aws.scheduler.protocol import Document, invalid, operations
from hadelay.aws.scheduler.schedules import Found, head, of_message, of_schedule
from hadelay.http.answers import Answer
from hadelay.http.forwarding.forwarder import Destination
from hadelay.model import FIRST, PENDING, SEPARATOR

#: Limit of a page, and limit of the topics that one page looks into.
_PAGE, _TOPICS = 100, 50
MaxResults = Annotated[int, Meta(ge=1, le=_PAGE)]
NextToken = Annotated[str, Meta(min_length=1, max_length=2_048)]


class ListSchedules(Document):
    schedule_group: Name | None = None
    name_prefix: Name | None = None
    state: State | None = None
    next_token: NextToken | None = None
    max_results: MaxResults = _PAGE


class _Position(msgspec.Struct, array_like=True):
    """Where a page begins: after a schedule's name; or, if `topic` is not None, in a topic after (due_ms, id)."""

    name: str = ""
    topic: str | None = None
    due_ms: int = FIRST[0]
    id: int = FIRST[1]
    #: Shard whose list this is a position in; None without a map.
    shard: int | None = None


async def _shard_after_shard(run: Run, ask: Ask, document: ListSchedules) -> Any:
    """A page over all shards. A shard's page that does not fit whole is left for the next request, because only the
    shard knows positions within it. A shard begins its list anew for a token of another shard."""
    router, first = ask.call.context.router, shard_of_groups(ask)

    def index(to: Destination | None) -> int | None:
        return router.here if to is None else to.shard

    order = sorted([None, *router.others()], key=lambda to: (to != first, index(to)))
    indexes = [index(to) for to in order]
    at = indexes[0] if document.next_token is None else _decoded(document.next_token).shard
    if at not in indexes:
        raise _no_token()
    found = list[Any]()
    for to in order[indexes.index(at) :]:
        page = await run(ask, document) if to is None else await ask.forward(to)
        if isinstance(page, Answer):
            if page.status != HTTPStatus.OK:
                return page
            page = msgspec.json.decode(page.body, type=dict[str, Any])
        if len(found) + len(page["Schedules"]) > document.max_results:
            return {"Schedules": found, "NextToken": encoded(_Position(shard=index(to)))}
        found += page["Schedules"]
        if "NextToken" in page:
            return page | {"Schedules": found}
    return {"Schedules": found}


@operations.add("GET", "/schedules", ListSchedules, over=_shard_after_shard)
async def list_schedules(ask: Ask, document: ListSchedules) -> Any:
    if document.schedule_group is not None:
        await need_group(ask, document.schedule_group)
    here = ask.call.context.router.here
    at = _Position(shard=here) if document.next_token is None else _decoded(document.next_token)
    if at.shard != here:
        at = _Position()
    found, following = await (_schedules if at.topic is None else _messages)(ask, document, at)
    answer: dict[str, Any] = {"Schedules": found}
    return answer if following is None else answer | {"NextToken": encoded(replace(following, shard=here))}


async def _schedules(ask: Ask, document: ListSchedules, at: _Position) -> tuple[list[Any], _Position | None]:
    group, prefix = document.schedule_group, document.name_prefix or ""
    begins = stored_name("").removesuffix(SEPARATOR) if group is None else stored_name(group, prefix)
    page = await ask.call.service.schedules.page(
        begins, at.name, document.max_results, stale=False, may=partial(ask.access.may, "read")
    )
    summaries = list[Any]()
    for schedule in page.schedules:
        summaries += _summaries(document, schedule.schedule, of_schedule(schedule))
    following = _Position(topic="") if page.cursor is None else _Position(page.cursor)
    if page.cursor is None and len(summaries) < document.max_results:
        rest, next_ = await _messages(ask, document, following, document.max_results - len(summaries))
        return summaries + rest, next_
    return summaries, following


async def _messages(
    ask: Ask, document: ListSchedules, at: _Position, room: int | None = None
) -> tuple[list[Any], _Position | None]:
    """room: limit of the schedules; None: of a whole page."""
    known = await ask.call.service.topics.all_settings()
    topics = sorted(
        name for name in known if name >= (at.topic or "") and SEPARATOR not in name and ask.access.may("read", name)
    )
    summaries, room = list[Any](), document.max_results if room is None else room
    for looked, topic in enumerate(topics):
        if not room or looked == _TOPICS:
            return summaries, _Position(topic=topic)
        after = (at.due_ms, at.id) if topic == at.topic else FIRST
        request = ListRequest(PENDING, 0, LARGEST_MS, (TAG,), after, room)
        messages, next_ = await ask.call.service.messages.list_messages(topic, request, stale=True)
        for message in messages:
            summaries += _summaries(document, message.key or "", of_message(message))
        room -= len(messages)
        if next_ is not None:
            return summaries, _Position("", topic, *next_)
    return summaries, None


def _summaries(document: ListSchedules, stored: str, found: list[Found]) -> list[Any]:
    """The summary of a schedule that the request asks for; else nothing."""
    names = names_of(stored)
    if names is None:
        return []
    group, name = names
    wanted = document.schedule_group in (None, group) and name.startswith(document.name_prefix or "")
    return [
        head(one, group, name) | {"Target": {"Arn": one.kept.target.arn}}
        for one in found
        if wanted and one.exists and document.state in (None, one.state)
    ]


def encoded(position: Any) -> str:
    """A NextToken."""
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
