"""The only door to PySyncObj 0.3.17: the library's consensus core, driven by us, with its holes closed from outside.

What stays the library's: terms, states, who may have a vote, counting votes, appending on leader and follower, match
indexes and the commit rule. What does not (docs/adr/0010): its clock (timeouts are set beyond all time, and an election
begins when we set the deadline into the past), its sender, its journal, its apply loop, its pickles.

Every private name that we touch is in this file, each with the reason; tests/raft/test_library.py fails when an upgrade
moves one. PySyncObj is MIT-licensed; nothing of it is copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.journal import Journal as LibraryJournal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from hadelay.raft.journal import Journal

#: What the library itself puts into the log when a term begins. Proposals are longer (RaftNode.propose sees to it).
NO_OP = b"\x01"
#: A node of its own, in a cluster of one: its disk, which has to agree like any other. No node can have a name with a
#: space in it.
DISK = "its disk"
#: Stands in for a node that does not vote itself, but leads until its removal is committed: the library counts it.
NOBODY = "nobody at all"

_FOLLOWER, _LEADER = 0, 2
#: Seconds; the library's own timers never fire.
_NEVER = 1e9


class Listener(Protocol):
    """Hears what the library does, from inside the library: a listener may note it, and must not call back."""

    def on_appended(self, index: int, command: bytes) -> None:
        """An entry is in the log, on a leader or a follower."""

    def on_state(self, leads: bool) -> None:
        """This node became leader (before its no-op is in the log), or stopped being it."""

    def on_vote_request(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        """This node campaigns, and asks `peer` (DISK: itself) for its vote."""

    def on_vote(self, peer: str, term: int) -> None:
        """This node votes for `peer`."""

    def on_entries(self) -> None:
        """The leader has entries to send."""


class _Log(LibraryJournal):  # type: ignore[misc]
    """Our journal, as far as the library looks into it: terms and indexes, never commands."""

    def __init__(self, journal: Journal, listener: Listener) -> None:
        self._journal, self._listener = journal, listener

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
        # A slice is asked for one term (the commit rule) or for whether anything follows an index (append_entries).
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
        """Not kept: the checkpoint's applied index and the next leader say it again."""

    def getRaftCommitIndex(self) -> int:
        return self._journal.base_index

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        raise AssertionError("conflicts are cut before the library sees the message")

    def deleteEntriesTo(self, entryTo: int) -> None:
        raise AssertionError("the library never compacts")

    clear = _destroy = lambda self: None


class _Transport(Transport):  # type: ignore[misc]
    """The library's other seam. Incoming messages are put in by `Core.message` when they are fit for it."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(None, None, None)
        self._listener = listener

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        kind = message["type"]
        if kind == "request_vote":
            log_end = message["last_log_index"], message["last_log_term"]
            self._listener.on_vote_request(node.id, message["term"], *log_end)
        elif kind == "response_vote":
            self._listener.on_vote(node.id, message["term"])
        # next_node_idx: the follower's answer is ours, when its disk has it.
        return True

    def destroy(self) -> None:
        pass


class _Idle:
    """Stands in for the library's poller and pipe: there is nothing to poll, the loop calls us."""

    def __init__(self, *_: object) -> None: ...

    def poll(self, timeout: float) -> None: ...

    def notify(self) -> None: ...


@contextmanager
def _seams(log: _Log) -> Iterator[None]:
    """The library takes these by module-level name, while it constructs itself."""
    names = {
        "createJournal": lambda _: log,
        "createPoller": _Idle,
        "PipeNotifier": _Idle,
    }
    saved = {name: getattr(syncobj, name) for name in names}
    try:
        for name, value in names.items():
            setattr(syncobj, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(syncobj, name, value)


class _Member(Node):  # type: ignore[misc]
    """Row 19: the library iterates sets of nodes, and vote requests would leave in another order in every process."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._hash = zlib.crc32(name.encode())

    def __hash__(self) -> int:
        return self._hash


class _Members(dict[str, _Member]):
    def __missing__(self, name: str) -> _Member:
        self[name] = member = _Member(name)
        return member


class Core(SyncObj):  # type: ignore[misc]
    def __init__(self, name: str, peers: Sequence[str], journal: Journal, listener: Listener) -> None:
        """`peers`: the names of the other voters."""
        self._journal, self._listener = journal, listener
        #: What this node believes: another may have been elected. Only committed entries are proof.
        self.leads = False
        #: Index of the no-op that began the term that this node leads, or led last.
        self.no_op = 0
        #: By name; whoever a frame comes from is one, whether it votes or not.
        self.members = _Members()
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
        with _seams(_Log(journal, listener)):
            others = [self.members[peer] for peer in peers or [DISK]]
            super().__init__(_Member(name), others, conf, transport=transport)
        self._to_library: Callable[[Node, dict[str, Any]], None] = transport._onMessageReceived
        if not peers:
            self.link(DISK, True)

    def _state_changed(self, old: int, new: int) -> None:
        if _LEADER in (old, new):
            self.leads = new == _LEADER
            if self.leads:
                self.no_op = self._journal.last_index + 1
            self._listener.on_state(self.leads)

    # -- what it says
    @property
    def leader(self) -> str | None:
        node = self._getLeader()
        return None if node is None else str(node.id)

    @property
    def term(self) -> int:
        return int(self.raftCurrentTerm)

    @property
    def commit_index(self) -> int:
        return int(self.raftCommitIndex)

    # -- what it is told
    def set_voters(self, others: Sequence[str], votes: bool) -> list[str]:
        """Who votes besides this node, from now on; none: its disk does. votes: whether this node does. Returns who is
        new."""
        # No public names: the library's own member changes lose members (docs/explanation/pysyncobj.md).
        new = {self.members[name]: None for name in [*(others or [DISK]), *([] if votes else [NOBODY])]}
        old: set[Node] = self._SyncObj__otherNodes  # type: ignore[has-type]
        added = [node for node in new if node not in old]
        if not added and len(new) == len(old):
            return []
        for node in added:
            self._SyncObj__raftNextIndex[node] = self._SyncObj__raftLog[-1][1] + 1
            self._SyncObj__raftMatchIndex[node] = 0
            self._SyncObj__lastResponseTime[node] = syncobj.monotonicTime()
        self._SyncObj__otherNodes = set(new)
        self.link(DISK, not others)
        return [str(node.id) for node in added]

    def link(self, peer: str, up: bool) -> None:
        """It campaigns only when it is connected to anyone."""
        transport = self._SyncObj__transport  # no public name
        (transport._onNodeConnected if up else transport._onNodeDisconnected)(self.members[peer])

    def tick(self) -> None:
        """Advance the commit index by what has been acknowledged; begin an election if `campaign` asked for one."""
        self._onTick(0.0)

    def campaign(self) -> None:
        # No public name: the only way to say that the election timeout is over.
        self._SyncObj__raftElectionDeadline = -1.0
        self.tick()

    def step_down(self, term: int = 0) -> None:
        """Stop leading or campaigning; go to `term` if it is a higher one."""
        # No public names: a follower without a leader, and a term heard of in a message that is ours.
        if term > self.raftCurrentTerm:
            self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = None

    def propose(self, command: bytes) -> None:
        self._applyCommand(command, None)
        self._checkCommandsToApply()

    def vote_requested(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        self._to_library(
            self.members[peer],
            {"type": "request_vote", "term": term, "last_log_index": last_index, "last_log_term": last_term},
        )

    def voted(self, peer: str, term: int) -> None:
        self._to_library(self.members[peer], {"type": "response_vote", "term": term})

    def heard(self, peer: str, term: int, commit_index: int) -> None:
        """`peer` leads `term`, and what this node holds up to `commit_index` is committed."""
        self._to_library(self.members[peer], {"type": "append_entries", "term": term, "commit_index": commit_index})

    def append(self, peer: str, term: int, commit_index: int, entries: list[tuple[Any, ...]]) -> None:
        """The same, with entries that follow directly on the last one here."""
        last = self._SyncObj__raftLog[-1]  # no public name
        self._to_library(
            self.members[peer],
            {
                "type": "append_entries",
                "term": term,
                "commit_index": commit_index,
                "prevLogIdx": last[1],
                "prevLogTerm": last[2],
                "entries": entries,
            },
        )

    def acknowledged(self, peer: str, index: int) -> None:
        """`peer` holds everything up to `index` on its disk, and so does this node. Never lowers anything."""
        self._to_library(
            self.members[peer],
            {"type": "next_node_idx", "next_node_idx": index + 1, "reset": False, "success": True},
        )

    def jump(self, index: int) -> None:
        """Everything up to `index` is in the state machine (checkpoint or snapshot), hence committed."""
        # No public names: the library knows no start but an empty one or its own pickled dump.
        self._SyncObj__raftCommitIndex = index
        self._SyncObj__raftLastApplied = index

    # -- what we take out of its hands
    def _SyncObj__sendAppendEntries(self) -> None:
        """Row 18: its sender slices the whole tail for each follower and knows no window."""
        self._listener.on_entries()

    def _SyncObj__applyLogEntries(self) -> bool:
        """Row 10: its apply loop retries for ever, and lets callbacks apply twice. Ours is raft/apply.py."""
        return False
