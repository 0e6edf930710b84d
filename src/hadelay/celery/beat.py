"""Scheduler for `celery beat` that stores the entries of `beat_schedule` as schedules of the cluster.

The cluster publishes one message per occurrence, with or without a beat, and however many beats run: equal beats store
equal schedules.
"""

from __future__ import annotations

import logging
import numbers
import re
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from celery import beat
from celery.exceptions import ImproperlyConfigured
from celery.schedules import crontab, schedule
from kombu.utils.json import dumps, loads

from hadelay.celery.bindings import tag_of
from hadelay.celery.messages import time_of
from hadelay.celery.transport import Channel, Transport
from hadelay.client.queues import topic_of

log = logging.getLogger(__name__)


class Scheduler(beat.Scheduler):
    """When beat starts, stores its entries as schedules, and deletes schedules whose entries are gone. Afterwards beat
    idles, because the cluster publishes the messages."""

    def setup_schedule(self) -> None:
        super().setup_schedule()
        if not self.app.main:
            raise ImproperlyConfigured(
                "the app has no name, which would distinguish its schedules from those of other apps: name it, as in "
                'Celery("shop")'
            )
        with self.app.connection_for_write() as connection:
            transport: Transport = connection.transport
            prefix = prefix_of(transport.address.prefix, self.app.main)
            stored = {topic_of(prefix, entry.name): entry for entry in self.schedule.values()}
            kept = [name for name, entry in stored.items() if self._store(name, entry, connection.default_channel)]
            for known in list(transport.cluster.schedules(prefix)):
                if known.schedule not in kept:
                    transport.cluster.delete_schedule(known.schedule)
                    log.info("deleted the schedule %s: beat_schedule has no such entry any more", known.schedule)

    def tick(self, *_: object, **__: object) -> float:
        return float(self.max_interval)

    @property
    def info(self) -> str:
        return "    . schedules -> the cluster publishes, also without beat\n"

    def _store(self, name: str, entry: Any, channel: Channel) -> bool:
        """Store a schedule. Returns False for an entry that has expired."""
        when = times_of(entry.name, entry.schedule)
        channel.drafts = []
        try:
            self.apply_async(entry, producer=self.app.amqp.Producer(channel, auto_declare=False), advance=False)
            drafts = channel.drafts
        finally:
            channel.drafts = None
        if len(drafts) != 1 or drafts[0].at is not None:
            raise ImproperlyConfigured(f"beat_schedule {entry.name!r}: name one queue, and neither countdown nor eta")
        (draft,) = drafts
        raw, ttl, expires = loads(draft.body), None, None
        if isinstance(given := self._expires(entry), numbers.Real):
            ttl = max(float(given), 0.001)  # TTL of each occurrence, counted from the due time of the occurrence
        elif (expires := time_of(raw["headers"]["expires"])) is not None:
            if expires <= datetime.now(UTC):
                log.warning("beat_schedule %s has expired at %s: it is not stored", entry.name, expires)
                return False
            when["end"] = expires
        channel.connection.cluster.put_schedule(
            name,
            draft.topic,
            _template(raw, expires),
            content_type=draft.content_type,
            tags=draft.tags or (),
            ttl=ttl,
            **when,
        )
        log.info("stored the schedule %s: %s", name, when)
        return True

    def _expires(self, entry: Any) -> Any:
        """Value of `expires` of an entry or its task: seconds after each occurrence, or a time after which no
        occurrence runs."""
        task = self.app.tasks.get(entry.task)
        return entry.options.get("expires", getattr(task, "expires", None))


def prefix_of(prefix: str, app: str) -> str:
    """Prefix of the names of an app's schedules, which no other app has. In the app's name, characters such as a dot
    are replaced, because the names of schedules have dots, too."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", app)
    return f"{prefix}celery.{app if safe == app else f'{safe[:30]}-{tag_of(app)[:12]}'}."


def times_of(name: str, when: Any) -> dict[str, Any]:
    """Settings of a schedule for a crontab or an interval. Raises ImproperlyConfigured for a schedule that hadelay
    cannot express."""
    if isinstance(when, crontab) and when.nowfun is None:
        if len(when.day_of_month) < 31 and len(when.day_of_week) < 7:
            raise ImproperlyConfigured(
                f"beat_schedule {name!r}: a crontab with day_of_month and day_of_week means days that fit both; in the "
                "cluster's cron they mean days that fit one. Use one of them, and check the other in the task."
            )
        zone = getattr(when.tz, "key", None) or str(when.tz)
        days, months = _field(when.day_of_month, 31), _field(when.month_of_year, 12)
        minutes, hours = _field(when.minute, 60), _field(when.hour, 24)
        return {"cron": f"{minutes} {hours} {days} {months} {_field(when.day_of_week, 7)}", "timezone": zone}
    if type(when) is schedule and when.nowfun is None:
        if when.seconds >= 1:
            return {"every": when.seconds}
        raise ImproperlyConfigured(
            f"beat_schedule {name!r}: the cluster's shortest interval is 1 s, not {when.seconds} s"
        )
    raise ImproperlyConfigured(
        f"beat_schedule {name!r}: a cluster has no equivalent of {when!r}; run a beat with Celery's scheduler for it"
    )


def _field(values: Collection[int], size: int) -> str:
    return "*" if len(values) == size else ",".join(map(str, sorted(values)))


def _template(raw: dict[str, Any], expires: datetime | None) -> bytes:
    """Body of a schedule's messages: the task's message without the fields that differ from one publish to the next.
    The transport gives each occurrence a task id."""
    raw["headers"] |= {"id": "", "root_id": "", "origin": "beat", "expires": expires and expires.isoformat()}
    raw["properties"] |= {"correlation_id": "", "delivery_tag": "", "reply_to": ""}
    raw["properties"].pop("expiration", None)  # differs per publish, and only RabbitMQ reads this property
    return str(dumps(raw)).encode()
