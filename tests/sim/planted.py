"""A healthy ledger and a healthy dispatcher in which everything occurs that chaos/sim/ledgercheck.py, groupcheck.py and
memorycheck.py check.

Tests plant one corruption into a copy of them.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from chaos.sim import ledgercheck, memorycheck
from hadelay.codec import commands
from hadelay.codec.ackparts import encode_results
from hadelay.codec.formats import DISPATCH
from hadelay.codec.results import Done
from hadelay.codec.schedules import Spec
from hadelay.ledger.groups.messagegroups import GROUP
from hadelay.ledger.hours.hourstate import HourState
from hadelay.ledger.hours.lookup import EntryRef, find_entry
from hadelay.ledger.hours.transitions import ID_KEY, PLACE_VALUE
from hadelay.ledger.leases.ackresults import RESULTS
from hadelay.ledger.leases.grantrows import OpenGrant
from hadelay.model import HOUR_MS, Draft, Event
from tests.handout.desk import Desk
from tests.ledger.test_fills import fill, run
from tests.ledger.test_schedules import Owner
from tests.ledger.world import START_HOUR, START_MS, draft

#: An id that no message has.
NOBODY = 0x7777 << 32
#: An hour that is over and had no messages, and an hour of the future that has some.
FREE_HOUR, FUTURE_HOUR = START_HOUR - 5, START_HOUR + 3


class Planted(Owner):
    """A world with messages in every state, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.checking = 0
        self.messages: dict[str, int] = {}
        self._topics()
        self._messages()
        self._groups()
        self._others()
        ledgercheck.check(self.ledger)

    def _topics(self) -> None:
        for name, config in (
            ("t", {}), ("dies", {"max_attempts": 1}), ("ends", {"expires_after_ms": 60_000}),
            ("g", {"group_concurrency": 1, "max_attempts": 1}), ("label", {}), ("orders", {}),
        ):  # fmt: skip
            assert isinstance(self.one(commands.encode_topic_put(name, config)), Done)

    def _messages(self) -> None:
        one = draft()
        self._add("waiting", one)
        self._add("later", draft("t", 2 * HOUR_MS + 1), draft("t", 2 * HOUR_MS + 2))
        self._add("future", draft("t", 3 * HOUR_MS + 1), draft("t", 3 * HOUR_MS + 2))
        self._add("cancelled", one)
        self.cancel(self["cancelled"], self["future.1"])
        self._add("keyed", replace(draft("t", 5_000), key=b"k"))
        self._add("brief", replace(draft("t", 1_000), ttl_ms=60_000), replace(draft("t"), ttl_ms=60_000))
        self._add("acked", one)
        self.one(commands.encode_ack("n1", self.lease(self["acked"]), encode_results([b"7"])))
        self._add("leased", one, one, one)
        leases = self.lease(*(self[f"leased.{n}"] for n in range(3)), request_id=b"r")
        self.ack(leases[2:])
        self.lease(self["brief.1"])
        self._add("dead", draft("dies"), draft("dies"))
        for n in range(2):
            self.nack(self.lease(self[f"dead.{n}"]), reason="no")
        self._add("moved", one)
        self.one(commands.encode_reschedule("n1", 2 * HOUR_MS, True, [self["moved"]]))
        self.ids(one)
        self.publish(one, key=b"idempotent")
        self.publish(replace(draft(), key=b"once", unique_ms=60_000), replace(draft(), key=b"twice", unique_ms=70_000))

    def _groups(self) -> None:
        def grouped(topic: str, in_ms: int = 0, group: int = 7) -> Draft:
            return replace(draft(topic, in_ms), group=group)

        self._add("group", *(grouped("g", n) for n in range(4)))
        self._add("letter", grouped("g", group=8))
        self.nack(self.lease(self["letter"]))
        self._add("over", grouped("g", group=9))
        self.ack(self.lease(self["over"]))
        self._add("labelled", grouped("label"))

    def _others(self) -> None:
        for name in ("s", "u"):
            assert isinstance(self.put(Spec("t", every_ms=60_000, start_ms=START_MS + 1_000), name), Done)
        self.fire(self.plan("s", 300_000))
        self._add("order", draft("orders"), draft("orders", 10_000))
        fill(self, "early")
        run(self)
        fill(self, "late")  # goes on

    def _add(self, name: str, *drafts: Draft) -> None:
        ids = self.ids(*drafts)
        self.messages |= {name: ids[0], **{f"{name}.{n}": first_id for n, first_id in enumerate(ids)}}

    def __getitem__(self, name: str) -> int:
        return self.messages[name]

    def entry(self, name: str) -> EntryRef:
        found = find_entry(self.ledger, self[name])
        assert found is not None
        return found

    def hour(self, name: str) -> HourState:
        """State of the hour in which the message is."""
        return self.ledger.hours[self.entry(name).hour]

    def index(self, name: str) -> int:
        return self.entry(name).index

    def grant_of(self, name: str) -> OpenGrant:
        """Grant by which the message is leased."""
        at = self.index(name)
        return next(grant for grant in self.ledger.grants.values() if at in grant.rows["index"])

    def result(self) -> tuple[HourState, int]:
        """State of the hour in which the result of an ack is, and the index of its entry."""
        hour, index = PLACE_VALUE.unpack(self.tables.rows[RESULTS][ID_KEY.pack(self["acked"])])
        return self.ledger.hours[hour], index

    @property
    def group_key(self) -> bytes:
        """Key of the only message group with a row."""
        return self.first(GROUP)

    def event(self, hour: int, index: int, event: Event) -> None:
        """Append an event to the dispatch log of an hour."""
        row = np.zeros(1, DISPATCH)
        row["index"], row["event"] = index, event
        self.store.append_events(hour, row)

    def first(self, table: bytes) -> bytes:
        """First key of the table."""
        return min(self.tables.rows[table])

    def drop(self, table: bytes) -> None:
        """Delete the first row of the table."""
        del self.tables.rows[table][self.first(table)]


class Busy(Desk):
    """A leader with polls that wait, polls of idle filters, leases, entries in windows, in flight and resting."""

    def __init__(self) -> None:
        super().__init__(commit_ms=50)
        self.lead()
        self.put("t")
        self.put("u")
        self.put("rated", group_concurrency=5, group_rate=0.5)
        self.run(5_000)
        self.publish("A", "B")
        self.poll(max=2, request=b"r")
        self.run(100)
        self.poll("empty", "other", wait=50_000)
        self.poll("empty", tags=["a"])
        self.poll("u", tags=["idle"], wait=10)
        self.run(100)
        self.publish("C", "D", "E", topic="rated", group="g")
        self.poll("rated", max=3)
        self.run(200)
        self.stuck = True
        self.publish("F", "G")
        self.publish("H", topic="u")
        self.poll(max=1)
        self.run(10)
        memorycheck.check(self.core)
        memorycheck.check_leases(self.delivery)
