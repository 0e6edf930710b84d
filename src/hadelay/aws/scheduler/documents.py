"""Documents of schedules, their limits, and what of them a message or a schedule keeps.

A one-time schedule is a message, a recurring one a schedule: in both, the message's body is the Input, and its own
field KEPT has the rest of the document as JSON. Both have the same name, which is the key of the message.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from hadelay.aws.arns import ACCOUNT, REGION
from hadelay.aws.scheduler.protocol import Document, invalid

#: Name of the field of a message's `meta` that has the document; tag of the messages of one-time schedules.
KEPT, TAG = "hadelay.schedule", "aws-schedule"
DEFAULT = "default"
#: Size limit of a kept document, in bytes: below that of all own fields of a message.
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
    """A FlexibleTimeWindow that is none."""

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
    """A queue, or a URL. Members about targets of other kinds are unknown here, and so are refused."""

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
    """The document of CreateSchedule and UpdateSchedule."""

    name: Name
    group_name: Name = DEFAULT
    state: State = "ENABLED"


class Kept(_Content, kw_only=True):
    """What a message keeps of a schedule's document, besides the Input."""

    #: When the schedule was created, if it was updated since.
    creation_date: Seconds | None = None
    #: Whether the body is the Input; else there was none, and the body is the default notification.
    has_input: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Kept).decode


def kept_of(request: Schedule, created_s: float | None) -> Kept:
    """The document to keep. created_s: time of the creation of a schedule that is updated."""
    content = {member: getattr(request, member) for member in _Content.__struct_fields__}
    content["target"] = replace(request.target, input=None)
    return Kept(**content, creation_date=created_s, has_input=request.target.input is not None)


def pack(request: Schedule, created_s: float | None) -> str:
    """The document to keep, as JSON. Raises AwsError."""
    text = _encode(kept_of(request, created_s)).decode()
    if (size := len(text.encode())) > _MAX_KEPT:
        raise invalid(
            f"the schedule has {size} bytes without its Input; at most {_MAX_KEPT} are kept: shorten the Description"
        )
    return text


def unpack(meta: dict[str, str]) -> Kept | None:
    """The document in a message's own fields; None for a message that is of no schedule of AWS SDKs."""
    try:
        return _decode(meta[KEPT])
    except (KeyError, msgspec.MsgspecError):
        return None


def stored_name(group: str, name: str = "") -> str:
    """Name of a schedule, and key of the message of a one-time schedule; without a name, what those of a group begin
    with."""
    return f"{_PREFIX}{group}{_SEPARATOR}{name}"


def names_of(stored: str) -> tuple[str, str] | None:
    """(group, name) of a name that `stored_name` made; None for other names."""
    group, separator, name = stored.removeprefix(_PREFIX).partition(_SEPARATOR)
    return (group, name) if separator and stored.startswith(_PREFIX) else None


def schedule_arn(group: str, name: str) -> str:
    return f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule/{group}/{name}"
