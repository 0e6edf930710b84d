"""JSON documents of schedules, their limits, and the part of a document that is stored with a message or a schedule.

A one-time schedule is a message, a recurring one a schedule: in both, the message's body is the Input, and its own
field KEPT has the rest of the document as JSON. Both have the same name, which is the key of the message.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from hadelay.aws.arns import ACCOUNT, REGION
from hadelay.aws.scheduler.protocol import Document, invalid

#: Name of the field of a message's meta that keeps the document; and tag of the messages of one-time schedules.
KEPT, TAG = "hadelay.schedule", "aws-schedule"
DEFAULT = "default"
#: Size limit of the stored document, in bytes: smaller than the limit of all own fields of a message together.
_MAX_KEPT = 3_800
_SEPARATOR = "~"
_PREFIX = f"aws{_SEPARATOR}"

_NAME = r"^[0-9a-zA-Z_.-]+\Z"
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=_NAME)]
ClientToken = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+\Z")]
State = Literal["ENABLED", "DISABLED"]
#: A time in seconds since 1970.
Seconds = Annotated[float, Meta(ge=0, lt=250_000_000_000)]


class Exact(Document, tag_field="Mode", tag="OFF"):
    """A FlexibleTimeWindow of the mode OFF: the schedule fires exactly at its time."""

    maximum_window_in_minutes: ClassVar[int] = 0


class Flexible(Document, tag_field="Mode", tag="FLEXIBLE"):
    maximum_window_in_minutes: Annotated[int, Meta(ge=1, le=1_440)]


class RetryPolicy(Document):
    maximum_event_age_in_seconds: Annotated[int, Meta(ge=60, le=86_400)] | None = None
    maximum_retry_attempts: Annotated[int, Meta(ge=0, le=185)] | None = None


class DeadLetterConfig(Document):
    arn: Annotated[str, Meta(min_length=1, max_length=1_600)] | None = None


class SqsParameters(Document):
    message_group_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Target(Document):
    """Target of a schedule: a queue, or a URL. Members for other kinds of targets are not declared here, so they are
    refused."""

    arn: Annotated[str, Meta(min_length=1, max_length=1_600)]
    role_arn: Annotated[
        str, Meta(max_length=1_600, pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9_+=,.@/-]+\Z")
    ]
    input: Annotated[str, Meta(min_length=1)] | None = None
    dead_letter_config: DeadLetterConfig | None = None
    retry_policy: RetryPolicy | None = None
    sqs_parameters: SqsParameters | None = None

    @property
    def message_group(self) -> str | None:
        return None if self.sqs_parameters is None else self.sqs_parameters.message_group_id


class _Content(Document, kw_only=True):
    schedule_expression: Annotated[str, Meta(min_length=1, max_length=256)]
    target: Target
    flexible_time_window: Exact | Flexible
    description: Annotated[str, Meta(max_length=512)] = ""
    schedule_expression_timezone: Annotated[str, Meta(min_length=1, max_length=50)] = "UTC"
    start_date: Seconds | None = None
    end_date: Seconds | None = None
    kms_key_arn: Annotated[str, Meta(min_length=1, max_length=2_048)] | None = None
    client_token: ClientToken | None = None
    action_after_completion: Literal["NONE", "DELETE"] = "NONE"


class Schedule(_Content, kw_only=True):
    """JSON document of CreateSchedule and UpdateSchedule."""

    name: Name
    group_name: Name = DEFAULT
    state: State = "ENABLED"


class Kept(_Content, kw_only=True):
    """The part of a schedule's document that its message keeps: all but the Input, which is the message's body."""

    #: Creation time of the schedule; None if the schedule was never updated, because its message has the time.
    creation_date: Seconds | None = None
    #: Whether the message's body is the schedule's Input; False: the schedule has no Input, and the body is AWS's
    #: default notification.
    has_input: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Kept).decode


def kept_of(request: Schedule, created_s: float | None) -> Kept:
    """Make the document to store with the message. created_s: creation time of a schedule that is updated, in Unix
    seconds; None for a new schedule."""
    content = {member: getattr(request, member) for member in _Content.__struct_fields__}
    content["target"] = replace(request.target, input=None)
    return Kept(**content, creation_date=created_s, has_input=request.target.input is not None)


def pack(request: Schedule, created_s: float | None) -> str:
    """Make the document to store with the message, as JSON. Raises AwsError if it is too large."""
    text = _encode(kept_of(request, created_s)).decode()
    if (size := len(text.encode())) > _MAX_KEPT:
        raise invalid(
            f"the schedule has {size} bytes without its Input; at most {_MAX_KEPT} are kept: shorten the Description"
        )
    return text


def unpack(meta: dict[str, str]) -> Kept | None:
    """The document that a message stores; None for a message that no AWS SDK has scheduled."""
    try:
        return _decode(meta[KEPT])
    except (KeyError, msgspec.MsgspecError):
        return None


def stored_name(group: str, name: str = "") -> str:
    """Name of the schedule in hadelay, or client key of the message of a one-time schedule. Without a name: the prefix
    of these names in a group."""
    return f"{_PREFIX}{group}{_SEPARATOR}{name}"


def names_of(stored: str) -> tuple[str, str] | None:
    """(group, name) from a name that `stored_name` made; None for any other name."""
    group, separator, name = stored.removeprefix(_PREFIX).partition(_SEPARATOR)
    return (group, name) if separator and stored.startswith(_PREFIX) else None


def schedule_arn(group: str, name: str) -> str:
    return f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule/{group}/{name}"
