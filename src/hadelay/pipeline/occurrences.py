"""Messages that schedules will publish: their occurrences within the next hours, for the job forecast."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import Any

import numpy as np

from hadelay.api.text import parse_duration
from hadelay.client import Client
from hadelay.codec.schedules import Spec
from hadelay.errors import BadRequest, Forbidden
from hadelay.pipeline.hourfiles import NameMap, Rows
from hadelay.pipeline.schema import Options
from hadelay.pipeline.timing import SECONDS
from hadelay.timing import plan

#: Time, in ms, by which the leader publishes messages of occurrences in advance. The forecast already counts these
#: messages as waiting, and so leaves out their occurrences.
_PUBLISHED_MS = 10_000


def coming(options: Options, names: NameMap, first: int, stop: int) -> tuple[Rows, NameMap, str]:
    """Occurrences of the cluster's active schedules that fall due in the seconds [first, stop) and are no messages yet:
    (SECONDS rows, names with the schedules' topics, reason why occurrences are missing, else "").

    Copies for subscriptions are not counted, and `overlap` is taken to leave nothing out."""
    if not options.endpoint:
        return np.zeros(0, SECONDS), names, "schedules are not counted: only the nodes know them, so set --endpoint"
    counts, problems = Counter[tuple[str, int]](), list[str]()
    selected = {name.strip() for name in options.topics.split(",")} - {""}
    with Client(options.endpoint, options.token or None, timeout=options.timeout) as client:
        try:
            for schedule in client.schedules():
                if schedule.state == "active" and (not selected or schedule.topic in selected):
                    try:
                        counts.update((schedule.topic, second) for second in _seconds(schedule, first, stop))
                    except BadRequest as error:  # this machine does not know the schedule's time zone or pattern
                        problems.append(f"schedule {schedule.schedule} is not counted: {error}")
        except Forbidden as error:
            problems.append(f"schedules are not counted: {error}")
    topics = [*names.topics, *sorted({topic for topic, _ in counts} - set(names.topics))]
    numbers = {name: number for number, name in enumerate(topics)}
    found = np.zeros(len(counts), SECONDS)
    if counts:
        found["topic"] = [numbers[topic] for topic, _ in counts]
        found["second"] = [second for _, second in counts]
        found["waiting"] = list(counts.values())
    return found, names._replace(topics=topics), "; ".join(problems[:3])


def _seconds(schedule: Any, first: int, stop: int) -> Iterator[int]:
    """Seconds in which messages of a schedule fall due."""
    spec = Spec(
        schedule.topic,
        schedule.cron,
        schedule.every and parse_duration("every", schedule.every),
        schedule.at and [_ms(at) for at in schedule.at],
        schedule.timezone,
        schedule.start and _ms(schedule.start),
        schedule.end and _ms(schedule.end),
        jitter_ms=parse_duration("jitter", schedule.jitter or 0),
    )
    left = None if schedule.max_occurrences is None else max(schedule.max_occurrences - schedule.made, 0)
    after_ms = first * 1000 + _PUBLISHED_MS
    for at_ms in islice(takewhile(lambda at_ms: at_ms < stop * 1000, plan.occurrences(spec, after_ms)), left):
        second = (at_ms + plan.jitter_ms(spec, schedule.schedule, at_ms)) // 1000
        if second < stop:
            yield second


def _ms(at: datetime) -> int:
    return round(at.astimezone(UTC).timestamp() * 1000)
