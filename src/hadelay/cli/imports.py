"""`hadelay import`: copy the delayed jobs of other systems into the cluster (docs/howto/move-in.md)."""

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from cyclopts import Parameter

from hadelay.cli.output import Remote, emit_json, fields, progress, say, table
from hadelay.client import Client
from hadelay.errors import ConfigError
from hadelay.importers.engine import Entry, Report, Skipped, copy

Url = Annotated[
    str,
    Parameter(
        help="Redis: redis://HOST:PORT/DATABASE, or rediss://… for TLS. With the variable, other users of this machine "
        "cannot see a password in it.",
        env_var="HADELAY_REDIS",
    ),
]
ToTopic = Annotated[str | None, Parameter(help="Topic of all messages. Default: the job's queue.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Importing(Remote):
    """Options of all import commands."""

    dry_run: bool = False
    "Count what would be imported, and publish nothing."


def redis_zset(url: Url, /, *, key: str, topic: str, hash: str | None = None, options: Importing = Importing()) -> int:
    """Import a sorted set of your own, whose scores are due times in Unix seconds or milliseconds.

    Args:
        key: Key of the sorted set. Its members become the keys of the messages.
        topic: Topic of the messages.
        hash: Key of a hash with the payloads by member. Default: the members are the payloads.
    """
    from hadelay.importers import fromredis

    return _import(url, options, lambda redis: fromredis.zset(redis, key, topic, hash))


def bullmq(url: Url, /, *, prefix: str = "bull", topic: ToTopic = None, options: Importing = Importing()) -> int:
    """Import the delayed jobs of all queues of BullMQ.

    Args:
        prefix: Prefix of BullMQ's keys.
    """
    from hadelay.importers import fromredis

    return _import(url, options, lambda redis: fromredis.bullmq(redis, prefix, topic))


def sidekiq(url: Url, /, *, prefix: str = "", topic: ToTopic = None, options: Importing = Importing()) -> int:
    """Import the scheduled and retried jobs of Sidekiq.

    Args:
        prefix: Prefix of Sidekiq's keys, such as "shop:" with redis-namespace.
    """
    from hadelay.importers import fromredis

    return _import(url, options, lambda redis: fromredis.sidekiq(redis, prefix, topic))


def celery_redis(url: Url, /, *, prefix: str = "", topic: ToTopic = None, options: Importing = Importing()) -> int:
    """Import the tasks with an ETA from Celery's queues in Redis, for workers of Celery on hadelay.

    Args:
        prefix: Prefix of the topics: the path of the new broker's URL, with a dot, such as "shop.".
    """
    from hadelay.importers import fromredis

    return _import(url, options, lambda redis: fromredis.celery(redis, prefix, topic))


def rq_scheduler(url: Url, /, *, topic: ToTopic = None, options: Importing = Importing()) -> int:
    """Import the scheduled jobs of rq-scheduler and of RQ."""
    from hadelay.importers import fromredis

    return _import(url, options, lambda redis: fromredis.rq(redis, topic))


def apscheduler(
    url: Url,
    /,
    *,
    topic: str,
    jobs_key: str = "apscheduler.jobs",
    run_times_key: str = "apscheduler.run_times",
    options: Importing = Importing(),
) -> int:
    """Import the jobs with a date from a Redis job store of APScheduler 3.

    Args:
        topic: Topic of the messages.
        jobs_key: Key of the store's jobs.
        run_times_key: Key of the store's times.
    """
    from hadelay.importers import fromredis

    return _import(url, options, lambda redis: fromredis.apscheduler(redis, topic, jobs_key, run_times_key))


def rabbitmq_delayed(
    file: Annotated[str | None, Parameter(help="File with the output of rabbitmqctl; - is standard input.")] = None,
    /,
    *,
    topic: str | None = None,
    exchange: str | None = None,
    vhost: str = "/",
    expression: bool = False,
    options: Importing = Importing(),
) -> int:
    """Import the messages of RabbitMQ's delayed-message plugin, up to RabbitMQ 3.12. A bridge publishes them when due.

    Args:
        topic: Topic of the bridge, such as hadelay.shop.delay.
        exchange: Exchange of the plugin. Default: all exchanges.
        vhost: Virtual host of the exchange.
        expression: Print the expression for `rabbitmqctl eval`, which lists the messages of a node.
    """
    try:
        from hadelay.importers import fromplugin
    except ModuleNotFoundError as error:
        raise ConfigError(f"this import needs the package {error.name}: pip install 'hadelay[rabbitmq]'") from None

    if expression:
        say(fromplugin.EXPRESSION.strip())
        return 0
    if file is None or topic is None:
        raise ConfigError(
            "name a FILE and the --topic of the bridge; --expression prints the expression that makes FILE"
        )
    with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as lines:
        try:
            return _copied(fromplugin.delayed(lines, topic, exchange, vhost), options)
        except ValueError as error:
            raise ConfigError(f"{file}: {error}") from None


def _import(url: str, options: Importing, entries: Callable[[Any], Iterable[Entry | Skipped]]) -> int:
    try:
        import redis
    except ModuleNotFoundError:
        raise ConfigError("imports from Redis need the package redis: pip install 'hadelay[redis]'") from None
    try:
        with redis.Redis.from_url(url) as connection:
            return _copied(entries(connection), options)
    except (redis.exceptions.RedisError, ValueError) as error:
        raise ConfigError(f"the jobs cannot be read from Redis: {error}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"this import needs the package {error.name}: pip install 'hadelay[celery]'") from None


def _copied(source: Iterable[Entry | Skipped], options: Importing) -> int:
    """Import with a progress bar, and print the report; exit code 1 if the cluster refused any message."""
    with progress(None) as update, contextlib.ExitStack() as stack:
        client = None
        if not options.dry_run:
            client = stack.enter_context(Client(options.addresses(), options.token))
        report = copy(source, client, lambda count: update(advance=count))
    _show(report, options)
    return 1 if report.refused else 0


def _show(report: Report, options: Importing) -> None:
    times = [None if ms is None else datetime.fromtimestamp(ms / 1000, UTC) for ms in (report.first_ms, report.last_ms)]
    shown: dict[str, Any] = {"found": report.found}
    if not options.dry_run:
        shown |= {"imported": report.imported, "repeated": report.repeated, "refused": report.refused}
    shown |= {"overdue": report.overdue, "bytes": report.bytes, "first_due": times[0], "last_due": times[1]}
    if options.output == "json":
        emit_json(shown | {"topics": report.topics, "skipped": report.skipped, "refusals": report.refusals})
        return
    fields({name.replace("_", " "): value for name, value in shown.items() if value is not None})
    for title, counts in (("topic", report.topics), ("skipped because", report.skipped)):
        if counts:
            say()
            table([{title: name, "count": count} for name, count in sorted(counts.items())], (title, "count"))
    if report.refusals:
        say()
        table([{"refused": id, "reason": reason} for id, reason in report.refusals], ("refused", "reason"))
