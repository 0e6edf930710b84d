"""(signatures; implementation follows within the half hour)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hadelay.config import Config
from hadelay.core.clustertime import ClusterClock
from hadelay.core.dispatch import Poll
from hadelay.errors import HadelayError
from hadelay.runtime import Runtime

#: done(result, error): the sub-command's own result from apply, or why it is not known.
Done = Callable[[Any, HadelayError | None], None]


class LeaderDispatcher:
    """Runs on every node, works only between on_leader and on_follower. It is also `state.listener` (set by
    on_leader, cleared by on_follower)."""

    #: Plain ints for /metrics.
    handed_out: int
    sweeper_found: int
    damaged_links: int
    lateness_counts: list[int]  # one per LATENESS_BUCKETS_MS, plus +Inf; not cumulative
    lateness_sum_ms: int

    def __init__(
        self,
        *,
        state: Any,  # core.state.DelayState
        store: Any,  # storage.hours.HourStore
        runtime: Runtime,
        clock: ClusterClock,
        propose: Callable[[bytes, Done], None],
        config: Config,
        on_damage: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """propose: the batcher's. on_damage(hour, index, what): a chain is broken at that entry; after the repair
        call `repaired(hour)`."""

    def on_leader(self, term: int) -> None:
        """The no-op of `term` is applied and clock.lead was called."""

    def on_follower(self) -> None:
        """Answers every poll with NoLeader and clears what a leader derives."""

    def poll(self, poll: Poll) -> None:
        """Only on the leader (else done(None, NoLeader) at once)."""

    def cancel_poll(self, poll: Poll) -> None:
        """The consumer is gone: unless a grant is proposed for it already, it gets none. `done` is not called."""

    def before_settlement(self) -> None:
        """Call before proposing any ack, nack, extend or cancel: in interval mode hand-outs go first."""

    def hold(self, done: Callable[[], None]) -> None:
        """A planned transfer: hand out nothing more, commit the dispatch state, then done()."""

    def resume(self) -> None:
        """Nobody took over: go on."""

    def repaired(self, hour: int) -> None:
        """Damaged entries of the hour were repaired: walk its broken seconds again."""

    def clock_changed(self) -> None:
        """The clock became ready, or was slewed: recompute timers. Cheap; call after every observe_wall."""

    def cursor(self) -> tuple[int, int, int]:
        """(hour tick, second tick, localIndex) for GET /v1/cluster."""
        raise NotImplementedError

    def ready_counts(self) -> dict[int, int]:
        """Per topic number: due, not leased, not settled."""
        raise NotImplementedError
