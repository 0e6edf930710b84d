"""Outcome of an attempt, and the settlement of its message by the outcome."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from hadelay.client import AsyncMessage, Delay, exactjson
from hadelay.client.message import reason_of
from hadelay.client.wire import seconds_of
from hadelay.model import MAX_RESULT

#: Prefix of the nack's reason when a task snoozes.
SNOOZED = "snoozed: "


class Dead(Exception):
    """A task raises `Dead` when no further attempt helps: its message becomes a dead letter at once."""


class Snooze(Exception):
    """A task raises `Snooze` to run again after `delay`. The attempt does not count."""

    def __init__(self, delay: Delay, reason: str = "") -> None:
        super().__init__(reason)
        self.delay = delay


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of a task, set by its decorator: retries, timeout, uniqueness and where the function runs."""

    #: Wait before the next attempt, by class of the exception. A list has one wait for each attempt; its last wait
    #: repeats.
    retry: Mapping[type[BaseException], Delay | Sequence[Delay]] = field(default_factory=dict)
    #: Number of attempts after which the message is dead. None: the topic's setting decides.
    max_attempts: int | None = None
    #: Timeout of one attempt, in seconds.
    timeout_s: float | None = None
    #: Whether a publish is dropped while a message with the same arguments is pending.
    unique: bool = False
    #: Time for which a publish is dropped after an earlier publish with the same arguments, even if the earlier message
    #: is settled.
    unique_for: Delay | None = None
    #: Whether the function runs in a process of its own.
    cpu: bool = False
    #: Whether the ack carries the function's return value.
    result: bool = False

    def __post_init__(self) -> None:
        if self.unique_for is not None:
            seconds_of(self.unique_for)
        for waits in self.retry.values():
            for wait in _listed(waits):
                seconds_of(wait)


class Outcome(Struct, frozen=True, kw_only=True):
    """Outcome of an attempt; CPU processes send it to their workers."""

    kind: Literal["done", "failed", "snoozed", "dead"]
    #: Seconds until the next attempt; None: the topic's backoff.
    delay_s: float | None = None
    reason: str | None = None
    #: Traceback for the log, beginning with a line break.
    trace: str = ""
    #: The function's return value, if the task keeps results.
    result: Any = None


class Failed(Exception):
    """A task failed in a CPU process, which has already made the outcome from the exception."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def done(value: Any, rules: Rules) -> Outcome:
    """The outcome of a function that returned `value`. ValueError or TypeError if the value cannot be stored as a
    result."""
    if not rules.result:
        return Outcome(kind="done")
    size = len(exactjson.encode(value, "result"))
    if size > MAX_RESULT:
        raise ValueError(f"the result has {size} bytes of JSON; at most {MAX_RESULT} are kept")
    return Outcome(kind="done", result=value)


def outcome_of(error: Exception, rules: Rules, counted: int) -> Outcome:
    """The outcome of an attempt that raised an exception, without regard to `max_attempts`. The most specific class in
    `retry` decides about the wait. counted: number of attempts that count, as in Attempt."""
    if isinstance(error, Failed):
        return error.outcome
    reason = reason_of(error)
    if isinstance(error, Snooze):
        return Outcome(kind="snoozed", delay_s=seconds_of(error.delay), reason=f"{SNOOZED}{error}"[:100])
    if isinstance(error, Dead):
        return Outcome(kind="dead", reason=str(error)[:100] or reason)
    trace = "\n" + "".join(traceback.format_exception(error))
    waits = next((rules.retry[kind] for kind in type(error).__mro__ if kind in rules.retry), None)
    if waits is None:
        return Outcome(kind="failed", reason=reason, trace=trace)
    listed = _listed(waits)
    return Outcome(kind="failed", delay_s=seconds_of(listed[min(counted, len(listed)) - 1]), reason=reason, trace=trace)


def _listed(waits: Delay | Sequence[Delay]) -> Sequence[Delay]:
    if isinstance(waits, str) or not isinstance(waits, Sequence):
        return [waits]
    if not waits:
        raise ValueError("retry: a list of waits must not be empty")
    return waits


async def settle(message: AsyncMessage, outcome: Outcome, rules: Rules) -> None:
    match outcome.kind:
        case "done" if rules.result and outcome.result is not None:
            await message.ack(outcome.result)
        case "done":
            await message.ack()
        case "dead":
            await message.nack(reason=outcome.reason, dead=True)
        case "snoozed":
            await message.snooze(outcome.delay_s or 0, reason=outcome.reason)
        case "failed":
            await message.nack(outcome.delay_s, reason=outcome.reason)
