"""The options of a publish, one row each. An option is declared nowhere else.

These are made from the rows: the query and the headers of a single publish, the items of a batch (both in
hadelay/api/publishrequest.py), the arguments of the client (hadelay/client/putoptions.py), the headers that it sends,
the options of `hadelay msg put`, the JSON Schema, and the columns that the Spark writer takes. `make docs` writes the
two modules. rules/publishing.py judges the values, and puts those with a `meta` into the message's record.
"""

from typing import Literal, NamedTuple

from hadelay.model import MAX_GROUP, MAX_UNIQUE_MS
from hadelay.version import FIRST_LEVEL


class Kind(NamedTuple):
    """Properties that all options of one kind share. The types are Python source text; `column` is a type of Spark
    SQL."""

    name: Literal["duration", "instant", "text", "name", "choice", "tags", "url", "topic", "headers", "meta", "type"]
    query: str
    item: str
    #: Type of the client's argument.
    put: str
    column: str
    #: Range of a duration, in ms, or length of a text, in bytes. `most` 0: the node's max_delay.
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()


def _duration(least_ms: int = 1, most_ms: int = 0) -> Kind:
    return Kind("duration", "Duration", "str | int | float", "Delay", "STRING|BIGINT|DOUBLE", least_ms, most_ms)


def _text(name: Literal["text", "name", "url", "topic", "type"], most: int = 0) -> Kind:
    return Kind(name, "str", "str", "str", "STRING", 1, most)


def _fields(name: Literal["headers", "meta"]) -> Kind:
    return Kind(name, "", "dict[str, str]", "Mapping[str, str]", "MAP<STRING,STRING>")


class Option(NamedTuple):
    kind: Kind
    #: Description of the option for users.
    help: str
    #: Attribute of the message's meta (codec/meta.py) that keeps the option; "": the option is not in the record.
    meta: str = ""
    #: Header of a single publish that sets the option; "": Hadelay- and the option's name. A name that ends in * stands
    #: for any number of headers.
    header: str = ""
    #: Name of the client's argument, and of the command's option, if different from the option's name. None: the
    #: command has no such option.
    put: str = ""
    command: str | None = ""
    #: Whether the query of a single publish may have the option, too.
    query: bool = True
    #: Field of Draft that says whether a message has this option; only for an option that needs a feature level of its
    #: own.
    draft: str = ""
    #: Feature level that the option needs: until the cluster has switched to this level, nodes refuse publishes with
    #: the option.
    level: int = FIRST_LEVEL
    #: Whether many messages have the option: http/publish.py has a fast path for batch items with usual options only.
    usual: bool = False

    @property
    def repeated(self) -> bool:
        """Whether the command's option may be repeated."""
        return self.kind.name in ("tags", "headers", "meta")


OPTIONS: dict[str, Option] = {
    "delay": Option(_duration(0), "Time until the message is due: 250ms, 15m, 2h30m, 7d.", usual=True),
    "deliver_at": Option(
        Kind("instant", "Instant", "str | int | float", "When", "TIMESTAMP|BIGINT|STRING"),
        "Due time instead of a delay: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.", put="at",
        usual=True,
    ),
    "key": Option(
        _text("name", 256),
        "Your name for the message within the topic, to find, cancel, reschedule or replace it.", "key",
        usual=True,
    ),
    "group": Option(
        _text("name", MAX_GROUP),
        "Message group: the topic hands out at most group_concurrency messages of a group at once.", "group",
        usual=True,
    ),
    "batch": Option(
        _text("name", 128),
        "Key of an open batch that the message joins: the batch's callback waits for this message.", "batch",
        draft="batched",
    ),
    "on_conflict": Option(
        Kind(
            "choice", 'Literal["keep", "replace", "reject"]', "str", "OnConflict", "STRING",
            choices=("keep", "replace", "reject"),
        ),
        "If a message with this key is pending (scheduled, ready or leased): keep it (the default), and answer with "
        "that message and `duplicate`; replace it, unless it is leased, and answer with the new one and `replaced`; or "
        "reject the new one, and answer 409 with the id of the pending one.",
    ),
    "max_wait": Option(
        _duration(),
        "With on_conflict replace: limit of the total delay since the first of the replaced messages.",
    ),
    "unique_for": Option(
        _duration(1, MAX_UNIQUE_MS),
        "With a key: time, at most 7d, in which later publishes with this key and unique_for are dropped, even if this "
        "message is settled by then. Dropped publishes do not extend it.",
    ),
    "tags": Option(
        Kind("tags", "str", "list[str]", "Sequence[str]", "ARRAY<STRING>|STRING"),
        "Tags that consumers can filter by, at most 16; commas separate them in a text.", "tags", command="tag",
    ),
    "ttl": Option(
        _duration(), "Time after which the message expires, counted from its due time.", "ttl", header="Hadelay-TTL"
    ),
    "callback": Option(_text("url"), "Webhook URL for this message, if the topic allows one.", "cb"),
    "on_success": Option(
        _text("topic"), "Topic of the callback about this message's ack, if the topic allows one.", "os"
    ),
    "on_failure": Option(
        _text("topic"), "Topic of the callback about this message's death, if the topic allows one.", "of"
    ),
    "forward": Option(
        _fields("headers"), "Headers of the message's webhook calls, at most 2 KiB: NAME=VALUE.", "fw",
        header="Hadelay-Forward-*", query=False,
    ),
    "meta": Option(
        _fields("meta"), "Your own fields, stored with the message: NAME=VALUE. Names in headers are in lower case.",
        "meta", header="Hadelay-Meta-*", query=False,
    ),
    "content_type": Option(
        _text("type"), "Content type, stored and given to the consumer. Default: by the type of the payload.", "ct",
        header="Content-Type", query=False,
    ),
    "traceparent": Option(
        _text("text"),
        "W3C traceparent of the span that publishes the message, given to the consumer. Default: the one of the "
        "request; the client sends OpenTelemetry's current span.",
        "tp", header="traceparent", command=None, query=False,
    ),
    "idempotency_key": Option(
        _text("text", 255), "Key that makes a repetition of this publish harmless. Default: a random key.",
        header="Idempotency-Key", query=False,
    ),
}  # fmt: skip
#: Option → header of a single publish.
HEADERS: dict[str, str] = {
    name: row.header or f"Hadelay-{name.replace('_', '-').title()}" for name, row in OPTIONS.items()
}
