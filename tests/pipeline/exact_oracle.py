"""`reconcile` as one SQL query over all messages and events: slower than the job, and simple enough to be believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from hadelay.model import DEAD_HOURS, NONE32, decode_id
from hadelay.pipeline import reconcile as fast
from hadelay.pipeline.archived import open_hours, parts
from hadelay.pipeline.check import check
from hadelay.pipeline.hourfiles import Listing, Rows, Store
from hadelay.pipeline.jobs import VERDICTS, JobSummary, ReconcileOptions
from hadelay.pipeline.reconcile import FACTS, Rule
from hadelay.pipeline.schema import Options, hour_int, hour_number
from hadelay.pipeline.session import check_spark
from hadelay.pipeline.stores import listing as list_hours
from hadelay.pipeline.tasks import no_connect
from hadelay.storage.locations import Location, absolute

#: Offending rows that are Python objects at once.
_ROWS = 10_000
_MESSAGES = ("first_id", "id", "hour", "dead", "entry", "topic", "subscription", "deliver_at")
_EVENTS = (
    "hour",
    "dead",
    "entry",
    "event",
    "at",
    "other_hour",
    "other_dead",
    "other_entry",
    "number",
    "handout_delay_ms",
)

#: messages, events, listed: tables; the rest are numbers.
_QUERY = """
WITH per_entry AS (
  SELECT hour AS ehour, dead AS edead, entry AS eentry,
    count_if(event = 'leased') AS leases, count_if(event IN ('nacked', 'redriven')) AS excused,
    bool_or(event IN ('moved', 'dead', 'redriven')) AS moved,
    bool_or(event = 'acked') AS acked, bool_or(event = 'ttl_expired') AS expired,
    bool_or(event = 'cancelled') AS cancelled, bool_or(event IN ('nacked', 'lease_expired')) AS failed,
    min(CASE WHEN event = 'leased' THEN unix_millis(at) END) AS first_lease,
    max(CASE WHEN event = 'leased' THEN unix_millis(at) END) AS last_lease,
    max(handout_delay_ms) AS delay,
    max_by(struct(other_hour, other_dead, other_entry), number)
      FILTER (WHERE event IN ('moved', 'dead', 'redriven')) AS target
  FROM {events} GROUP BY hour, dead, entry
), facts AS (
  SELECT m.*, unix_millis(m.deliver_at) AS due, coalesce(leases, 0) AS leases, coalesce(excused, 0) AS excused,
    coalesce(moved, false) AS moved, acked, expired, cancelled, coalesce(leases > 0 AND NOT failed, false) AS held,
    target, first_lease, last_lease, delay
  FROM {messages} m LEFT JOIN per_entry e ON m.hour = e.ehour AND m.dead = e.edead AND m.entry = e.eentry
), reached AS (
  SELECT f.*, t.entry IS NOT NULL AS found, l.hour IS NOT NULL AS listed
  FROM facts f
  LEFT JOIN {messages} t
    ON t.hour = f.target.other_hour AND t.dead = f.target.other_dead AND t.entry = f.target.other_entry
  LEFT JOIN {listed} l ON l.hour = f.target.other_hour AND l.dead = f.target.other_dead
), status AS (
  SELECT *, CASE
      WHEN moved AND found THEN 0
      WHEN moved AND NOT listed AND unix_millis(to_timestamp(CAST(target.other_hour AS STRING), 'yyyyMMddHH')) + 3600000
        + IF(target.other_dead, 0, {retired_ms}) <= {as_of_ms} THEN 1
      WHEN moved THEN 8
      WHEN cancelled THEN 3 WHEN expired THEN 4 WHEN acked THEN 2
      WHEN held THEN 7
      WHEN dead THEN 5
      WHEN due + {grace_ms} <= {as_of_ms} THEN 8 ELSE 6 END AS status
  FROM reached
), whole AS (
  SELECT first_id, min(id) AS id,
    min_by(coalesce(topic || '~' || subscription, topic), struct(dead, hour, entry)) AS topic,
    max(status) AS status, sum(leases) AS leases, sum(excused) AS excused, count_if(NOT moved) AS live,
    bool_or(coalesce(first_lease < due - {ahead_ms}, false)) AS early,
    max(CASE WHEN last_lease IS NULL THEN -1 ELSE greatest(last_lease + coalesce(delay, 0) - due, 0) END) AS late_ms,
    min_by(deliver_at, struct(dead, hour, entry)) AS deliver_at, min_by(entry, struct(dead, hour, entry)) AS entry
  FROM status GROUP BY first_id
), judged AS (
  SELECT *, CASE
      WHEN status = 8 THEN 'undelivered' WHEN early THEN 'early'
      WHEN leases > excused + 1 OR live > 1 THEN 'duplicate'
      WHEN status = 7 THEN 'unacked' WHEN status = 6 THEN 'pending' WHEN status = 5 THEN 'dead'
      WHEN status = 4 THEN 'expired' WHEN status = 3 THEN 'cancelled' WHEN status IN (0, 1) THEN 'gone'
      WHEN late_ms > {late_ms} THEN 'late' ELSE 'ok' END AS verdict,
    CAST(date_format(timestamp_seconds((shiftright(first_id, 32) & 16777215) * 3600), 'yyyyMMddHH') AS INT) AS home
  FROM whole
), orphans AS (
  SELECT ehour, edead, eentry FROM per_entry e
  LEFT ANTI JOIN {messages} m ON m.hour = e.ehour AND m.dead = e.edead AND m.entry = e.eentry
)
SELECT home AS hour, false AS dead, entry, id, topic, verdict, deliver_at, CAST(leases AS INT) AS leases, late_ms
FROM judged {only_homes}
UNION ALL
SELECT ehour, edead, eentry, NULL, NULL, 'orphan', NULL, 0, -1 FROM orphans {only_orphans}
"""


def run(spark: Any, options: ReconcileOptions) -> JobSummary:
    """As `reconcile.run`. Damage is named before Spark is asked for anything."""
    store = open_hours(options.source, options.archive)
    listing = list_hours(store, options.source)
    if options.check:
        check(spark, store, listing.hours, options.source)
    return judge(spark, store, listing, fast.rule_of(listing, options, store.names()), options)


def judge(spark: Any, store: Store, listing: Listing, rule: Rule, options: ReconcileOptions) -> JobSummary:
    """Both tables are read from the one listing: what is filed meanwhile is in neither."""
    no_connect(spark)
    archive = absolute(options.archive)
    check_spark(spark, "--archive", archive)
    listed = [(hour_int(files.hour), files.hour >= DEAD_HOURS) for files in listing.hours]
    homes = ", ".join(str(hour_int(hour)) for hour in sorted(rule.homes or ())) or "0"
    query = _QUERY
    for name, column in (("homes", "home"), ("orphans", "NOT edead AND ehour")):
        query = query.replace(f"{{only_{name}}}", "" if rule.homes is None else f"WHERE {column} IN ({homes})")
    judged = spark.sql(
        query,
        messages=frame(spark, listing, "messages", _MESSAGES, options.source, archive),
        events=frame(spark, listing, "events", _EVENTS, options.source, archive),
        listed=spark.createDataFrame(listed, "hour INT, dead BOOLEAN"),
        late_ms=rule.late_ms, grace_ms=rule.grace_ms, as_of_ms=rule.as_of_ms, ahead_ms=fast.AHEAD_MS,
        retired_ms=fast.RETIRED_MS,
    ).cache()  # fmt: skip
    names = store.names()
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names.topics)} | {None: -1}
    counts: Counter[tuple[int, int, int]] = Counter()
    for row in judged.groupBy("hour", "dead", "topic", "verdict").count().collect():
        key = (hour_number(row["hour"], row["dead"]), numbers[row["topic"]], VERDICTS.index(row["verdict"]))
        counts[key] += row["count"]
    offends = [VERDICTS[verdict] for verdict in fast.OFFENDING]
    try:
        return fast.summarise(
            counts, _facts(judged.where(judged.verdict.isin(offends)), numbers), names, listing, rule, options
        )
    finally:
        judged.unpersist()


def _facts(offending: Any, numbers: dict[str | None, int]) -> Iterator[Rows]:
    """FACTS of the query's rows, some at a time."""
    rows = offending.toLocalIterator()
    while some := list(islice(rows, _ROWS)):
        found = np.zeros(len(some), FACTS)
        for fact, row in zip(found, some, strict=True):
            fact["hour"], fact["entry"] = hour_number(row["hour"], row["dead"]), row["entry"]
            fact["verdict"], fact["leases"] = VERDICTS.index(row["verdict"]), row["leases"]
            fact["late_ms"] = row["late_ms"]
            if row["id"] is not None:
                fact["first_id"], fact["topic"] = decode_id(row["id"]), numbers[row["topic"]] & NONE32
                fact["deliver_at_ms"] = round(row["deliver_at"].timestamp() * 1000)
        yield found


def frame(
    spark: Any, listing: Listing, kind: str, columns: tuple[str, ...], options: Options, archive: str = ""
) -> Any:
    """Rows of the hours listed; of those that are archived from there."""
    live = [files for files in listing.hours if not files.archived]
    where = {"path": options.path} if options.path else {"endpoint": options.endpoint, "token": options.token}
    reader = spark.read.format("hadelay").options(
        **where, kind=kind, columns=",".join(columns), listing=listing._replace(hours=live).encode()
    )
    found = reader.options(onTorn=options.on_torn, splitRows=options.split_rows, verify=options.verify).load()
    hours = [files.hour for files in listing.hours if files.archived]
    paths = [f"{archive}/{part['path']}" for hour in hours for part in parts(Location(archive), hour, kind)]
    if paths:
        old = spark.read.option("basePath", f"{archive}/{kind}").parquet(*paths).selectExpr("*", "false AS dead")
        found = found.union(old.select(*columns))
    return found
