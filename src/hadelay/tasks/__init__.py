"""Tasks: functions that workers call later (docs/howto/tasks.md)."""

from hadelay.tasks.app import App as App
from hadelay.tasks.attempt import Attempt as Attempt
from hadelay.tasks.attempt import current as current
from hadelay.tasks.batch import Batch as Batch
from hadelay.tasks.outcomes import Dead as Dead
from hadelay.tasks.outcomes import Snooze as Snooze
from hadelay.tasks.task import Task as Task
from hadelay.tasks.task import TaskFailed as TaskFailed
