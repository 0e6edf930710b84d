"""The only module that imports PySyncObj 0.3.17. hadelay uses this library's consensus algorithm; the module works
around the library's faults.

PySyncObj keeps: terms, states, granting and counting votes, appending on leader and follower, match indexes and the
commit rule. Replaced (ADR 10): its clock (its timers never fire; an election begins when this module sets the
deadline into the past), its sender, journal, apply loop and pickles.

This file has every private name in use, each with the reason; tests/raft/test_library.py fails when an upgrade moves
one. PySyncObj is MIT-licensed; nothing of it is copied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.journal import Journal as LibraryJournal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from hadelay.raft.journal import Journal

#: Entry that PySyncObj appends when a term begins. RaftNode.propose takes only longer entries, so no proposal is
#: equal to it.
NO_OP = b"\x01"
#: Name of the second voter in a cluster of one node: the node's own disk. It contains a space, so no node can have this
#: name.
DISK = "its disk"
#: Extra voter that never answers, set while a removed leader still leads: PySyncObj counts that leader as a voter, so
#: with this extra voter a majority needs one vote more.
NOBODY = "nobody at all"

_FOLLOWER, _LEADER = 0, 2
#: Timeout of PySyncObj's own timers, in seconds: so long that none of them ever fires.
_NEVER = 1e9


class RaftListener(Protocol):
    """Receives calls from inside PySyncObj; a method must not call PySyncObj back."""

    def on_appended(self, index: int, command: bytes) -> None:
        """Called when an entry was appended to the log, on a leader or a follower."""

    def on_state(self, leads: bool) -> None:
        """Called when this node became leader (`leads` is True; its no-op is not in the log yet), or stopped
        leading."""

    def on_vote_request(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        """Called when this node campaigns and requests the vote of `peer`; DISK stands for this node's own disk."""

    def on_vote(self, peer: str, term: int) -> None:
        """Called when this node votes for `peer`."""

    def on_entries(self) -> None:
        """Called when this node, the leader, has entries to send to its followers."""


class _Log(LibraryJournal):  # type: ignore[misc]
    """View of the journal for PySyncObj: terms and indexes of entries, never commands."""

    def __init__(self, journal: Journal, listener: RaftListener, committed: Callable[[int], None]) -> None:
        """committed: function that is called with each new commit index."""
        self._journal, self._listener, self._committed = journal, listener, committed

    def add(self, command: bytes, idx: int, term: int, record: memoryview | None = None) -> None:
        self._journal.append(command, idx, term, record)
        self._listener.on_appended(idx, command)

    def __getitem__(self, at: int | slice) -> Any:
        journal = self._journal
        if at == -1:
            return b"", journal.last_index, journal.last_term
        if isinstance(at, int):
            index = journal.base_index + at
            return b"", index, journal.term_at(index)
        # PySyncObj reads a slice of the log only to get a term, or to see whether more entries follow: two entries
        # suffice.
        first = journal.base_index + at.start
        last = journal.last_index if at.stop is None else min(journal.last_index, journal.base_index + at.stop - 1)
        return [(b"", index, journal.term_at(index)) for index in range(first, min(last, first + 1) + 1)]

    def __len__(self) -> int:
        return self._journal.last_index - self._journal.base_index + 1

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self._journal.vote(term, votedForNodeId)

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:
        return self._journal.voted_for

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        """Store nothing on disk: after a restart, this node learns the commit index from its checkpoint and the next
        leader."""
        self._committed(raftCommitIndex)

    def getRaftCommitIndex(self) -> int:
        return self._journal.base_index

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        raise AssertionError("PySyncObj must not delete entries: conflicts are cut off before it sees an append")

    def deleteEntriesTo(self, entryTo: int) -> None:
        raise AssertionError("PySyncObj must not compact the log")

    clear = _destroy = lambda self: None


class _Transport(Transport):  # type: ignore[misc]
    """Passes outgoing messages of PySyncObj to the listener. The class Core passes incoming messages to PySyncObj,
    by calls of `_onMessageReceived`."""

    def __init__(self, listener: RaftListener) -> None:
        super().__init__(None, None, None)
        self._listener = listener

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        kind = message["type"]
        if kind == "request_vote":
            log_end = message["last_log_index"], message["last_log_term"]
            self._listener.on_vote_request(node.id, message["term"], *log_end)
        elif kind == "response_vote":
            self._listener.on_vote(node.id, message["term"])
        # Drop PySyncObj's answers to appends (next_node_idx): raft/follower.py sends them once the entries are on disk.
        return True

    def destroy(self) -> None:
        pass


class _Idle:
    """Replaces PySyncObj's poller and pipe, which are not needed: the event loop of this node calls PySyncObj."""

    def __init__(self, *_: object) -> None: ...

    def poll(self, timeout: float) -> None: ...

    def notify(self) -> None: ...


@contextmanager
def _seams(log: _Log) -> Iterator[None]:
    """Context manager, to be used while PySyncObj is constructed: replaces functions that PySyncObj finds by their
    names in its module."""
    names = {"createJournal": lambda _: log, "createPoller": _Idle, "PipeNotifier": _Idle}
    saved = {name: getattr(syncobj, name) for name in names}
    try:
        for name, value in names.items():
            setattr(syncobj, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(syncobj, name, value)


class _Member(Node):  # type: ignore[misc]
    """Node of PySyncObj. There is one object for each name (_Members), so that comparing objects is enough. PySyncObj
    looks nodes up for every entry, and its own comparison, by name, takes four function calls."""

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class _Members(dict[str, _Member]):
    def __missing__(self, name: str) -> _Member:
        self[name] = member = _Member(name)
        return member


class Core(SyncObj):  # type: ignore[misc]
    def __init__(self, name: str, peers: Sequence[str], journal: Journal, listener: RaftListener) -> None:
        """`peers`: the names of the other voters."""
        self._journal, self._listener = journal, listener
        #: Whether this node believes that it leads; another leader may be elected already.
        self.leads = False
        #: Reason of this node's last step-down, as a predicate ("handed over: …"); "": another node had a later term.
        self.left = ""
        #: Index of the no-op entry that began the term which this node leads, or led last.
        self.no_op = 0
        #: Name → PySyncObj's node object of this node, and of every node that sends frames, voter or not.
        self.members = _Members()
        #: Index of the last entry that is known to be committed.
        self.commit_index = journal.base_index
        conf = SyncObjConf(
            autoTick=False,
            useFork=False,
            appendEntriesUseBatch=False,
            appendEntriesPeriod=_NEVER / 1000,
            raftMinTimeout=_NEVER,
            raftMaxTimeout=2 * _NEVER,
            connectionTimeout=4 * _NEVER,
            leaderFallbackTimeout=_NEVER,
            logCompactionMinEntries=1 << 62,
            logCompactionMinTime=_NEVER,
            commandsQueueSize=0,
            onStateChanged=self._state_changed,
        )
        transport = _Transport(listener)
        with _seams(_Log(journal, listener, self._committed)):
            others = [self.members[peer] for peer in peers or [DISK]]
            super().__init__(self.members[name], others, conf, transport=transport)
        # Replace PySyncObj's set of nodes by an ordered set: PySyncObj requests votes in this order, which has to
        # be the same in every process.
        self._SyncObj__otherNodes = dict.fromkeys(others).keys()
        self._to_library: Callable[[Node, dict[str, Any]], None] = transport._onMessageReceived
        if not peers:
            self.link(DISK, True)

    def _state_changed(self, old: int, new: int) -> None:
        if _LEADER in (old, new):
            self.leads = new == _LEADER
            if self.leads:
                self.left = ""
                self.no_op = self._journal.last_index + 1
            self._listener.on_state(self.leads)

    @property
    def leader(self) -> str | None:
        node = self._getLeader()
        return None if node is None else str(node.id)

    @property
    def term(self) -> int:
        return int(self.raftCurrentTerm)

    def _committed(self, index: int) -> None:
        self.commit_index = index

    def set_voters(self, others: Sequence[str], votes: bool) -> list[str]:
        """Set the voters besides this node; without others, the node's disk is the second voter. votes: whether this
        node votes. Returns the names of the added voters."""
        # Change private attributes: PySyncObj's public functions to change members lose members
        # (docs/explanation/pysyncobj.md).
        new = {self.members[name]: None for name in [*(others or [DISK]), *([] if votes else [NOBODY])]}
        old = self._SyncObj__otherNodes
        self._SyncObj__otherNodes = new.keys()
        added = [node for node in new if node not in old]
        if not added and len(new) == len(old):
            return []
        for node in added:
            self._SyncObj__raftNextIndex[node] = self._SyncObj__raftLog[-1][1] + 1
            self._SyncObj__raftMatchIndex[node] = 0
            self._SyncObj__lastResponseTime[node] = syncobj.monotonicTime()
        self.link(DISK, not others)
        return [str(node.id) for node in added]

    def link(self, peer: str, up: bool) -> None:
        """Tell PySyncObj whether `peer` is linked: without any linked node, PySyncObj does not campaign."""
        transport = self._SyncObj__transport  # a private attribute: PySyncObj has no public name for its transport
        (transport._onNodeConnected if up else transport._onNodeDisconnected)(self.members[peer])

    def tick(self) -> None:
        """Let PySyncObj advance the commit index, and begin an election if `campaign` asked for one."""
        self._onTick(0.0)

    def campaign(self) -> None:
        # Set a private attribute: PySyncObj has no public function to end the election timeout early.
        self._SyncObj__raftElectionDeadline = -1.0
        self.tick()

    def step_down(self, term: int = 0) -> None:
        """Become a follower without a leader; adopt `term` if it is higher than the current term."""
        # Set private attributes: through public methods, PySyncObj can neither lose its leader nor adopt a term.
        if term > self.raftCurrentTerm:
            self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = None

    def propose(self, command: bytes) -> None:
        self._applyCommand(command, None)
        self._checkCommandsToApply()

    def _receive(self, peer: str, kind: str, **fields: Any) -> None:
        self._to_library(self.members[peer], {"type": kind, **fields})

    def vote_requested(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        self._receive(peer, "request_vote", term=term, last_log_index=last_index, last_log_term=last_term)

    def voted(self, peer: str, term: int) -> None:
        self._receive(peer, "response_vote", term=term)

    def heard(self, peer: str, term: int, commit_index: int) -> None:
        """Tell PySyncObj that `peer` leads `term` and has committed this log up to `commit_index`."""
        self._receive(peer, "append_entries", term=term, commit_index=commit_index)

    def append(self, peer: str, term: int, commit_index: int, entries: list[tuple[Any, ...]]) -> None:
        """Tell PySyncObj that `peer` leads `term`, has committed the log up to `commit_index`, and sends `entries`,
        which directly follow this node's last entry."""
        # Read a private attribute: PySyncObj has no public access to its log
        _, index, last_term = self._SyncObj__raftLog[-1]
        prev = {"prevLogIdx": index, "prevLogTerm": last_term}
        self._receive(peer, "append_entries", term=term, commit_index=commit_index, entries=entries, **prev)

    def acknowledged(self, peer: str, index: int) -> None:
        """Tell PySyncObj that `peer` and this node have synced all entries up to `index`. Never lowers that index."""
        self._receive(peer, "next_node_idx", next_node_idx=index + 1, reset=False, success=True)

    def jump(self, index: int) -> None:
        """Tell PySyncObj that the state machine has all entries up to `index`, so they are committed."""
        # Set private attributes: PySyncObj can only start with an empty state, or with a dump that it pickled itself.
        self._SyncObj__raftCommitIndex = self.commit_index = index
        self._SyncObj__raftLastApplied = index

    def _SyncObj__sendAppendEntries(self) -> None:
        """Replaces PySyncObj's sender of entries, which would copy the log's tail for each follower, and has no send
        window."""
        self._listener.on_entries()

    def _SyncObj__applyLogEntries(self) -> bool:
        """Disables PySyncObj's apply loop, which may apply entries twice; raft/apply.py applies entries."""
        return False
