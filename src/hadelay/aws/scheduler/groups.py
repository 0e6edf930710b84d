"""Schedule groups and their tags.

A group is a document: the message of a paused schedule that never fires, `aws-group~NAME`. So groups are replicated,
audited and counted like schedules, and a change of tags is one PUT with an expected version. The group `default` always
exists, and has a document only once it has tags.

With several shards, the shard that owns the topic of the documents has all groups, and each shard its own schedules.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct, field

from hadelay.api.text import parse_instant
from hadelay.aws.door import Ask, answered
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Run
from hadelay.aws.scheduler.documents import DEFAULT, TAG, ClientToken, Name, group_arn, stored_name
from hadelay.aws.scheduler.protocol import Document, invalid, missing, operations, path_name, refused, repeats
from hadelay.codec.jobcommands import JobSpec
from hadelay.codec.schedules import Spec, template_meta
from hadelay.errors import Conflict, NotFound
from hadelay.http.forwarding.forwarder import Destination
from hadelay.model import Draft
from hadelay.rules.publishing import pack_meta

_PATH, _TAGS = "/schedule-groups/{name}", "/tags/{key}"
_PREFIX = "aws-group~"
#: Topic of the documents; nothing is ever published there.
_TOPIC = "aws-schedule-groups"
#: The time at which a document would be published, unless its schedule were paused: the year 9800, in Unix ms.
_NEVER_MS = 247_091_000_000_000
_ARN = re.compile(r"arn:aws[a-z-]*:scheduler:[a-z0-9-]+:[0-9]{12}:schedule-group/([0-9a-zA-Z_.-]{1,64})", re.ASCII)
#: Limits: tags of a group, schedules that one request deletes, attempts to change tags that others change too.
_MAX_TAGS, _DELETED, _ATTEMPTS = 50, 1_000, 5
_PAGE = 100


class Tag(Document):
    key: Annotated[str, Meta(min_length=1, max_length=128)]
    value: Annotated[str, Meta(min_length=1, max_length=256)]


class _AboutGroups(Document):
    @property
    def names(self) -> Mapping[str, str]:
        return {"topic": _TOPIC}


class CreateGroup(_AboutGroups):
    name: Name | None = None
    tags: list[Tag] = field(default_factory=list)
    client_token: ClientToken | None = None


class OfGroup(_AboutGroups):
    client_token: str | None = None


class DeleteGroup(Document):
    client_token: str | None = None


class ListGroups(_AboutGroups):
    name_prefix: Name | None = None
    next_token: Name | None = None
    max_results: Annotated[int, Meta(ge=1, le=_PAGE)] = _PAGE


class TagResource(_AboutGroups):
    tags: list[Tag]
    resource_arn: str | None = None


class UntagResource(_AboutGroups):
    tag_keys: list[str] = field(default_factory=list)


class _Stored(Struct):
    """The document of a group, as JSON in the body of its schedule. created_s: time of the creation in seconds."""

    tags: dict[str, str] = field(default_factory=dict)
    created_s: float = 0.0
    client_token: str | None = None


class _Group(NamedTuple):
    stored: _Stored
    #: Version of the document's schedule; 0: the group has no document.
    version: int
    changed_s: float


def _tags(given: list[Tag]) -> dict[str, str]:
    tags = {tag.key: tag.value for tag in given}
    if len(tags) < len(given) or any(key.startswith("aws:") for key in tags):
        raise invalid("Tags: two tags have the same key, or a key begins with aws:")
    return tags


def shard_of_groups(ask: Ask) -> Destination | None:
    """The shard that has the groups; None for this one."""
    return ask.call.context.router.of_topics([_TOPIC], None)


async def need_group(ask: Ask, name: str) -> None:
    """Raises AwsError unless there is such a group. Other shards than that of the groups ask nothing."""
    if name == DEFAULT or shard_of_groups(ask) is not None:
        return
    if await ask.call.service.schedules.topic_of(_PREFIX + name) is None:
        raise missing(f"there is no schedule group {name!r}")


async def _find(ask: Ask, name: str) -> _Group | None:
    try:
        schedule = await ask.call.service.schedules.get(_PREFIX + name, body=True, stale=False)
        stored = msgspec.json.decode(schedule.body or b"", type=_Stored)
        return _Group(stored, schedule.version, parse_instant("time", schedule.changed_at) / 1_000)
    except (NotFound, msgspec.MsgspecError):
        return _Group(_Stored(), 0, 0.0) if name == DEFAULT else None


async def _found(ask: Ask, name: str) -> _Group:
    found = await _find(ask, name)
    if found is None:
        raise missing(f"there is no schedule group {name!r}")
    return found


async def _put(ask: Ask, name: str, stored: _Stored, version: int) -> None:
    """Raises Conflict unless the group's document has this version."""
    if len(stored.tags) > _MAX_TAGS:
        raise invalid(f"Tags: {len(stored.tags)} tags; a group has at most {_MAX_TAGS}")
    meta = pack_meta(ask.call.context.config, "application/json", None, sch=_PREFIX + name)
    draft = Draft(_TOPIC, 0, True, 0, 0, template_meta(meta), msgspec.json.encode(stored))
    spec = Spec(_TOPIC, at=[_NEVER_MS])
    await ask.call.service.schedules.put(_PREFIX + name, spec, draft, ask.access.actor, version=version, paused=True)


@operations.add("POST", _PATH, CreateGroup)
async def create_schedule_group(ask: Ask, document: CreateGroup) -> Any:
    name = path_name(ask, document.name)
    ask.access.need("admin", None)
    found = await _find(ask, name)
    if found is None:
        tags = _tags(document.tags)
        now_s = ask.call.service.access.now_ms() / 1_000
        await _put(ask, name, _Stored(tags, now_s, document.client_token), 0)
    elif document.client_token is None or (found.stored.client_token, found.stored.tags) != (
        document.client_token,
        _tags(document.tags),
    ):
        raise AwsError("ConflictException", f"there is a schedule group {name!r}", 409)
    return {"ScheduleGroupArn": group_arn(name)}


@operations.add("GET", _PATH, OfGroup)
async def get_schedule_group(ask: Ask, document: OfGroup) -> Any:
    _need_read(ask)
    return _description(name := path_name(ask), await _found(ask, name))


@operations.add("GET", "/schedule-groups", ListGroups)
async def list_schedule_groups(ask: Ask, document: ListGroups) -> Any:
    """The groups by name. The group `default` is among them, with a document or without."""
    _need_read(ask)
    prefix, after = document.name_prefix or "", document.next_token or ""
    page = await ask.call.service.schedules.page(
        _PREFIX + prefix, _PREFIX + after if after else "", document.max_results, stale=False
    )
    names = {schedule.schedule.removeprefix(_PREFIX) for schedule in page.schedules}
    names |= {DEFAULT} if DEFAULT.startswith(prefix) and after < DEFAULT else set()
    shown = sorted(names)[: document.max_results]
    groups = [(name, await _find(ask, name)) for name in shown]
    answer = {"ScheduleGroups": [_description(name, group) for name, group in groups if group is not None]}
    more = page.cursor is not None or len(shown) < len(names)
    return answer | ({"NextToken": shown[-1]} if more else {})


async def _delete_in_all(run: Run, ask: Ask, document: DeleteGroup) -> Any:
    """Delete what each shard has of a group; last the group itself, so that a repetition finds it until all is done."""
    to = shard_of_groups(ask)
    others = [one for one in ask.call.context.router.others() if one != to]
    if to is not None:
        await run(ask, document)
    if (refusal := refused(answered(await ask.forward_all(others)))) is not None:
        return refusal
    return await (run(ask, document) if to is None else ask.forward(to))


@operations.add("DELETE", _PATH, DeleteGroup, over=_delete_in_all)
async def delete_schedule_group(ask: Ask, document: DeleteGroup) -> Any:
    """Delete the group's schedules, cancel the messages of its one-time schedules by a bulk job, delete the group."""
    name, has_groups = path_name(ask), shard_of_groups(ask) is None
    ask.access.need("admin", None)
    if name == DEFAULT:
        raise invalid("the group default cannot be deleted")
    if has_groups and await _find(ask, name) is None:
        if repeats(ask):
            return {}
        raise missing(f"there is no schedule group {name!r}")
    services, prefix = ask.call.service, stored_name(name)
    page = await services.schedules.page(prefix, "", _DELETED, stale=False)
    for schedule in page.schedules:
        await services.schedules.delete(schedule.schedule, ask.access.actor)
    if page.cursor is not None:
        what = f"{_DELETED} schedules of the group are deleted, and more are left: repeat the request"
        raise AwsError("ThrottlingException", what, 429)
    with suppress(NotFound):  # there is no topic yet
        cancel = JobSpec("cancel", "*", tags=(TAG,), key_prefix=prefix)
        await services.jobs.begin(cancel, f"{name[:32]} {document.client_token or uuid4()}"[:64], ask.access.actor)
    if has_groups:
        await services.schedules.delete(_PREFIX + name, ask.access.actor)
    return {}


@operations.add("GET", _TAGS, OfGroup)
async def list_tags(ask: Ask, document: OfGroup) -> Any:
    _need_read(ask)
    found = await _found(ask, _group_of(ask))
    return {"Tags": [{"Key": key, "Value": value} for key, value in found.stored.tags.items()]}


@operations.add("POST", _TAGS, TagResource)
async def tag_resource(ask: Ask, document: TagResource) -> Any:
    return await _retag(ask, _tags(document.tags), [])


@operations.add("DELETE", _TAGS, UntagResource)
async def untag_resource(ask: Ask, document: UntagResource) -> Any:
    return await _retag(ask, {}, document.tag_keys)


async def _retag(ask: Ask, added: dict[str, str], removed: list[str]) -> dict[str, Any]:
    ask.access.need("admin", None)
    name = _group_of(ask)
    for attempt in range(_ATTEMPTS):
        found = await _found(ask, name)
        tags = {key: value for key, value in (found.stored.tags | added).items() if key not in removed}
        try:
            await _put(ask, name, msgspec.structs.replace(found.stored, tags=tags), found.version)
            break
        except Conflict:  # another request changed the tags meanwhile
            if attempt == _ATTEMPTS - 1:
                raise
    return {}


def _group_of(ask: Ask) -> str:
    """The group of an ARN in the path."""
    found = _ARN.fullmatch(ask.call.path["key"])
    if found is None:
        what = f"{ask.call.path['key'][:120]!r} is not the ARN of a schedule group, such as {group_arn('NAME')}"
        raise invalid(f"ResourceArn: {what}; schedules have no tags")
    return found[1]


def _need_read(ask: Ask) -> None:
    if not ask.access.rights.may_somewhere("read"):
        ask.access.need("read", None)


def _description(name: str, group: _Group) -> dict[str, Any]:
    answer: dict[str, Any] = {"Arn": group_arn(name), "Name": name, "State": "ACTIVE"}
    dates = {"CreationDate": group.stored.created_s, "LastModificationDate": group.changed_s}
    return answer | {key: at_s for key, at_s in dates.items() if at_s}
