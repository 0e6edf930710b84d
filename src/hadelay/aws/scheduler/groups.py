"""Schedule groups and their tags.

A group is a topic without messages, `aws-schedule-group.NAME`, whose labels are the tags: so groups are replicated and
audited like topics, and tags are merged by name. The group `default` always exists, and has a topic only once it has
tags. With several shards, the group is in the shard of its topic, and each shard has its own schedules of the group.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any
from uuid import uuid4

from msgspec import Meta, field

from hadelay.aws.arns import ACCOUNT, GROUPS, REGION
from hadelay.aws.door import Ask, whole
from hadelay.aws.errors import AwsError
from hadelay.aws.labels import CHANGED, CREATED, OWN, check_tags, tags_of, times
from hadelay.aws.operations import Run
from hadelay.aws.scheduler.documents import DEFAULT, TAG, ClientToken, Name, stored_name
from hadelay.aws.scheduler.protocol import Document, invalid, missing, operations, repeats
from hadelay.codec.jobcommands import JobSpec
from hadelay.errors import NotFound

_PATH, _TAGS = "/schedule-groups/{name}", "/tags/{key}"
_TOKEN = f"{OWN}ClientToken"
#: Limits: schedules that one DeleteScheduleGroup deletes, and groups on a page of a list.
_DELETED, _PAGE = 1_000, 100
_ARN = r"^arn:aws[a-z-]*:scheduler:[a-z0-9-]+:[0-9]{12}:schedule-group/[0-9a-zA-Z_.-]{1,64}\Z"
Labels = Mapping[str, str]


class Tag(Document):
    key: Annotated[str, Meta(min_length=1, max_length=128)]
    value: Annotated[str, Meta(min_length=1, max_length=256)]


class DeleteGroup(Document):
    name: Name
    client_token: str | None = None


class OfGroup(DeleteGroup):
    @property
    def names(self) -> Mapping[str, str]:
        return {"topic": GROUPS + self.name}


class CreateGroup(OfGroup):
    client_token: ClientToken | None = None
    tags: list[Tag] = field(default_factory=list)


class ListGroups(Document):
    name_prefix: Name | None = None
    next_token: Name | None = None
    max_results: Annotated[int, Meta(ge=1, le=_PAGE)] = _PAGE


class OfTags(Document):
    resource_arn: Annotated[str, Meta(pattern=_ARN)]

    @property
    def group(self) -> str:
        return self.resource_arn.rpartition("/")[2]

    @property
    def names(self) -> Mapping[str, str]:
        return {"topic": GROUPS + self.group}


class TagResource(OfTags, kw_only=True):
    tags: list[Tag]


class UntagResource(OfTags):
    tag_keys: list[str] = field(default_factory=list)
    client_token: str | None = None


def _tags(given: list[Tag], before: Labels) -> dict[str, str]:
    """Labels for tags. before: labels that the group has already, whose tags count for the limit. Raises AwsError."""
    tags = {tag.key: tag.value for tag in given}
    if len(tags) < len(given):
        raise invalid("Tags: two tags have the same key")
    return check_tags(tags, tags_of(before))


async def _labels(ask: Ask, name: str) -> Labels | None:
    """Labels of a group's topic; {} for the group `default` without a topic, None if there is no such group."""
    with suppress(NotFound):
        return dict((await ask.service.topics.settings_of(GROUPS + name, stale=False)).labels)
    return {} if name == DEFAULT else None


async def _found(ask: Ask, name: str) -> Labels:
    labels = await _labels(ask, name)
    if labels is None:
        raise missing(f"there is no schedule group {name!r}")
    return labels


async def need_group(ask: Ask, name: str) -> None:
    """Raises AwsError if there is no such group. A shard that does not own the group's topic cannot know, and does not
    check."""
    if ask.router.owner(GROUPS + name) is None:
        await _found(ask, name)


async def _put(ask: Ask, name: str, labels: Mapping[str, str | None], *, new: bool) -> None:
    """Set labels of a group, and the time of the change. A label with the value None is removed."""
    await ask.service.topics.put_topic(GROUPS + name, {"labels": {**labels, **times(new=new)}}, ask.access.actor)


@operations.add(f"POST {_PATH}", CreateGroup)
async def create_schedule_group(ask: Ask, document: CreateGroup) -> Any:
    ask.access.need("admin", None)
    tags, name, token = _tags(document.tags, {}), document.name, document.client_token
    labels = await _labels(ask, name)
    if labels is None:
        await _put(ask, name, tags if token is None else {**tags, _TOKEN: token}, new=True)
    elif token is None or (labels.get(_TOKEN), tags_of(labels)) != (token, tags):
        raise AwsError("ConflictException", f"there is a schedule group {name!r}", 409)
    return {"ScheduleGroupArn": group_arn(name)}


@operations.add(f"GET {_PATH}", OfGroup)
async def get_schedule_group(ask: Ask, document: OfGroup) -> Any:
    _need_read(ask)
    return _description(document.name, await _found(ask, document.name))


async def _groups_of_all(run: Run, ask: Ask, document: ListGroups) -> Any:
    """A page over all shards: the first groups, by name, of one page of each shard. A token is the name of a group, so
    it means the same in each shard."""
    pages = [await run(ask, document), *whole(await ask.parts(ask.router.others()))]
    groups = sorted((group for page in pages for group in page["ScheduleGroups"]), key=lambda group: group["Name"])
    return _page(groups, document, more=any("NextToken" in page for page in pages))


@operations.add("GET /schedule-groups", ListGroups, over=_groups_of_all)
async def list_schedule_groups(ask: Ask, document: ListGroups) -> Any:
    """List the groups by name. The group `default` is always among them, even without a topic."""
    _need_read(ask)
    prefix = document.name_prefix or ""
    topics = await ask.service.topics.all_settings(GROUPS + prefix)
    found = {name.removeprefix(GROUPS): dict(settings.labels) for name, settings in topics.items()}
    if DEFAULT.startswith(prefix) and ask.router.owner(GROUPS + DEFAULT) is None:
        found.setdefault(DEFAULT, {})
    after = document.next_token or ""
    return _page([_description(name, found[name]) for name in sorted(found) if name > after], document)


def _page(groups: list[dict[str, Any]], document: ListGroups, *, more: bool = False) -> dict[str, Any]:
    """Make a page of the first `groups`. more: whether further groups follow after all of these."""
    shown = groups[: document.max_results]
    more = more or len(shown) < len(groups)
    return {"ScheduleGroups": shown} | ({"NextToken": shown[-1]["Name"]} if more else {})


async def _delete_in_all(run: Run, ask: Ask, document: DeleteGroup) -> Any:
    """Delete each shard's schedules of a group, and last the group itself, so that a repeated request still finds the
    group until all is deleted."""
    to = ask.router.of_topics([GROUPS + document.name], None)
    if to is not None:
        await run(ask, document)
    whole(await ask.parts(one for one in ask.router.others() if one != to))
    return await (run(ask, document) if to is None else ask.forward(to))


@operations.add(f"DELETE {_PATH}", DeleteGroup, over=_delete_in_all)
async def delete_schedule_group(ask: Ask, document: DeleteGroup) -> Any:
    """Delete the group's schedules of this shard, begin a bulk job that cancels the messages of its one-time schedules,
    and delete the group if it is in this shard."""
    ask.access.need("admin", None)
    name, services, has_group = document.name, ask.service, ask.router.owner(GROUPS + document.name) is None
    if name == DEFAULT:
        raise invalid("the group default cannot be deleted")
    if has_group and await _labels(ask, name) is None:
        if repeats(ask):
            return {}
        raise missing(f"there is no schedule group {name!r}")
    page = await services.schedules.page(stored_name(name), "", _DELETED, stale=False)
    for schedule in page.schedules:
        await services.schedules.delete(schedule.schedule, ask.access.actor)
    if page.cursor is not None:
        what = f"{_DELETED} schedules of the group are deleted, and more are left: repeat the request"
        raise AwsError("ThrottlingException", what, 429)
    with suppress(NotFound):  # NotFound: this shard has no topic, so no messages
        cancel = JobSpec("cancel", "*", tags=(TAG,), key_prefix=stored_name(name))
        await services.jobs.begin(cancel, f"{name[:32]} {document.client_token or uuid4()}"[:64], ask.access.actor)
    if has_group:
        await services.topics.delete_topic(GROUPS + name, force=True, by=ask.access.actor)
    return {}


@operations.add(f"GET {_TAGS}", OfTags)
async def list_tags(ask: Ask, document: OfTags) -> Any:
    _need_read(ask)
    tags = tags_of(await _found(ask, document.group))
    return {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


@operations.add(f"POST {_TAGS}", TagResource)
async def tag_resource(ask: Ask, document: TagResource) -> Any:
    ask.access.need("admin", None)
    await _put(ask, document.group, _tags(document.tags, await _found(ask, document.group)), new=False)
    return {}


@operations.add(f"DELETE {_TAGS}", UntagResource)
async def untag_resource(ask: Ask, document: UntagResource) -> Any:
    ask.access.need("admin", None)
    labels = await _found(ask, document.group)
    await _put(ask, document.group, dict.fromkeys(tags_of(labels).keys() & set(document.tag_keys)), new=False)
    return {}


def _need_read(ask: Ask) -> None:
    if not ask.access.rights.may_somewhere("read"):
        ask.access.need("read", None)


def group_arn(name: str) -> str:
    return f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule-group/{name}"


def _description(name: str, labels: Labels) -> dict[str, Any]:
    dates = {"CreationDate": CREATED, "LastModificationDate": CHANGED}
    found: dict[str, Any] = {member: int(labels[label]) for member, label in dates.items() if label in labels}
    return found | {"Arn": group_arn(name), "Name": name, "State": "ACTIVE"}
