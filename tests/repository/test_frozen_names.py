"""Names and positions that are bytes: on disk, on the node link, in what users keep. Classes and attributes may be
renamed; nothing in this file may change, except that something is added at an end."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from chaos.sim.cluster import SimCluster
from hadelay import errors
from hadelay.codec.commandtypes import Command
from hadelay.codec.records import Record
from hadelay.errors import HadelayError
from hadelay.ledger import access, checkpoint
from hadelay.ledger.chain import Damage
from hadelay.ledger.grants import HELD, HeldGrant
from hadelay.ledger.state import Ledger, ScheduleCounts
from hadelay.ledger.topics import PurgeMark, RedriveJob, TopicState
from hadelay.members import Member
from hadelay.pipeline import jobs, publish
from hadelay.rights import AuditEntry, Token
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
        "request-timeout": (408, True, True),
        "conflict": (409, False, True),
        "too-large": (413, False, True),
        "unsupported-media-type": (415, False, True),
        "impossible": (422, False, True),
        "limit-reached": (429, True, True),
        "no-leader": (503, True, True),
        "overloaded": (503, True, True),
        "outcome-unknown": (504, True, False),
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


OPERATIONS = {"hello", "submit", "ready", "consumers", "blocked", "transfer", "drain", "members", "bytes", "logbook"}


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


def state_of_everything() -> Ledger:
    """One of each that a main blob can hold, with values that show which is which."""
    ledger = World().ledger
    ledger.now_ms, ledger.applied, ledger.term, ledger.chain, ledger.level = 1, 2, 3, 4, 5
    ledger.key_epoch, ledger.key_epoch_ends_ms, ledger.key_count, ledger.key_count_before = 6, 7, 8, 9
    ledger.keys_dropped_early = 10
    ledger.cursor, ledger.sweep = (11, 12, 13), (14, 15)
    ledger.topics.add(
        TopicState(
            number=0, name="orders", exists=False, generation=20, lives=31, floor=32, config={"lease_ms": 9},
            open=21, leased=22, tombstoned=23, published=24, bytes=25, spent_ns=26, dead=27, dead_mark_ms=33,
            redrive=RedriveJob(upto_ms=41, rate=2.5, start_ms=42, count=43, after=(44, 45)), alerted=34,
            marks=[PurgeMark(generation=51, at_ms=52, ready=True)], settled=[28, 29],
        )
    )  # fmt: skip
    grant = HeldGrant(61, 62, "c", 63, b"request", 64, np.zeros(1, HELD))
    ledger.grants[grant.key] = grant
    ledger.requests = {"c": {b"request": (61, 62)}}
    ledger.incarnations = {"n2": 2, "n1": 1}
    ledger.members_index = 71
    ledger.members = (Member(name="n1", address="h:1", voter=False, joined=True),)
    token = Token(name="t", hash=b"\xab" * 32, scopes=("read", "admin"), created_at_ms=81, expires_at_ms=82)
    ledger.tokens = {token.id: token}
    entry = AuditEntry(
        number=1, at_ms=91, node="n1", token_id="i", token="t", action="a", target="o", outcome="done"
    )  # fmt: skip
    ledger.audit = access.Audit(1, [entry])
    ledger.schedules = ScheduleCounts(count=101, bytes=102, tzdata="2026f")
    return ledger


def test_the_main_blob_has_these_keys_and_positions() -> None:
    blob = msgpack.unpackb(checkpoint.dump_main(state_of_everything()), strict_map_key=False)
    raw = np.zeros(1, HELD).tobytes()
    expected: dict[str, Any] = {
        "version": 1,
        "now_ms": 1,
        "applied": 2,
        "term": 3,
        "chain": 4,
        "level": 5,
        "key_epoch": 6,
        "key_epoch_ends_ms": 7,
        "key_count": 8,
        "key_count_before": 9,
        "keys_dropped_early": 10,
        "group": 0,
        "cursor": [11, 12, 13],
        "sweep": [14, 15],
        "named": [[2, 0], [3, 0], [4, 0]],
        "settings": SETTINGS,
        "topics": [
            [
                0, "orders", False, 20, {"lease_ms": 9}, 21, 22, 23, 24, 25, 26, 27, [28, 29], 31, 32, 33, 34,
                [41, 2.5, 42, 43, [44, 45]],
                [[51, 52, True]],
            ]
        ],
        "grants": [[61, 62, "c", 63, b"request", 64, raw]],
        "requests": [["c", [[b"request", [61, 62]]]]],
        "incarnations": [["n1", 1], ["n2", 2]],
        "retired": blob["retired"],
        "tokens": [["t", b"\xab" * 32, ["read", "admin"], 81, 82]],
        "audit": [1, [[91, "n1", "i", "t", "a", "o", "done"]]],
        "schedules": [101, 102, "2026f"],
        "members": [71, ["n1", "h:1", False, True]],
    }  # fmt: skip
    assert blob == expected
    assert list(blob) == list(expected)


def test_a_main_blob_is_read_into_the_same_places() -> None:
    before = state_of_everything()
    before.level = 1
    blob = checkpoint.dump_main(before)
    after = Ledger(0, MemoryHours(0), MemoryTables(), MemoryNames())
    checkpoint.load(after, blob, {})
    assert checkpoint.dump_main(after) == blob
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
        "catch_up_rate", "concurrency", "max_messages", "max_bytes", "ttl_ms", "retention_ms", "webhook", "alert",
        "group_concurrency", "paused", "paused_reason", "dispatch_sync", "defaults", "own_queue", "tags", "any_tags",
        "on_full", "expires_after_ms",
        "on_success", "on_failure", "group_rate",
    ]  # fmt: skip
    assert list(topic.WEBHOOK) == ["url", "secrets", "timeout_ms", "headers", "allow_per_message", "method"]
    assert list(topic.ALERT) == ["url", "secret"]
    backoff = {"min_ms": 1, "max_ms": 2, "factor": 2.0, "jitter": 0.5}
    webhook = {"url": "http://h", "secrets": ["x" * 16], "timeout_ms": 100, "headers": {}, "allow_per_message": True}
    config = {"backoff": backoff, "webhook": webhook, "alert": {"url": "http://h", "secret": "x" * 16}}
    assert topic.problem(config, Settings()) == ""
    read = topic.settings_of(config)
    assert isinstance(read.backoff, topic.Exponential)
    assert (read.backoff.min_ms, read.backoff.max_ms, read.backoff.factor, read.backoff.jitter) == (1, 2, 2.0, 0.5)


def test_commands_have_these_numbers() -> None:
    assert {name: int(number) for name, number in Command.__members__.items()} == {
        "NOOP": 0, "PUBLISH": 1, "GRANT": 2, "ACK": 3, "NACK": 4, "EXTEND": 5, "EXPIRE": 6, "CANCEL": 7, "CURSOR": 8,
        "TOPIC_PUT": 9, "TOPIC_DELETE": 10, "SWEEP": 11, "CARRY": 12, "RETIRE": 13, "FEATURE": 14, "INCARNATION": 15,
        "SETTINGS": 16, "PUBLISH2": 17, "RESCHEDULE": 32, "REDRIVE": 33, "TTL_EXPIRE": 34, "PURGE": 35, "DROP_DEAD": 36,
        "REDRIVE_SOME": 40, "ALERTED": 41, "TOKEN_CREATE": 64, "TOKEN_REVOKE": 65, "AUDITED": 66, "MEMBERS": 80,
        "SCHEDULE_PUT": 96, "SCHEDULE_DELETE": 97, "SCHEDULE_FIRE": 98, "SCHEDULE_STATE": 99, "SCHEDULE_RUN": 100,
        "SUBSCRIPTION_PUT": 101, "TOPIC_EXPIRY": 102, "SUBSCRIPTION_FILL": 103, "SETTLE": 113,
        "JOB_BEGIN": 120, "JOB_STEP": 121, "JOB_STOP": 122,
    }  # fmt: skip


# ---- what people and their scripts read


def test_jobs_of_the_pipeline_report_these_members() -> None:
    """In `summary.json` and under `-o json`."""
    assert jobs.FACTS == {
        "archive": "as_of_ms hours",
        "audit": "messages events hours problem",
        "forecast": "as_of_ms threshold coming overdue hot_seconds hot table backlog wait_s clear_at jitter_s "
        "catch_up_rate advice",
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
