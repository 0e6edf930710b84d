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
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hadelay.api.base import Duration
from hadelay.api.messages import Message
from hadelay.api.publishrequest import BatchItem
from hadelay.api.schedules import PutSchedule
from hadelay.api.schedules import Schedule as OurSchedule
from hadelay.api.text import check_new_topic, parse_instant
from hadelay.aws.arns import ACCOUNT, REGION, queue_of_arn
from hadelay.aws.door import Ask, whole
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Run, everywhere
from hadelay.aws.scheduler import documents, expressions
from hadelay.aws.scheduler.documents import DEFAULT, TAG, Kept, Name, Schedule, State, Target, schedule_arn, stored_name
from hadelay.aws.scheduler.expressions import Times
from hadelay.aws.scheduler.groups import need_group
from hadelay.aws.scheduler.protocol import Document, invalid, is_missing, missing, operations, repeats
from hadelay.codec.schedules import MAX_JITTER_MS, Spec
from hadelay.errors import Conflict, HadelayError, Impossible, NoLeader, NotFound
from hadelay.http.answers import NOTHING
from hadelay.model import PENDING, Draft
from hadelay.rules.publishing import draft_of
from hadelay.rules.schedules import schedule_spec, schedule_to_put
from hadelay.settings.urls import url_problem
from hadelay.timing import plan

_PATH = "/schedules/{name}"
_TEXT = "text/plain"
#: Topic of the messages for targets with a URL. Its webhook must allow URLs of single messages (allow_per_message).
WEBHOOKS = "aws-scheduler"
#: Time in ms from now to the first occurrence of rate(…) without a StartDate. AWS invokes such a target at once.
_SOON_MS = 2_000
#: Beginning of variables of AWS in an Input, such as <aws.scheduler.scheduled-time>. Hadelay refuses them.
_VARIABLE = "<aws.scheduler."
#: RetryPolicy that AWS shows for a target without a RetryPolicy of its own.
_RETRY_POLICY = {"MaximumEventAgeInSeconds": 86_400, "MaximumRetryAttempts": 185}

#: A schedule of AWS as hadelay stores it: a recurring one as a schedule, a one-time one as a message.
Row = OurSchedule[str] | Message[str]


class Named(Document):
    name: Name
    group_name: Name = DEFAULT
    client_token: str | None = None


class Found(NamedTuple):
    """A schedule of AWS as hadelay stores it, and the document that is stored with it."""

    row: Row
    kept: Kept

    @property
    def place(self) -> str | None:
        """Topic of the message of a one-time schedule; None for a schedule of hadelay."""
        return None if isinstance(self.row, OurSchedule) else self.row.topic

    @property
    def stored(self) -> str:
        """Name of the schedule of hadelay, or client key of the message."""
        return self.row.schedule if isinstance(self.row, OurSchedule) else self.row.key or ""

    @property
    def exists(self) -> bool:
        """Whether AWS would still show the schedule: False if it has no further occurrence, and deletes itself then."""
        return self.row.state != "finished" or self.kept.action_after_completion != "DELETE"

    @property
    def state(self) -> State:
        return "DISABLED" if self.row.state == "paused" else "ENABLED"

    @property
    def input(self) -> str | None:
        return None if self.row.body is None else self.row.body.decode(errors="replace")

    @property
    def changed_s(self) -> float:
        at = self.row.changed_at if isinstance(self.row, OurSchedule) else self.row.published_at
        return parse_instant("time", at) / 1_000

    @property
    def created_s(self) -> float:
        return self.changed_s if self.kept.creation_date is None else self.kept.creation_date

    def is_of(self, request: Schedule) -> bool:
        """Whether this schedule was made by a request with the same document and ClientToken, so that the request is a
        repetition."""
        same = self.kept == documents.kept_of(request, self.kept.creation_date) and self.state == request.state
        return same and request.target.input in (None, self.input)


class _Plan(NamedTuple):
    """Checked plan of a CreateSchedule or UpdateSchedule: the values to store."""

    #: Name of the schedule of hadelay, or client key of the message.
    stored: str
    #: The message of a one-time schedule, or the message that the schedule of hadelay publishes.
    draft: Draft
    #: Times and other settings of the schedule of hadelay; None for a one-time schedule, which is a message alone.
    spec: Spec | None


async def _at_owner(run: Run, ask: Ask, document: Schedule) -> Any:
    """Create or update a schedule in the shard of its target's topic, after all other shards have confirmed that they
    do not have the name."""
    topic, _ = _named_target(ask, document.target)
    owner = ask.router.of_topics([topic], None)
    done = whole(await ask.parts(to for to in ask.router.others() if to != owner))
    if any(done):  # a shard with another map owns the topic, and has made the change
        return next(filter(None, done))
    answer = await run(ask, document)
    if owner is None or answer is not NOTHING:
        return answer
    answer = await ask.forward(owner)
    if answer.status == NOTHING.status:
        what = f"the nodes have different shard maps: shard {owner.shard} does not own the topic {topic!r}"
        raise NoLeader(what, retry_after_ms=200)
    return answer


@operations.add(f"POST {_PATH}", Schedule, over=_at_owner)
async def create_schedule(ask: Ask, document: Schedule) -> Any:
    return await _set(ask, document, new=True)


@operations.add(f"PUT {_PATH}", Schedule, over=_at_owner)
async def update_schedule(ask: Ask, document: Schedule) -> Any:
    return await _set(ask, document, new=False)


async def _set(ask: Ask, document: Schedule, *, new: bool) -> Any:
    """Create or update a schedule. A shard that does not own the target's topic returns NOTHING; but it refuses if it
    has a schedule of this name, or owns the group's topic and has no such group."""
    name, group = document.name, document.group_name
    topic, url = _named_target(ask, document.target)
    await need_group(ask, group)
    found = await find(ask, group, name, body=new)
    existing = [one for one in found if one.exists]
    what = f"there is a schedule {name!r} in the group {group!r}"
    if (owner := ask.router.owner(topic)) is not None:
        if not existing:
            return NOTHING
        what += f", in shard {ask.router.here}, and {topic!r} belongs to shard {owner}"
        raise _conflict(f"{what}: a schedule cannot move to another shard. Delete it first")
    await _check_target(ask, document.target, topic, url)
    if existing and new:
        if document.client_token is None or not existing[0].is_of(document):
            raise _conflict(what)
        return {"ScheduleArn": schedule_arn(group, name)}
    if not existing and not new:
        raise _no_schedule(group, name)
    for one in existing:
        ask.access.need_of("publish", one.row.topic, "schedule")
    if any(one.row.state == "leased" for one in existing):
        raise _conflict(f"the message of the schedule {name!r} in the group {group!r} is being handled")
    planned = _planned(ask, document, topic, url, existing[0] if existing else None)
    if planned.spec is None:
        token = document.client_token
        key = None if token is None else f"{'create' if new else 'update'} {planned.stored} {token}"
        await _publish(ask, planned.draft, key)
    else:
        version = next((one.row.version for one in found if isinstance(one.row, OurSchedule)), 0)
        how: Any = {"version": version, "paused": document.state == "DISABLED"}
        await ask.service.schedules.put(planned.stored, planned.spec, planned.draft, ask.access.actor, **how)
    place = topic if planned.spec is None else None
    for one in existing:
        if one.place != place:
            await _remove(ask, one)
    return {"ScheduleArn": schedule_arn(group, name)}


def _conflict(words: str) -> AwsError:
    return AwsError("ConflictException", words, 409)


def _worst(found: Iterable[Any]) -> HadelayError | None:
    """The most important error in the answers of all shards, None without errors: any other error goes before one that
    only says that a shard does not have the name."""
    return min((one for one in found if isinstance(one, HadelayError)), key=is_missing, default=None)


async def _wherever(run: Run, ask: Ask, document: Named) -> Any:
    """The answer of the shard that has the schedule. If no shard has it, raises an error; a shard that did not answer
    may have the schedule, so its error goes first."""
    found = await everywhere(run, ask, document)
    having = [one for one in found if not isinstance(one, HadelayError)]
    if not having and (error := _worst(found)) is not None:
        raise error
    return having[0]


@operations.add(f"GET {_PATH}", Named, over=_wherever)
async def get_schedule(ask: Ask, document: Named) -> Any:
    name, group = document.name, document.group_name
    found = next((one for one in await find(ask, group, name, body=True) if one.exists), None)
    if found is None:
        raise _no_schedule(group, name)
    ask.access.need_of("read", found.row.topic, "schedule")
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


async def _delete_in_all(run: Run, ask: Ask, document: Named) -> Any:
    found = await everywhere(run, ask, document)
    error = _worst(found)
    if error is not None and (not is_missing(error) or all(isinstance(one, HadelayError) for one in found)):
        raise error
    return {}


@operations.add(f"DELETE {_PATH}", Named, over=_delete_in_all)
async def delete_schedule(ask: Ask, document: Named) -> Any:
    found = [one for one in await find(ask, document.group_name, document.name) if one.exists]
    if not found and not repeats(ask):
        raise _no_schedule(document.group_name, document.name)
    for one in found:
        ask.access.need_of("publish", one.row.topic, "schedule")
    for one in found:
        await _remove(ask, one)
    return {}


def head(found: Found, group: str, name: str) -> dict[str, Any]:
    """Members that the answers of GetSchedule and ListSchedules share."""
    own = {"Arn": schedule_arn(group, name), "GroupName": group, "Name": name, "State": found.state}
    return own | {"CreationDate": found.created_s, "LastModificationDate": found.changed_s}


async def find(ask: Ask, group: str, name: str, *, body: bool = False) -> list[Found]:
    """The stored schedules of this name. There are two only during an update that turns a schedule into a message or
    back, or that changes the topic; or if such an update broke off."""
    stored, services, rows = stored_name(group, name), ask.service, list[Row]()
    with suppress(NotFound):
        rows.append(await services.schedules.get(stored, body=body, stale=False))
    for topic in await services.messages.topics_with_key(stored.encode(), stale=True):
        with suppress(NotFound):
            rows.append(await services.messages.describe((topic, stored.encode()), body=body, stale=True))
    return [found for row in rows if (found := found_of(row)) is not None]


def found_of(row: Row) -> Found | None:
    """The schedule of AWS that is stored as `row`. None if no AWS SDK made the row, and for a settled message, because
    its one-time schedule is over."""
    kept = documents.unpack(row.meta)
    over = not isinstance(row, OurSchedule) and row.state not in PENDING
    return None if kept is None or over else Found(row, kept)


def _no_schedule(group: str, name: str) -> AwsError:
    return missing(f"there is no schedule {name!r} in the group {group!r}; a one-time schedule ends with its message")


def _named_target(ask: Ask, target: Target) -> tuple[str, str | None]:
    """(topic, URL) of a target; URL None for a queue. Raises AwsError; Forbidden without the right to publish to the
    topic."""
    arn, url = target.arn, target.arn if "://" in target.arn else None
    if url is None and ":sqs:" not in arn:
        what = "targets are queues of this cluster (arn:aws:sqs:…:NAME) and URLs, nothing else"
        raise invalid(f"Target.Arn: {arn[:120]!r}: {what}")
    if _VARIABLE in (target.input or ""):
        what = "are not replaced: a message has its own time and attributes, and a webhook call headers"
        raise invalid(f"Target.Input: variables such as {_VARIABLE}scheduled-time> {what}")
    if target.dead_letter_config is not None and target.dead_letter_config.arn is not None:
        queue_of_arn(target.dead_letter_config.arn, "Target.DeadLetterConfig.Arn")
    topic = WEBHOOKS if url is not None else queue_of_arn(arn, "Target.Arn")
    ask.access.need("publish", check_new_topic(topic, ask.limits.max_topic_bytes))
    return topic, url


async def _check_target(ask: Ask, target: Target, topic: str, url: str | None) -> None:
    """Raises AwsError for a target that cannot get messages: a missing topic, an invalid URL, or no message group."""
    try:
        settings = await ask.service.topics.settings_of(topic, stale=False)
    except NotFound:
        what = f"there is no topic {topic!r}, where messages for URLs go" if url else f"there is no queue {topic!r}"
        raise invalid(f"Target.Arn: {what}: create it first") from None
    if url is not None and (wrong := url_problem(url)):
        raise invalid(f"Target.Arn: {wrong}")
    if url is not None and (settings.webhook is None or not settings.webhook.allow_per_message):
        raise invalid(f"Target.Arn: set allow_per_message of the webhook of topic {topic}: then messages may name URLs")
    if topic.endswith(".fifo") and target.message_group is None:
        raise invalid("Target.SqsParameters.MessageGroupId: a FIFO queue needs one")


def _planned(ask: Ask, document: Schedule, topic: str, url: str | None, before: Found | None) -> _Plan:
    """Check a request, and compute the message or the schedule to store. before: the present version of the schedule;
    None for a new one. Raises HadelayError."""
    limits, max_delay_ms, now_ms = ask.limits, ask.call.context.max_delay_ms, ask.service.access.now_ms()
    stored, target = stored_name(document.group_name, document.name), document.target
    times = expressions.parse(document.schedule_expression, document.schedule_expression_timezone)
    given = _recurring(document, times, now_ms, before) if times.at_ms is None else {"at": [times.at_ms]}
    # A message for a URL expires at the maximum age in the RetryPolicy. A message in a queue does not expire, because
    # it counts as delivered to the target.
    ttl_s = target.retry_policy.maximum_event_age_in_seconds if url is not None and target.retry_policy else None
    kept = documents.pack(document, None if before is None else before.created_s)
    message: dict[str, Any] = {"tags": [TAG], "meta": {documents.KEPT: kept}, "group": target.message_group}
    jitter_ms = min(document.flexible_time_window.maximum_window_in_minutes * 60_000, MAX_JITTER_MS)
    put = PutSchedule(topic=topic, jitter=Duration(jitter_ms), **given, **message)
    body = (target.input or _notification(document.group_name, document.name)).encode()
    if times.at_ms is None or times.at_ms - now_ms > max_delay_ms or document.state == "DISABLED":
        put.ttl = None if ttl_s is None else Duration(1_000 * ttl_s)
        spec, draft = schedule_to_put(limits, max_delay_ms, stored, put, (body, _TEXT), callback=url)
        return _Plan(stored, draft, spec)
    if len(body) > limits.max_body_bytes:
        raise invalid(f"Target.Input: {len(body)} bytes; a message has at most {limits.max_body_bytes}")
    due_ms = times.at_ms + plan.jitter_ms(schedule_spec(put, topic), stored, times.at_ms)
    taken = "reject" if before is None else "replace"
    item = BatchItem(topic, content_type=_TEXT, key=stored, on_conflict=taken, callback=url, ttl=ttl_s, **message)
    return _Plan(stored, draft_of(limits, max_delay_ms, item, (due_ms, False), None, body), None)


def _recurring(document: Schedule, times: Times, now_ms: int, before: Found | None) -> dict[str, Any]:
    """Times of a recurring schedule, as fields of PutSchedule. before: the present version of the schedule; None for a
    new one."""
    start_ms, end_ms = (None if at is None else int(at * 1_000) for at in (document.start_date, document.end_date))
    if times.every_ms is not None and start_ms is None:
        start_ms = now_ms + _SOON_MS
        if before is not None and before.kept.schedule_expression == document.schedule_expression:
            row = before.row
            start_ms = parse_instant("start", row.start) if isinstance(row, OurSchedule) and row.start else start_ms
    return {
        "cron": times.cron,
        "every": times.every_ms,
        "timezone": "UTC" if times.cron is None else document.schedule_expression_timezone,
        "start": max((ms for ms in (start_ms, times.start_ms) if ms is not None), default=None),
        "end": min((ms for ms in (end_ms, times.end_ms) if ms is not None), default=None),
    }


def _notification(group: str, name: str) -> str:
    """Body of the message of a schedule without Input: AWS's default notification, as JSON."""
    answer: dict[str, Any] = {"version": "0", "detail-type": "Scheduled Event", "source": "aws.scheduler"}
    answer |= {"account": ACCOUNT, "region": REGION, "resources": [schedule_arn(group, name)], "detail": "{}"}
    return msgspec.json.encode(answer).decode()


async def _publish(ask: Ask, draft: Draft, key: str | None) -> None:
    """Publish the message of a one-time schedule. key: idempotency key from the request's ClientToken; None without
    one. The same ClientToken may make a schedule of this name again after the first one is deleted, so a request that
    is no repetition publishes under a second key if the first is used up."""
    keys = [None if key is None else key.encode()]
    if key is not None and not repeats(ask):
        again = blake2b(key.encode() + (ask.retry_key or os.urandom(16)), digest_size=16)
        keys.append(again.hexdigest().encode())
    for idem in keys:
        problem = (await ask.publish([replace(draft, idem=idem)], None)).problems.get(0)
        if not isinstance(problem, Conflict | Impossible):
            break
    if problem is not None:
        raise problem


async def _remove(ask: Ask, found: Found) -> None:
    """Delete a schedule. If the schedule is a single message, cancel this message. A leased message is being delivered,
    so its schedule is over, and nothing is left to cancel."""
    if found.place is None:
        await ask.service.schedules.delete(found.stored, ask.access.actor)
        return
    with suppress(NotFound, Conflict):
        await ask.service.messages.cancel((found.place, found.stored.encode()))
