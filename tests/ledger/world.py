"""A state machine with its files in memory, as the tests drive it: one call per command, every step checked."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from chaos.sim import ledgercheck
from chaos.sim.savedcheck import Saved, Sliced, same
from hadelay.codec import commands
from hadelay.codec.commandtypes import Command, Grant, Job
from hadelay.codec.entries import encode_entry
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import Refused, Result
from hadelay.codec.wire import frame
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, Draft, unpack_id
from hadelay.settings.cluster import Settings
from hadelay.version import FEATURE_LEVEL
from tests.memory import MemoryHours, MemoryNames, MemoryTables

#: 2026-11-20T18:00:00Z
START_MS = 1_795_197_600_000
START_HOUR = START_MS // HOUR_MS
#: Each entry of this number is applied while a checkpoint is encoded. (All entries of these tests passed once.)
SLICED = 5


def draft(
    topic: str = "t", in_ms: int = 0, body: bytes = b"x", *, idem: bytes | None = None, at: int | None = None
) -> Draft:
    if at is not None:
        return Draft(topic, START_MS + at, False, 0, 0, b"", body, idem)
    return Draft(topic, in_ms, True, 0, 0, b"", body, idem)


def leases(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    """(term, seq, position, hour, index) each."""
    return np.array(list(rows), LEASE)


class World:
    def __init__(self, settings: Settings | None = None, group: int = 0, level: int = FEATURE_LEVEL) -> None:
        self.store, self.tables, self.names = MemoryHours(group), MemoryTables(), MemoryNames()
        self.ledger = Ledger(group, self.store, self.tables, self.names, settings)
        self.ledger.level = level
        self.now = 0  # ms since START_MS
        self.term = 1
        self.seq = 0
        self.entries: list[bytes] = []
        #: Check the ledger after each entry; 3: after each third one, for models that end with a check; 0: never.
        self.checking = 1
        self.saved = Saved(self.ledger)

    def apply(self, *encoded: bytes) -> list[Result]:
        """One entry, at the present time and term."""
        self.entries.append(encode_entry(START_MS + self.now, encoded))
        sliced = Sliced(self.ledger) if self.checking and len(self.entries) % SLICED == 0 else None
        results = apply_entry(self.ledger, len(self.entries), self.term, self.entries[-1])
        if sliced is not None:
            sliced.look()
        if self.checking and len(self.entries) % self.checking == 0:
            ledgercheck.check(self.ledger)
            self.saved.look(self.ledger)
            self.ledger.changes.clear()
        return results

    def one(self, encoded: bytes) -> Any:
        (result,) = self.apply(encoded)
        return result

    def raw(self, kind: Command, *fields: Any) -> Any:
        """Apply a command whose body is an array of these fields, valid or not."""
        return self.one(frame(kind, msgspec.msgpack.encode(fields)))

    def maintain(self, job: Job, hour: int = 0, limit: int | None = None, topic: str = "") -> Any:
        return self.one(commands.encode_maintain(job, hour, limit, topic))

    def publish(self, *drafts: Draft, key: bytes | None = None, node: str = "n1") -> Any:
        return self.one(commands.encode_publish(node, drafts or [draft()], key))

    def ids(self, *drafts: Draft) -> list[int]:
        return self.publish(*drafts).ids.tolist()

    def place(self, message_id: int) -> tuple[int, int]:
        """Where it is; for what never was, where its id says."""
        entry = find_entry(self.ledger, message_id)
        return (entry.hour, entry.index) if entry else unpack_id(message_id)[1:]

    def grant(
        self, *ids: int, lease_ms: int = 30_000, consumer: str = "c", request_id: bytes = b"", seq: int | None = None
    ) -> Any:
        self.seq = self.seq + 1 if seq is None else seq
        places = [self.place(i) for i in ids]
        hours, indexes = [p[0] for p in places], [p[1] for p in places]
        return self.one(
            commands.encode_grant(Grant(self.term, self.seq, lease_ms, consumer, request_id, "n1", hours, indexes))  # type: ignore[arg-type]
        )

    def leased(self, term: int, seq: int) -> np.ndarray:
        """The leases of a grant, all positions."""
        rows = self.ledger.grants[term, seq].rows
        out = np.zeros(len(rows), LEASE)
        out["term"], out["seq"], out["pos"] = term, seq, np.arange(len(rows))
        out["hour"], out["index"] = rows["hour"], rows["index"]
        return out

    def lease(self, *ids: int, **how: Any) -> np.ndarray:
        """Grant them, and return the leases."""
        result = self.grant(*ids, **how)
        assert result.granted.all()
        return self.leased(result.term, result.seq)

    def ack(self, rows: np.ndarray) -> list[int]:
        return self.one(commands.encode_ack("n1", rows)).outcomes.tolist()

    def nack(self, rows: np.ndarray, delay_ms: int = -1, reason: str = "") -> Any:
        result = self.one(commands.encode_nack("n1", rows, delay_ms, reason))
        return result if isinstance(result, Refused) else result.outcomes.tolist()

    def extend(self, rows: np.ndarray, lease_ms: int) -> list[int]:
        return self.one(commands.encode_extend("n1", rows, lease_ms)).outcomes.tolist()

    def expire(self, *keys: tuple[int, int]) -> Any:
        return self.one(commands.encode_expire(keys))

    def cancel(self, *ids: int) -> list[int]:
        return self.one(commands.encode_cancel("n1", ids)).outcomes.tolist()

    def states(self, *ids: int) -> list[str]:
        found = [describe(self.ledger, i, START_MS + self.now) for i in ids]
        return [str(d.state) if d else "gone" for d in found]

    def topic(self, name: str = "t") -> Any:
        return self.ledger.topic(name)

    def restart(self) -> None:
        """Checkpoint and start again from it; nothing may be different."""
        before, ledger = checkpoint.dump(self.ledger), self.ledger
        self.ledger = Ledger(self.ledger.group, self.store, self.tables, self.names)
        checkpoint.load(self.ledger, *before)
        assert checkpoint.dump(self.ledger) == before
        same(ledger, self.ledger, "ledger")
        self.saved = Saved(self.ledger)
        ledgercheck.check(self.ledger)
