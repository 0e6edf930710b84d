"""Kinds, columns and options of the data source. Imports neither pyarrow nor pyspark.

docs/reference/pipeline.md is generated from this module.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

from hadelay.api.publishoptions import OPTIONS
from hadelay.errors import BadRequest
from hadelay.model import DEAD_HOURS, Event, hour_from_name, hour_name

T = TypeVar("T")


class Column(NamedTuple):
    #: Name of the column's type in Spark SQL.
    type: str
    doc: str
    #: Whether the column's values come from the .log file.
    log: bool = False
    #: Whether values may be null; Spark reads other columns faster.
    null: bool = True


_ENTRY = {
    "hour": Column("INT", "the UTC hour of the file, as yyyymmddHH", null=False),
    "dead": Column("BOOLEAN", "an hour of dead letters: `hour` is the end of their retention", null=False),
    "entry": Column("BIGINT", "globalIndex within the hour; `hour`, `dead`, `entry` identify an entry", null=False),
}
_SUBSCRIPTION = Column("STRING", "subscription of `topic` that the message is a copy for; null: the topic's own queue")
MESSAGES = {
    "id": Column("STRING", "id of the message, the same in all its entries", null=False),
    "first_id": Column("BIGINT", "id of the message as a number, for joins", null=False),
    "published_id": Column("STRING", "of a copy for a subscription, the id of the published message", log=True),
    **_ENTRY,
    "topic": Column("STRING", ""),
    "subscription": _SUBSCRIPTION,
    "generation": Column("INT", "number of times that the topic was deleted before", null=False),
    "deliver_at": Column("TIMESTAMP", "due time of this entry; in a dead hour, the time of death", null=False),
    "attempt": Column("INT", "number of hand-outs before this entry", null=False),
    "flags": Column("INT", "on-disk-format.md, INDEX.flags", null=False),
    "tag_mask": Column("BIGINT", "hashes of the tags, combined by OR", null=False),
    "size": Column("INT", "size of the record, in bytes", null=False),
    "state": Column(
        "STRING",
        "scheduled, ready, leased, acked, cancelled, expired, dead; moved: a later entry exists. A blocked "
        "message is scheduled or ready here: hour files do not tell which messages wait behind their group",
        null=False,
    ),
    "published_at": Column("TIMESTAMP", "cluster time of the publish's commit", log=True, null=False),
    "content_type": Column("STRING", "", log=True),
    "key": Column("STRING", "client key of the message", log=True),
    "tags": Column("ARRAY<STRING>", "", log=True),
    "meta": Column("MAP<STRING,STRING>", "", log=True),
    "group": Column("STRING", "message group", log=True),
    "batch": Column("STRING", "batch that the message joined", log=True),
    "schedule": Column("STRING", "schedule that made the message", log=True),
    "occurrence": Column("TIMESTAMP", "planned time of the schedule's occurrence", log=True),
    "forward": Column("MAP<STRING,STRING>", "headers of the message's own webhook calls; may hold secrets", log=True),
    "on_success": Column("STRING", "topic of success callbacks that the message names itself", log=True),
    "on_failure": Column("STRING", "topic of failure callbacks that the message names itself", log=True),
    "body": Column("BINARY", "only with `columns` or `body`", log=True, null=False),
}
EVENTS = {
    **_ENTRY,
    "number": Column("BIGINT", "position of the event in its file", null=False),
    "event": Column("STRING", ", ".join(event.name.lower() for event in Event)),
    "at": Column("TIMESTAMP", "cluster time; a grant may be committed before the due time", null=False),
    "attempt": Column("INT", "", null=False),
    "consumer": Column("STRING", "consumer of the lease; null if unknown"),
    "node": Column("STRING", "node that handled the event"),
    "other_hour": Column("INT", "new hour of a moved message"),
    "other_dead": Column("BOOLEAN", ""),
    "other_entry": Column("BIGINT", ""),
    "reason": Column("STRING", "reason of a nack"),
    "handout_delay_ms": Column(
        "BIGINT", "acked, nacked: time from the grant to the answer to the consumer; null if unknown"
    ),
    "previous": Column("BIGINT", "number of the entry's previous event"),
    "id": Column("STRING", "id of the message; null if the entry is missing"),
    "first_id": Column("BIGINT", ""),
    "topic": Column("STRING", ""),
    "subscription": _SUBSCRIPTION,
    "deliver_at": Column("TIMESTAMP", "due time of the entry"),
}
#: Kind of rows → its columns. dispatches: hand-outs (event `leased`); settlements: all other events; events: both.
KINDS = {"messages": MESSAGES, "dispatches": EVENTS, "settlements": EVENTS, "events": EVENTS}


#: Columns that the writer accepts; allowed types are separated by bars.
PUBLISHED = {
    "topic": Column("STRING", "topic of the message; default: the option `topic`"),
    "body": Column("BINARY|STRING", "payload; null: empty. A STRING is text/plain unless `content_type` is set"),
    **{name: Column(row.kind.column, row.help) for name, row in OPTIONS.items() if name != "traceparent"},
    "idempotency_key": Column("STRING|BIGINT", "identifies the row; `keyColumn` may name another column"),
}
_WHOLE = ("INT", "SMALLINT", "TINYINT")


def option(default: Any, help: str, kind: Any = None) -> Any:
    """Make a dataclass field for an option with this help text. kind: type of the command-line option, if it differs
    from the field's type."""
    return field(default=default, metadata={"help": help, "kind": kind})


@dataclass(frozen=True)
class WriteOptions:
    """Options of the data source's writer, which publishes rows as messages."""

    endpoint: str = option("", "URLs of nodes, separated by commas.")
    token: str = option("", "Token of the requests.")
    topic: str = option("", "Topic of rows without a topic.")
    key_column: str = option(
        "idempotency_key", "Column that identifies a row: rows with the same value are one message."
    )
    key_prefix: str = option("", "Prefix of each value, to separate the keys of jobs: the cluster has one set of keys.")
    rejected: str = option(
        "",
        "Directory for rejected rows, as Parquet, with reasons. Empty: rejected rows fail the write at its end. "
        "Streams need a directory.",
    )
    summary: str = option("", "File on the driver's machine for the counts of published and rejected rows, as JSON.")
    timeout: int = option(300, "Limit of retries after temporary errors (no leader, a limit), in seconds.")

    def __post_init__(self) -> None:
        if not self.endpoint:
            raise BadRequest("option endpoint is missing: set URLs of nodes, separated by commas")


def check_published(columns: Mapping[str, str], options: WriteOptions) -> None:
    """Raise BadRequest unless the writer accepts these columns. columns: name → type in Spark SQL."""
    if options.key_column not in columns:
        raise BadRequest(
            f"no column {options.key_column}, which identifies a row so that a repeated task publishes no row twice; "
            f"the columns are {', '.join(columns)}. Set the option keyColumn to another one"
        )
    if not {"deliver_at", "delay"} & set(columns):
        raise BadRequest(f"no column deliver_at or delay for the due time; the columns are {', '.join(columns)}")
    if not options.topic and "topic" not in columns:
        raise BadRequest("the topic is missing: add a column topic, or set the option topic")
    for name, given in columns.items():
        if name not in PUBLISHED and name != options.key_column:
            raise BadRequest(f"column {name} is not a message field ({', '.join(PUBLISHED)}): leave it out")
        kind = given.upper().replace(" ", "")
        kind = "BIGINT" if kind in _WHOLE else "DOUBLE" if kind == "FLOAT" else kind
        takes = PUBLISHED[name if name in PUBLISHED else "idempotency_key"].type.split("|")
        if kind not in (*takes, "NULL", "VOID"):
            raise BadRequest(f"column {name} has the type {given}; allowed is {' or '.join(takes)}")


@dataclass(frozen=True)
class Options:
    """Options of the data source. Names are in camelCase; their case is ignored."""

    path: str = option(
        "",
        "Data directory of a node or group, or a copy of one: any directory with `hours/` and `names`. A path, or "
        "a URI that pyarrow.fs supports, such as s3://bucket/n1. Replaces `endpoint`; `root` is a synonym.",
    )
    endpoint: str = option(
        "", "URLs of nodes, separated by commas. Followers are read first; a failed read goes to the next."
    )
    token: str = option("", "Token for the nodes.")
    timeout: int = option(30, "Timeout of a request to `endpoint`, in seconds.")
    kind: str = option(
        "messages",
        "messages: index entries, with their state at that time. events: hand-outs (dispatches) and settlements.",
        Literal["messages", "events", "dispatches", "settlements"],
    )
    columns: str = option("", "Only these columns, separated by commas; Spark reads all of them. `tail` needs hour.")
    body: bool = option(False, "Add `body` to the columns.")
    hour_from: int = option(0, "First hour, as yyyymmddHH. The name of a dead hour is the end of its retention.")
    hour_to: int = option(0, "Last hour, as yyyymmddHH.")
    topics: str = option(
        "", "Only these topics with their subscriptions, separated by commas; orders~billing: only this subscription."
    )
    dead: bool = option(True, "Include hours of dead letters.")
    as_of: int = option(
        0,
        "Time for the states of pending messages, in Unix ms; 0: cluster time of the checkpoint, or of the nodes. "
        "A copy without a checkpoint needs it.",
    )
    listing: str = option(
        "", "Result of `hourfiles.Listing.encode`: read exactly these hours, for several equal reads."
    )
    split_rows: int = option(2_500_000, "Limit of rows per partition. Spark makes the partitions of an hour equal.")
    batch_rows: int = option(65_536, "Limit of rows per Arrow batch; large bodies make smaller batches.")
    verify: bool = option(
        True, "Check the CRC-32C of every row and record before use. false: faster, for files that were checked before."
    )
    on_torn: str = option(
        "fail",
        "Damaged files, or files shorter than their checkpoint says: fail with the position, or skip the damaged part.",
        Literal["fail", "skip"],
    )
    max_rows_per_trigger: int = option(
        0, "Approximate number of rows per micro-batch, oldest hours first; 0: no limit."
    )
    pushdown: bool = option(
        False,
        "Refused: Spark 4.3 reuses the filters of a query for the next query of the same DataFrame, which then "
        "counts wrong. hourFrom, hourTo, topics and dead apply to every query.",
    )

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.endpoint):
            raise BadRequest("set either the option path (or root) or endpoint, to locate the hours")
        if self.pushdown:
            raise BadRequest(
                "option pushdown: Spark reuses the filters of a query for the next one of the same DataFrame, which "
                "then counts wrong. Select rows by the options hourFrom, hourTo, topics and dead instead"
            )
        _among("kind", self.kind, KINDS)
        _among("onTorn", self.on_torn, ("fail", "skip"))
        for name in ("split_rows", "batch_rows"):
            if getattr(self, name) < 1:
                raise BadRequest(f"option {camel(name)} must be at least 1")
        if self.max_rows_per_trigger < 0:
            raise BadRequest("option maxRowsPerTrigger must be 0 or more")
        for hour in (self.hour_from, self.hour_to):
            if hour:
                hour_number(hour)
        self.projection()

    def projection(self) -> list[str]:
        """Names of the columns to read. BadRequest for an unknown column."""
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
    """Options from Spark or a command line, with names in any case. BadRequest for unknown names and invalid values."""
    return _parse(Options, given)


def parse_write_options(given: Mapping[str, Any]) -> WriteOptions:
    return _parse(WriteOptions, given)


def _parse(kind: type[T], given: Mapping[str, Any]) -> T:
    types = get_type_hints(kind)
    known = {camel(name).lower(): name for name in types} | ({"root": "path"} if "path" in types else {})
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = known.get(key.replace("_", "").lower())
        if name is None:
            raise BadRequest(f"there is no option {key}; the options are {', '.join(sorted(map(camel, types)))}")
        text = str(value).strip()
        if types[name] is bool:
            _among(camel(name), text.lower(), ("true", "false"))
            values[name] = text.lower() == "true"
            continue
        try:
            values[name] = types[name](text)
        except ValueError:
            raise BadRequest(f"option {camel(name)} must be a whole number, not {text!r}") from None
    return kind(**values)


def given(options: Options | WriteOptions) -> dict[str, str]:
    """Options that differ from their defaults, as text values for Spark."""
    values = {field: getattr(options, field.name) for field in fields(options)}
    return {camel(field.name): str(value) for field, value in values.items() if value != field.default}


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def _among(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise BadRequest(f"option {name}: {value!r} is unknown; choose from {', '.join(known)}")


def within(hour: int, first: int, last: int) -> bool:
    """Whether an hour's number is within [first, last], given as yyyymmddHH; 0: no bound."""
    return first <= hour_int(hour) <= (last or 1 << 62)


def hour_int(hour: int) -> int:
    """Convert an hour's number to yyyymmddHH; hours of dead letters give the same value as live hours."""
    return int(hour_name(hour % DEAD_HOURS))


def hour_number(shown: int, dead: bool = False) -> int:
    """Convert yyyymmddHH to the hour's number. Raises BadRequest for other values."""
    try:
        return hour_from_name(f"{shown:010}") + (DEAD_HOURS if dead else 0)
    except ValueError:
        raise BadRequest(f"{shown} is not an hour: write yyyymmddHH, in UTC") from None
