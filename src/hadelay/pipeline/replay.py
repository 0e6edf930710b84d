"""Make dead letters due again that match a filter: those of an outage, and not those of a poisoned message.

The cluster has each letter with its failures at hand, so no files are read. A redriven letter is not a dead letter any
more: a repeated replay continues where the last one stopped.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hadelay.client import Client, DeadLetter
from hadelay.pipeline.jobs import JobSummary, ReplayOptions
from hadelay.pipeline.tasks import Progress, silent

_AT_ONCE = 1_000


def run(spark: Any, options: ReplayOptions, progress: Progress = silent) -> JobSummary:
    """Run the job; spark is ignored. progress counts matching letters. outcomes in the summary: number of letters that
    were redriven, and of others by their present state."""
    summary = JobSummary("replay", looked_at=0, fit=0, outcomes={})
    with Client(options.endpoint, options.token or None) as client:
        for ids in _chosen(client, options, summary):
            if options.dry_run:
                continue
            began = time.monotonic()
            found = Counter(found.outcome for found in client.redrive(options.topic, ids))
            summary["outcomes"] = dict(found + Counter(summary.outcomes))
            progress(sum(summary.outcomes.values()), summary.fit)
            if options.rate:
                time.sleep(max(0.0, len(ids) / options.rate - (time.monotonic() - began)))
    summary.failed = not options.dry_run and summary.outcomes.get("redriven", 0) != summary.fit
    return summary


def _fits(letter: DeadLetter, options: ReplayOptions) -> bool:
    (first, last), tags = options.died(), {tag.strip() for tag in options.tags.split(",") if tag.strip()}
    failure = letter.errors[-1] if letter.errors else None
    why = (failure.reason or failure.event) if failure else ""
    return bool(
        (first is None or letter.died_at >= first)
        and (last is None or letter.died_at < last)
        and tags <= set(letter.tags)
        and re.search(options.reason, why)
    )


def _chosen(client: Client, options: ReplayOptions, summary: JobSummary) -> Iterator[list[str]]:
    """Ids of matching dead letters, a list per request to redrive; counts letters in the summary."""
    ids = list[str]()
    most = min(_AT_ONCE, max(1, int(options.rate))) if options.rate else _AT_ONCE
    # Redriving while listing leaves no letter out: redriven letters leave the list, and letters behind the cursor stay.
    for letter in client.dead(options.topic):
        summary["looked_at"] += 1
        if not _fits(letter, options):
            continue
        summary["fit"] += 1
        ids.append(letter.id)
        if summary.fit == options.limit:
            break
        if len(ids) == most:
            yield ids
            ids = []
    if ids:
        yield ids
