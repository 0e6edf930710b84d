"""Job: redrive the dead letters that match a filter, for example those of an outage but not those of a faulty message.

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
    """Redrive the matching dead letters; spark is ignored. progress counts matching letters. The summary's outcomes
    count redriven letters, and others by their present state."""
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
    """Lists of ids of matching dead letters, one list per redrive request; counts the letters in the summary."""
    ids = list[str]()
    most = min(_AT_ONCE, max(1, int(options.rate))) if options.rate else _AT_ONCE
    # Redriving while listing skips no dead letter: redriven letters leave the list, and the list's cursor has passed
    # the others.
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
