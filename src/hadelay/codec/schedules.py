"""Schedules as the log and the tables hold them: specification, state, and the commands 48–52.

docs/spec/commands.md has the fields of each command with an example. A specification is a msgpack map; a template is a
PUBLISH of one row whose meta ends with the occurrence (`Meta.oc`) as eight bytes, which apply fills in.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from hadelay.codec.commandtypes import Command
from hadelay.codec.packed import I64, U8, U32, U64, Name, Packed
from hadelay.codec.publishcommand import Publish, decode_body
from hadelay.codec.wire import MAX_NAME, Malformed, WireReader, frame

#: Limit of the times in a schedule's list `at`; a longer list is refused.
MAX_TIMES = 1_000
#: Limit of the occurrences in one SCHEDULE_RUN or one firing; a command with more is malformed.
MAX_RUN = 1_000
#: Limit of the schedules in one SCHEDULE_FIRE; a command with more is malformed.
MAX_FIRINGS = 2_000
#: Limit of the body of a template (the message that a schedule publishes), in bytes; a larger one is refused.
MAX_TEMPLATE_BYTES = 64 << 10
#: Value of the expected version in a SCHEDULE_PUT or SCHEDULE_RUN that stands for any version.
ANY_VERSION = 0xFFFFFFFF
#: Smallest interval of a schedule, in ms; a shorter one is refused.
MIN_EVERY_MS = 1_000
#: Largest random part of a due time (jitter), in ms; a schedule with a larger one is refused.
MAX_JITTER_MS = 3_600_000
#: All numbers in a schedule's specification (Spec) must be below this limit: the year 10000 in Unix ms.
_MAX_NUMBER = 253_402_300_800_000
#: Bits of Firing.flags. LAST: no occurrence follows, and Firing.next is the time at which to remove the schedule.
#: REMOVE: remove the finished schedule.
LAST, REMOVE = 1, 2
#: Time for which a finished schedule is kept, in ms.
KEPT_MS = 7 * 86_400_000
#: Values of `paused` in a SCHEDULE_PUT; KEEP_PAUSE: the schedule stays paused or running, as it is.
KEEP_PAUSE, PAUSE, RUN = 0, 1, 2
#: Last field of a template's meta, without its 8 bytes of value: msgpack key `oc`, type byte of a u64.
_OC = b"\xa2oc\xcf"
_OCCURRENCE = struct.Struct(">Q")
#: Largest number of keys of a msgpack map whose header is one byte; `template_meta` adds a key by changing this byte.
_FIXMAP = 15


class CatchUp(IntEnum):
    """Which of the occurrences missed in an outage are published afterwards, if not older than Spec.window_ms."""

    ONE = 0
    NONE = 1
    ALL = 2


class Overlap(IntEnum):
    """Whether an occurrence is published while the schedule's previous message is still pending."""

    ALLOW = 0
    SKIP = 1
    #: Publish one more message, which waits behind the pending message in a message group of the schedule's own.
    WAIT = 2


class Spec(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """Times and policies of a schedule, in Unix ms. Exactly one of cron, every_ms and at is given."""

    topic: str
    cron: str | None = None
    every_ms: int | None = None
    at: list[int] | None = None
    timezone: str = "UTC"
    start_ms: int | None = None
    end_ms: int | None = None
    max_occurrences: int | None = None
    jitter_ms: int = 0
    #: catch_up: a CatchUp, which decides about occurrences missed in the last window_ms. overlap: an Overlap.
    catch_up: Literal[0, 1, 2] = 0
    window_ms: int = 7 * 86_400_000
    overlap: Literal[0, 1, 2] = 0
    #: Message group of the schedule's messages.
    group: str | None = None

    def same_times(self, other: "Spec") -> bool:
        """Whether the two specifications give the same occurrences, with the same due times."""
        ours = (self.cron, self.every_ms, self.at, self.timezone, self.start_ms, self.end_ms, self.jitter_ms)
        return ours == (
            other.cron, other.every_ms, other.at, other.timezone, other.start_ms, other.end_ms, other.jitter_ms,
        )  # fmt: skip


class Stored(Packed, frozen=True):
    """A schedule as a user set it: a row of table `sched`, and a part of a SCHEDULE_PUT command."""

    #: Name of the token that made the schedule; empty where no tokens are required.
    creator: str
    spec: Spec
    template: bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := problem(self.spec):
            raise ValueError(f"invalid specification of a schedule: {wrong}")


def problem(spec: Spec) -> str:
    """Explain why apply refuses a specification, in the words of the API; "" for a valid one."""
    if [spec.cron is None, spec.every_ms is None, spec.at is None].count(False) != 1:
        return "give exactly one of cron, every and at"
    times: dict[str, Sequence[int | None]] = {"start": [spec.start_ms], "end": [spec.end_ms], "at": spec.at or []}
    numbers = {"every": spec.every_ms, "catch_up_window": spec.window_ms, "max_occurrences": spec.max_occurrences}
    for name, few in times.items():
        if any(at_ms is not None and not 0 <= at_ms < _MAX_NUMBER for at_ms in few):
            return f"{name}: a time from 1970 to 9999"
    for name, number in numbers.items():
        if number is not None and not 0 <= number < _MAX_NUMBER:
            return f"{name}: too large"
    if spec.every_ms is not None and spec.every_ms < MIN_EVERY_MS:
        return "every: at least 1s"
    if spec.at is not None and not (0 < len(spec.at) <= MAX_TIMES and sorted(set(spec.at)) == spec.at):
        return f"at: 1 to {MAX_TIMES} times, ascending"
    texts = {"topic": spec.topic, "cron": spec.cron or "", "timezone": spec.timezone, "group": spec.group or ""}
    for name, text in texts.items():
        if len(text.encode(errors="replace")) > MAX_NAME:
            return f"{name}: at most {MAX_NAME} bytes"
    if not spec.topic:
        return "topic: must not be empty"
    return "" if 0 <= spec.jitter_ms <= MAX_JITTER_MS else "jitter: at most 1h"


#: An occurrence: its planned time, which identifies it, and the due time of its message, with jitter. Unix ms.
_Instant = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_NUMBER)]
Time = tuple[_Instant, _Instant]


class Put(Packed, frozen=True):
    name: Name
    expected: U32
    paused: Annotated[int, msgspec.Meta(ge=KEEP_PAUSE, le=RUN)]
    stored: Stored

    def __post_init__(self) -> None:
        super().__post_init__()
        decode_template(self.stored.template)

    @property
    def publish(self) -> Publish:
        return decode_template(self.stored.template)


class Delete(Packed, frozen=True):
    name: Name


class Firing(Packed, frozen=True):
    """Firing of one schedule in a SCHEDULE_FIRE; refused unless version and expected match the schedule's State."""

    name: Name
    version: U32
    #: State.next of the schedule as the leader read it; the firing is refused if State.next has changed since then.
    expected: I64
    next: I64
    #: Newest occurrence that this firing publishes or skips; later occurrences remain for later firings.
    last: I64
    missed: _Instant
    flags: U8
    #: Occurrences to publish, with the due times of their messages.
    times: Annotated[Sequence[Time], msgspec.Meta(max_length=MAX_RUN)] = ()

    @property
    def occurrences(self) -> list[int]:
        return [occurrence for occurrence, _ in self.times]


class Fire(Packed, frozen=True):
    #: Version of the time zone data with which all schedules were recomputed; "" in an ordinary firing.
    tzdata: str
    firings: Annotated[Sequence[Firing], msgspec.Meta(max_length=MAX_FIRINGS)]


class Pause(Packed, frozen=True):
    """SCHEDULE_STATE: pause a schedule, or let it go on."""

    name: Name
    paused: bool


class Run(Packed, frozen=True):
    """SCHEDULE_RUN: a trigger or backfill. times: occurrences to publish, with 0 for the present time. key: hash and
    fingerprint of the request's Idempotency-Key."""

    name: Name
    version: U32
    key: tuple[Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)], U64] | None
    times: Annotated[Sequence[Time], msgspec.Meta(min_length=1, max_length=MAX_RUN)]


class Made(NamedTuple):
    """A message that a schedule made. manual: by trigger or backfill."""

    occurrence: I64
    id: U64
    manual: U8


class State(Packed, frozen=True):
    """State of a schedule: a row of table `schedst`. Times in Unix ms."""

    version: U32
    flags: U8
    #: Time at which the leader has to act on the schedule; table `schednext` is ordered by it. It is the next
    #: occurrence (0: the leader computes it first); for a finished schedule, its removal. Means nothing while the
    #: schedule is paused.
    next: I64
    #: Newest occurrence that was published or skipped; later occurrences remain for later firings.
    last: I64
    #: Time of the last change by a user.
    put_ms: I64
    made: U64 = 0
    missed: U64 = 0
    overlapped: U64 = 0
    refused: U64 = 0
    manual: U64 = 0
    #: Messages that the schedule published last, oldest first.
    ring: tuple[Made, ...] = ()

    @property
    def paused(self) -> bool:
        return bool(self.flags & PAUSED)

    @property
    def finished(self) -> bool:
        return bool(self.flags & FINISHED)


#: Bits of State.flags. RESTORED: paused by a restore, and not by a user.
PAUSED, FINISHED, RESTORED = 1, 2, 4


def template_meta(meta: bytes) -> bytes:
    """Add a last field to an encoded meta map: `oc`, whose value `with_occurrence` writes later."""
    head = meta[0] if meta else 0x80
    assert 0x80 <= head < 0x80 | _FIXMAP
    return bytes([head + 1]) + meta[1:] + _OC + bytes(_OCCURRENCE.size)


def with_occurrence(payload: bytearray, meta_size: int, occurrence: int) -> None:
    """Write an occurrence into the field `oc` of a template's payload, in place."""
    _OCCURRENCE.pack_into(payload, meta_size - _OCCURRENCE.size, occurrence)


def encode_put(name: str, expected: int, paused: int, stored: Stored) -> bytes:
    return frame(Command.SCHEDULE_PUT, Put(name, expected, paused, stored).pack())


def encode_delete(name: str) -> bytes:
    return frame(Command.SCHEDULE_DELETE, Delete(name).pack())


def encode_state(name: str, paused: bool) -> bytes:
    return frame(Command.SCHEDULE_STATE, Pause(name, paused).pack())


def encode_fire(firings: Sequence[Firing], tzdata: str = "") -> bytes:
    return frame(Command.SCHEDULE_FIRE, Fire(tzdata, firings).pack())


def hash_run_key(key: bytes) -> bytes:
    """Hash of the Idempotency-Key of a trigger or backfill."""
    return blake2b(key, digest_size=16, key=b"schedule").digest()


def encode_run(
    name: str, version: int, times: Sequence[Time], key: bytes | None = None, span: tuple[int, int] | None = None
) -> bytes:
    """Encode a SCHEDULE_RUN. key: the request's Idempotency-Key. span: range of times that a backfill asks for. The
    key's fingerprint has the range, as a repetition may find other occurrences in it."""
    hashed = None
    if key is not None:
        asked = repr(list(times) if span is None else span)
        print_of = blake2b(f"{name}\0{asked}".encode(), digest_size=8).digest()
        hashed = hash_run_key(key), int.from_bytes(print_of, "little")
    return frame(Command.SCHEDULE_RUN, Run(name, version, hashed, times).pack())


def same_message(a: bytes, b: bytes) -> bool:
    """Whether two templates contain the same message, even if different nodes encoded them."""
    one, other = decode_template(a), decode_template(b)
    return bool(one.rows == other.rows) and one.blob == other.blob and one.topics == other.topics


def decode_template(template: bytes) -> Publish:
    """Decode a template, which is a PUBLISH of one message. Raises Malformed unless its meta ends with the field
    `oc`."""
    publish = decode_body(template)
    row, blob = publish.rows[0], publish.blob
    end = 48 + int(row["meta_size"])
    tail = end - _OCCURRENCE.size - len(_OC)
    keyed = len(publish.keys) or len(publish.client_keys) or len(publish.groups) or publish.by
    if len(publish.rows) != 1 or len(publish.topics) != 1 or keyed:
        raise Malformed("a template must be one message without keys, group and token")
    if tail < 48 or bytes(blob[tail : tail + len(_OC)]) != _OC:
        raise Malformed("the meta of a template must end with the field `oc` (occurrence)")
    return publish


DECODERS: dict[int, Callable[[WireReader], Any]] = {
    Command.SCHEDULE_PUT: Put.read,
    Command.SCHEDULE_DELETE: Delete.read,
    Command.SCHEDULE_FIRE: Fire.read,
    Command.SCHEDULE_STATE: Pause.read,
    Command.SCHEDULE_RUN: Run.read,
}
