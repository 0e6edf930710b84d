"""What the client gives back. Decoded straight from the wire; unknown members are ignored, so newer servers may add."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Struct, field

from hadelay.errors import HadelayError

T = TypeVar("T")

#: "15m", "2h30m", seconds, or a timedelta.
Delay = str | float | timedelta
#: An aware datetime, RFC 3339 text, or Unix milliseconds.
When = datetime | str | int
#: bytes go as they are, str as text/plain, anything else as JSON.
Body = Any


class Put(Struct, kw_only=True):
    """One message of `put_many`."""

    topic: str
    body: Body = b""
    delay: Delay | None = None
    at: When | None = None
    content_type: str | None = None
    meta: Mapping[str, str] | None = None
    idempotency_key: str | None = None


class Receipt(Struct, frozen=True):
    """The message is on disk at a majority."""

    id: str
    #: Resolved against cluster time.
    deliver_at: datetime
    topic: str = ""
    #: The same was published before, and this is the first answer again.
    duplicate: bool = False


class Message(Struct, kw_only=True):
    """A leased message. It is handed out again unless it is acked, or its lease extended, before `lease_until`."""

    id: str
    lease: str
    topic: str
    body: bytes
    content_type: str = "application/octet-stream"
    key: str | None = None
    tags: list[str] = []
    meta: dict[str, str] = {}
    deliver_at: datetime
    late_ms: int
    #: 1 the first time.
    attempt: int
    #: It may have been handed out before.
    redelivered: bool
    lease_until: datetime
    lease_left_ms: int

    def text(self) -> str:
        return self.body.decode()

    @overload
    def json(self) -> Any: ...
    @overload
    def json(self, kind: type[T]) -> T: ...
    def json(self, kind: Any = Any) -> Any:
        """The body as JSON, validated as `kind` (any type msgspec knows: a dataclass, a Struct, list[int] …)."""
        return msgspec.json.decode(self.body, type=kind)


class HistoryEvent(Struct, frozen=True):
    event: str
    at: datetime
    attempt: int
    consumer: str | None = None
    node: str | None = None


class MessageInfo(Struct, frozen=True, kw_only=True):
    """What is known of a message; `state` is scheduled, ready, leased, acked, cancelled, expired or dead."""

    id: str
    topic: str
    state: str
    deliver_at: datetime
    published_at: datetime
    attempt: int
    content_type: str
    size: int
    key: str | None = None
    tags: list[str] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    history: list[HistoryEvent] = field(default_factory=list)
    #: Only when it was asked for.
    body: bytes | None = field(default=None, name="body_base64")


class Lateness(Struct, frozen=True):
    """How late messages were handed out, over the last five minutes of this leader."""

    count: int
    p50_ms: float
    p99_ms: float


class TopicInfo(Struct, frozen=True, kw_only=True):
    topic: str
    scheduled: int
    ready: int
    leased: int
    dead: int
    lease: str | None = None
    oldest_ready_age_ms: int | None = None
    #: Of the records of what is pending.
    bytes: int = 0
    #: None: nothing was handed out lately.
    lateness: Lateness | None = None


class Bucket(Struct, frozen=True, rename={"start": "from"}):
    start: datetime
    count: int


class Cursor(Struct, frozen=True):
    """The replicated dispatch cursor: hour tick, second tick, localIndex."""

    hour: str
    second: int
    local_index: int
    sync: str


class Member(Struct, frozen=True, kw_only=True):
    name: str
    http: str
    raft: str
    role: str
    applied_index: str
    lag: int
    version: str
    clock_skew_ms: float | None = None


class ClusterInfo(Struct, frozen=True, kw_only=True):
    cluster_id: str
    leader: str | None
    term: int
    applied_index: str
    time: datetime
    dispatch: Cursor
    members: list[Member]


class HourFile(Struct, frozen=True):
    entries: int
    bytes: str
    crc32c: str


class HourInfo(Struct, frozen=True, kw_only=True):
    hour: str
    sealed: bool
    mapped: bool
    log: HourFile
    idx: HourFile
    dsp: HourFile


class HoursInfo(Struct, frozen=True):
    """One node's files, all as of one applied index."""

    applied_index: str
    hours: list[HourInfo]


class Names(Struct, frozen=True):
    topics: dict[str, int]
    consumers: dict[str, int]
    nodes: dict[str, int]


class Check(Struct, frozen=True):
    name: str
    ok: bool
    detail: str = ""


class Health(Struct, frozen=True):
    status: str
    checks: list[Check] = field(default_factory=list)


#: Per item of put_many: a receipt, or why it was refused.
PutResult = Receipt | HadelayError
