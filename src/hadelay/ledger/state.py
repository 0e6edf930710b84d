"""State of the replicated state machine: all messages with their states. This module has data and look-ups;
ledger/apply.py and the modules that it calls change them.

Law 1: only `apply_entry` changes the ledger, and only because a committed entry says so.
Law 2: `now_ms` arrives inside the entry, stamped once by the leader. Nothing here asks what time it is.
Law 3: apply never raises for bad input; a refusal is a value. Errors that apply raises (a damaged file, a feature
       level that this code does not have) must stop the node: going on would make the replicas differ.
Law 4: never iterate a set of strings: hashing differs between processes, so replicas would disagree.
Law 5: nothing is kept in memory per waiting message. Entries live in the hours' files; the ledger has bitmaps of
       settled entries, held grants, and counters.
"""

from collections import Counter
from dataclasses import dataclass

from pyroaring import BitMap

from hadelay.codec.formats import CONSUMER, NODE, REASON, TOPIC
from hadelay.ledger.bulkjob import BulkJob
from hadelay.ledger.grants import HeldGrant
from hadelay.ledger.hourstate import HourState
from hadelay.ledger.ports import HourStore, LedgerListener, NameStore, TableStore
from hadelay.ledger.topics import TopicBook, TopicState
from hadelay.members import Members
from hadelay.model import HOUR_MS, NONE32, Event
from hadelay.rights import Audit, Token
from hadelay.settings.cluster import Settings
from hadelay.version import FIRST_LEVEL

#: Node number in dispatch log entries of events that were not caused by a request to a node.
NO_NODE = 0xFF


@dataclass(slots=True)
class ScheduleCounts:
    """Counts over all schedules; the schedules are in tables (ledger/schedules.py)."""

    count: int = 0
    #: Size of the templates (messages to publish) of all schedules, in bytes.
    bytes: int = 0
    #: Newest version of the IANA time zone data, such as 2026f, with which every schedule was computed.
    tzdata: str = ""


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
        #: Dispatch cursor: hour, second of the hour, localIndex. A new leader hands out nothing before this second; the
        #: localIndex is only shown to users (ADR 191).
        self.cursor = (0, 0, 0)
        self.topics = TopicBook()
        self.hours: dict[int, HourState] = {}
        self.grants: dict[tuple[int, int], HeldGrant] = {}
        #: Consumer → request id → (term, seq) of the grant, as long as the grant is held.
        self.requests: dict[str, dict[bytes, tuple[int, int]]] = {}
        self.incarnations: dict[str, int] = {}
        #: Members from the log entry at `members_index`; () as long as the cluster has the members it was founded with.
        self.members: Members = ()
        self.members_index = 0
        #: Whether MEMBERS is the only command of the entry that is being applied.
        self.changes_members = False
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
        #: Numbers of callbacks, by what became of them, since this object was made; not in checkpoints.
        self.callbacks: Counter[str] = Counter()
        #: Numbers of topics and schedules that ended by themselves, since this object was made; not in checkpoints.
        self.topics_expired = self.schedules_finished = 0
        #: Tokens by id. A change replaces the dict, so that caches notice it (ledger/access.py).
        self.tokens: dict[str, Token] = {}
        self.audit, self.schedules = Audit(), ScheduleCounts()
        #: Bulk jobs by number, running and ended, oldest first; and the number of jobs ever begun.
        self.jobs: dict[int, BulkJob] = {}
        self.jobs_begun = 0
        #: Running fills by number of the topic whose messages they copy; and number of copies that fills have made and
        #: that are kept (ledger/fills.py).
        self.fills: dict[int, BulkJob] = {}
        self.filled_copies = 0
        #: Number of dead letters with a group (ledger/messagegroups.py).
        self.grouped_dead = 0
        #: Number of names that have a number, by kind: consumers, nodes and reasons.
        self.named = {CONSUMER: 0, NODE: 0, REASON: 0}
        #: Hours that changed since the last dump (ledger/checkpoint.py).
        self.touched: set[int] = set()

    @property
    def now_hour(self) -> int:
        return self.now_ms // HOUR_MS

    def hour_state(self, hour: int) -> HourState:
        """State of an hour for a change, created if missing; puts the hour into the next checkpoint."""
        self.touched.add(hour)
        if hour not in self.hours:
            self.hours[hour] = HourState()
        return self.hours[hour]

    def retire_hour(self, hour: int) -> None:
        self.store.retire(hour)
        self.retired.add(hour)
        self.touched.add(hour)
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
        if self.named[kind] >= limit:
            return beyond
        self.named[kind] += 1
        return self.names.register(kind, name)

    def open_entries(self, hour: int) -> int:
        """Number of entries that wait or are leased, in O(1)."""
        hour_state = self.hours.get(hour)
        return self.store.count(hour) - (len(hour_state.settled) if hour_state else 0)

    def outcome_of(self, hour: int, index: int) -> tuple[Event | None, bool]:
        """(event that ended the entry, whether the entry is leased); (None, False) for a waiting or unknown entry."""
        hour_state = self.hours.get(hour)
        return (hour_state.ended(index), index in hour_state.leased) if hour_state else (None, False)

    def held_by(self, consumer: str, request_id: bytes) -> HeldGrant | None:
        """Grant of an earlier receive with this request id, if still held: the grant answers the repeated receive."""
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
