"""Schedules as the log and the tables hold them: specification, state, and the commands 96–100.

    SCHEDULE_PUT     name  {expected u4, paused u1}  creator  {size u4} specification  template
    SCHEDULE_DELETE  name
    SCHEDULE_FIRE    tzdata  {n u2}  n × firing                                                    little-endian
    SCHEDULE_STATE   name  {paused u1}
    SCHEDULE_RUN     name  {version u4, keyed u1, count u2}  [hash 16 bytes, fingerprint u8]  count × TIME
    firing           name  {version u4, expected i8, next i8, last i8, missed u8, flags u1, count u2}  count × TIME

docs/spec/commands.md says the same with examples. A specification is a msgpack map; a template is a PUBLISH of one row
whose meta ends with the occurrence (`Meta.oc`) as eight bytes, which apply fills in.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from hadelay.codec.commandtypes import Command
from hadelay.codec.formats import Rows
from hadelay.codec.publishcommand import Publish, decode_publish
from hadelay.codec.wire import MAX_NAME, Malformed, WireReader, frame, pack_name

#: Limits: times in a schedule's list `at`; occurrences in one SCHEDULE_RUN or one firing; schedules in one
#: SCHEDULE_FIRE; bytes of the body of a template (the message that a schedule publishes).
MAX_TIMES = 1_000
MAX_RUN = 1_000
MAX_FIRINGS = 2_000
MAX_TEMPLATE_BYTES = 64 << 10
#: Expected version in a SCHEDULE_PUT or SCHEDULE_RUN that means: any version.
ANY_VERSION = 0xFFFFFFFF
#: Smallest interval, and largest random part of a due time, in ms.
MIN_EVERY_MS = 1_000
MAX_JITTER_MS = 3_600_000
#: Limit of all numbers in a schedule's specification (Spec): the year 10000 in Unix ms.
_MAX_NUMBER = 253_402_300_800_000
#: Bits of Firing.flags. LAST: no occurrence follows, and Firing.next is the time at which to remove the schedule.
#: REMOVE: remove the finished schedule.
LAST, REMOVE = 1, 2
#: Time for which a finished schedule is kept, in ms.
KEPT_MS = 7 * 86_400_000
#: Values of `paused` in a SCHEDULE_PUT.
KEEP_PAUSE, PAUSE, RUN = 0, 1, 2

#: Layout of an occurrence: its planned time, which identifies it, and the due time of its message, with jitter.
TIME = np.dtype([("occurrence", "<i8"), ("deliver_at_ms", "<i8")])

_PUT, _COUNT16, _FLAG = struct.Struct("<IB"), struct.Struct("<H"), struct.Struct("<B")
_SIZE = struct.Struct("<I")
_FIRING = struct.Struct("<IqqqQBH")
_RUN = struct.Struct("<IBH")
_KEY = struct.Struct("<16sQ")
_STATE = struct.Struct("<IBqqqQQQQQ")
_MADE = struct.Struct("<qQB")
#: Last field of a template's meta, without its 8 bytes of value: msgpack key `oc`, type byte of a u64.
_OC = b"\xa2oc\xcf"
_OCCURRENCE = struct.Struct(">Q")
#: Largest number of keys of a msgpack map whose header is one byte.
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
    #: Publish one message more, which waits behind the pending message in a message group of the schedule's own.
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
    #: catch_up: a CatchUp, for occurrences missed in the last window_ms. overlap: an Overlap.
    catch_up: Literal[0, 1, 2] = 0
    window_ms: int = 7 * 86_400_000
    overlap: Literal[0, 1, 2] = 0
    #: Message group of the messages.
    group: str | None = None

    def same_times(self, other: "Spec") -> bool:
        """Whether the two specifications give the same occurrences, with the same due times."""
        ours = (self.cron, self.every_ms, self.at, self.timezone, self.start_ms, self.end_ms, self.jitter_ms)
        return ours == (
            other.cron, other.every_ms, other.at, other.timezone, other.start_ms, other.end_ms, other.jitter_ms,
        )  # fmt: skip


_encode_spec = msgspec.msgpack.Encoder().encode
_decode_spec = msgspec.msgpack.Decoder(Spec).decode


class Stored(NamedTuple):
    """A schedule as a user set it: a row of table `sched`, and the last part of a SCHEDULE_PUT command."""

    #: Name of the token that made the schedule; empty where no tokens are required.
    creator: str
    spec: Spec
    template: bytes

    def pack(self) -> bytes:
        spec = _encode_spec(self.spec)
        return pack_name(self.creator) + _SIZE.pack(len(spec)) + spec + self.template

    @classmethod
    def unpack(cls, row: bytes) -> "Stored":
        return cls.read(WireReader(memoryview(row)))

    @classmethod
    def read(cls, reader: WireReader) -> "Stored":
        """Read a stored schedule. Raises Malformed, also for an invalid specification."""
        creator = reader.name()
        (size,) = reader.unpack(_SIZE)
        try:
            spec = _decode_spec(reader.take(size))
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise Malformed(f"not the specification of a schedule: {error}") from error
        if wrong := problem(spec):
            raise Malformed(f"invalid specification of a schedule: {wrong}")
        return cls(creator, spec, bytes(reader.take(len(reader.view) - reader.at)))


def problem(spec: Spec) -> str:
    """Why apply refuses a specification, in the words of the API; "" for a valid one."""
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


class Put(NamedTuple):
    name: str
    expected: int
    paused: int
    stored: Stored
    publish: Publish


class Firing(NamedTuple):
    """Firing of one schedule in a SCHEDULE_FIRE; refused unless version and expected match the schedule's State."""

    name: str
    version: int
    #: State.next of the schedule when the leader computed the firing.
    expected: int
    next: int
    #: Newest occurrence that this firing publishes or skips; later occurrences remain for later firings.
    last: int
    missed: int
    flags: int
    #: The occurrences to publish, in the layout TIME.
    times: Rows


class Fire(NamedTuple):
    #: Version of the time zone data with which all schedules were recomputed; "" in an ordinary firing.
    tzdata: str
    firings: list[Firing]


class Run(NamedTuple):
    """SCHEDULE_RUN: a trigger or backfill. Times of 0 mean now. key: Idempotency-Key's hash and fingerprint."""

    name: str
    version: int
    key: tuple[bytes, int] | None
    times: Rows


class Made(NamedTuple):
    """A message that a schedule made. manual: by trigger or backfill."""

    occurrence: int
    id: int
    manual: int


class State(NamedTuple):
    """State of a schedule: a row of table `schedst`. Times in Unix ms."""

    version: int
    flags: int
    #: When the leader has to act on the schedule, its place in table `schednext`: time of the next occurrence; 0:
    #: compute that time; if the schedule is finished, time of its removal. Means nothing while it is paused.
    next: int
    #: Newest occurrence that was published or skipped; later occurrences remain for later firings.
    last: int
    #: Time of the last change by a user.
    put_ms: int
    made: int
    missed: int
    overlapped: int
    refused: int
    manual: int
    #: Messages that the schedule published last, oldest first.
    ring: tuple[Made, ...] = ()

    def pack(self) -> bytes:
        return _STATE.pack(*self[:-1]) + b"".join([_MADE.pack(*made) for made in self.ring])

    @classmethod
    def unpack(cls, row: bytes) -> "State":
        ring = tuple([Made(*made) for made in _MADE.iter_unpack(row[_STATE.size :])])
        return cls._make((*_STATE.unpack_from(row), ring))

    @property
    def paused(self) -> bool:
        return bool(self.flags & PAUSED)

    @property
    def finished(self) -> bool:
        return bool(self.flags & FINISHED)


#: Bits of State.flags. HELD: paused by a restore, and not by a user.
PAUSED, FINISHED, HELD = 1, 2, 4


def times(pairs: Iterable[tuple[int, int]]) -> Rows:
    return np.array(list(pairs), TIME)


def template_meta(meta: bytes) -> bytes:
    """Add a last field to an encoded meta map: `oc`, whose value `with_occurrence` writes later."""
    head = meta[0] if meta else 0x80
    assert 0x80 <= head < 0x80 | _FIXMAP
    return bytes([head + 1]) + meta[1:] + _OC + bytes(_OCCURRENCE.size)


def with_occurrence(payload: bytearray, meta_size: int, occurrence: int) -> None:
    """Write an occurrence into the field `oc` of a template's payload, in place."""
    _OCCURRENCE.pack_into(payload, meta_size - _OCCURRENCE.size, occurrence)


def encode_put(name: str, expected: int, paused: int, stored: Stored) -> bytes:
    return frame(Command.SCHEDULE_PUT, pack_name(name), _PUT.pack(expected, paused), stored.pack())


def encode_delete(name: str) -> bytes:
    return frame(Command.SCHEDULE_DELETE, pack_name(name))


def encode_state(name: str, paused: bool) -> bytes:
    return frame(Command.SCHEDULE_STATE, pack_name(name), _FLAG.pack(paused))


def encode_fire(firings: Sequence[Firing], tzdata: str = "") -> bytes:
    assert len(firings) <= MAX_FIRINGS
    packed = [
        pack_name(f.name)
        + _FIRING.pack(f.version, f.expected, f.next, f.last, f.missed, f.flags, len(f.times))
        + f.times.tobytes()
        for f in firings
    ]
    return frame(Command.SCHEDULE_FIRE, pack_name(tzdata), _COUNT16.pack(len(packed)), *packed)


def encode_run(name: str, version: int, rows: Rows, key: bytes | None = None) -> bytes:
    """Encode a SCHEDULE_RUN. key: the request's Idempotency-Key."""
    packed = b""
    if key is not None:
        digest = blake2b(key, digest_size=16, key=b"schedule").digest()
        print_of = blake2b(name.encode() + b"\0" + rows.tobytes(), digest_size=8).digest()
        packed = _KEY.pack(digest, int.from_bytes(print_of, "little"))
    return frame(
        Command.SCHEDULE_RUN, pack_name(name), _RUN.pack(version, key is not None, len(rows)), packed, rows.tobytes()
    )


def _decode_put(reader: WireReader) -> Put:
    name = reader.named()
    expected, paused = reader.unpack(_PUT)
    stored = Stored.read(reader)
    if paused > RUN:
        raise Malformed("`paused` of a SCHEDULE_PUT must be 0, 1 or 2")
    return Put(name, expected, paused, stored, decode_template(stored.template))


def same_message(a: bytes, b: bytes) -> bool:
    """Whether two templates contain the same message, even if different nodes encoded them."""
    one, other = decode_template(a), decode_template(b)
    return bool(one.rows == other.rows) and one.blob == other.blob and one.topics == other.topics


def decode_template(template: bytes) -> Publish:
    """Decode a template, which is a PUBLISH of one message. Raises Malformed unless its meta ends with the field
    `oc`."""
    publish = decode_publish(memoryview(template))
    row, blob = publish.rows[0], publish.blob
    end = 48 + int(row["meta_size"])
    tail = end - _OCCURRENCE.size - len(_OC)
    if len(publish.rows) != 1 or len(publish.topics) != 1 or len(publish.keys) or len(publish.client_keys):
        raise Malformed("a template must be one message without keys")
    if tail < 48 or bytes(blob[tail : tail + len(_OC)]) != _OC:
        raise Malformed("the meta of a template must end with the field `oc` (occurrence)")
    return publish


def _decode_fire(reader: WireReader) -> Fire:
    tzdata = reader.name()
    (count,) = reader.unpack(_COUNT16)
    if count > MAX_FIRINGS:
        raise Malformed(f"a SCHEDULE_FIRE must have at most {MAX_FIRINGS} firings")
    return Fire(tzdata, [_decode_firing(reader) for _ in range(count)])


def _decode_firing(reader: WireReader) -> Firing:
    name = reader.named()
    version, expected, following, last, missed, flags, count = reader.unpack(_FIRING)
    if missed >= _MAX_NUMBER:
        raise Malformed("the number of missed occurrences is out of range")
    return Firing(name, version, expected, following, last, missed, flags, _times(reader, count))


def _decode_run(reader: WireReader) -> Run:
    name = reader.named()
    version, keyed, count = reader.unpack(_RUN)
    key = None
    if keyed:
        digest, fingerprint = reader.unpack(_KEY)
        key = digest, fingerprint
    if not count:
        raise Malformed("a SCHEDULE_RUN must have at least one occurrence")
    return Run(name, version, key, _times(reader, count))


def _times(reader: WireReader, count: int) -> Rows:
    if count > MAX_RUN:
        raise Malformed(f"a firing or run must have at most {MAX_RUN} occurrences")
    rows = reader.array(TIME, count)
    numbers = rows.view("<i8")
    if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < _MAX_NUMBER:
        raise Malformed("the time of an occurrence is out of range")
    return rows


DECODERS: dict[int, Callable[[WireReader], Any]] = {
    Command.SCHEDULE_PUT: _decode_put,
    Command.SCHEDULE_DELETE: WireReader.named,
    Command.SCHEDULE_FIRE: _decode_fire,
    Command.SCHEDULE_STATE: lambda reader: (reader.named(), bool(reader.unpack(_FLAG)[0])),
    Command.SCHEDULE_RUN: _decode_run,
}
