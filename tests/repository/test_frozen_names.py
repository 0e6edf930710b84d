"""Names and positions that are bytes: on disk, on the node link, in what users keep. Classes and attributes may be
renamed; nothing in this file may change, except that something is added at an end."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from pyroaring import BitMap

from chaos.sim.cluster import SimCluster
from hadelay import errors
from hadelay.codec.batches import State
from hadelay.codec.commandtypes import Command
from hadelay.codec.jobcommands import JobSpec
from hadelay.codec.records import Record
from hadelay.errors import HadelayError
from hadelay.ledger import checkpoint
from hadelay.ledger.hours.chain import Damage
from hadelay.ledger.hours.hourstate import HourState
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.leases.grantrows import LEASED, OpenGrant
from hadelay.ledger.state import BatchCounts, Ledger, ScheduleCounts
from hadelay.ledger.topics.topics import PurgeMark, RedriveJob, TopicState
from hadelay.members import Member
from hadelay.model import Event
from hadelay.pipeline import jobs, publish
from hadelay.rights import Audit, AuditEntry, Token
from hadelay.server import link
from hadelay.settings import topic
from hadelay.settings.cluster import Settings
from hadelay.storage.identity import Identity, decode_identity, encode_identity
from hadelay.storage.names import Name
from tests.ledger.world import World
from tests.memory import MemoryHours, MemoryNames, MemoryTables
from tests.server.test_lost_disks import wait_for_leader

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hadelay"

# ---- the node link


def test_results_have_these_names_on_the_link() -> None:
    """What is in them, and where: tests/server/test_golden_link.py."""
    assert set(link._RESULTS) == {
        "PublishResult", "GrantResult", "LeaseResult", "ExpireResult", "CancelResult", "RedriveResult",
        "RescheduleResult", "Progress", "JobBegun", "Done", "Refused",
    }  # fmt: skip


def test_errors_have_these_types_on_the_link_and_in_answers() -> None:
    """type: HTTP status, may be retried, its outcome is known."""
    expected: dict[str, tuple[int, bool, bool]] = {
        "internal": (500, False, True),
        "bad-request": (400, False, True),
        "unauthorized": (401, False, True),
        "forbidden": (403, False, True),
        "not-found": (404, False, True),
        "method-not-allowed": (405, False, True),
        "misdirected": (421, True, True),
        "request-timeout": (408, True, True),
        "conflict": (409, False, True),
        "too-large": (413, False, True),
        "unsupported-media-type": (415, False, True),
        "impossible": (422, False, True),
        "limit-reached": (429, True, True),
        "no-leader": (503, True, True),
        "overloaded": (503, True, True),
        "outcome-unknown": (504, True, False),
        "other-shard": (503, True, True),
        "disk-full": (507, True, True),
        "damaged-file": (500, False, True),
        "config": (500, False, True),
        "fatal": (500, False, True),
    }
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HadelayError)]
    assert {c.type: (c.http_status, c.retryable, c.outcome_known) for c in kinds} == expected
    for kind in expected.keys() - {"damaged-file"}:
        assert link._error(kind, "x", None, {}).type == kind
    assert link._error("damaged-file", "x", None, {}).type == "internal"
    assert link._error("of a later version", "x", None, {}).type == "internal"


OPERATIONS = {"hello", "submit", "ready", "consumers", "blocked", "groups", "transfer", "drain", "members", "bytes",
              "logbook", "attention", "sessions"}  # fmt: skip


def test_these_operations_are_served_to_other_nodes() -> None:
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    served = [set(m.process.node.link.handlers) for m in cluster.machines.values() if m.process and m.process.node]
    assert served == [OPERATIONS] * len(served)
    assert served


def test_these_operations_are_asked_of_other_nodes() -> None:
    #: Method → position of the operation's name among its arguments.
    at = {"call": 1, "note": 1, "_ask_leader": 0}
    asked = {
        node.args[at[node.func.attr]].value
        for path in (SOURCE / "server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in at
        and len(node.args) >= 3
        and isinstance(node.args[at[node.func.attr]], ast.Constant)
    }
    assert asked == OPERATIONS


# ---- checkpoints


SPEC = JobSpec("cancel", "orders")


def state_of_everything() -> Ledger:
    """One of each that a checkpoint can hold, with values that show which is which."""
    ledger = World().ledger
    ledger.now_ms, ledger.applied, ledger.term, ledger.chain, ledger.level = 1, 2, 3, 4, 5
    ledger.key_epoch, ledger.key_epoch_ends_ms, ledger.key_count, ledger.key_count_before = 6, 7, 8, 9
    ledger.keys_dropped_early, ledger.granted, ledger.jobs_begun, ledger.grouped_dead = 10, 16, 17, 18
    ledger.unique_count, ledger.filled_copies, ledger.made = 19, 20, {"topics": Counter(t=3)}
    ledger.hours[51] = HourState(
        others={Event.CANCELLED: BitMap()}, returned=1, carried=2, retire_at=3, keyed=4, settled_at_ms=5, results=6,
        unfilled={7: BitMap()}, batched=8,
    )  # fmt: skip
    ledger.jobs[1] = BulkJob(1, SPEC, "n1", "t", b"r", 66, {0: 3}, (67, 68), 69, True, 70, 71, 72, 73, 74)
    ledger.cursor, ledger.sweep, ledger.suspects = (11, 12, 13), (14, 15), ((81, 82),)
    ledger.topics.add(
        TopicState(
            number=0, name="orders", exists=False, generation=20, lives=31, floor=32, config={"lease_ms": 9},
            open=21, leased=22, tombstoned=23, published=24, bytes=25, spent_ns=26, dead=27, dead_mark_ms=33,
            redrive=RedriveJob(upto_ms=41, rate=2.5, start_ms=42, count=43, after=(44, 45)), alerted=34,
            marks=[PurgeMark(generation=51, at_ms=52, ready=True)], settled=[28] * 10, group_rows=35, grouped=36,
            blocked=37, used_ms=38, dropped=39, born=40, retrying=46, batched=True,
        )
    )  # fmt: skip
    grant = OpenGrant(61, 62, "c", 63, b"request", 64, np.zeros(1, LEASED), progress={0: "half"}, number=65)
    ledger.grants[grant.key] = grant
    ledger.requests = {"c": {b"request": (61, 62)}}
    ledger.incarnations = {"n2": 2, "n1": 1}
    ledger.members_index = 71
    ledger.members = (Member(name="n1", address="h:1", voter=False, joined=True),)
    token = Token(
        name="t", hash=b"\xab" * 32, scopes=("read", "admin"), created_at_ms=81, expires_at_ms=82, aws_key=b"\xcd" * 32
    )
    ledger.tokens = {token.id: token}
    entry = AuditEntry(
        number=1, at_ms=91, node="n1", token_id="i", token="t", action="a", target="o", outcome="done"
    )  # fmt: skip
    ledger.audit = Audit(1, [entry])
    ledger.schedules = ScheduleCounts(count=101, bytes=102, tzdata="2026f")
    ledger.batch_states = {7: State(*range(1, 13))}
    ledger.batches = BatchCounts(count=111, opened=112, cancels=113, searched=114)
    return ledger


def test_the_core_has_these_keys_and_the_rows_these_positions() -> None:
    core, rows = checkpoint.dump(state_of_everything())
    found = msgpack.unpackb(core, strict_map_key=False)
    raw = np.zeros(1, LEASED).tobytes()
    expected: dict[str, Any] = {
        "version": 1, "level": 5, "group": 0, "now_ms": 1, "applied": 2, "term": 3, "chain": 4, "key_epoch": 6,
        "key_epoch_ends_ms": 7, "key_count": 8, "key_count_before": 9, "keys_dropped_early": 10, "granted": 16,
        "jobs_begun": 17, "grouped_dead": 18, "unique_count": 19, "filled_copies": 20, "cursor": [11, 12, 13],
        "sweep": [14, 15], "suspects": [[81, 82]], "retired": found["retired"],
        "schedules": {"count": 101, "bytes": 102, "tzdata": "2026f"},
        "batches": {"count": 111, "opened": 112, "cancels": 113, "searched": 114},
        "members": [["n1", "h:1", False, True]],
        "members_index": 71, "settings": SETTINGS, "named": {2: 0, 3: 0, 4: 0}, "incarnations": {"n1": 1, "n2": 2},
        "audited": 1, "made": {"topics": {"t": 3}},
    }  # fmt: skip
    assert found == expected
    assert list(found) == list(expected)
    unpacked = partial(msgpack.unpackb, strict_map_key=False)
    values = {table: [(key.hex(), unpacked(value)) for key, value in some] for table, some in rows.items()}
    bits = bytes(BitMap().serialize())
    assert values == {
        b"topic": [
            (
                "00000000",
                [
                    0, "orders", False, 20, 31, 32, {"lease_ms": 9}, 21, 22, 23, 24, 35, 36, 37, 46, 25, 26, 27,
                    33,
                    [41, 2.5, 42, 43, [44, 45]], 34, [[51, 52, True]], 38, 39, 40, True, [28] * 10,
                ],
            )
        ],
        b"grant": [
            ("000000000000003d" "000000000000003e", [True, [61, 62, "c", 63, b"request", 64, raw, {0: "half"}, 65]])
        ],
        b"job": [
            (
                "00000001",
                [
                    1, {"action": "cancel", "topic": "orders"}, "n1", "t", b"r", 66, {0: 3}, [67, 68], 69, True, 70,
                    71, 72, 73, 74,
                ],
            )
        ],
        b"token": [(b"abababababab".hex(), ["t", b"\xab" * 32, ["read", "admin"], 81, 82, b"\xcd" * 32])],
        b"audit": [("0000000000000001", [1, 91, "n1", "i", "t", "a", "o", "done"])],
        b"hour-states": [
            ("00000033", [bits, bits, {6: bits}, None, 1, 2, 3, 4, 5, bits, bits, bits, 6, bits, {7: bits}, 8])
        ],
        b"batchst": [("ff" * 7 + "f8", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])],
    }  # fmt: skip


def test_core_and_rows_are_read_into_the_same_places() -> None:
    before = state_of_everything()
    before.level = 1
    core, rows = checkpoint.dump(before)
    after = Ledger(0, MemoryHours(0), MemoryTables(), MemoryNames())
    checkpoint.load(after, core, rows)
    assert checkpoint.dump(after) == (core, rows)
    assert (after.topics[0].redrive, after.topics[0].marks) == (before.topics[0].redrive, before.topics[0].marks)
    assert (after.members, after.tokens, after.cursor) == (before.members, before.tokens, before.cursor)


#: Also the keys of SETTINGS in the log.
SETTINGS = {
    "max_delay_ms": 63_072_000_000,
    "idempotency_window_ms": 3_600_000,
    "idempotency_max_keys": 10_000_000,
    "auto_create_topics": True,
    "max_topics": 100_000,
    "max_consumers": 100_000,
    "max_reasons": 10_000,
    "requests_per_consumer": 64,
    "max_lease_ms": 43_200_000,
}


def test_replicated_settings_have_these_keys() -> None:
    assert Settings().to_map() == SETTINGS
    assert list(Settings().to_map()) == list(SETTINGS)
    other = {name: not value if value is True else value + 1 for name, value in SETTINGS.items()}
    assert Settings.from_map(other).to_map() == other


def test_the_identity_file_has_these_keys() -> None:
    identity = Identity("c", 3, "n1", incarnation=4, format_version=1, feature_level=2)
    expected = {"cluster_id": "c", "group": 3, "node": "n1", "incarnation": 4, "format_version": 1, "feature_level": 2}
    found = decode_identity(encode_identity(identity), "identity")
    assert found == expected
    assert list(found) == list(expected)


# ---- the log


def test_topic_settings_have_these_keys() -> None:
    assert list(topic.SETTINGS) == [
        "lease_ms", "max_attempts", "backoff", "dead_letter", "dead_retention_ms", "rate", "publish_rate",
        "catch_up_rate", "concurrency", "group_concurrency", "group_rate", "max_messages", "max_bytes", "delay_ms",
        "ttl_ms", "retention_ms", "webhook", "alert", "paused", "paused_reason", "dispatch_sync", "own_queue", "tags",
        "any_tags", "on_full", "labels", "expires_after_ms", "on_success", "on_failure",
    ]  # fmt: skip
    parts = {name: row.kind.parts for name, row in topic.SETTINGS.items()}
    stored = [name for name, part in parts["webhook"].items() if part.stored]
    assert stored == ["url", "secrets", "timeout_ms", "headers", "allow_per_message", "method"]
    assert list(parts["alert"]) == ["url", "secret"]
    assert list(parts["backoff"]) == ["min_ms", "max_ms", "factor", "jitter"]
    backoff = {"min_ms": 1, "max_ms": 2, "factor": 2.0, "jitter": 0.5}
    webhook = {"url": "http://h", "secrets": ["x" * 16], "timeout_ms": 100, "headers": {}, "allow_per_message": True}
    config = {"backoff": backoff, "webhook": webhook, "alert": {"url": "http://h", "secret": "x" * 16}}
    assert topic.problem(config, Settings()) == ""
    read = topic.settings_of(config)
    assert isinstance(read.backoff, topic.Exponential)
    assert (read.backoff.min_ms, read.backoff.max_ms, read.backoff.factor, read.backoff.jitter) == (1, 2, 2.0, 0.5)


def test_commands_have_these_numbers() -> None:
    assert {name: int(number) for name, number in Command.__members__.items()} == {
        "NOOP": 0, "PUBLISH": 1, "GRANT": 2, "SETTLE": 3, "EXTEND": 4, "EXPIRE": 5, "CANCEL": 6, "RESCHEDULE": 7,
        "REDRIVE": 8, "CURSOR": 16, "SWEEP": 17, "CARRY": 18, "RETIRE": 19, "TTL_EXPIRE": 20, "DROP_DEAD": 21,
        "REDRIVE_SOME": 22, "ALERTED": 23, "TOPIC_EXPIRY": 24, "BATCHES": 25, "TOPIC_PUT": 32, "TOPIC_DELETE": 33,
        "PURGE": 34, "SUBSCRIPTION_PUT": 35, "SUBSCRIPTION_FILL": 36, "SCHEDULE_PUT": 48, "SCHEDULE_DELETE": 49,
        "SCHEDULE_FIRE": 50, "SCHEDULE_STATE": 51,
        "SCHEDULE_RUN": 52, "JOB_BEGIN": 56, "JOB_STEP": 57, "JOB_STOP": 58, "BATCH_OPEN": 60,
        "BATCH_SEAL": 61, "BATCH_CANCEL": 62, "BATCH_STEP": 63, "FEATURE": 64,
        "INCARNATION": 65, "MEMBERS": 66, "SETTINGS": 67, "SHARD_MAP": 68, "TOKEN_CREATE": 72,
        "TOKEN_REVOKE": 73, "AUDITED": 74,
    }  # fmt: skip


# ---- what people and their scripts read


def test_jobs_of_the_pipeline_report_these_members() -> None:
    """In `summary.json` and under `-o json`."""
    assert jobs.FACTS == {
        "archive": "as_of_ms hours",
        "audit": "messages events hours problem",
        "forecast": "as_of_ms threshold coming of_schedules overdue hot_seconds hot table backlog wait_s clear_at "
        "jitter_s catch_up_rate advice",
        "lateness": "as_of_ms handed_out overdue not_measured overall table",
        "load": "as_of_ms due handed_out acked table",
        "reconcile": "as_of_ms engine hours messages verdicts table offending failed",
        "replay": "looked_at fit outcomes",
        "tail": "batches rows",
    }
    with pytest.raises(AssertionError, match="load reports"):
        jobs.JobSummary("load", as_of_ms=1, acked=2)
    published = "rows published duplicates rejected reasons aside"
    assert [field.name for field in fields(publish.RowTotals)] == published.split()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Name, "offset kind number name"),
        (
            Record,
            "magic version flags meta_size body_size topic first_id published_at_ms deliver_at_ms payload_crc "
            "header_crc meta body",
        ),
    ],
)
def test_inspect_prints_these_members(kind: Any, names: str) -> None:
    assert list(kind._fields) == names.split()


def test_the_log_event_chain_damaged_has_these_members() -> None:
    assert Damage._fields == ("hour", "second", "at", "lost", "what")
