"""Entries, the main blob and the blobs of hours of one small history, byte for byte: what checkpoints, snapshots and
backups of released versions hold. The entries stand in the file, so that a blob is compared by what the log says and
not by how this test makes it. `pytest tests/ledger/test_golden.py --rewrite` accepts today's bytes: a change of format.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hadelay.codec import commands
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.changedrows import HOURS
from hadelay.ledger.state import Ledger
from hadelay.members import Member
from hadelay.model import HOUR_MS
from tests import scenarios
from tests.ledger.world import START_HOUR, World, draft
from tests.memory import MemoryHours, MemoryNames, MemoryTables

GOLDEN = Path(__file__).parent / "golden" / "checkpoint.txt"


@pytest.fixture
def plain_topics() -> None:
    """Topics as nodes make them."""


def history() -> World:
    """Something of everything that a checkpoint keeps."""
    world = World()
    world.one(commands.encode_settings({"max_lease_ms": 3_600_000, "idempotency_window_ms": 60_000}))
    world.one(commands.encode_topic_put("orders", {"lease_ms": 5_000, "max_attempts": 1, "backoff": [10]}))
    world.one(commands.encode_token_create("ci", b"\xab" * 32, ["read", "publish:orders*"], 86_400_000))
    put = commands.encode_topic_put("mail", {"paused": True})
    world.one(commands.encode_audited("n1", "abababababab", "ci", "topic.set", "mail", put))
    kept = world.ids(*[draft("orders", n * 1_000) for n in range(6)], draft("mail", 10), draft("mail", 2 * HOUR_MS))
    world.publish(draft("orders", 500, b"once", idem=b"key"), key=b"request")
    far = world.ids(*[draft("gone", HOUR_MS + 5), draft("orders", HOUR_MS + 5)])
    world.now += 4_000
    leased = world.lease(*kept[:4], consumer="worker", request_id=b"r1", lease_ms=60_000)
    world.ack(leased[:1])
    world.nack(leased[1:2], reason="no stock")  # its last attempt: it is dead
    world.extend(leased[2:3], 30_000)
    world.cancel(kept[4])
    world.one(commands.encode_cursor(START_HOUR, 4, 5))
    world.one(commands.encode_reschedule("n1", 30_000, True, [kept[5]]))
    world.one(commands.encode_purge("orders", 1))
    world.publish(draft("orders", 1_000))
    world.one(commands.encode_topic_delete("gone", True))
    world.now += HOUR_MS
    world.one(commands.encode_redrive("n1", "orders", (), all=True, rate=0.5))
    world.ids(draft("orders", 0))
    world.one(commands.encode_incarnation("n2", 2))
    world.one(commands.encode_members([Member("n1", "h:1"), Member("n4", "h:4", voter=False, joined=True)]))
    assert far
    return world


def text_of(entries: list[bytes]) -> str:
    """Replayed, as a replica that was given the entries alone."""
    ledger = Ledger(0, MemoryHours(0), MemoryTables(), MemoryNames())
    for index, entry in enumerate(entries, 1):
        apply_entry(ledger, index, 1, entry)
    core, slices = checkpoint.begin(ledger)
    written = sorted(row for some in slices for row in some)
    rows: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for table, key, value in written:
        rows.setdefault(table, []).append((key, value or b""))
    again = Ledger(0, ledger.store, ledger.tables, ledger.names)
    checkpoint.load(again, core, rows)
    assert checkpoint.dump(again) == checkpoint.dump(ledger)
    canonical = checkpoint.dump(ledger)
    lines = [f"entry {entry.hex()}" for entry in entries]
    lines += [
        f"core {_shown(core)}",
        *(f"{table.decode()} {key.hex()} {_shown(value or b'')}" for table, key, value in written),
    ]
    lines += [f"canonical {key.hex()} {_shown(b)}" for key, b in canonical[1][HOURS] if (key, b) not in rows[HOURS]]
    return "\n".join(lines) + "\n"


def _shown(blob: bytes) -> str:
    """In hex, many zeroes by their number: an hour counts its 3,600 seconds."""
    return re.sub(r"(?:00){16,}", lambda zeroes: f"[{len(zeroes[0]) // 2} zeroes]", blob.hex())


def test_a_history_gives_these_bytes(request: pytest.FixtureRequest) -> None:
    scenarios.same(GOLDEN, text_of(history().entries), request)


def test_the_same_entries_as_ever_give_these_bytes() -> None:
    """Whatever encodes commands today."""
    text = GOLDEN.read_text()
    entries = [bytes.fromhex(line.split()[1]) for line in text.splitlines() if line.startswith("entry ")]
    assert text_of(entries) == text
