"""What the data source offers: kinds, columns, options. Imports neither pyarrow nor pyspark.

docs/reference/pipeline.md is made from this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from hadelay.errors import BadRequest
from hadelay.model import DEAD_HOURS, hour_from_name, hour_name

T = TypeVar("T")


class Column(NamedTuple):
    #: As Spark SQL writes it.
    type: str
    doc: str
    #: Which file it is made from besides the row's own: "log", "idx", "dsp" or none.
    needs: str = ""
    #: May a row have none? Spark reads quicker what always is.
    null: bool = True


_PLACE = {
    "hour": Column("INT", "the UTC hour of the file, as yyyymmddHH", null=False),
    "dead": Column("BOOLEAN", "the hour is one of dead letters: `hour` is then when their retention ends", null=False),
    "entry": Column("BIGINT", "globalIndex within the hour; `hour`, `dead`, `entry` name an entry", null=False),
}
MESSAGES = {
    "id": Column(
        "STRING", "the message's id, as the API writes it; all entries of a message have the same", null=False
    ),
    "first_id": Column("BIGINT", "the same as a number: cheap to join by", null=False),
    **_PLACE,
    "topic": Column("STRING", ""),
    "generation": Column("INT", "of the topic: it was deleted so many times before", null=False),
    "deliver_at": Column("TIMESTAMP", "when this entry is due; in a dead hour, when the message died", null=False),
    "attempt": Column("INT", "hand-outs before this entry was filed", null=False),
    "flags": Column("INT", "on-disk-format.md, INDEX.flags", null=False),
    "tag_mask": Column("BIGINT", "the tags' hashes, OR-ed", null=False),
    "size": Column("INT", "bytes of the whole record", null=False),
    "state": Column(
        "STRING",
        "scheduled, ready, leased, acked, cancelled, expired, dead; or moved: the message has a later entry",
        "dsp",
        null=False,
    ),
    "published_at": Column("TIMESTAMP", "cluster time of its commit", "log", null=False),
    "content_type": Column("STRING", "", "log"),
    "key": Column("STRING", "the client's key", "log"),
    "tags": Column("ARRAY<STRING>", "", "log"),
    "meta": Column("MAP<STRING,STRING>", "", "log"),
    "body": Column("BINARY", "only with `columns` or `body`", "log", null=False),
}
EVENTS = {
    **_PLACE,
    "number": Column("BIGINT", "place of the event in its file", null=False),
    "event": Column("STRING", "leased, acked, nacked, lease_expired, ttl_expired, cancelled, moved, dead, redriven"),
    "at": Column("TIMESTAMP", "cluster time; of a grant ahead of its time, when it was committed", null=False),
    "attempt": Column("INT", "", null=False),
    "consumer": Column("STRING", "who leased it; none if the log does not say"),
    "node": Column("STRING", "which node handled it"),
    "other_hour": Column("INT", "where a moved message went"),
    "other_dead": Column("BOOLEAN", ""),
    "other_entry": Column("BIGINT", ""),
    "reason": Column("STRING", "why it was nacked"),
    "handout_delay_ms": Column(
        "BIGINT",
        "of acked and nacked: from the grant (`at` of leased) until the answer to the consumer was written; none if "
        "that is not known",
    ),
    "previous": Column("BIGINT", "number of the same entry's event before this one"),
    "id": Column("STRING", "of the message; none if there is no such entry", "idx"),
    "first_id": Column("BIGINT", "", "idx"),
    "topic": Column("STRING", "", "idx"),
    "deliver_at": Column("TIMESTAMP", "of the entry", "idx"),
}
#: dispatches are hand-outs (`leased`), settlements everything else, events both.
KINDS = {"messages": MESSAGES, "dispatches": EVENTS, "settlements": EVENTS, "events": EVENTS}


#: What a row of the writer may have; the types it takes are separated by a bar.
PUBLISHED = {
    "topic": Column("STRING", "where it goes; the option `topic` says it for rows that do not"),
    "body": Column("BINARY|STRING", "null is empty; a STRING is text/plain unless `content_type` says otherwise"),
    "deliver_at": Column(
        "TIMESTAMP|BIGINT|STRING", "when it is due; BIGINT is Unix ms, STRING RFC 3339. Past: at once"
    ),
    "delay": Column("STRING|BIGINT|DOUBLE", "instead: due so long after its commit, `15m`, or seconds"),
    "idempotency_key": Column("STRING|BIGINT", "what makes the row one of a kind; `keyColumn` may name another column"),
    "key": Column("STRING", "the client's key"),
    "on_conflict": Column("STRING", "keep, replace or reject, when the key's message is pending"),
    "max_wait": Column("STRING|BIGINT|DOUBLE", "with replace"),
    "tags": Column("ARRAY<STRING>|STRING", "a STRING is separated by commas"),
    "ttl": Column("STRING|BIGINT|DOUBLE", "it expires so long after it was due"),
    "callback": Column("STRING", "a webhook URL of its own"),
    "content_type": Column("STRING", ""),
    "meta": Column("MAP<STRING,STRING>", ""),
}
_WHOLE = ("INT", "SMALLINT", "TINYINT")


@dataclass(frozen=True)
class WriteOptions:
    """Of the writer."""

    #: URLs of nodes, separated by commas.
    endpoint: str = ""
    #: The token to send.
    token: str = ""
    #: For rows without a topic of their own.
    topic: str = ""
    #: The column that identifies a row: the same value again is the same message, and is not published twice.
    key_column: str = "idempotency_key"
    #: Put before each of its values. Idempotency keys are the whole cluster's: two jobs should not have the same.
    key_prefix: str = ""
    #: Directory for rows that are rejected, as Parquet, with the reason. None: they fail the write, at its end. A
    #: stream needs one.
    rejected: str = ""
    #: File for what became of the rows, as JSON; written where the driver runs.
    summary: str = ""
    #: Seconds for which what may succeed later (no leader, a limit) is tried again.
    timeout: int = 300

    def __post_init__(self) -> None:
        if not self.endpoint:
            raise BadRequest("option endpoint: URLs of nodes, separated by commas, have to say where to publish")


def check_published(columns: Mapping[str, str], options: WriteOptions) -> None:
    """columns: name → type, as Spark SQL writes it. BadRequest for what could not be meant."""
    if options.key_column not in columns:
        raise BadRequest(
            f"no column {options.key_column}, which identifies a row so that a task that runs again publishes nothing "
            f"twice; there are {', '.join(columns)}. The option keyColumn names another"
        )
    if not {"deliver_at", "delay"} & set(columns):
        raise BadRequest(f"no column deliver_at or delay says when messages are due; there are {', '.join(columns)}")
    if not options.topic and "topic" not in columns:
        raise BadRequest("no column topic, and no option topic")
    for name, given in columns.items():
        if name not in PUBLISHED and name != options.key_column:
            raise BadRequest(f"column {name} is none of a message's: {', '.join(PUBLISHED)}. Leave it out")
        kind = given.upper().replace(" ", "")
        kind = "BIGINT" if kind in _WHOLE else "DOUBLE" if kind == "FLOAT" else kind
        takes = PUBLISHED[name if name in PUBLISHED else "idempotency_key"].type.split("|")
        if kind not in (*takes, "NULL", "VOID"):
            raise BadRequest(f"column {name} is {given}; it is taken as {' or '.join(takes)}")


@dataclass(frozen=True)
class Options:
    """Of the data source. Names are written in camelCase and compared without case."""

    #: A node's data directory, a group's, or any with `hours/` and `names` in it; `root` says the same. A path, or a
    #: URI that pyarrow.fs knows: s3://, gs://, abfs://, hdfs://, file://.
    path: str = ""
    #: Instead: URLs of nodes, separated by commas. Followers are read first; what fails is read from another.
    endpoint: str = ""
    #: For `endpoint`: the token to send.
    token: str = ""
    #: For `endpoint`: seconds one request may take.
    timeout: int = 30
    #: messages, dispatches, settlements, or events, which is the last two together.
    kind: str = "messages"
    #: Names of columns, separated by commas: only they are read. Spark itself asks for all of a source's columns.
    columns: str = ""
    #: Add `body` to the columns.
    body: bool = False
    #: First and last hour to read, as yyyymmddHH. Dead hours are named by the end of their retention.
    hour_from: int = 0
    hour_to: int = 0
    #: Topics to read, separated by commas.
    topics: str = ""
    #: Read hours of dead letters too.
    dead: bool = True
    #: Unix ms at which what waits is scheduled, ready or overdue; 0: of the last checkpoint, or the nodes' time.
    as_of: int = 0
    #: What `hourfiles.Listing.encode` gave: read exactly this, so that several reads see the same.
    listing: str = ""
    #: Rows of one partition at most; an hour has at least one. A read by Spark makes an hour's partitions equal.
    split_rows: int = 2_500_000
    #: Rows of one Arrow batch; fewer where bodies are large.
    batch_rows: int = 65_536
    #: Check every row's and record's CRC-32C before it is used.
    verify: bool = False
    #: Of a file shorter than its checkpoint says, of what is cut off, or does not verify: fail names it, skip leaves it
    #: out.
    on_torn: str = "fail"
    #: Of a stream: about so many rows at once, oldest hours first; 0: all that there are.
    max_rows_per_trigger: int = 0
    #: Refused: Spark 4.3 keeps the filters of one query for the next one of the same DataFrame, whose counts are wrong
    #: then. hourFrom, hourTo, topics and dead hold for every query.
    pushdown: bool = False

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.endpoint):
            raise BadRequest("one of the options path (or root) and endpoint has to say where the hours are")
        if self.pushdown:
            raise BadRequest(
                "option pushdown: Spark keeps the filters of one query for the next one of the same DataFrame, which "
                "then counts wrong. Name rows by the options hourFrom, hourTo, topics and dead instead"
            )
        _among("kind", self.kind, KINDS)
        _among("onTorn", self.on_torn, ("fail", "skip"))
        for name in ("split_rows", "batch_rows"):
            if getattr(self, name) < 1:
                raise BadRequest(f"option {camel(name)} has to be at least 1")
        if self.max_rows_per_trigger < 0:
            raise BadRequest("option maxRowsPerTrigger has to be 0 or more")
        for hour in (self.hour_from, self.hour_to):
            if hour:
                hour_number(hour)
        self.projection()

    def projection(self) -> list[str]:
        """Names of the columns to read. BadRequest for one that is not there."""
        known = KINDS[self.kind]
        if not self.columns:
            return [name for name in known if name != "body" or self.body]
        names = [name.strip() for name in self.columns.split(",") if name.strip()]
        if self.body and "body" in known and "body" not in names:
            names.append("body")
        for name in names:
            _among("columns", name, known)
        return names

    def takes(self, hour: int) -> bool:
        return (self.dead or hour < DEAD_HOURS) and within(hour, self.hour_from, self.hour_to)


def parse_options(given: Mapping[str, Any]) -> Options:
    """Options from what Spark or a command line has, in any case. BadRequest in words."""
    return _options(Options, given, {"root": "path"})


def parse_write_options(given: Mapping[str, Any]) -> WriteOptions:
    return _options(WriteOptions, given, {})


def _options(kind: type[T], given: Mapping[str, Any], synonyms: dict[str, str]) -> T:
    types = get_type_hints(kind)
    known = {camel(name).lower(): name for name in types} | synonyms
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = known.get(key.replace("_", "").lower())
        if name is None:
            raise BadRequest(f"there is no option {key}; there are {', '.join(sorted(map(camel, types)))}")
        values[name] = _parsed(camel(name), value, types[name])
    return kind(**values)


def given(options: Options | WriteOptions) -> dict[str, str]:
    """What differs from the defaults, as Spark takes it."""
    found = {field.name: getattr(options, field.name) for field in fields(options)}
    defaults = {field.name: field.default for field in fields(options)}
    return {
        camel(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in found.items()
        if value != defaults[name]
    }


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def _parsed(name: str, value: Any, kind: type) -> Any:
    text = str(value).strip()
    if kind is bool:
        _among(name, text.lower(), ("true", "false"))
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise BadRequest(f"option {name} is a whole number, not {text!r}") from None


def _among(name: str, value: str, known: Any) -> None:
    if value not in known:
        names = ", ".join(known if not get_args(known) else get_args(known))
        raise BadRequest(f"option {name}: {value!r} is none of {names}")


def within(hour: int, first: int, last: int) -> bool:
    """first, last: as yyyymmddHH; 0: no bound."""
    return first <= hour_int(hour) <= (last or 1 << 62)


def hour_int(hour: int) -> int:
    """yyyymmddHH of an hour's number; of a dead one, that of the hour it is named after."""
    return int(hour_name(hour % DEAD_HOURS))


def hour_number(shown: int, dead: bool = False) -> int:
    """The hour's number. BadRequest unless it is a yyyymmddHH."""
    try:
        return hour_from_name(f"{shown:010}") + (DEAD_HOURS if dead else 0)
    except ValueError:
        raise BadRequest(f"{shown} is no hour: it is written yyyymmddHH, in UTC") from None
