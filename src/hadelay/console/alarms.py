"""Problems that need attention, as pages show them: grouped by kind, all but the first three folded away; and as badges
of topics."""

from collections.abc import Container
from itertools import groupby
from typing import NamedTuple

from hadelay.api.attention import Attention, Kind, Row

#: Kind of problem → heading of a folded list of such problems, which is also the text of a topic's badge.
WORDS: dict[Kind, str] = {
    "receiver": "receiver fails", "group": "group is stuck", "idle": "nobody consumes", "deaths": "messages died",
    "schedule": "schedule has problems", "drained": "node is drained", "leader": "leader changes",
    "member": "member has problems", "shards": "shard map has problems",
    "certificate": "certificate ends", "token": "token ends",
    "archive": "archive waits", "backup": "backup has problems", "backlog": "backlog grows", "late": "late",
    "paused": "paused", "upgrade": "upgrade is under way",
}  # fmt: skip
#: Number of problems of one kind that a page shows; the others are folded away.
_BEFORE = 3
#: Kinds of problems that a list of topics shows as badges; for other kinds, the list has columns.
_BADGES = ("receiver", "group", "idle", "backlog", "late")


class Fold(NamedTuple):
    """Problems of one kind and severity: those that a page shows, and those that it folds away. unlisted: number of
    problems that the report left out."""

    words: str
    shown: list[Row[str]]
    folded: list[Row[str]]
    unlisted: int


class Alarms(NamedTuple):
    folds: list[Fold]
    total: int
    #: Number of problems that only the overview shows, and not this page.
    elsewhere: int


def alarms(report: Attention[str] | None, of: Container[str] | None = None) -> Alarms | None:
    """Problems for a page; None while the problems are unknown. of: kinds of things whose problems are shown; None:
    all."""
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
    """Topic → problems that a list of topics shows as badges, at most one of a kind."""
    found: dict[str, dict[str, Row[str]]] = {}
    for row in report.rows if report is not None else ():
        if row.kind in _BADGES and row.topic:
            found.setdefault(row.topic, {}).setdefault(row.kind, row)
    return {topic: list(rows.values()) for topic, rows in found.items()}
