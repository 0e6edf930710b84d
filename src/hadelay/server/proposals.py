"""The way of commands into the log, for this node's users and for followers that forward theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import is_whole, kind_of
from hadelay.codec.results import Refused
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.raft.ports import Done
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.leadership import Leadership
from hadelay.server.link import Link, Reply
from hadelay.server.peers import Peers

#: Members are changed by the leader alone, which looks first whether they may be.
_NEVER = frozenset({Command.MEMBERS})
#: What a leader knows by itself. A FEATURE that this program doesn't have would end every node, at each start again.
_LEADERS = frozenset({Command.FEATURE, Command.INCARNATION})


class Proposals:
    """One per node. In interval mode hand-outs go first: apply judges leases by them."""

    def __init__(
        self, leadership: Leadership, group_commit: GroupCommit, peers: Peers, link: Link, max_queue_bytes: int
    ) -> None:
        """max_queue_bytes: of publishes that wait here; beyond, followers are refused."""
        self._leadership, self._group_commit, self._peers = leadership, group_commit, peers
        self._max_queue_bytes = max_queue_bytes
        link.handlers["submit"] = self._on_submit

    def propose(self, command: bytes, done: Done, term: int = 0) -> None:
        """Any command, on any node. term: as GroupCommit.propose."""
        dispatcher = self._leadership.dispatcher
        dispatcher.before_settlement()
        command = dispatcher.settling(command)
        self._group_commit.propose(command, dispatcher.in_order(command, done), term)

    def _on_submit(self, peer: str, commands: Any, reply: Reply) -> None:
        """A follower's batch: its commands join the next entry here, and of this term: a node that was paused must not
        pass on what it was asked as leader, when others have answered that and forgotten its keys. Who asked does."""
        leading = self._leadership.leading
        if not leading:
            reply(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        if self._group_commit.queued_bytes > self._max_queue_bytes:
            reply(None, Overloaded("too many publishes are waiting for their commit", retry_after_ms=200))
            return
        if not isinstance(commands, list) or not all(map(is_whole, commands)) or any(c[0] in _NEVER for c in commands):
            # Before any of it is in an entry, where one that ends elsewhere would spoil the others.
            raise ValueError("a batch is a list of whole commands")
        answers, full = _Answers(len(commands), reply), self._peers.no_space()
        for n, command in enumerate(commands):
            if kind_of(command) in _LEADERS:
                answers.take(n, Refused("malformed", "no other node than the leader asks for that"), None)
            elif full and command[0] == Command.PUBLISH:
                answers.take(n, Refused("disk_full", full), None)
            else:
                self.propose(command, partial(answers.take, n), leading)


class _Answers:
    """The results of a follower's commands, answered together."""

    def __init__(self, count: int, reply: Reply) -> None:
        self.results: list[Any] = [None] * count
        self.missing, self.reply = count, reply
        self.errors: list[HadelayError] = []

    def take(self, n: int, result: Any, error: HadelayError | None) -> None:
        self.results[n] = result
        self.errors += [error] if error is not None else []
        self.missing -= 1
        if self.missing:
            return
        if not self.errors:
            self.reply(self.results, None)
        elif len(self.errors) == len(self.results) and all(isinstance(e, NoLeader) for e in self.errors):
            self.reply(None, self.errors[0])
        else:
            # NoLeader would make the follower send all of it again, and a part of it may be in the log.
            self.reply(None, OutcomeUnknown("leadership changed before all commands finished"))
