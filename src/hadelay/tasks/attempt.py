"""`current()`: the attempt of the running task, with its number, deadline and progress."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime

from hadelay.client.message import printable


def _never() -> bool:
    return False


def _nowhere(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt to run a task."""

    #: Name of the task.
    task: str
    #: Id of the message.
    id: str
    #: Topic of the message.
    topic: str
    #: Key of the message; None without a key.
    key: str | None = None
    #: Number of this hand-out, from 1; attempts that do not count (snoozes, stops) have numbers, too.
    number: int
    #: Number of attempts that count, this one included. `max_attempts` and the list of waits in `retry` use this
    #: number.
    counted: int
    #: End of the task's timeout; None without a timeout.
    deadline: datetime | None = None
    meta: Mapping[str, str] = field(default_factory=dict)
    #: Name of the worker process, as in the message's history.
    consumer: str = ""
    _over: Callable[[], bool] = _never
    _tell: Callable[[str], None] = _nowhere

    @property
    def cancelled(self) -> bool:
        """Whether the function should stop: the timeout is over, the worker gave the message back, or the lease was
        lost. A function that runs in a thread has to check this, because a thread cannot be ended."""
        return self._over()

    def progress(self, text: str) -> None:
        """Report how far the task is, such as "page 7 of 20": shown by `get` until the attempt ends. Returns at once,
        in any thread. The newest text is stored at most once a second, cut to 128 bytes."""
        self._tell(printable(text))


CURRENT: ContextVar[Attempt] = ContextVar("hadelay_attempt")


def current() -> Attempt:
    """The attempt of the task that runs here. RuntimeError outside of a task."""
    try:
        return CURRENT.get()
    except LookupError:
        raise RuntimeError("no task runs here: call current() inside a task's function") from None
