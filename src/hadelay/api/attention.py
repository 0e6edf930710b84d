"""HTTP API types of the report of what needs attention."""

from typing import Generic, Literal

from hadelay.api.base import At, Document

Kind = Literal[
    "receiver",
    "group",
    "idle",
    "deaths",
    "schedule",
    "drained",
    "leader",
    "member",
    "shards",
    "certificate",
    "token",
    "archive",
    "backup",
    "backlog",
    "late",
    "paused",
    "upgrade",
]
#: Kinds of problems, in the order in which the report lists them.
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]


class Action(Document, frozen=True):
    """A step that an administrator can take against the problem."""

    text: str
    #: Path of a page of the console, and a command line that does or shows the same as the page.
    href: str
    command: str


class Row(Document, Generic[At], frozen=True):
    """One problem in the report. Its members are always sent, except `topic` and `message`."""

    kind: Kind
    #: bad: messages are not handled, or the cluster is at risk. warn: an administrator should look at the problem
    #: today.
    severity: Literal["bad", "warn"]
    #: Kind and name of the thing that has the problem. For a message group, `name` is the group's name.
    what: Literal["topic", "schedule", "group", "node", "cluster"]
    name: str
    sentence: str
    #: Size of the problem, in messages, calls, log entries or days; `sentence` names the unit.
    number: int
    #: Time at which the problem began; None: unknown.
    since: At | None
    actions: list[Action]
    #: Topic, if the problem is about a topic, a message group or a schedule.
    topic: str = ""
    #: For a message group: id of the message that the group's other messages wait for.
    message: str = ""


class Attention(Document, Generic[At], frozen=True):
    """Problems of the cluster, its topics and schedules, the worst first. Empty `rows`: all is well."""

    cluster_id: str
    #: Cluster time of the report.
    time: At
    rows: list[Row[At]]
    #: Kind → number of problems of this kind that were left out: the report has at most 100 of a kind.
    more: dict[str, int]
