"""Transfer of leadership: proposals wait, the target gets the rest of the log, and is then asked to campaign."""

import logging
from functools import partial

from hadelay.errors import HadelayError, NoLeader, Overloaded
from hadelay.raft import messages
from hadelay.raft.membership import Membership
from hadelay.raft.part import Peer, RaftPart, Ready, Shared
from hadelay.raft.ports import Done, Finished
from hadelay.raft.replication import Replication

log = logging.getLogger(__name__)

#: Reason for which this node hands leadership over by itself (Notice.HAND_OVER) → the reason in words.
_WORDS = {"slow_sync": "a sync of its disk took too long", "removed": "it was removed from the cluster"}


class Transfers(RaftPart):
    def __init__(self, shared: Shared, members: Membership, replication: Replication) -> None:
        super().__init__(shared)
        self._members, self._replication = members, replication
        #: Peer that gets the leadership; None: no transfer is under way.
        self.target: Peer | None = None
        self._why = ""
        self._asked = False
        self._done: Finished | None = None
        self._waiting: list[tuple[bytes, Done]] = []
        self._attempt = 0
        #: Last failed transfer, as (target, heartbeat round at the failure): the target may still win an election.
        self._doubt: tuple[Peer, int] | None = None

    @property
    def in_doubt(self) -> bool:
        """Whether the target of a failed transfer may still take over: until it answers a heartbeat sent afterwards."""
        return self._doubt is not None and self._doubt[0].round <= self._doubt[1]

    def begin(self, to: str | None, done: Finished, why: str, now: float, ready: Ready) -> None:
        voters, peers = self._members.voters, self._members.peers.values()
        fit = [p for p in peers if p.up and p.admitted and p.name in voters and to in (None, p.name)]
        error: HadelayError | None = None
        if not self._core.leads:
            error = NoLeader("this node does not lead")
        elif self.target is not None or self.in_doubt:
            error = Overloaded("a transfer is already under way", retry_after_ms=self._config.transfer_ms)
        elif not fit:
            what = "no voting follower is connected" if to is None else f"{to} is not connected, or not a voting member"
            error = Overloaded(what, retry_after_ms=500)
        if error is not None:
            ready.answers.append(partial(done, error))
            return
        self.target, self._asked = max(fit, key=lambda peer: peer.match), False
        self._done, self._why = done, why
        self._attempt += 1
        ready.later(self._config.transfer_ms / 1000, self._give_up, self._attempt)
        self.progress(ready)

    def give_away(self, why: str, now: float, ready: Ready) -> None:
        """Hand over leadership to any other node; step down if the handover fails."""
        if self.target is None:
            log.warning(f"{why}_hand_over", extra={"term": self._core.term})

            def over(error: HadelayError | None) -> None:
                if error and self._core.leads:
                    self._core.left = f"stepped down: {_WORDS[why]}, and no node took over"
                    self._core.step_down()

            self.begin(None, over, _WORDS[why], now, ready)

    def hold(self, command: bytes, done: Done) -> None:
        if len(self._waiting) >= self._config.max_waiting:
            done(None, Overloaded("too many proposals wait for a transfer to end", retry_after_ms=300))
        else:
            self._waiting.append((command, done))

    def progress(self, ready: Ready) -> None:
        """Tell the target of the transfer to take over once it has the whole log."""
        target = self.target
        if target is not None and not self._asked and target.match == self._journal.last_index:
            self._asked, self._core.left = True, f"handed over: {self._why}"
            ready.send(target.name, messages.encode(messages.TIMEOUT_NOW, self._core.term))

    def _give_up(self, attempt: int, now: float, ready: Ready) -> None:
        target = self.target
        if attempt == self._attempt and target is not None:
            if self._asked and self._config.fence_failed_transfer:
                self._doubt = target, self._replication.round
                ready.later(self._config.transfer_ms / 1000, self._settle, attempt)
            self._core.left = ""
            self._end(Overloaded(f"{target.name} did not take over in time", retry_after_ms=1_000), ready)

    def _settle(self, attempt: int, now: float, ready: Ready) -> None:
        """After a failed transfer, force an election if the target may still take over: a new term voids the request to
        take over."""
        if attempt == self._attempt and self.in_doubt and self._core.leads:
            self._core.left = "stepped down: a handover had failed"
            self._core.step_down()

    def deposed(self, ready: Ready) -> None:
        self._doubt = None
        self._end(None, ready)

    def _end(self, error: HadelayError | None, ready: Ready) -> None:
        if self.target is None:
            return
        done, self._done, self.target = self._done, None, None
        waiting, self._waiting = self._waiting, []
        ready.answers += [partial(self._propose, command, answer) for command, answer in waiting]
        if done is not None:
            ready.answers.append(partial(done, error))
