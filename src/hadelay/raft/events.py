"""Event handling of a Raft node: a part of the node handles each event; afterwards the event's effects are carried
out."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from hadelay.platform.network import Network
from hadelay.platform.runtime import Runtime
from hadelay.raft.apply import Applier
from hadelay.raft.journal import Journal
from hadelay.raft.part import Notice, Ready, Step

log = logging.getLogger(__name__)


class Events:
    """Base class of RaftNode, which runs the node's events. An error in an event stops the node."""

    applier: Applier

    def __init__(
        self, journal: Journal, network: Network, runtime: Runtime, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self.journal, self.network, self.runtime, self._on_fatal = journal, network, runtime, on_fatal
        self.stopped = False
        #: Effects of the current event (frames, syncs, timers, callbacks), and whether an event is being handled.
        self._ready, self._busy = Ready(), False
        self._flushing = False

    def _advance(self, now: float, ready: Ready) -> None:
        raise NotImplementedError

    def _apply(self, now: float, ready: Ready) -> None:
        raise NotImplementedError

    def _notice(self, notice: Notice, about: Any, now: float, ready: Ready) -> None:
        raise NotImplementedError

    def fatal(self, error: BaseException) -> None:
        """Stop the node because of an unexpected error: from now on, it sends nothing more."""
        if not self.stopped:
            self.stopped = True
            log.critical("fatal", exc_info=error)
            self.journal.closed = True
            self.network.close()
            self._on_fatal(error)

    def event(self, step: Step, *args: Any) -> None:
        """Let a part of the node handle an event by a call of `step`. If events are nested, the effects of all are
        carried out at the end of the outer event."""
        if self.stopped:
            return
        inside, self._busy = self._busy, True
        try:
            step(*args, self.runtime.monotonic(), self._ready)
            if not inside:
                self._carry_out(self._ready)
        except Exception as error:
            self.fatal(error)
        finally:
            self._busy = inside

    def _carry_out(self, ready: Ready) -> None:
        """Carry out an event's pending effects, kind by kind in the order of Ready's fields, until nothing is pending.
        After each kind, begin with the first kind again."""
        while not self.stopped:
            if ready.sends:
                sends, ready.sends = ready.sends, []
                for peer, frame, urgent in sends:
                    self.network.send(peer, frame, urgent)
            elif ready.when_durable:
                steps, ready.when_durable = ready.when_durable, []
                for step, args in steps:
                    self.journal.when_synced(partial(self.event, step, *args))
            elif ready.sync:
                ready.sync = False
                if not self._flushing and not self.journal.all_synced:
                    self._flushing = True
                    self.runtime.call_soon(self.event, self._flush)
                if self._flushing:
                    # begin the sync first, and apply later: other nodes wait for the sync, not for apply
                    ready.apply = False
            elif ready.advance:
                ready.advance = False
                self._advance(self.runtime.monotonic(), ready)
            elif ready.apply:
                ready.apply = False
                self._apply(self.runtime.monotonic(), ready)
            elif ready.timers:
                timers, ready.timers = ready.timers, []
                for delay_s, step, args in timers:
                    if delay_s > 0:
                        self.runtime.call_later(delay_s, self.event, step, *args)
                    else:
                        self.runtime.call_soon(self.event, step, *args)
            elif ready.notices:
                notice, about = ready.notices.pop(0)
                self._notice(notice, about, self.runtime.monotonic(), ready)
            elif ready.answers:
                answers, ready.answers = ready.answers, []
                for answer in answers:
                    answer()
            else:
                return

    def _flush(self, now: float, ready: Ready) -> None:
        """Write and sync queued journal records, once per turn of the loop, after the turn's frames were sent."""
        self._flushing = False
        self.journal.kick()
        self.applier.soon(ready)
