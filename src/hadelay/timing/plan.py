"""Computes the times of a schedule from its specification, and which of them are published at a given moment. Pure: the
leader, the preview and GET call it."""

from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import islice, pairwise

from hadelay.codec.schedules import LAST, MAX_RUN, CatchUp, Firing, Spec, State
from hadelay.errors import Impossible
from hadelay.model import NEVER_MS
from hadelay.timing import cron

#: Time in ms that the cluster has to make the message of an occurrence; after this time, the occurrence is missed.
GRACE_MS = 60_000
#: Limit of the occurrences that one firing of a schedule makes; the next firing continues with the rest.
FIRED = 200
#: Limit of the late occurrences that one firing examines beside those that may still be made. A slow pattern takes 70
#: µs per occurrence, on the leader's loop.
_LOOKED = 240
#: Latest occurrence, in Unix ms: the year 9900. cronsim searches up to 50 years ahead, and the calendar of Python ends
#: with the year 9999.
LATEST_MS = 250_246_627_200_000
#: Number of coming occurrences checked when a schedule is set: a jitter above one of their distances is refused.
_COMPARED = 100


def occurrences(spec: Spec, after_ms: int) -> Iterator[int]:
    """Occurrences after `after_ms`, ascending, without jitter. Raises BadRequest for a pattern or zone that this node
    does not know."""
    after_ms = max(after_ms, -1 if spec.start_ms is None else spec.start_ms - 1)
    end_ms = LATEST_MS if spec.end_ms is None else min(spec.end_ms, LATEST_MS)
    for at_ms in _all(spec, after_ms) if after_ms < end_ms else ():
        if at_ms > end_ms:
            return
        yield at_ms


def _all(spec: Spec, after_ms: int) -> Iterator[int]:
    if spec.cron is not None:
        yield from cron.after(cron.parse(spec.cron, spec.timezone), after_ms)
    elif spec.every_ms is not None:
        anchor_ms = spec.start_ms or 0
        at_ms = after_ms - (after_ms - anchor_ms) % spec.every_ms
        while True:
            at_ms += spec.every_ms
            yield at_ms
    else:
        yield from (at_ms for at_ms in spec.at or () if at_ms > after_ms)


def jitter_ms(spec: Spec, name: str, occurrence: int) -> int:
    """The random part of an occurrence's due time: the same at each call."""
    if not spec.jitter_ms:
        return 0
    digest = blake2b(f"{name}\0{occurrence}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % spec.jitter_ms


def check(spec: Spec, now_ms: int) -> None:
    """Check a schedule. Raises Impossible if it has no future occurrence, or if its jitter could change the order of
    its occurrences."""
    first = list(islice(occurrences(spec, now_ms), _COMPARED))
    if not first:
        years = f"; {cron.MAX_YEARS} years are searched" if spec.cron is not None else ""
        raise Impossible(f"the schedule has no future occurrence: check cron, at, start and end{years}")
    if spec.jitter_ms and any(b - a < spec.jitter_ms for a, b in pairwise(first)):
        raise Impossible("jitter: longer than the time between two occurrences, so messages could change order")


def fire(name: str, spec: Spec, state: State, now_ms: int, ahead_ms: int, most: int = FIRED) -> Firing | None:
    """Compute the firing to propose for an active schedule at `now_ms`: at most `most` occurrences up to `ahead_ms`
    ahead. Returns None if there is nothing to propose.

    Late occurrences are older than GRACE_MS. `one` makes the last of them, unless a later occurrence has come, too;
    `all` makes those within the window, the newest MAX_RUN at most; `none` makes none. The others are missed."""
    fresh_ms = now_ms - GRACE_MS
    skipped, last = _skip(spec, state.last, fresh_ms)
    coming = occurrences(spec, last)
    late: list[int] = []
    #: Limit of late occurrences that may still be made. They are the newest late ones, which are known only once all
    #: late ones are known.
    open_ = MAX_RUN if CatchUp(spec.catch_up) is CatchUp.ALL else 1
    following: int | None = None
    for following in coming:
        if following > fresh_ms or len(late) == open_ + _LOOKED:
            break
        late.append(following)
    else:
        following = None
    if len(late) == open_ + _LOOKED:
        # More late occurrences may follow. At most the newest `open_` can still be made: count all before them as
        # missed.
        sure = late[:_LOOKED]
        missed, following = skipped + len(sure), late[len(sure)]
        return _firing(name, spec, state, missed=missed, last=sure[-1], following=following, made=[])
    late_made = _caught_up(spec, late, now_ms, following)
    missed = len(late) - len(late_made)
    if missed:
        last = late[missed - 1]
    made = late_made
    while following is not None and following <= now_ms + ahead_ms and len(made) <= most:
        made.append(following)
        following = next(coming, None)
    room = NEVER_MS if spec.max_occurrences is None else spec.max_occurrences - state.made
    most = max(min(most, room), 1)
    if len(made) > most:
        made, following = made[:most], made[most]
    if made:
        last = made[-1]
    elif not skipped + missed and following == state.next:
        return None
    return _firing(name, spec, state, missed=skipped + missed, last=last, following=following, made=made)


def _skip(spec: Spec, last: int, fresh_ms: int) -> tuple[int, int]:
    """Skip occurrences of a schedule with an interval after a long outage, without visiting each: (number of
    occurrences that are missed for certain, the last of them)."""
    if spec.every_ms is None:
        return 0, last
    first = next(occurrences(spec, last), NEVER_MS)
    over = (min(fresh_ms, LATEST_MS if spec.end_ms is None else spec.end_ms) - first) // spec.every_ms - MAX_RUN
    return (over, first + (over - 1) * spec.every_ms) if over > 0 else (0, last)


def _caught_up(spec: Spec, late: list[int], now_ms: int, following: int | None) -> list[int]:
    """Choose the late occurrences to make, by the schedule's `catch_up`. following: first occurrence that is not
    late."""
    within = [at_ms for at_ms in late[-MAX_RUN:] if at_ms >= now_ms - spec.window_ms]
    if CatchUp(spec.catch_up) is CatchUp.ALL:
        return within
    if CatchUp(spec.catch_up) is CatchUp.ONE and (following is None or following > now_ms):
        return within[-1:]
    return []


def _firing(
    name: str, spec: Spec, state: State, *, missed: int, last: int, following: int | None, made: list[int]
) -> Firing:
    times = [(at_ms, at_ms + jitter_ms(spec, name, at_ms)) for at_ms in made]
    flags = LAST if following is None else 0
    return Firing(name, state.version, state.next, following or 0, last, missed, flags, times)


def explain(spec: Spec) -> str:
    """Describe the times of a schedule in words."""
    if spec.cron is not None:
        return f"{cron.explain(spec.cron)}, {spec.timezone}"
    if spec.every_ms is not None:
        since = datetime.fromtimestamp((spec.start_ms or 0) / 1000, UTC).isoformat().replace("+00:00", "Z")
        return f"Every {spec.every_ms / 1000:g} s, counted from {since}"
    return f"At {len(spec.at or ())} given times"
