"""Makes the specification of a bulk job from a document of the API."""

import re

from hadelay.api.jobs import CountJob, JobRequest
from hadelay.api.text import (
    END_OF_YEARS_MS,
    LONGEST_TOPIC,
    check_topic,
    parse_duration,
    parse_id,
    parse_instant,
    parse_shift,
)
from hadelay.codec.jobcommands import MAX_IDS, JobSpec
from hadelay.errors import BadRequest
from hadelay.rules.publishing import check_tags
from hadelay.settings.node import HttpConfig

_PATTERN = re.compile(rf"[A-Za-z0-9._*~-]{{1,{LONGEST_TOPIC}}}")


def job_spec(document: JobRequest | CountJob, config: HttpConfig) -> JobSpec:
    """Specification of a job from a document of the API. Raises BadRequest."""
    of = document.filter
    if "*" not in of.topic:
        check_topic(of.topic)
    elif not _PATTERN.fullmatch(of.topic):
        raise BadRequest(f"filter.topic: {of.topic[:80]!r} is neither a name nor a pattern such as orders-*")
    if len(of.ids) > MAX_IDS:
        raise BadRequest(f"filter.ids: {len(of.ids)} given; at most {MAX_IDS} are allowed")
    for name, at in (("from", of.from_), ("to", of.to)):
        if at is not None and not 0 <= at < END_OF_YEARS_MS:
            # Refuse times beyond the year 9999: answers about the job could not show them.
            raise BadRequest(f"filter.{name}: expected a time from 1970 to 9999")
    return JobSpec(
        document.action,
        of.topic,
        check_tags(config, of.tags),
        of.key_prefix,
        None if of.from_ is None else int(of.from_),
        None if of.to is None else int(of.to),
        of.group,
        of.schedule,
        tuple(dict.fromkeys(map(parse_id, of.ids))),
        of.error,
        of.retrying,
        shift_ms=None if document.shift is None else parse_shift(document.shift),
        at_ms=None if document.deliver_at is None else parse_instant("deliver_at", document.deliver_at),
        delay_ms=None if document.delay is None else parse_duration("delay", document.delay),
        rate=document.rate,
        into="" if document.into is None else check_topic(document.into),
    )
