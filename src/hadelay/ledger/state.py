"""State of the replicated state machine: all messages with their states. This module has data and look-ups;
ledger/apply.py and the modules that it calls change them.

Law 1: only `apply_entry` changes the ledger, and only because a committed entry says so.
Law 2: `now_ms` arrives inside the entry, stamped once by the leader. Nothing here asks what time it is.
Law 3: apply never raises for bad input; a refusal is a value. Errors that apply raises (a damaged file, a feature
       level that this code does not have) must stop the node: going on would make the replicas differ.
Law 4: never iterate a set of strings: hashing differs between processes, so replicas would disagree.
Law 5: nothing is kept in memory per waiting message. Entries live in the hours' files; the ledger has bitmaps of
       settled entries, open grants, and counters.
"""

import re
from collections import Counter
from dataclasses import dataclass

from pyroaring import BitMap

from hadelay.codec.batches import State
from hadelay.codec.formats import CONSUMER, NODE, REASON, TOPIC
from hadelay.ledger.changedrows import HOURS, ChangedRows
from hadelay.ledger.hours.hourstate import HourState
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.leases.grantrows import OpenGrant
from hadelay.ledger.ports import HourStore, LedgerListener, NameStore, TableStore
from hadelay.ledger.topics.topics import TopicBook, TopicState
from hadelay.members import Members
from hadelay.model import HOUR_MS, NONE32, Event
from hadelay.rights import Audit, Token
from hadelay.settings.cluster import Settings
from hadelay.settings.shardmap import ALONE, Shards
from hadelay.version import FIRST_LEVEL

#: Pattern of the parts in which reasons of similar failures differ: words with a digit, such as a number or an id.
_VARIABLE = re.compile(r"[A-Za-z0-9_-]*[0-9][A-Za-z0-9_-]*")
#: Text shown for failures whose own reason got no number, because the limit of reasons is reached.
OTHER_REASONS = "(other reasons)"
#: Kind of names → (pattern of the parts in which similar names differ, name that histories show for all names beyond
#: the limit).
OTHERS = {
    REASON: (_VARIABLE, OTHER_REASONS),
    CONSUMER: (re.compile(r"[A-Za-z0-9]*[0-9][A-Za-z0-9]*"), "(other consumers)"),
}
#: Node number in dispatch log entries of events that were not caused by a request to a node.
NO_NODE = 0xFF


@dataclass(slots=True)
class ScheduleCounts:
    """Counts over all schedules; the schedules are in tables (ledger/schedules/schedules.py)."""

    count: int = 0
    #: Size of the templates (messages to publish) of all schedules, in bytes.
    bytes: int = 0
    #: Newest version of the IANA time zone data, such as 2026f, with which every schedule was computed.
    tzdata: str = ""


@dataclass(slots=True)
class BatchCounts:
    """Counts over all batches, which are in tables (ledger/batches)."""

    count: int = 0
    #: Number of batches ever opened, which is the number of the last one.
    opened: int = 0
    #: `cancels`: number of commands that require a search for waiting members of cancelled batches: a BATCH_CANCEL that
    #: left unsettled members, or a command that filed such members anew during a search. `searched`: number of these
    #: commands, from the first on, whose waiting members are all cancelled.
    cancels: int = 0
    searched: int = 0


class Ledger:
    """Replicated state of the cluster. Only apply changes `store`, `tables` and `names`; see ledger/ports.py."""

    def __init__(
        self, group: int, store: HourStore, tables: TableStore, names: NameStore, settings: Settings | None = None
    ) -> None:
        self.group, self.store, self.tables, self.names = group, store, tables, names
        self.settings, self.listener = settings or Settings(), LedgerListener()
        #: Cluster time of the last applied entry, in Unix ms.
        self.now_ms = 0
        self.applied = self.term = 0
        #: CRC32C over all applied log entries, each with its index and term: equal on equal replicas.
        self.chain = 0
        #: The feature level that the cluster has switched to.
        self.level = FIRST_LEVEL
        #: Dispatch cursor: hour, second of the hour, localIndex. A new leader resumes at this second (ADR 191).
        self.cursor = (0, 0, 0)
        #: Due times, as ranges in Unix ms, of messages that earlier leaders may have handed out without a record; as of
        #: the beginning of the last applied entry's term (ledger/leases/suspects.py).
        self.suspects: tuple[tuple[int, int], ...] = ()
        #: Rows that the next checkpoint writes (ledger/checkpoint.py).
        self.changes = ChangedRows()
        self.topics = TopicBook(self.changes)
        self.hours: dict[int, HourState] = {}
        self.grants: dict[tuple[int, int], OpenGrant] = {}
        #: Number of grants ever made.
        self.granted = 0
        #: Consumer → request id → (term, seq) of the grant, as long as the grant is open.
        self.requests: dict[str, dict[bytes, tuple[int, int]]] = {}
        self.incarnations: dict[str, int] = {}
        #: Members from the log entry at `members_index`; () as long as the cluster has the members it was founded with.
        self.members: Members = ()
        self.members_index = 0
        #: The shard map; ALONE for a cluster without one. A change replaces the object, so that caches notice it.
        self.shards: Shards = ALONE
        #: Whether a MEMBERS is the only command of the entry being applied: beside others, a MEMBERS is refused.
        self.changes_members = False
        #: Name of the token that requested the command being applied; "" without a token (ledger/limits/shares.py).
        self.by = ""
        #: Name of a shared table → name of a token → number of rows that requests with such tokens made.
        self.made: dict[str, Counter[str]] = {}
        #: Names of tokens that no share limits: all tokens of the name have the scope admin. Derived from `tokens`.
        self.admins: frozenset[str] = frozenset()
        self.retired = BitMap()
        #: Position from which SWEEP continues: (hour, globalIndex).
        self.sweep = (0, 0)
        #: Key up to which TTL_EXPIRE has finished the table `ttl`. Not in checkpoints: b"" is correct, only slower.
        self.ttl_from = b""
        self.key_epoch = self.key_epoch_ends_ms = 0
        self.key_count = self.key_count_before = self.keys_dropped_early = 0
        #: Number of rows of the table `uniq`; and key of `uniqend` where the search for ended periods begins. The key
        #: is not in checkpoints: b"" is correct, only slower.
        self.unique_count, self.unique_from = 0, b""
        #: Key up to which BATCHES has finished the table `batchend`. Not in checkpoints: b"" is correct, only slower.
        self.batchend_from = b""
        #: Counts of callbacks by outcome, since this object was made; not in checkpoints.
        self.callbacks: Counter[str] = Counter()
        #: Counts of unused topics that were deleted (`expires_after`) and of schedules that finished, since this object
        #: was made; not in checkpoints.
        self.topics_expired = self.schedules_finished = 0
        #: Tokens by id. A change replaces the dict, so that caches notice it (ledger/access.py).
        self.tokens: dict[str, Token] = {}
        self.audit, self.schedules, self.batches = Audit(), ScheduleCounts(), BatchCounts()
        #: States of all batches by number: counters that are changed in place, after `changes.note`.
        self.batch_states: dict[int, State] = {}
        #: Numbers of the batches whose last member was settled by the command being applied.
        self.complete: list[int] = []
        #: Bulk jobs by number, running and ended, oldest first.
        self.jobs: dict[int, BulkJob] = {}
        #: Number of bulk jobs ever begun.
        self.jobs_begun = 0
        #: Running fills by number of the topic whose messages they copy (ledger/messages/fills.py).
        self.fills: dict[int, BulkJob] = {}
        #: Number of the kept copies that fills have made.
        self.filled_copies = 0
        #: Number of dead letters with a group (ledger/groups/messagegroups.py).
        self.grouped_dead = 0
        #: Number of names that have a number, by kind: consumers, nodes and reasons.
        self.named = {CONSUMER: 0, NODE: 0, REASON: 0}

    @property
    def now_hour(self) -> int:
        return self.now_ms // HOUR_MS

    def hour_state(self, hour: int) -> HourState:
        """State of an hour for a change, created if missing; puts the hour into the next checkpoint."""
        self.changes.note(HOURS, hour)
        if hour not in self.hours:
            self.hours[hour] = HourState()
        return self.hours[hour]

    def retire_hour(self, hour: int) -> None:
        self.changes.note(HOURS, hour)
        self.store.retire(hour)
        self.retired.add(hour)
        self.hours.pop(hour, None)

    def number_of(self, kind: int, name: str) -> int:
        """Number of a consumer, node or reason, assigned if new; beyond the limit NONE32, for nodes NO_NODE."""
        try:
            return self.names.number(kind, name)
        except KeyError:
            pass
        limits = {
            CONSUMER: (self.settings.max_consumers, NONE32),
            NODE: (NO_NODE, NO_NODE),
            REASON: (self.settings.max_reasons, NONE32),
        }
        limit, beyond = limits[kind]
        if kind in OTHERS and self.named[kind] >= limit // 2:
            return self._shared_name(kind, name, limit)
        if self.named[kind] >= limit:
            return beyond
        self.named[kind] += 1
        return self.names.register(kind, name)

    def _shared_name(self, kind: int, text: str, limit: int) -> int:
        """Number of a reason or consumer that is new although half of all numbers are in use: texts that differ only in
        numbers and ids share one, and the last number stands for all further texts, so that histories have no gaps."""
        variable, others = OTHERS[kind]
        shared = variable.sub("#", text)
        for name in (shared, others):
            try:
                return self.names.number(kind, name)
            except KeyError:
                if self.named[kind] < limit - (name is shared):
                    self.named[kind] += 1
                    return self.names.register(kind, name)
        return NONE32

    def open_entries(self, hour: int) -> int:
        """Number of entries that wait or are leased, in O(1)."""
        hour_state = self.hours.get(hour)
        return self.store.count(hour) - (len(hour_state.settled) if hour_state else 0)

    def outcome_of(self, hour: int, index: int) -> tuple[Event | None, bool]:
        """How an entry ended: (event, whether the entry is leased); (None, False) for a waiting or unknown entry."""
        hour_state = self.hours.get(hour)
        return (hour_state.ended(index), index in hour_state.leased) if hour_state else (None, False)

    def grant_for(self, consumer: str, request_id: bytes) -> OpenGrant | None:
        """Grant of an earlier receive with this request id, if still open: the grant answers the repeated receive."""
        key = self.requests.get(consumer, {}).get(request_id)
        return self.grants[key] if key is not None else None

    def topic(self, name: str) -> TopicState | None:
        """The existing topic of that name; None if there is none."""
        found = self.known_topic(name)
        return found if found is not None and found.exists else None

    def known_topic(self, name: str) -> TopicState | None:
        """The topic of that name, even if it is deleted; None if there never was one."""
        try:
            return self.topics[self.names.number(TOPIC, name)]
        except KeyError:
            return None

    def end_job(self, job: BulkJob, *, stopped: bool = False) -> None:
        """End a bulk job. The end of a fill releases the acked messages that were kept for the fill."""
        job.ended_ms, job.stopped = self.now_ms, stopped
        for topic in [number for number, fill in self.fills.items() if fill is job]:
            self.fills = {number: fill for number, fill in self.fills.items() if number != topic}
            for hour in [hour for hour, hour_state in self.hours.items() if topic in hour_state.unfilled]:
                del self.hour_state(hour).unfilled[topic]
