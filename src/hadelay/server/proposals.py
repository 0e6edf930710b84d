"""How commands get into the log: those of this node's users, and batches that followers forward."""

from __future__ import annotations

from functools import partial
from typing import Any

from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import is_whole, kind_of
from hadelay.codec.results import Refused
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.raft.ports import Done
from hadelay.server.groupcommit import gather
from hadelay.server.leadership import Leadership
from hadelay.server.link import Reply

#: Only the leader changes members, after it has checked the change.
_NEVER = frozenset({Command.MEMBERS})
#: Commands of the leader alone. A FEATURE that this program does not have would end every node, at each start again.
_LEADERS = frozenset({Command.FEATURE, Command.INCARNATION})


class Proposals:
    """One per node. In interval mode hand-outs are proposed first, because apply judges leases by them."""

    def __init__(self, leadership: Leadership, max_queue_bytes: int) -> None:
        """max_queue_bytes: limit of publishes that wait here; beyond, followers' batches are refused."""
        self._leadership, self._group_commit, self._peers = leadership, leadership.group_commit, leadership.peers
        self._max_queue_bytes = max_queue_bytes
        leadership.link.handlers["submit"] = self._on_submit

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Propose any command, on any node. term: as in GroupCommit.propose."""
        dispatcher = self._leadership.dispatcher
        dispatcher.before_settlement()
        command = dispatcher.settling(command)
        self._group_commit.propose(command, dispatcher.in_order(command, done), term)

    def _on_submit(self, peer: str, commands: Any, reply: Reply) -> None:
        """A follower's batch: its commands join the next entry here, in this term only. A leader that was paused must
        not propose them in a later term: others may have answered them and forgotten their keys."""
        leading = self._leadership.leading
        if not leading:
            reply(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        if self._group_commit.queued_bytes > self._max_queue_bytes:
            reply(None, Overloaded("too many publishes are waiting for their commit", retry_after_ms=200))
            return
        if not isinstance(commands, list) or not all(map(is_whole, commands)) or any(c[0] in _NEVER for c in commands):
            # Checked before any command is in an entry, where a malformed one would spoil the others.
            raise ValueError("a batch is a list of whole commands")
        part, full = gather(len(commands), partial(_answer, reply)), self._peers.no_space()
        for n, command in enumerate(commands):
            if kind_of(command) in _LEADERS:
                part(n, Refused("malformed", "no other node than the leader asks for that"), None)
            elif full and command[0] == Command.PUBLISH:
                part(n, Refused("disk_full", full), None)
            else:
                self.propose(command, partial(part, n), leading)


def _answer(reply: Reply, results: list[Any], errors: list[HadelayError]) -> None:
    if not errors:
        reply(results, None)
    elif len(errors) == len(results) and all(isinstance(error, NoLeader) for error in errors):
        reply(None, errors[0])
    else:
        # NoLeader would make the follower send all commands again, and some of them may be in the log.
        reply(None, OutcomeUnknown("leadership changed before all commands finished"))
