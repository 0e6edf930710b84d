"""Expiry of messages by their TTL, on the leader.

Table `ttl` is in the order of time, and keeps rows of messages that were acked. So rows whose time has come are read
first: TTL_EXPIRE is proposed only if one of their messages waits, or if many rows are useless.
"""

from __future__ import annotations

from typing import Any

from hadelay.codec.commands import encode_maintain
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import JobResult
from hadelay.errors import HadelayError
from hadelay.ledger import ttl
from hadelay.model import NEVER_MS
from hadelay.server.delivery.term import Term

#: Limit of rows of table `ttl` read at once; least count of useless rows that is worth a command.
_ROWS = 250
_SILENT_ROWS = 500
#: Pause between two looks, in ms: messages expire together. Apply grants none of them meanwhile.
_PAUSE_MS = 100


class TtlExpiry:
    """One per term. `filed` takes every time that apply tells of (ledger.ports.Listener.on_ttl)."""

    def __init__(self, term: Term) -> None:
        self._term, self._ledger = term, term.ledger
        self._alarm = term.alarm(self._look)
        #: No message of the rows before this key waits.
        self._start = b""
        self._silent = 0
        self._rest_until_ms = 0
        self._look_at(ttl.first_ms(self._ledger))

    def filed(self, at_ms: int) -> None:
        """Look at this cluster time, in Unix ms. It may have passed: a message whose row was skipped while it was
        leased waits again."""
        self._start = min(self._start, ttl.KEY.pack(at_ms, 0))
        self._look_at(at_ms)

    def _look_at(self, at_ms: int) -> None:
        if at_ms < NEVER_MS:
            self._alarm.at(self._term.mono_at(max(at_ms, self._rest_until_ms)))

    def _look(self) -> None:
        now = self._term.now()
        keys = ttl.due(self._ledger, now, self._start, _ROWS)
        self._silent += len(keys)
        if keys:
            self._rest_until_ms = now + _PAUSE_MS
        if self._silent >= _SILENT_ROWS or ttl.ends_something(self._ledger, keys):
            self._term.propose_behind(encode_maintain(Job.TTL_EXPIRE), self._ended)
            return
        if keys:
            self._start = keys[-1] + b"\0"
        self._look_at(now if len(keys) == _ROWS else ttl.first_ms(self._ledger, self._start))

    def _ended(self, result: Any, error: HadelayError | None) -> None:
        self._start, self._silent = self._ledger.ttl_from, 0
        # A slice after a slice as long as there is more: a backlog goes as fast as the log takes it.
        if error is None and isinstance(result, JobResult) and not result.done:
            self._rest_until_ms = 0
        self._look_at(self._term.now())
