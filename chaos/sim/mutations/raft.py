"""Deliberate bugs in Raft, and in the code that writes to disks."""

import errno
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

from chaos.sim.disk import SimDisk, SimFile
from chaos.sim.mutations.table import CRASHES, LOG, Bug, Original, bug, stub
from hadelay.codec.entries import encode_entry
from hadelay.platform.disk import Disk, File
from hadelay.raft import messages
from hadelay.raft.apply import Applier, Reads
from hadelay.raft.election import Elections
from hadelay.raft.follower import Follower
from hadelay.raft.journal import Journal
from hadelay.raft.library import NO_OP, Core
from hadelay.raft.membership import Membership
from hadelay.raft.messages import AppendReply
from hadelay.raft.node import RaftNode
from hadelay.raft.part import Peer, Ready
from hadelay.raft.ports import FOUNDING
from hadelay.raft.replication import Replication
from hadelay.raft.snapshot import Snapshots


def _nothing(*_: Any) -> None:
    pass


def _careless(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    def careless(file: Any) -> None:
        with suppress(OSError):
            sync(file)

    return careless


stub(
    "no_sync", "no sync reaches the disk", "power_cut_all kill", LOG, (SimDisk, "sync", _nothing),
    (File, "sync", _nothing), (Disk, "sync_dir", _nothing), (Disk, "sync_files", _nothing),
)  # fmt: skip
stub(
    "swallowed_sync_error", "an error of fdatasync is ignored", "failed_sync", ("I17 fail-stop, failed sync",),
    (SimFile, "sync", _careless(SimFile.sync)), (File, "sync", _careless(File.sync)),
)  # fmt: skip
stub(
    "unsynced_snapshot", "the files of a snapshot are not synced", "power_at_send power_cut kill partition", LOG,
    (SimDisk, "sync_files", _nothing),
)  # fmt: skip
stub(
    "two_lists_at_once", "a leader changes the members before an entry of its own term is committed", "members", LOG,
    (Membership, "refusal", lambda membership, members: None),
)  # fmt: skip
stub(
    "kept_change", "a change of the members that is cut off from the log stays in force", "members",
    ("I13 log safety, members",), (Membership, "truncated", _nothing),
)  # fmt: skip
stub(
    "founder_joins", "who is added is taken for a founder until that is committed", "members",
    ("I12 divergence, entries",),
    (Membership, "min_incarnation", lambda self, name: self._machine.incarnation(name) or FOUNDING),
)  # fmt: skip
stub(
    "unconfirmed_read", "a read does not wait for what was committed before it", "pause partition slow_link",
    ("stale read",), (Reads, "read", lambda self, done, now, ready: done(None)),
)  # fmt: skip


@bug("every fifth sync is skipped", "power_cut_all power_cut", *LOG, at=(SimDisk, "sync"))
def skipped_sync(sync: Original, disk: SimDisk, settle: Callable[[], None]) -> None:
    sync(disk, (lambda: None) if disk.syncs % 5 == 4 else settle)


@bug("a follower acknowledges before its disk has it", "power_cut_all slow_sync", *LOG, at=(Follower, "_answer"))
def answer_before_sync(_: Original, follower: Follower, message: Any, ready: Ready) -> None:
    journal = follower._journal
    journal.synced_index = max(journal.synced_index, follower.verified)
    follower._send_ok(message.round, ready)


@bug("the leader commits without a majority", CRASHES, "I14 durability, majority", at=(Replication, "count_all"))
def commit_alone(_: Original, leader: Replication, ready: Ready) -> None:
    for peer in leader._members.peers.values():
        leader._core.acknowledged(peer.name, leader._journal.synced_index)
    ready.advance = True


@bug(
    "PySyncObj's own follower and sender: batches are sent twice, and matching entries are cut", "reset kill one_way",
    *LOG,
)  # fmt: skip
def plain_library() -> Bug:
    matched = Peer.matched

    def back(peer: Peer, index: int) -> None:
        matched(peer, index)
        peer.next = peer.match + 1

    def take_all(follower: Follower, entries: list[Any], now: float, ready: Ready) -> list[Any]:
        journal = follower._journal
        if entries[0][1] > journal.base_index and entries[0][1] <= journal.last_index:
            journal.truncate(entries[0][1])
        return entries

    return [patch.object(Follower, "_skip_known", take_all), patch.object(Peer, "matched", back)]


@bug("a vote is not written down", CRASHES, "I13 log safety, vote on disk", at=(Journal, "vote"))
def forgotten_vote(vote: Original, journal: Journal, term: int, voted_for: str | None) -> None:
    vote(journal, term, None)
    journal.voted_for = voted_for


@bug("a node with an empty disk votes at once", "wipe kill partition", *LOG)
def wiped_node_votes() -> Bug:
    note = Journal.create.__func__  # type: ignore[attr-defined]

    def trusted(cls: type[Journal], *args: Any, **more: Any) -> Journal:
        journal: Journal = note(cls, *args, **more)
        journal.admitted = True
        return journal

    return [patch.object(Journal, "create", classmethod(trusted))]


@bug("a change of the members is in force only when it is applied", "members", *LOG, at=(Membership, "_derive"))
def members_when_applied(derive: Original, membership: Membership) -> None:
    appended, membership.appended_lists = membership.appended_lists, []
    derive(membership)
    membership.appended_lists = appended


@bug(
    "a node that was asked to take over does not wait for a healthy leader until its next campaign",
    "transfer",
    "campaigns",
)
def deaf_after_transfer() -> Bug:
    heard, campaign = Elections.heard_leader, Elections.campaign
    deaf: set[Elections] = set()

    def called_on(elections: Elections, now: float, ready: Ready, *, called: bool = False) -> None:
        (deaf.add if called else deaf.discard)(elections)
        campaign(elections, now, ready, called=called)

    def hear(elections: Elections, now: float) -> None:
        deadline = elections._deadline
        heard(elections, now)
        if elections in deaf:
            elections._deadline = deadline

    return [patch.object(Elections, "campaign", called_on), patch.object(Elections, "heard_leader", hear)]


@bug(
    "a vote leaves before its sync",
    "power_at_send kill",
    "I13 log safety, vote on disk",
    at=(Elections, "vote"),
    raft=True,
)
def vote_before_sync(_: Original, elections: Elections, name: str, term: int, ready: Ready) -> None:
    if elections._members.connected(name):
        ready.send(name, messages.encode(messages.VOTE_REPLY, term))


@bug(
    "the name of the segment that a truncation begins is not synced", "partition power_cut power_at_send", *LOG,
    at=(Journal, "truncate"), raft=True,
)  # fmt: skip
def unsynced_name(truncate: Original, journal: Journal, index: int) -> None:
    names_changed = journal._names_changed
    truncate(journal, index)
    journal._names_changed = names_changed


@bug(
    "what was verified against one leader's log counts for the next one's", "partition transfer", "what leaders count",
    at=(Follower, "_follow"), raft=True,
)  # fmt: skip
def kept_verified(follow: Original, follower: Follower, *args: Any) -> None:
    verified = follower.verified
    follow(follower, *args)
    follower.verified = verified


@bug(
    "a new leader answers reads before an entry of its own term is committed", "kill slow_sync", "stale read",
    at=(Replication, "begin"), raft=True,
)  # fmt: skip
def read_before_no_op(begin: Original, leader: Replication, now: float, ready: Ready) -> None:
    begin(leader, now, ready)
    leader._core.no_op = 0


@bug(
    "an answer to an append of an earlier term counts", "partition transfer one_way", "what leaders count",
    at=(Replication, "on_reply"), raft=True,
)  # fmt: skip
def old_reply(
    on_reply: Original, leader: Replication, peer: Peer, reply: AppendReply, now: float, ready: Ready
) -> None:
    if reply.status == messages.OK and reply.term < leader._core.term:
        reply = reply._replace(term=leader._core.term)
    on_reply(leader, peer, reply, now, ready)


@bug(
    "an answer to the heartbeat before a read confirms it", "partition reset", "stale read", at=(Replication, "read"),
    raft=True,
)  # fmt: skip
def old_round(read: Original, leader: Replication, done: Any, now: float, ready: Ready) -> None:
    count = len(leader._reads)
    read(leader, done, now, ready)
    if len(leader._reads) > count:
        leader._reads[-1] = (leader._reads[-1][0] - 1, *leader._reads[-1][1:])


@bug(
    "after a snapshot the commit index is one too high",
    "kill partition",
    "I13 log safety, commit index ahead",
    at=(Snapshots, "_switch"),
    raft=True,
)
def commit_past_snapshot(switch: Original, snapshots: Snapshots, *args: Any) -> None:
    switch(snapshots, *args)
    if snapshots._stats.snapshots_installed == 1:
        snapshots._core.jump(snapshots._core.commit_index + 1)


@bug(
    "after a snapshot, a node keeps a log with another entry at the snapshot's index", "partition kill",
    "I13 log safety, applied entry", at=(Snapshots, "_switch"), raft=True,
)  # fmt: skip
def kept_log(switch: Original, snapshots: Snapshots, pull: Any, *args: Any) -> None:
    journal = snapshots._journal
    here = journal.base_index <= pull.manifest.index <= journal.last_index
    with patch.object(journal, "reset", _nothing) if here else nullcontext():
        switch(snapshots, pull, *args)


@bug("the journal is deleted up to the applied index, ahead of the checkpoint", "", "I14 durability, compacted",
    at=(RaftNode, "compact"),
)  # fmt: skip
def compacted_ahead(compact: Original, node: RaftNode, index: int) -> None:
    compact(node, node.applied_index)


@bug("a node applies another entry", "", "I12 divergence, entries", at=(Applier, "_apply"))
def other_entry(apply: Original, applier: Applier, entry: Any, *rest: Any) -> None:
    command, index, term, record = entry
    if command != NO_OP and not index % 50 and applier._members.name == "n2":
        command = encode_entry(0, [])
    apply(applier, (command, index, term, record), *rest)


@bug(
    "who has voted votes again", "partition kill reset", "I13 log safety, votes", at=(Core, "vote_requested"), raft=True
)
def two_votes(request: Original, core: Core, *args: Any) -> None:
    core._SyncObj__votedForNodeId = None
    request(core, *args)


@bug(
    "the first vote that a candidate gets elects it", "partition kill reset", "I13 log safety, leaders",
    at=(Elections, "on_vote_reply"), raft=True,
)  # fmt: skip
def one_vote_elects(reply: Original, elections: Elections, peer: Peer, term: int, now: float, ready: Ready) -> None:
    reply(elections, peer, term, now, ready)
    for name in elections._members.others:
        elections._core.voted(name, term)


@bug("a term without a vote is not written down", CRASHES, "I13 log safety, term", at=(Journal, "vote"))
def forgotten_term(vote: Original, journal: Journal, term: int, voted_for: str | None) -> None:
    if voted_for is None:
        journal.term, journal.voted_for = term, None
    else:
        vote(journal, term, voted_for)


@bug(
    "a new leader's heartbeat sets the commit index back", "kill partition", "I13 log safety, commit index back",
    at=(Follower, "_follow"), raft=True,
)  # fmt: skip
def commit_index_back(follow: Original, follower: Follower, *args: Any) -> None:
    follow(follower, *args)
    core = follower._core
    core._SyncObj__raftCommitIndex = max(follower._journal.base_index, core.commit_index - 1)


@bug(
    "a follower applies before its own disk has the entry", "slow_sync", "I14 durability, applied", at=(Applier, "run")
)
def applied_before_sync(run: Original, applier: Applier, now: float, ready: Ready) -> None:
    journal = applier._journal
    synced, journal.synced_index = journal.synced_index, journal.last_index
    try:
        run(applier, now, ready)
    finally:
        journal.synced_index = min(synced, journal.last_index)


@bug(
    "a journal that is opened forgets its last entry", "kill stop", "I14 durability, restart",
    at=(Journal, "_begin_anew"),
)  # fmt: skip
def lost_tail(begin: Original, journal: Journal, durable: tuple[int, int]) -> None:
    begin(journal, durable)
    if journal.last_index > journal.base_index + 1:
        journal.truncate(journal.last_index)
        journal._write_all()


@bug("a node whose sync failed goes on", "failed_sync", "I17 fail-stop, failed sync", at=(RaftNode, "fatal"))
def goes_on(fatal: Original, node: RaftNode, error: BaseException) -> None:
    if not isinstance(error, OSError) or error.errno != errno.EIO:
        fatal(node, error)


@bug(
    "a reply to an earlier pre-vote counts", "partition slow_link pause", "campaigns, pre-votes",
    at=(Elections, "on_pre_vote_reply"), raft=True,
)  # fmt: skip
def old_pre_vote(reply: Original, elections: Elections, peer: Peer, asked: int, *more: Any) -> None:
    reply(elections, peer, elections._core.term + 1, *more)


@bug(
    "a follower answers in a term that is not on its disk", "power_at_send partition slow_sync",
    "I13 log safety, term on disk", at=(Follower, "_answer"), raft=True,
)  # fmt: skip
def answer_before_term(answer: Original, follower: Follower, message: Any, ready: Ready) -> None:
    if follower._journal.synced_index >= follower.verified:
        follower._send_ok(message.round, ready)
    else:
        answer(follower, message, ready)


@bug(
    "a node whose pre-vote failed asks again after a minute only", CRASHES, "leaderless", at=(Elections, "_ask"),
    raft=True,
)  # fmt: skip
def asks_once(ask: Original, elections: Elections, now: float, ready: Ready) -> None:
    ask(elections, now, ready)
    if elections._asking is not None:
        elections._deadline = now + 60.0
