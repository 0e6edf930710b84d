"""Every row of the table, by the name it is selected with. Each takes a Setup and returns its Row (or several)."""

from __future__ import annotations

from collections.abc import Callable

from bench.result import Row, Setup
from bench.rows import (
    access,
    backup,
    bounds,
    clients,
    console,
    deliver,
    failure,
    jobs,
    look,
    metrics,
    publish,
    replace,
    schedules,
    size,
    spark,
    tags,
    webhooks,
)

ROWS: dict[str, Callable[[Setup], list[Row]]] = {
    "single": publish.single,
    "keys": publish.keys,
    "access": access.access,
    "s4": publish.s4,
    "batch": publish.batch,
    "subscriptions": publish.subscriptions,
    "follower": publish.follower,
    "slowdisk": publish.slowdisk,
    "put": clients.put,
    "peers": publish.others,
    "e2e": deliver.end_to_end,
    "burst": deliver.burst,
    "lateness": deliver.lateness,
    "readers": clients.readers,
    "cold": deliver.cold,
    "schedules": schedules.schedules,
    "crowd": schedules.crowd,
    "webhooks": webhooks.calls,
    "hanging": webhooks.hanging,
    "look": look.looking,
    "jobs": jobs.jobs,
    "tags": tags.tags,
    "catchup": tags.catch_up,
    "memory": size.memory,
    "failover": failure.failover,
    "rolling": failure.rolling,
    "console": console.console,
    "lists": console.lists,
    "metrics": metrics.metrics,
    "worst": bounds.bounds,
    "restart": size.restart,
    "idle": size.idle,
    "spark": spark.pipeline,
    "backup": backup.backup,
    "replace": replace.replace,
}
