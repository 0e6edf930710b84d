"""ListSchedules: first the schedules of ours by name, then the messages of one-time schedules by topic and due time."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadelay.api.service import ListRequest
from hadelay.api.text import LARGEST_MS
from hadelay.aws.door import Ask
from hadelay.aws.scheduler.documents import TAG, Name, State, names_of, stored_name
from hadelay.aws.scheduler.groups import need_group
from hadelay.aws.scheduler.protocol import Document, invalid, operations
from hadelay.aws.scheduler.schedules import Found, head, of_message, of_schedule
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


@operations.add("GET", "/schedules", ListSchedules)
async def list_schedules(ask: Ask, document: ListSchedules) -> Any:
    if document.schedule_group is not None:
        await need_group(ask, document.schedule_group)
    at = _Position() if document.next_token is None else _decoded(document.next_token)
    found, following = await (_schedules if at.topic is None else _messages)(ask, document, at)
    answer: dict[str, Any] = {"Schedules": found}
    return answer if following is None else answer | {"NextToken": encoded(following)}


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
        raise invalid("NextToken: this is no token from a list: leave it out to begin again") from None
    if not -1 <= position.due_ms < LARGEST_MS or not 0 <= position.id < 1 << 64:
        raise invalid("NextToken: this is no token from a list: leave it out to begin again")
    return position
