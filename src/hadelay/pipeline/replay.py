"""Dead letters that a filter fits, due again: those of an outage, and not those of a poisoned message.

It asks the cluster, which has each letter with its failures at hand: files would be read for as many hours as there
were attempts. A letter that was redriven is none any more, so that a replay that is run again goes on where it stopped.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hadelay.client import Client, DeadLetter
from hadelay.errors import BadRequest

_AT_ONCE = 1_000


@dataclass(frozen=True)
class ReplayOptions:
    #: URLs of nodes, separated by commas.
    endpoint: str
    topic: str
    token: str = ""
    #: Regular expression, found in the reason of the last failure; lease_expired is the reason of a lease that ran out.
    reason: str = ""
    #: RFC 3339: died in [from, to).
    died_from: str = ""
    died_to: str = ""
    #: All of these, separated by commas.
    tags: str = ""
    #: At most so many; 0: all that fit.
    limit: int = 0
    #: Per second; 0: as fast as it goes.
    rate: float = 0.0
    #: Say how many fit, and redrive none.
    dry_run: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.reason)
        except re.error as error:
            raise BadRequest(f"reason: {self.reason!r} is no regular expression: {error}") from None
        for name in ("died_from", "died_to"):
            _instant(name, getattr(self, name))
        if self.limit < 0 or self.rate < 0:
            raise BadRequest("replay: limit and rate are 0 or more")

    def fits(self) -> Callable[[DeadLetter], bool]:
        reason, tags = re.compile(self.reason), {tag.strip() for tag in self.tags.split(",") if tag.strip()}
        first, last = _instant("died_from", self.died_from), _instant("died_to", self.died_to)

        def fits(letter: DeadLetter) -> bool:
            failure = letter.errors[-1] if letter.errors else None
            why = (failure.reason or failure.event) if failure else ""
            return bool(
                (first is None or letter.died_at >= first)
                and (last is None or letter.died_at < last)
                and tags <= set(letter.tags)
                and reason.search(why)
            )

        return fits


def _instant(name: str, text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if text else None
    except ValueError:
        at = None
    if text and (at is None or at.tzinfo is None):
        raise BadRequest(f"{name}: {text!r} is no time with a zone, such as 2026-11-20T18:00:00Z")
    return at


@dataclass
class Summary:
    looked_at: int = 0
    fit: int = 0
    #: What became of those that fit: redriven, or what the letter is instead.
    outcomes: dict[str, int] = field(default_factory=dict)


def run(spark: Any, options: ReplayOptions, progress: Callable[[Summary], None] = lambda _: None) -> Summary:
    """spark: is not used; every job takes one."""
    summary = Summary()
    with Client(options.endpoint, options.token or None) as client:
        for ids in _chosen(client, options, summary):
            began = time.monotonic()
            found = Counter(found.outcome for found in client.redrive(options.topic, ids))
            summary.outcomes = dict(found + Counter(summary.outcomes))
            progress(summary)
            if options.rate:
                time.sleep(max(0.0, len(ids) / options.rate - (time.monotonic() - began)))
    return summary


def _chosen(client: Client, options: ReplayOptions, summary: Summary) -> Iterator[list[str]]:
    """Ids to redrive at once."""
    fits, ids = options.fits(), list[str]()
    most = min(_AT_ONCE, max(1, int(options.rate))) if options.rate else _AT_ONCE
    # What is redriven leaves the list, and what is after the cursor stays: none is left out.
    for letter in client.dead(options.topic):
        summary.looked_at += 1
        if not fits(letter):
            continue
        summary.fit += 1
        ids.append(letter.id)
        if len(ids) == most or summary.fit == options.limit:
            if not options.dry_run:
                yield ids
            ids = []
        if summary.fit == options.limit:
            return
    if ids and not options.dry_run:
        yield ids
