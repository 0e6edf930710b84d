"""Dead letters that a filter fits, due again: those of an outage, and not those of a poisoned message.

It asks the cluster, which has each letter with its failures at hand: files would be read for as many hours as there
were attempts. A letter that was redriven is none any more, so that a replay that is run again goes on where it stopped.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hadelay.client import Client, DeadLetter
from hadelay.pipeline.jobs import JobSummary, ReplayOptions
from hadelay.pipeline.tasks import Progress, silent

_AT_ONCE = 1_000


def _fits(options: ReplayOptions) -> Callable[[DeadLetter], bool]:
    reason, tags = re.compile(options.reason), {tag.strip() for tag in options.tags.split(",") if tag.strip()}
    first, last = options.died()

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


def run(spark: Any, options: ReplayOptions, progress: Progress = silent) -> JobSummary:
    """spark: is not used; every job takes one. progress is told of letters that fit. outcomes: how many letters were
    redriven, or are something else by now."""
    summary = JobSummary("replay", looked_at=0, fit=0, outcomes={})
    with Client(options.endpoint, options.token or None) as client:
        for ids in _chosen(client, options, summary):
            began = time.monotonic()
            found = Counter(found.outcome for found in client.redrive(options.topic, ids))
            summary["outcomes"] = dict(found + Counter(summary.outcomes))
            progress(sum(summary.outcomes.values()), summary.fit)
            if options.rate:
                time.sleep(max(0.0, len(ids) / options.rate - (time.monotonic() - began)))
    summary.failed = not options.dry_run and summary.outcomes.get("redriven", 0) != summary.fit
    return summary


def _chosen(client: Client, options: ReplayOptions, summary: JobSummary) -> Iterator[list[str]]:
    """Ids to redrive at once."""
    fits, ids = _fits(options), list[str]()
    most = min(_AT_ONCE, max(1, int(options.rate))) if options.rate else _AT_ONCE
    # What is redriven leaves the list, and what is after the cursor stays: none is left out.
    for letter in client.dead(options.topic):
        summary["looked_at"] += 1
        if not fits(letter):
            continue
        summary["fit"] += 1
        ids.append(letter.id)
        if len(ids) == most or summary.fit == options.limit:
            if not options.dry_run:
                yield ids
            ids = []
        if summary.fit == options.limit:
            return
    if ids and not options.dry_run:
        yield ids
