"""Names that a change of the shard map must leave to this shard: its topics, and the topics that its settings and
schedules name. Read in pages: there may be 100,000 topics, and as many schedules."""

from typing import NamedTuple

from hadelay.ledger.schedules.schedules import OF_TOPIC
from hadelay.ledger.state import Ledger
from hadelay.model import SEPARATOR
from hadelay.settings.topic import topics_named

_END = b"\xff"


class Names(NamedTuple):
    """Names of one page; a name may come more than once. next: cursor of the next page; None after the last one."""

    #: Topics that exist here; their subscriptions are not listed.
    topics: list[str]
    #: Topics that settings and schedules name, whether they exist or not.
    targets: list[str]
    next: str | None


def names(ledger: Ledger, cursor: str, limit: int) -> Names:
    """The page at a cursor, "" for the first one. Raises ValueError for an invalid cursor."""
    stage, _, after = (cursor or "t:0").partition(":")
    if stage == "t":
        return _of_topics(ledger, int(after), limit)
    if stage == "s":
        return _of_schedules(ledger, after, limit)
    raise ValueError(f"{cursor[:80]!r} is not a cursor from the previous page")


def _of_topics(ledger: Ledger, start: int, limit: int) -> Names:
    # Pages by number miss none of the topics that exist when the first page is read. Topics that are created later need
    # not be listed: this shard owns them by both maps.
    end = max(start, 0) + limit
    page = [topic for topic in ledger.topics.all[max(start, 0) : end] if topic.exists]
    found = [topic.name for topic in page if SEPARATOR not in topic.name]
    targets = [target for topic in page for target in topics_named(topic.config)]
    more = f"t:{end}" if end < len(ledger.topics.all) else "s:" if ledger.schedules.count else None
    return Names(found, targets, more)


def _of_schedules(ledger: Ledger, after: str, limit: int) -> Names:
    """List the topics of schedules behind `after`. The table is sorted by topic: the next page begins behind the last
    topic of this page, and so skips the topic's other schedules."""
    rows = ledger.tables.range(OF_TOPIC, after.encode() + b"\1" if after else b"", _END, limit)
    targets = list(dict.fromkeys(key.partition(b"\0")[0].decode() for key, _ in rows))
    return Names([], targets, f"s:{targets[-1]}" if len(rows) == limit else None)
