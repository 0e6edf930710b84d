"""Schedules: the cluster publishes the calls, so no scheduler runs anywhere."""

from datetime import UTC, datetime, timedelta
from typing import Any

from taskiq import ScheduledTask, ScheduleSource, TaskiqEvents, TaskiqMessage
from taskiq.kicker import AsyncKicker
from taskiq.labels import prepare_label

from hadelay.client.anyloop import awaited
from hadelay.client.queues import topic_of
from hadelay.errors import NotFound
from hadelay.taskiq.broker import HadelayBroker


class HadelayScheduleSource(ScheduleSource):
    """Stores schedules in the cluster of a broker: those of `schedule_by_cron`, `schedule_by_interval` and
    `schedule_by_time`, and, when a worker starts, those of `@broker.task(schedule=[…])`.

    A schedule by time is a delayed message. Nothing deletes the schedules of labels that are gone.
    """

    def __init__(self, broker: HadelayBroker) -> None:
        self._broker = broker
        broker.add_event_handler(TaskiqEvents.WORKER_STARTUP, lambda _: self.startup())

    async def startup(self) -> None:
        """Store the schedules in the labels of tasks; a schedule that has not changed stays as it is."""
        for name, task in self._broker.get_all_tasks().items():
            for number, settings in enumerate(task.labels.get("schedule", []) if task.broker is self._broker else []):
                labels = {label: value for label, value in task.labels.items() if label != "schedule"}
                known = {"args": [], "kwargs": {}, "schedule_id": f"{name}.{number}", **settings}
                known["labels"] = labels | settings.get("labels", {})
                await self._store(ScheduledTask(task_name=name, **known))

    async def get_schedules(self) -> list[ScheduledTask]:
        """An empty list: the cluster publishes the calls, so a scheduler process has nothing to send."""
        return []

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        if schedule.time is None:
            await self._store(schedule)
            return
        kicker: AsyncKicker[Any, Any] = AsyncKicker(schedule.task_name, self._broker, dict(schedule.labels))
        kicker = kicker.with_task_id(schedule.task_id or schedule.schedule_id)
        kicker = kicker.with_labels(deliver_at=_aware(schedule.time).isoformat(), schedule_id=schedule.schedule_id)
        await kicker.kiq(*schedule.args, **schedule.kwargs)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Delete a schedule. A schedule by time is a message, which is cancelled; raises Conflict if the message runs
        or has run."""
        try:
            await awaited(self._broker.client, lambda client: client.schedule(_name(schedule_id)))
        except NotFound:
            await self._broker.cancel(schedule_id)
            return
        await awaited(self._broker.client, lambda client: client.delete_schedule(_name(schedule_id)))

    async def _store(self, schedule: ScheduledTask) -> None:
        if isinstance(schedule.cron_offset, timedelta):
            raise ValueError(
                f"{schedule.schedule_id}: cron_offset is a time zone such as Europe/Vienna, not an interval"
            )
        # Add the label schedule_id, as taskiq's own scheduler process does.
        given = {**schedule.labels, "schedule_id": schedule.schedule_id}
        labels = {label: prepare_label(value) for label, value in given.items()}
        call = TaskiqMessage(
            task_id=schedule.schedule_id,
            task_name=schedule.task_name,
            args=schedule.args,
            kwargs=schedule.kwargs,
            labels={label: value for label, (value, _) in labels.items()},
            labels_types={label: kind for label, (_, kind) in labels.items()},
        )
        body = self._broker.formatter.dumps(call).message
        at = None if schedule.time is None else [_aware(schedule.time)]
        await awaited(
            self._broker.client,
            lambda client: client.put_schedule(
                _name(schedule.schedule_id),
                self._broker.topic,
                body,
                content_type="application/json",
                cron=schedule.cron,
                every=schedule.interval,
                at=at,
                timezone=schedule.cron_offset or "UTC",
            ),
        )


def _name(schedule_id: str) -> str:
    return topic_of("taskiq.", schedule_id)


def _aware(at: datetime) -> datetime:
    """The time with a time zone: UTC if it has none, as in taskiq."""
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
