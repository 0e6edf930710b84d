"""Problems that need attention, for pages: the rows of one kind fold behind the first three, and rows have badges."""

from collections.abc import Container
from itertools import groupby
from typing import NamedTuple

from hadelay.api.attention import Attention, Kind, Row

#: Kind of a row → what a fold, or the badge of a topic, says.
WORDS: dict[Kind, str] = {
    "receiver": "receiver fails", "group": "group is stuck", "idle": "nobody consumes", "deaths": "messages died",
    "schedule": "schedule has problems", "drained": "node is drained", "leader": "leader changes",
    "member": "member has problems", "shards": "shard map has problems",
    "certificate": "certificate ends", "token": "token ends",
    "archive": "archive waits", "backup": "backup has problems", "backlog": "backlog grows", "late": "late",
    "paused": "paused", "upgrade": "upgrade is under way",
}  # fmt: skip
#: Number of rows of a kind that a page shows before the fold.
_BEFORE = 3
#: Kinds that a list of topics shows as a badge; the list has its own columns for the others.
_BADGES = ("receiver", "group", "idle", "backlog", "late")


class Fold(NamedTuple):
    """Rows of one kind and severity. unlisted: number of rows that the report left out."""

    words: str
    shown: list[Row[str]]
    folded: list[Row[str]]
    unlisted: int


class Alarms(NamedTuple):
    folds: list[Fold]
    total: int
    #: Number of problems that the page leaves to the overview.
    elsewhere: int


def alarms(report: Attention[str] | None, of: Container[str] | None = None) -> Alarms | None:
    """Problems for a page; None while they are unknown. of: kinds of things whose problems are shown; None: all."""
    if report is None:
        return None
    rows = [row for row in report.rows if of is None or row.what in of]
    more = dict(report.more) if of is None or len(rows) == len(report.rows) else {}
    folds = []
    for (_, kind), found in groupby(rows, key=lambda row: (row.severity, row.kind)):
        one = list(found)
        at = _BEFORE if len(one) > _BEFORE + 1 else len(one)
        folds.append(Fold(WORDS[kind], one[:at], one[at:], more.pop(kind, 0)))
    total = sum(len(one.shown) + len(one.folded) + one.unlisted for one in folds)
    return Alarms(folds, total, len(report.rows) + sum(report.more.values()) - total)


def badges(report: Attention[str] | None) -> dict[str, list[Row[str]]]:
    """Topic → rows that a list of topics shows as badges, at most one of a kind."""
    found: dict[str, dict[str, Row[str]]] = {}
    for row in report.rows if report is not None else ():
        if row.kind in _BADGES and row.topic:
            found.setdefault(row.topic, {}).setdefault(row.kind, row)
    return {topic: list(rows.values()) for topic, rows in found.items()}
