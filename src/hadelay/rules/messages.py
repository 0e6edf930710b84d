"""Checks the values that a request may give for lists, reschedules and redrives of messages."""

from hadelay.api.messages import Reschedule
from hadelay.api.text import parse_shift, suggest
from hadelay.errors import BadRequest
from hadelay.model import MAX_RATE, PENDING, State
from hadelay.rules.publishing import due_time

#: Names of states, and of sets of states, by which a list can be filtered → the states. `retrying` is no state of its
#: own, so it stands for none.
RETRYING = "retrying"
STATES: dict[str, frozenset[State]] = {
    "pending": PENDING,
    **{str(state): frozenset((state,)) for state in State},
    RETRYING: frozenset(),
    "all": frozenset(State),
}


def states_of(text: str) -> tuple[frozenset[State], bool]:
    """Parse `text`, names of states separated by commas: (states, whether messages that wait after a failed attempt are
    wanted, too). Raises BadRequest."""
    states: frozenset[State] = frozenset()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STATES:
            raise BadRequest(f"state: {name[:40]!r} is not a state{suggest(name, STATES)}")
        states |= STATES[name]
    return states, RETRYING in names


def new_due_time(max_delay_ms: int, document: Reschedule) -> tuple[int, bool, int | None]:
    """The new due time that a reschedule asks for, as values of a RESCHEDULE: (when_ms, relative, expected_ms). Raises
    BadRequest, Impossible."""
    if sum(value is not None for value in (document.shift, document.delay, document.deliver_at)) != 1:
        raise BadRequest("the new due time: give one of shift, delay and deliver_at")
    expected_ms = None if document.expected_deliver_at is None else int(document.expected_deliver_at)
    if document.shift is None:
        return *due_time(max_delay_ms, document.delay, document.deliver_at), expected_ms
    if expected_ms is None:
        why = "a repeated request then moves the message once"
        raise BadRequest(f"shift: give expected_deliver_at, too, the due time that the message has: {why}")
    if not (shift_ms := parse_shift(document.shift)):
        raise BadRequest("shift: 0 moves nothing; give a duration, or a negative one")
    return max(expected_ms + shift_ms, 0), False, expected_ms


def check_rate(rate: float | None) -> float | None:
    """Check the rate of a redrive, in messages per second, and return it; None for no limit. Raises BadRequest."""
    if rate is not None and not 0 < rate <= MAX_RATE:
        raise BadRequest(f"rate: messages per second, more than 0 and at most {MAX_RATE}, not {rate}")
    return rate
