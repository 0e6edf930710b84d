"""CreateSchedule, GetSchedule, UpdateSchedule and DeleteSchedule.

An enabled one-time schedule is a message in the topic of its target, with the schedule's name as its key. Every other
schedule is a schedule of ours. No command changes both: an update that makes one into the other stores the new one
first, and removes the old one then. Both exist if it is cut short; a repetition finishes it, and a deletion removes
both.

With several shards, a schedule is in the shard of its target's topic. No map says where a name is: a look by name asks
all shards. A creation or an update goes to the other shards first, where it changes nothing: each of them refuses it
if it has the name.
"""

import os
from contextlib import suppress
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from hadelay.api.messages import Message
from hadelay.api.publishrequest import BatchItem
from hadelay.api.schedules import Schedule as OurSchedule
from hadelay.api.service import Receipts, answered
from hadelay.api.text import check_new_topic, parse_instant
from hadelay.aws.arns import ACCOUNT, REGION, queue_of_arn
from hadelay.aws.door import Ask
from hadelay.aws.door import answered as whole
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Run
from hadelay.aws.scheduler import documents, expressions
from hadelay.aws.scheduler.documents import DEFAULT, Kept, Name, Schedule, State, Target, schedule_arn, stored_name
from hadelay.aws.scheduler.groups import need_group
from hadelay.aws.scheduler.protocol import MISSING, Document, invalid, missing, operations, path_name, refused, repeats
from hadelay.codec.meta import mask_of
from hadelay.codec.schedules import MAX_JITTER_MS, MAX_TEMPLATE_BYTES, Spec, problem, template_meta
from hadelay.errors import Conflict, HadelayError, Impossible, NoLeader, NotFound
from hadelay.http.answers import NOTHING, Answer
from hadelay.model import PENDING, Draft
from hadelay.rules.publishing import check_group, draft_of, pack_meta
from hadelay.settings.urls import url_problem
from hadelay.timing import plan

_PATH = "/schedules/{name}"
_TEXT = "text/plain"
#: Topic of the messages for URLs.
WEBHOOKS = "aws-scheduler"
#: Time from now to the first occurrence of a rate without StartDate, in ms: AWS invokes the target at once.
_SOON_MS = 2_000
#: AWS's variables in an Input, such as <aws.scheduler.scheduled-time>.
_VARIABLE = "<aws.scheduler."
#: RetryPolicy of a target that sets none of its own, as AWS shows it.
_RETRY_POLICY = {"MaximumEventAgeInSeconds": 86_400, "MaximumRetryAttempts": 185}


class OfGroup(Document):
    group_name: Name = DEFAULT
    client_token: str | None = None


class Found(NamedTuple):
    """A schedule as the cluster has it: as a message, or as a schedule of ours."""

    kept: Kept
    state: State
    topic: str
    #: Times of creation and of the last change, in seconds.
    created_s: float
    changed_s: float
    input: str | None
    #: Version of a schedule of ours; None: a message.
    version: int | None
    #: When a schedule of ours begins, in Unix ms.
    start_ms: int | None = None
    #: False for a schedule that deletes itself, and has no further occurrence.
    exists: bool = True
    #: Whether a consumer has received the message, and has not settled it yet.
    leased: bool = False

    def is_of(self, request: Schedule) -> bool:
        """Whether a request with this document, ClientToken included, made the schedule."""
        same = self.kept == documents.kept_of(request, self.kept.creation_date) and self.state == request.state
        return same and request.target.input in (None, self.input)


class _Plan(NamedTuple):
    """What a request asks for, with all that was computed and checked."""

    #: Name of the schedule, and key of the message.
    name: str
    document: Schedule
    spec: Spec
    url: str | None
    body: str

    #: Whether the schedule is a message: it is enabled, and its one time is not beyond the longest delay.
    is_message: bool

    @property
    def ttl_s(self) -> int | None:
        """A message for a URL expires with the age that the retry policy allows; one in a queue is delivered."""
        retries = self.document.target.retry_policy
        return None if self.url is None or retries is None else retries.maximum_event_age_in_seconds


async def _at_owner(run: Run, ask: Ask, document: Schedule) -> Any:
    """Create or update a schedule in the shard of its target, once no other shard has the name."""
    router, (topic, _) = ask.call.context.router, _named_target(ask, document.target)
    owner = router.of_topics([topic], None)
    others = whole(await ask.forward_all(to for to in router.others() if to != owner))
    if owner is not None:
        others.append(await run(ask, document))
    for answer in others:
        if answer.status != NOTHING.status:
            return answer
    if owner is None:
        return await run(ask, document)
    answer = await ask.forward(owner)
    if answer.status == NOTHING.status:
        what = f"the nodes have different shard maps: shard {owner.shard} does not own the topic {topic!r}"
        raise NoLeader(what, retry_after_ms=200)
    return answer


async def _only_looks(ask: Ask, document: Schedule, name: str) -> bool:
    """Whether another shard creates or updates this schedule, because it owns the topic. Raises AwsError if this shard
    has the name, or has the groups and not this group."""
    router, (topic, _), group = ask.call.context.router, _named_target(ask, document.target), document.group_name
    owner = router.owner(topic)
    if owner is None:
        return False
    await need_group(ask, group)
    if any(one.exists for one in await find(ask, group, name)):
        what = f"there is a schedule {name!r} in the group {group!r}, in shard {router.here}"
        what += f", and {topic!r} belongs to shard {owner}: a schedule cannot move to another shard. Delete it first"
        raise AwsError("ConflictException", what, 409)
    return True


@operations.add("POST", _PATH, Schedule, over=_at_owner)
async def create_schedule(ask: Ask, document: Schedule) -> Any:
    name, group = path_name(ask, document.name), document.group_name
    if await _only_looks(ask, document, name):
        return NOTHING
    topic, url = await _target(ask, document.target)
    await need_group(ask, group)
    found = await find(ask, group, name, body=True)
    if existing := next((one for one in found if one.exists), None):
        if document.client_token is None or not existing.is_of(document):
            raise AwsError("ConflictException", f"there is a schedule {name!r} in the group {group!r}", 409)
    else:
        await _store(ask, _planned(ask, document, name, (topic, url)), found)
    return {"ScheduleArn": schedule_arn(group, name)}


@operations.add("PUT", _PATH, Schedule, over=_at_owner)
async def update_schedule(ask: Ask, document: Schedule) -> Any:
    name, group = path_name(ask, document.name), document.group_name
    if await _only_looks(ask, document, name):
        return NOTHING
    topic, url = await _target(ask, document.target)
    found = [one for one in await find(ask, group, name) if one.exists]
    if not found:
        raise _no_schedule(group, name)
    for one in found:
        ask.access.need_of("publish", one.topic, "schedule")
    if any(one.leased for one in found):
        what = f"the message of the schedule {name!r} in the group {group!r} is being handled"
        raise AwsError("ConflictException", what, 409)
    planned = _planned(ask, document, name, (topic, url), found[0])
    await _store(ask, planned, found, found[0].created_s)
    for one in found:
        if (one.version is None) != planned.is_message or (planned.is_message and one.topic != topic):
            await _remove(ask, planned.name, one)
    return {"ScheduleArn": schedule_arn(group, name)}


async def _wherever(run: Run, ask: Ask, document: OfGroup) -> Any:
    """The answer of the shard that has the schedule."""
    try:
        return await run(ask, document)
    except AwsError as error:
        if error.code != MISSING:
            raise
        unknown = error
    found = await ask.forward_all(ask.call.context.router.others())
    having = [one for one in found if isinstance(one, Answer) and one.status == HTTPStatus.OK]
    if having:
        return having[0]
    # No shard that answered has the schedule, but a shard that did not answer may have it: report that.
    if (refusal := refused(whole(found))) is not None:
        return refusal
    raise unknown


@operations.add("GET", _PATH, OfGroup, over=_wherever)
async def get_schedule(ask: Ask, document: OfGroup) -> Any:
    name, group = path_name(ask), document.group_name
    found = next((one for one in await find(ask, group, name, body=True) if one.exists), None)
    if found is None:
        raise _no_schedule(group, name)
    ask.access.need_of("read", found.topic, "schedule")
    answer = msgspec.to_builtins(found.kept)
    for own in ("CreationDate", "HasInput", "ClientToken"):
        answer.pop(own, None)
    if found.kept.has_input:
        answer["Target"]["Input"] = found.input
    answer["Target"]["RetryPolicy"] = _RETRY_POLICY | answer["Target"].get("RetryPolicy", {})
    return {
        "ActionAfterCompletion": found.kept.action_after_completion,
        "ScheduleExpressionTimezone": found.kept.schedule_expression_timezone,
        **answer,
        **head(found, group, name),
    }


async def _delete_in_all(run: Run, ask: Ask, document: OfGroup) -> Any:
    found = whole(await ask.forward_all(ask.call.context.router.others()))
    if (refusal := refused(found)) is not None:
        return refusal
    try:
        return await run(ask, document)
    except AwsError as error:
        if error.code != MISSING or all(one.status != HTTPStatus.OK for one in found):
            raise
    return {}


@operations.add("DELETE", _PATH, OfGroup, over=_delete_in_all)
async def delete_schedule(ask: Ask, document: OfGroup) -> Any:
    name, group = path_name(ask), document.group_name
    found = [one for one in await find(ask, group, name) if one.exists]
    if not found and not repeats(ask):
        raise _no_schedule(group, name)
    for one in found:
        ask.access.need_of("publish", one.topic, "schedule")
    for one in found:
        await _remove(ask, stored_name(group, name), one)
    return {}


def head(found: Found, group: str, name: str) -> dict[str, Any]:
    """Members that descriptions and lists have."""
    own = {"Arn": schedule_arn(group, name), "GroupName": group, "Name": name, "State": found.state}
    return own | {"CreationDate": found.created_s, "LastModificationDate": found.changed_s}


async def find(ask: Ask, group: str, name: str, *, body: bool = False) -> list[Found]:
    """The schedule of this name; more than one only while an update makes a message of it, or changes the topic."""
    stored, services, found = stored_name(group, name), ask.call.service, list[Found]()
    with suppress(NotFound):
        found += of_schedule(await services.schedules.get(stored, body=body, stale=False))
    for topic in await services.messages.topics_with_key(stored.encode(), stale=True):
        with suppress(NotFound):
            found += of_message(await services.messages.describe((topic, stored.encode()), body=body, stale=True))
    return found


def of_message(message: Message[str]) -> list[Found]:
    """The schedule that a message is; none for other messages, and for one that is settled: that schedule is over."""
    kept = documents.unpack(message.meta)
    if kept is None or message.state not in PENDING:
        return []
    at_s = parse_instant("time", message.published_at) / 1_000
    created_s = at_s if kept.creation_date is None else kept.creation_date
    body = None if message.body is None else message.body.decode(errors="replace")
    return [Found(kept, "ENABLED", message.topic, created_s, at_s, body, None, leased=message.state == "leased")]


def of_schedule(schedule: OurSchedule[str]) -> list[Found]:
    """The schedule that a schedule of ours is; none for those that AWS SDKs did not make."""
    kept = documents.unpack(schedule.meta)
    if kept is None:
        return []
    at_s = parse_instant("time", schedule.changed_at) / 1_000
    created_s = at_s if kept.creation_date is None else kept.creation_date
    body = None if schedule.body is None else schedule.body.decode(errors="replace")
    start_ms = None if schedule.start is None else parse_instant("time", schedule.start)
    over = schedule.state == "finished" and kept.action_after_completion == "DELETE"
    state: State = "DISABLED" if schedule.state == "paused" else "ENABLED"
    return [Found(kept, state, schedule.topic, created_s, at_s, body, schedule.version, start_ms, exists=not over)]


def _no_schedule(group: str, name: str) -> AwsError:
    return missing(f"there is no schedule {name!r} in the group {group!r}; a one-time schedule ends with its message")


def _named_target(ask: Ask, target: Target) -> tuple[str, str | None]:
    """(topic, URL) of a target. Raises AwsError; Forbidden without the right to publish there."""
    arn, url = target.arn, target.arn if "://" in target.arn else None
    supported = ("arn", "role_arn", "input", "dead_letter_config", "retry_policy", "sqs_parameters")
    others = [name for name in target.__struct_fields__ if name not in supported and getattr(target, name) is not None]
    if others or (url is None and ":sqs:" not in arn):
        what = f"its parameter {others[0]}" if others else repr(arn[:120])
        raise invalid(f"Target: {what}: targets are queues of this cluster (arn:aws:sqs:…:NAME) and URLs, nothing else")
    if _VARIABLE in (target.input or ""):
        what = "are not replaced: a message has its own time and attributes, and a webhook call headers"
        raise invalid(f"Target.Input: variables such as {_VARIABLE}scheduled-time> {what}")
    dead = None if target.dead_letter_config is None else target.dead_letter_config.arn
    if dead is not None:
        queue_of_arn(dead, "Target.DeadLetterConfig.Arn")
    topic = check_new_topic(
        WEBHOOKS if url is not None else queue_of_arn(arn, "Target.Arn"), ask.call.context.config.max_topic_bytes
    )
    ask.access.need("publish", topic)
    return topic, url


async def _target(ask: Ask, target: Target) -> tuple[str, str | None]:
    """(topic, URL) of a target that can be used. Raises AwsError; Forbidden without the right to publish there."""
    topic, url = _named_target(ask, target)
    try:
        settings = await ask.call.service.topics.settings_of(topic, stale=False)
    except NotFound:
        what = f"there is no topic {topic!r}, where messages for URLs go" if url else f"there is no queue {topic!r}"
        raise invalid(f"Target.Arn: {what}: create it first") from None
    if url is not None and (wrong := url_problem(url)):
        raise invalid(f"Target.Arn: {wrong}")
    if url is not None and (settings.webhook is None or not settings.webhook.allow_per_message):
        raise invalid(f"Target.Arn: set allow_per_message of the webhook of topic {topic}: then messages may name URLs")
    if topic.endswith(".fifo") and (target.sqs_parameters is None or target.sqs_parameters.message_group_id is None):
        raise invalid("Target.SqsParameters.MessageGroupId: a FIFO queue needs one")
    return topic, url


def _planned(
    ask: Ask, document: Schedule, name: str, target: tuple[str, str | None], found: Found | None = None
) -> _Plan:
    """Raises AwsError. found: the schedule that is updated."""
    topic, url = target
    times = expressions.parse(document.schedule_expression, document.schedule_expression_timezone)
    start_ms, end_ms = (
        None if at_s is None else int(at_s * 1_000) for at_s in (document.start_date, document.end_date)
    )
    if times.every_ms is not None and start_ms is None:
        start_ms = ask.call.service.access.now_ms() + _SOON_MS
        if found is not None and found.kept.schedule_expression == document.schedule_expression:
            start_ms = found.start_ms if found.start_ms is not None else start_ms
    window = document.flexible_time_window
    if (window.mode == "FLEXIBLE") != (window.maximum_window_in_minutes is not None):
        raise invalid("FlexibleTimeWindow: MaximumWindowInMinutes goes with Mode FLEXIBLE, and only with that")
    group = None if document.target.sqs_parameters is None else document.target.sqs_parameters.message_group_id
    recurs = times.at_ms is None
    spec = Spec(
        topic,
        cron=times.cron,
        every_ms=times.every_ms,
        at=None if recurs else [max(times.at_ms or 0, 0)],
        timezone=document.schedule_expression_timezone if times.cron is not None else "UTC",
        start_ms=max((ms for ms in (start_ms, times.start_ms) if ms is not None), default=None) if recurs else None,
        end_ms=min((ms for ms in (end_ms, times.end_ms) if ms is not None), default=None) if recurs else None,
        jitter_ms=min((window.maximum_window_in_minutes or 0) * 60_000, MAX_JITTER_MS),
        group=None if group is None else check_group(group),
    )
    if wrong := problem(spec):
        raise invalid(wrong)
    body = document.target.input or _notification(document.group_name, name)
    most = ask.call.context.config.max_body_bytes if not recurs else MAX_TEMPLATE_BYTES
    if (size := len(body.encode())) > most:
        raise invalid(f"Target.Input: {size} bytes; that of this kind of schedule has at most {most}")
    near = times.at_ms is not None and times.at_ms - ask.call.service.access.now_ms() <= ask.call.context.max_delay_ms
    is_message = near and document.state == "ENABLED"
    return _Plan(stored_name(document.group_name, name), document, spec, url, body, is_message)


def _notification(group: str, name: str) -> str:
    """The message of a schedule without Input, as AWS has it."""
    answer: dict[str, Any] = {"version": "0", "detail-type": "Scheduled Event", "source": "aws.scheduler"}
    answer |= {"account": ACCOUNT, "region": REGION, "resources": [schedule_arn(group, name)], "detail": "{}"}
    return msgspec.json.encode(answer).decode()


async def _store(ask: Ask, planned: _Plan, found: list[Found], created_s: float | None = None) -> None:
    """Store a schedule. found: what the cluster has of it. created_s: when a schedule that is updated was created."""
    kept = documents.pack(planned.document, created_s)
    if planned.is_message:
        await _publish(ask, planned, kept, replaces=created_s is not None)
    else:
        version = next((one.version for one in found if one.version is not None), 0)
        await _put(ask, planned, kept, version)


async def _publish(ask: Ask, planned: _Plan, kept: str, *, replaces: bool) -> None:
    """Publish the message of a one-time schedule. The ClientToken of one that was deleted since may be used again."""
    token = planned.document.client_token
    key = None if token is None else f"{'update' if replaces else 'create'} {planned.name} {token}"
    problem = await _published(ask, planned, kept, key, replaces=replaces)
    if isinstance(problem, Conflict | Impossible) and key is not None and not repeats(ask):
        again = blake2b(key.encode() + (ask.retry_key or os.urandom(16)), digest_size=16).hexdigest()
        problem = await _published(ask, planned, kept, again, replaces=replaces)
    if problem is not None:
        raise problem


async def _published(ask: Ask, planned: _Plan, kept: str, key: str | None, *, replaces: bool) -> HadelayError | None:
    """key: Idempotency-Key. Returns the refusal, if any."""
    context, spec = ask.call.context, planned.spec
    assert spec.at is not None
    item = BatchItem(
        spec.topic,
        content_type=_TEXT,
        key=planned.name,
        on_conflict="replace" if replaces else "reject",
        idempotency_key=key,
        tags=[documents.TAG],
        meta={documents.KEPT: kept},
        group=spec.group,
        callback=planned.url,
        ttl=planned.ttl_s,
    )
    at_ms = spec.at[0] + plan.jitter_ms(spec, planned.name, spec.at[0])
    draft = draft_of(context.config, context.max_delay_ms, item, (at_ms, False), None, planned.body.encode())
    receipts: Receipts = await answered(
        lambda done: ask.call.service.publish([draft], None, done, ask.access.actor.token)
    )
    return receipts.problems.get(0)


async def _put(ask: Ask, planned: _Plan, kept: str, version: int) -> None:
    ttl_ms, spec, limits = (planned.ttl_s or 0) * 1_000, planned.spec, ask.call.context.config
    own, tags = {documents.KEPT: kept}, [documents.TAG]
    meta = pack_meta(limits, _TEXT, own, tags=tags, ttl=ttl_ms, sch=planned.name, group=spec.group, cb=planned.url)
    body, has_url = planned.body.encode(), planned.url is not None
    draft = Draft(spec.topic, 0, True, mask_of(tags), ttl_ms, template_meta(meta), body, callback=has_url)
    await ask.call.service.schedules.put(
        planned.name, spec, draft, ask.access.actor, version=version, paused=planned.document.state == "DISABLED"
    )


async def _remove(ask: Ask, name: str, found: Found) -> None:
    """Delete a schedule. If the schedule is a single message, cancel this message. A leased message is being delivered,
    so its schedule is over, and nothing is left to cancel."""
    if found.version is not None:
        await ask.call.service.schedules.delete(name, ask.access.actor)
        return
    with suppress(NotFound, Conflict):
        await ask.call.service.messages.cancel((found.topic, name.encode()))
