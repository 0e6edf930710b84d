"""What reads bytes that may be anything: one function per kind, which raises what it declares and nothing else.

`samples` are honest inputs to start from. What a checksum guards is read behind it: a frame is that of a connection
whose checksum held, and the commands of an entry are not those that a node would have written.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgpack
import msgspec
import numpy as np

from chaos import scenario
from chaos.cluster import GivenCluster
from chaos.sim import ledgercheck
from chaos.sim.disk import SimDisk
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.api import text as forms
from hadelay.api.base import Request
from hadelay.cli import remote
from hadelay.cli.certs import make_authority, make_certificate
from hadelay.codec import commands, meta, schedules
from hadelay.codec import records as messages_in_files
from hadelay.codec.ackparts import CallReply, encode_replies, encode_results
from hadelay.codec.checksums import crc32c
from hadelay.codec.commandtypes import Grant, Job, TopicUse
from hadelay.codec.entries import decode_entry, encode_entry, members_in
from hadelay.codec.formats import DISPATCH, HEADS, HEADS_MAGIC, INDEX
from hadelay.codec.jobcommands import LAST, FillBegin, JobBegin, JobSpec
from hadelay.codec.leasetokens import decode_leases, encode_leases
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish
from hadelay.errors import ConfigError, DamagedFile, FatalError, HadelayError, NotFound
from hadelay.http import decoding, options, publish
from hadelay.http import messages as listing
from hadelay.http.batches import slices
from hadelay.http.forwarding.exchange import Exchange, Odd, State, WholeAnswer
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.changedrows import HOURS
from hadelay.ledger.hours.hourstate import HourState
from hadelay.ledger.state import Ledger
from hadelay.members import Member
from hadelay.model import DEAD_HOURS, Draft, Event, encode_id, hour_name
from hadelay.platform.tls import Certificates
from hadelay.raft import messages, records, snapshot
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.rules import publishing
from hadelay.rules.documents import decoded
from hadelay.rules.messages import states_of
from hadelay.server.link import CALL, REFUSAL, REPLY, Link
from hadelay.settings.load import load
from hadelay.settings.node import HttpConfig
from hadelay.storage import backup, identity, names
from hadelay.storage import heads as hour_heads
from hadelay.storage.inspect import inspect
from hadelay.storage.snapshots import row_at
from hadelay.timing import cron
from hadelay.version import FEATURE_LEVEL
from tests.ledger.world import START_HOUR, START_MS, World, draft
from tests.raft.rig import Lone

#: Next time of the schedule of `world`.
FIRED_MS = START_MS + 2_000
OWNER = identity.Identity("c", 0, "n1")
_DAY_MS = 86_400_000


class Target(NamedTuple):
    run: Callable[[bytes], None]
    declared: tuple[type[BaseException], ...]
    samples: Callable[[], list[bytes]]


# --- what is replicated


def world() -> World:
    """A state with something of everything: waiting, leased, dead, keyed, limited, with jobs."""
    made = World()
    made.checking = False
    made.one(commands.encode_topic_put("t", {"max_attempts": 1, "backoff": [50]}))
    rows = made.lease(*made.ids(draft(), draft("u"), draft()))
    made.nack(rows[:2])
    made.publish(Draft("u", 5_000, True, 0, 900, b"", b"x", None, b"key", 1), key=b"k")
    made.one(schedules.encode_put("s", 0, 0, schedule(every_ms=1_000)))
    times = [(START_MS + 1_000, START_MS + 1_000)]
    made.one(schedules.encode_fire([schedules.Firing("s", 1, 0, START_MS + 2_000, START_MS + 1_000, 0, 0, times)]))
    for spec in (JobSpec("reschedule", "*", delay_ms=50), JobSpec("redrive", "*")):
        made.one(commands.encode_job_begin(JobBegin("n1", "", b"", ["t", "u"], spec)))
    return made


def schedule(**spec: Any) -> schedules.Stored:
    meta = schedules.template_meta(pack(Meta(sch="s")))
    template = encode_publish("n1", [Draft("u", 0, True, 0, 0, meta, b"body")])
    return schedules.Stored("name", schedules.Spec("u", **spec), template)


def patterns(data: bytes) -> None:
    """A cron pattern, a line break, and a time zone: refused in words, or a few times, ascending."""
    pattern, _, zone = data.decode(errors="replace").partition("\n")
    after_ms = START_MS
    for at_ms in islice(cron.after(cron.parse(pattern, zone), START_MS), 3):
        assert at_ms > after_ms
        after_ms = at_ms
    cron.explain(pattern)


def pattern_samples() -> list[bytes]:
    zones = ("UTC", "Europe/Vienna", "Australia/Lord_Howe")
    texts = ("0 9 * * MON-FRI", "*/15 30 2 L * 5#3", "@daily", "0 0 29 2 *", "1-5/2,7 */3 LW 1,JUN 5L", "* * * * * *")
    return [f"{pattern}\n{zone}".encode() for pattern in texts for zone in zones]


def entry(data: bytes) -> None:
    """A committed entry is applied, whatever is in it: refusals are answers, and the state stays consistent."""
    made = world()
    results = apply_entry(made.ledger, len(made.entries) + 1, made.term, data)
    assert isinstance(results, list)
    ledgercheck.check(made.ledger)
    checkpoint.dump(made.ledger)


def entries() -> list[bytes]:
    made = world()
    lease = made.lease(made.ids(draft())[0])
    topic, first = "t", made.ids(draft())[0]
    bodies = [
        commands.encode_publish("n1", [draft(), draft("new", 50)], b"key"),
        commands.encode_publish("n1", [Draft("u", 0, True, 3, 50, b"", b"body", b"own", b"client", 1, 70)]),
        commands.encode_publish("n1", [draft(), Draft("t", 0, True, 0, 0, b"", b"body", group=7)] * 2),
        commands.encode_publish("n1", [Draft("t", 0, True, 0, 0, b"", b"", None, b"o", unique_ms=40, group=7)] * 2),
        commands.encode_grant(Grant(2, 1, 50, "c", b"r", "n1", [START_HOUR], [0])),  # type: ignore[arg-type]
        commands.encode_ack("n1", lease), commands.encode_nack("n1", lease, 50, "why"),
        commands.encode_nack("n1", lease, commands.uncounted(0)),
        commands.encode_nack("n1", lease, commands.DEAD_NOW, "no such customer"),
        commands.encode_extend("n1", lease, 60_000, "page 7"),
        commands.encode_ack("n1", lease, encode_results([b'{"paid":7}'] * len(lease))),
        commands.encode_ack(
            "n1", lease, replies=encode_replies([CallReply(200, "text/plain", b"ok", True)] * len(lease))
        ),
        commands.encode_topic_put(topic, {"on_success": "told", "on_failure": "told", "max_attempts": 1}),
        commands.encode_extend("n1", lease, 50), commands.encode_expire([(1, 1), (1, 2)]),
        commands.encode_cancel("n1", [first], [(topic, b"key")]),
        commands.encode_reschedule("n1", 50, True, [first], [(topic, b"key")]),
        commands.encode_cursor(START_HOUR, 5, 1), commands.encode_topic_put(topic, {"rate": 5.0, "ttl_ms": 50}),
        commands.encode_topic_put(topic, {"backoff": {"min_ms": 1, "max_ms": 9, "factor": 2, "jitter": 0.1}}),
        commands.encode_topic_put(topic, {"webhook": {"url": "https://a.b/c", "secrets": ["whsec_MfKQ9r8GKYqrTwjU"]}}),
        commands.encode_topic_expiry([TopicUse(0, 0, False, 0), TopicUse(0, 0, True, START_MS)]),
        commands.encode_topic_put(topic, {"expires_after_ms": 60_000}),
        commands.encode_subscription_put(topic, "some", {"max_messages": 1, "on_full": "drop"}),
        commands.encode_subscription_fill(FillBegin("n1", "", topic, "late", {})),
        commands.encode_topic_delete(topic, True), commands.encode_alerted(topic, 1), commands.encode_purge(topic, 7),
        commands.encode_redrive("n1", topic, [first], all=True, rate=5.0),
        *(commands.encode_maintain(job, hour, 9, topic) for job, hour in (
            (Job.SWEEP, 0), (Job.ROLL_FORWARD, START_HOUR), (Job.RETIRE, START_HOUR - 1), (Job.REDRIVE, 0),
            (Job.TTL_EXPIRE, 0), (Job.DROP_DEAD, DEAD_HOURS + START_HOUR),
        )),
        commands.encode_token_create("name", bytes(32), ["admin", "consume:a*"], 50),
        commands.encode_token_revoke("00" * 6), commands.encode_feature(3), commands.encode_incarnation("n1", 7),
        commands.encode_members((Member("n1", "a:1"), Member("n2", "b:1", voter=False, joined=True))),
        commands.encode_settings({"max_topics": 5}), commands.encode_noop(),
        *(
            commands.encode_job_begin(JobBegin("n1", "", b"", ["t", "u"], JobSpec(action, "*", **change)))  # type: ignore[arg-type]
            for action, change in (("cancel", {}), ("reschedule", {"shift_ms": -50}), ("redrive", {"tags": ("a",)}))
        ),
        commands.encode_job_step(1, (0, 0), (START_HOUR, 7), made.ids(draft(), draft("u"))),
        commands.encode_job_step(2, (0, 0), LAST, [first]), commands.encode_job_stop(1),
        commands.encode_audited("n1", "", "name", "POST", "/v1", commands.encode_purge(topic, 1)),
        schedules.encode_put("s", schedules.ANY_VERSION, 1, schedule(every_ms=2_000, overlap=1)),
        schedules.encode_put("new", 0, 0, schedule(cron="0 9 * * *", timezone="Europe/Vienna", jitter_ms=50)),
        schedules.encode_put("s", 1, 2, schedule(at=[START_MS, START_MS + 50], max_occurrences=1)),
        schedules.encode_state("s", True), schedules.encode_delete("s"),
        schedules.encode_fire([schedules.Firing(
            "s", 1, FIRED_MS, FIRED_MS + 9_000, FIRED_MS + 50, 3, 0,
            [(FIRED_MS + 50, FIRED_MS + 60)],
        )]),
        schedules.encode_run("s", 1, [(0, 0), (START_MS, 50)], b"key"),
    ]  # fmt: skip
    return [encode_entry(START_MS + 1_000, [body]) for body in bodies] + [encode_entry(START_MS + _DAY_MS, bodies[:4])]


# --- the node link


def frame(data: bytes) -> None:
    """A Raft frame, behind the checksum of the connection."""
    if not data:
        return
    if data[0] == messages.APPEND:
        append = messages.decode_append(data)
        try:
            list(records.decode_entries(data, append.records))
        except ValueError as error:
            raise messages.BadFrame from error
    elif data[0] == messages.APPEND_REPLY:
        messages.decode_append_reply(data)
    else:
        for types_ in ((int, int, bool, int, int, int), (dict,), (int, bool, int), (int, int, int, bytes, list)):
            try:
                fields = messages.decode(data, *types_)
            except messages.BadFrame:
                continue
            for file in fields[-1] if types_[-1] is list else ():
                snapshot._file(file)


def frames() -> list[bytes]:
    record = records.encode_record(records.ENTRY, 7, 1, b"command")
    return [
        messages.encode_append(1, 6, 1, 5, 2, info=b"info", rtt_ms=3) + record + record,
        messages.encode_append_reply(1, 2, 3, 4, 5),
        messages.encode(messages.SNAPSHOT, 1, 2, 3, b"blob", [["a/b", 5, 6]]),
        messages.encode(messages.PRE_VOTE_REPLY, 5, True, 7),
        messages.encode(messages.SEEN, {"n1": [1, 2]}),
        messages.encode(1, 1, 2, True, 4, 5, 6),
    ]


def raft(data: bytes) -> None:
    """Frames of members, one after another (their length in two bytes first), as a node takes them that follows or, by
    the first byte, leads. It may end on purpose, and drop the link; nothing else."""
    lone = Lone()
    machine, node = lone.machine, lone.node
    machine.members_in = members_in  # type: ignore[assignment]
    machine.members_command = lambda members: encode_entry(0, [commands.encode_members(members)])  # type: ignore[method-assign]
    if data[:1] == b"\1":
        lone.lead()
    else:
        lone.append([(2, 1, b"\1"), (3, 1, b"one"), (4, 1, b"two")], term=1, prev=(1, 0), commit=3)
    at = 1
    while at + 2 <= len(data) and not node.stopped:
        size = int.from_bytes(data[at : at + 2], "little") % 600
        node.frame(("n2", "n3")[data[at] & 1], data[at + 2 : at + 2 + size] or b"\0")
        at += 2 + size
        lone.run(0.01)
    lone.run(0.5)
    assert len(lone.fatal) <= 1
    assert len(node.peers) <= 200
    for error in lone.fatal:
        raise error


def rafts() -> list[bytes]:
    encode = messages.encode
    members = [["n1", "a:1"], ["n2", "b:1"], ["n4", "c:1"]]
    list_ = commands.encode_members(tuple(Member(name, address) for name, address in members))
    record = records.encode_record(records.ENTRY, 5, 1, encode_entry(0, [list_]))
    other = records.encode_record(records.ENTRY, 4, 2, b"other")
    sent = [
        [encode(messages.MEMBERS, 7, members), encode(messages.VOTE, 3, 9, 2, False)],
        [messages.encode_append(1, 4, 1, 5, 2, info=b"info", rtt_ms=3) + record, messages.encode_append(1, 5, 1, 5, 3)],
        [
            messages.encode_append(2, 3, 1, 3, 2) + other,
            encode(messages.READ, 5),
            encode(messages.READ_REPLY, 5, True, 9),
        ],
        [
            encode(messages.PRE_VOTE, 2, 9, 1),
            encode(messages.PRE_VOTE_REPLY, 2, True, 1),
            encode(messages.VOTE_REPLY, 2),
        ],
        [encode(messages.SNAPSHOT, 1, 9, 1, b"blob", [["state", 5, 6], ["hours/empty", 0, 0]])],
        [encode(messages.CHUNK, 9, "state", 0, 5), encode(messages.CHUNK_REPLY, 9, "state", 0, 6, b"abcde")],
        [
            encode(messages.SNAPSHOT_DONE, 9),
            encode(messages.SEEN, {"n3": [1, 7, 1, 4]}),
            encode(messages.TIMEOUT_NOW, 1),
        ],
        [encode(messages.GREETING, 1, 1, True, 8, 0, 1), encode(messages.REWOUND, 1, 1, 4)],
        [messages.encode_append_reply(messages.OK, 1, 2, 0, 1), messages.encode_append_reply(1, 1, 1, 1, 1)],
    ]
    packed = [b"".join(struct.pack("<H", len(one)) + one for one in frames) for frames in sent]
    return [role + frames for role in (b"\0", b"\1") for frames in packed]


def call(data: bytes) -> None:
    """A call of another node, an answer, or a refusal: raises nothing, and every call is answered once at most."""
    answers: list[Any] = []
    link = Link(SimRuntime(SimWorld(1), "n1"), lambda peer, kind, payload: True)
    link._numbers = iter(range(1, 3))  # type: ignore[assignment]
    link.call("n2", "op", [], 1.0, lambda result, error: answers.append((result, error)))
    link.handlers["op"] = lambda peer, argument, reply: reply(argument, None)
    link.on_message("n2", (CALL, REPLY, REFUSAL)[data[0] % 3] if data else CALL, data[1:])
    assert len(answers) <= 1


def calls() -> list[bytes]:
    result = decode_leases(0, encode_leases(0, 1, 2, [3], [4], [5]))[0]["term"]
    packed = []
    link = Link(SimRuntime(SimWorld(1), "n1"), lambda peer, kind, payload: packed.append(payload) is None)
    for value in ([1, "a", None], result, {"a": b"b"}):
        link.note("n2", "op", value)
    return [
        *(b"\0" + payload for payload in packed),
        b"\1" + msgpack.packb([1, {"a": 1}]),
        b"\1" + msgpack.packb([1, msgpack.ExtType(2, msgpack.packb(["Done", True]))]),
        b"\2" + msgpack.packb([1, "overloaded", "text", 50, {}]),
        b"\1" + msgpack.packb([1, nested(2_000)]),
    ]


def nested(depth: int) -> msgpack.ExtType:
    """A result in a result in a result."""
    inner = msgpack.ExtType(2, b"\x90")
    for _ in range(depth):
        inner = msgpack.ExtType(2, msgpack.packb(["Done", inner]))
    return inner


# --- files


def journal(data: bytes) -> None:
    """The first segment of a Raft journal is these bytes."""
    disk = SimDisk(random.Random(1))
    disk.makedirs("/raft")
    disk.open("/raft/0000000000000001.seg", create=True).pwrite(data, 0)
    runtime = SimRuntime(SimWorld(1), "n1", disk)
    opened = Journal.open(disk, "/raft", runtime, OWNER, JournalConfig(8192, 2000))
    for index in range(opened.base_index + 1, opened.last_index + 1):
        assert opened.entries(index, 1 << 20)


def journals() -> list[bytes]:
    disk = SimDisk(random.Random(1))
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1", disk)
    config = JournalConfig(8192, 2000)
    made = Journal.create(disk, "/raft", runtime, OWNER, config)
    out = []
    for index in range(2, 8):
        made.append(b"command" * index, index, 1)
        made.vote(index, "n2")
        runtime.call_soon(made.kick)
        world.run_for(1.0)
        (name,) = (name for name in disk.copy() if name.endswith("1.seg"))
        out.append(disk.copy()[name])
    return [data[: len(data.rstrip(b"\0")) + 40] for data in out]


_NAMES = ("2026112018.log", "2026112018.idx", "2026112018.dsp", "2026112018.heads", "names", "identity")


def file(data: bytes) -> None:
    """A file of a data directory, as `hadelay inspect` shows it. The first byte says which."""
    disk = SimDisk(random.Random(1))
    disk.makedirs("/d")
    path = f"/d/{_NAMES[data[0] % len(_NAMES)]}" if data else "/d/names"
    disk.open(path, create=True).pwrite(data[1:], 0)
    for _ in inspect(path, disk):
        pass


def files() -> list[bytes]:
    made = world()
    contents = dict(made.store.bytes_of())
    found = [contents[f"{START_HOUR}.{suffix}"] for suffix in ("log", "idx", "dsp")]
    found += [
        bytes(14_400),
        names.encode_name(names.TOPIC, 0, "orders") + names.encode_name(names.NODE, 0, "n1"),
        identity.encode_identity(identity.Identity("c", 0, "n1")),
    ]
    events = np.zeros(2, DISPATCH)  # what a damaged file may name: an hour and a time that no calendar has
    events["event"], events["other_hour"] = Event.MOVED, (1 << 31) + 5
    events["at_ms"][1] = 1 << 60
    samples = [bytes([n]) + content for n, content in enumerate(found)]
    # Of nothing the checksum is zero.
    return [*samples, b"\2" + events.tobytes(), b"\5HDL1" + bytes(8), b"\5HDL1" + bytes(30), b"\5HDID" + bytes(8)]


def pieces(data: bytes) -> None:
    """Names, identities, records and rows of a snapshot, one after another."""
    for decode in (names.decode_names, identity.decode_identity):
        with suppress(DamagedFile, ConfigError):
            list(decode(data, "path"))
    if messages_in_files.check_record(data) is None:
        messages_in_files.decode_record(data)
    at = 0
    while (row := row_at(data, at)) is not None:
        at = row[1]


def piece_samples() -> list[bytes]:
    return [content[1:] for content in files()] + [b"\1\0\0\0\1\0\0\0\1\0\0\0abc" * 3]


def manifest(data: bytes) -> None:
    """A manifest of a backup: these bytes, or, behind a 1, what its checksum is over."""
    disk = SimDisk(random.Random(1))
    disk.makedirs("/b/hours")
    raw = data[1:]
    if data[:1] == b"\1":
        raw = b'{"crc32c":"%08x","backup":%s}' % (crc32c(raw), raw)
    for name, content in (("manifest-5.json", raw), ("state-5", b"state"), ("names", b"names")):
        disk.open(f"/b/{name}", create=True).pwrite(content, 0)
    archive = backup.Archive(backup.LocalBackups(disk, "/b"))
    found = archive.read()
    for name, known in found.files.items():
        archive.has(name, known.length, known.crc, found)
    assert all(isinstance(damage.offset, int) for _, damages in archive.verify(found) for damage in damages)


def manifests() -> list[bytes]:
    files = {name: backup.Contents(5, crc32c(text), crc32c(text).to_bytes(4, "little")) for name, text in _BACKED_UP}
    made = backup.Backup(1, "c", 0, FEATURE_LEVEL, 5, 1, "2026-11-20T18:00:00Z", files)
    body = msgspec.json.encode(made)
    return [b"\1" + body, b'\0{"crc32c":"%08x","backup":%s}' % (crc32c(body), body), b"\1" + b"[" * 2_000]


_BACKED_UP = (("state-5", b"state"), ("names", b"names"))


def archive(data: bytes) -> None:
    """A manifest of an archived hour, and what is made of it."""
    from hadelay.pipeline import archived
    from hadelay.storage import manifests
    from hadelay.storage.locations import Location

    name = hour_name(START_HOUR)
    path = _files() / "archive" / "_manifest" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    place = Location(str(path.parent.parent))
    manifests.source_of(archived.read_manifest(place, START_HOUR))
    for kind in ("messages", "events"):
        for part in archived.parts(place, START_HOUR, kind):
            archived.difference(place, part)
            assert part["rows"] + part["bytes"] >= 0


def archives() -> list[bytes]:
    name = hour_name(START_HOUR)
    part = {"path": f"messages/hour={name}/part-0.parquet", "rows": 5, "bytes": 9, "crc32c": "00000000"}
    source = {"entries": 5, "events": 0, "log_bytes": 9, "crc32c_log_idx_dsp": ["00000000"] * 3}
    body = {
        "version": 2,
        "hour": int(name),
        "source": source,
        "files": [part, part | {"path": f"events/hour={name}/e"}],
    }
    return [json.dumps(body).encode(), b"[" * 2_000]


def state(data: bytes) -> None:
    """A checkpoint's blob of everything, or of one hour."""
    made = _made()
    loaded = Ledger(0, made.store, made.tables, made.names)
    if data[:1] == b"\1":
        checkpoint.decode(loaded, _dumped()[0], {HOURS: [(START_HOUR.to_bytes(4, "big"), data[1:])]})
    else:
        checkpoint.decode(loaded, data[1:], {})


def states() -> list[bytes]:
    made = _made()
    core, rows = _dumped()
    empty = Ledger(0, made.store, made.tables, made.names)
    return [
        b"\0" + core, b"\0" + checkpoint.dump_core(empty), b"\1" + checkpoint.dump_hour(HourState()),
        *(b"\1" + blob for _, blob in rows[HOURS]),
    ]  # fmt: skip


_made = cache(world)


@cache
def _dumped() -> tuple[bytes, dict[bytes, list[tuple[bytes, bytes]]]]:
    return checkpoint.dump(_made().ledger)


def heads_file(data: bytes) -> None:
    """A .heads file: its header, then its counters; the seconds between are zeroes. The checksum holds."""
    header = bytearray(data[: HEADS.itemsize].ljust(HEADS.itemsize, b"\0"))
    body = bytes(8 * 3600) + data[HEADS.itemsize :]
    header[-4:] = crc32c(body, crc32c(bytes(header[:-4]))).to_bytes(4, "little")
    derived = hour_heads.decode_heads(bytes(header) + body, START_HOUR)
    if derived is not None:
        hour_heads.count_topics(derived.counters, np.zeros(3, INDEX))
        assert min(derived.entries, derived.counted) >= 0
    hour_heads.decode_heads(data, START_HOUR)


def heads_files() -> list[bytes]:
    derived = hour_heads.Derived()
    derived.counters = hour_heads.count_topics(derived.counters, np.zeros(5, INDEX))
    data = hour_heads.encode_heads(START_HOUR, derived)
    assert data.startswith(np.array([HEADS_MAGIC], HEADS["magic"]).tobytes())
    return [data[: HEADS.itemsize] + data[HEADS.itemsize + 8 * 3600 :], data[: HEADS.itemsize]]


def who(data: bytes) -> None:
    """An identity, behind its checksum."""
    disk = SimDisk(random.Random(1))
    disk.makedirs("/d")
    disk.open("/d/identity", create=True).pwrite(
        identity._HEAD.pack(identity._MAGIC, len(data), crc32c(data)) + data, 0
    )
    found = identity.check_identity(disk, "/d", identity.Identity("c", 0, "n1"))
    identity.encode_identity(found)


def whos() -> list[bytes]:
    return [identity.encode_identity(identity.Identity("c", 0, "n1", 5))[identity._HEAD.size :]]


# --- what people write


@cache
def _files() -> Path:
    """A directory that goes when the process does."""
    _files.directory = tempfile.TemporaryDirectory(prefix="hadelay-fuzz-")  # type: ignore[attr-defined]
    return Path(_files.directory.name)  # type: ignore[attr-defined]


def _written(name: str, data: bytes) -> Path:
    path = _files() / name
    path.write_bytes(data)
    return path


def config_file(data: bytes) -> None:
    """A node's file, or, behind a 1, variables of its environment."""
    if data[:1] == b"\1":
        lines = (line.partition("=") for line in data[1:].decode("latin-1").split("\n"))
        load(None, {f"HADELAY_{name}": text for name, _, text in lines})
    else:
        load(str(_written("n1.toml", data[1:])))


def config_files() -> list[bytes]:
    text = b"""[node]
name = "n1"
data_dir = "/d"
[cluster]
id = "c"
init = true
[http]
listen = "127.0.0.1:8400"
[raft]
heartbeat_ms = "50ms"
max_entry_bytes = "1MiB"
[raft.peers]
n1 = "127.0.0.1:8500"
'n 2' = "[::1]:8501"
"""
    return [b"\0" + text, b"\1HTTP__MAX_WAIT_MS=20ms\nRAFT__PEERS=n1=a:1,n2=b:2\nNODE__NAME=n1", b"\0a=" + b"[" * 2_000]


def chaos_file(data: bytes) -> None:
    """A scenario of chaos, or, behind a 1, the file of a cluster that chaos is let at."""
    path = _written("chaos.toml", data[1:])
    if data[:1] == b"\1":
        GivenCluster(path).kinds({"any", "kill"})
        return
    found = scenario.load(path)
    for _ in islice(scenario.rounds(found, 1, ["kill", "pause"]), 20):
        pass


def chaos_files() -> list[bytes]:
    mine = b"""[nodes.n1]
http = "http://127.0.0.1:8400"
kill = "ssh {node} kill"
start = "ssh {node} start"
[nodes.n2]
http = "http://127.0.0.1:8401/"
kill = "a 'b c' {peers}"
"""
    shipped = sorted((Path(scenario.__file__).parent / "scenarios").glob("*.toml"))
    return [b"\1" + mine, *(b"\0" + path.read_bytes() for path in shipped), b"\0a=" + b"[" * 2_000]


def certificate(data: bytes) -> None:
    """A certificate, its key or its authority are these bytes."""
    files = [str(path) for path in _pem()]
    files[data[0] % 3 if data else 0] = str(_written("some.pem", data[1:]))
    Certificates("raft", *files, mutual=True)


def certificates() -> list[bytes]:
    return [bytes([n]) + path.read_bytes() for n, path in enumerate(_pem())]


@cache
def _pem() -> tuple[Path, Path, Path]:
    directory = _files() / "pki"
    make_authority(directory)
    made = make_certificate(directory, "n1", ("127.0.0.1",), 2)
    return made, made.with_suffix(".key"), directory / "ca.pem"


# --- HTTP


class _Call:
    """As much of a request as the readers of bodies look at."""

    class context:
        config = HttpConfig()
        max_delay_ms = 2 * 365 * _DAY_MS

    class request:
        headers: ClassVar[dict[str, str]] = {}

    class access:
        @staticmethod
        def need(scope: str, topic: str) -> None:
            pass


_BODIES = ("application/json", "application/x-ndjson", "application/msgpack")


def batch(data: bytes) -> None:
    """The body of POST /v1/batches, in one of three formats, as far as the commit."""
    built = publish._Drafts(_Call())  # type: ignore[arg-type]
    for some in slices(data[1:], _BODIES[data[0] % 3] if data else _BODIES[0], 10_000, 1 << 20):
        built.add(some.items)
    drafts = built.drafts
    assert len(drafts) + len(built.problems) == built.total
    if drafts:
        kind, body = decode_entry(encode_entry(0, [commands.encode_publish("n1", drafts)]))[2][0]
        commands.decode(kind, body)


def batches() -> list[bytes]:
    items = [
        {"topic": "t", "body": "text", "delay": "5s", "key": "k", "on_conflict": "replace", "max_wait": "1m"},
        {"topic": "t", "body": "text", "key": "k", "unique_for": "1d"},
        {"topic": "t", "body": {"a": [1.5, None]}, "deliver_at": "2026-11-20T18:00:00Z", "tags": ["a"], "ttl": 5},
        {"topic": "t", "body_base64": "aGk=", "content_type": "a/b", "meta": {"a": "b"}, "idempotency_key": "i"},
    ]
    lines = b"\n".join(msgspec.json.encode(item) for item in items)
    packed = msgspec.msgpack.encode([{"topic": "t", "body": b"x", "delay": 5}, *items[1:]])
    return [b"\0" + msgspec.json.encode(items), b"\1" + lines, b"\2" + packed]


def body(data: bytes) -> None:
    """Any other body that the API reads, as JSON or msgpack."""
    kinds = sorted(_inputs(Request), key=lambda kind: kind.__name__)
    kind = kinds[data[0] % len(kinds)] if data else kinds[0]
    decode = msgspec.json.decode if data[1:2] != b"\2" else msgspec.msgpack.decode
    decoded(lambda data: decode(data, type=kind), data[2:], kind)


def _inputs(kind: type) -> list[type]:
    return [found for sub in kind.__subclasses__() for found in (sub, *_inputs(sub))]


def bodies() -> list[bytes]:
    some = {"ids": ["01"], "leases": ["0" * 29], "reason": "why", "delay": "5s", "topic": "t", "name": "n"}
    return [bytes([n, 0]) + msgspec.json.encode(some) for n in range(len(_inputs(Request)))] + [
        bytes([n, 2]) + msgspec.msgpack.encode({"ids": ["1"]}) for n in range(3)
    ]


def query(data: bytes) -> None:
    """The query of any other call; the first byte says of which."""
    kinds = sorted(_inputs(Request), key=lambda kind: kind.__name__)
    pairs = decoding.parse_query(data[1:].decode("latin-1"))
    decoding.decode_query(pairs, kinds[data[0] % len(kinds)] if data else None)


def queries() -> list[bytes]:
    text = b"limit=5&cursor=x&states=ready%2Cdead&from=2026-11-20T18:00:00Z&until=5&history&stale=true&verbose="
    some = text.split(b"&")
    return [bytes([n]) + part for n in range(len(_inputs(Request))) for part in (text, some[n % len(some)])]


def answer(data: bytes) -> None:
    """What commands and the client make of an answer, of a node or of whatever else listens there."""
    status = (200, 400, 404, 409, 503, 504)[data[0] % 6] if data else 500
    with suppress(HadelayError):
        remote.read_answer(remote.RemoteAnswer("http://127.0.0.1", status, {}, data[1:]), "POST", "outcome")


def answers() -> list[bytes]:
    problem = {
        "type": "conflict", "title": "Conflict", "status": 409, "detail": "why", "retryable": False,
        "outcome_known": True, "retry_after_ms": 5, "outcome": "leased",
    }  # fmt: skip
    bodies = (json.dumps(problem).encode(), b'{"self":"/"}', b"<html>", b"[" * 2_000, b'"\xff"')
    return [bytes([n]) + body for n in range(6) for body in bodies]


def forwarded(data: bytes) -> None:
    """An answer from a node of another shard, whole and in pieces. What is accepted, and leaves the connection open,
    another reader of HTTP reads alike."""
    at_once, in_pieces = (_exchanged(data, step) for step in (len(data) or 1, 1 + len(data) // 7))
    if at_once:
        assert at_once == in_pieces
    for whole in (at_once, in_pieces):
        if whole:
            other = http.client.HTTPResponse(_Sent(data))  # type: ignore[arg-type]
            other.begin()
            assert (other.status, other.read()) == (whole.status, whole.body)
            assert not other.will_close


def _exchanged(data: bytes, step: int) -> WholeAnswer | None:
    """The answer, if the connection may be used again."""
    exchange, whole = Exchange(), None
    exchange.begin()
    with suppress(Odd):
        for at in range(0, len(data), step):
            whole = exchange.feed(data[at : at + step])
            assert whole is None or exchange.state is not State.ASKED
    return whole if exchange.state is State.IDLE else None


class _Sent:
    """A socket with these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def forwarded_answers() -> list[bytes]:
    some = [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"HTTP/1.1 204 No Content\r\n\r\n"]
    more = (b"Connection: close", b"Transfer-Encoding: chunked", b"Content-Length: 1", b"A: b", b"Upgrade: h2c")
    some += [b"HTTP/1.1 503 \r\n%b\r\nContent-Length: 1\r\n\r\nx" % line for line in more]
    return some


def head(data: bytes) -> None:
    """Query and headers of a publish: a line each."""
    query, *lines = data.split(b"\n")
    headers = [(name, value) for line in lines for name, _, value in [line.partition(b":")]]
    options.parse_head(HttpConfig(), _DAY_MS, "t", query.decode("latin-1"), headers)


def heads() -> list[bytes]:
    return [
        b"delay=5s&key=k&tags=a,b&ttl=1h\nContent-Type:a/b\nHadelay-Meta-A:b\nIdempotency-Key:i",
        b"\nHadelay-Delay:5s\ntraceparent:00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\nHadelay-Tags:a",
        b"deliver_at=2026-11-20T18:00:00Z&on_conflict=replace&max_wait=5s&callback=https://a.b/c",
        b"unique_for=7d&key=k&on_success=done&on_failure=failed",
    ]


def text(data: bytes) -> None:
    """Tokens, ids, cursors, times and names that come as text; the first byte says which."""
    raw = data[1:].decode("latin-1")
    config = HttpConfig()
    (
        lambda: decode_leases(0, raw.split(",")),
        lambda: forms.parse_id(raw),
        lambda: listing._decode(raw, 7),
        lambda: forms.parse_duration("delay", raw),
        lambda: forms.parse_instant("deliver_at", raw),
        lambda: forms.check_topic(raw),
        lambda: states_of(raw),
        lambda: publishing.check_tags(config, raw.split(",")),
        lambda: publishing.check_traceparent(data[1:]),
        lambda: meta.unpack(meta.pack(Meta(ct=raw))),
    )[data[0] % 10 if data else 0]()


def texts() -> list[bytes]:
    token = encode_leases(0, 1, 2, [3], [START_HOUR], [5])[0]
    some = [
        f"{token},{token.lower()}", encode_id(1 << 60), listing._encode((5, 6), 7), "1h30m",
        "2026-11-20T18:00:00.5+01:00", "orders.new", "ready,dead", "a,b",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "text/plain",
    ]  # fmt: skip
    return [bytes([n]) + value.encode() for n, value in enumerate(some)]


def config(data: bytes) -> None:
    """Settings given on the command line, one per line: the same checks as those of a file."""
    load(None, {}, data[:1_000].decode("latin-1").split("\n"))


def configs() -> list[bytes]:
    return [b"http.max_wait_ms=20ms\nraft.heartbeat_ms=50", b"raft.peers={n1='a:1'}\nnode.name=n1", b"dispatch.sync=x"]


TARGETS: dict[str, Target] = {
    "entry": Target(entry, (FatalError,), entries),
    "cron": Target(patterns, (HadelayError,), pattern_samples),
    "frame": Target(frame, (messages.BadFrame,), frames),
    "raft": Target(raft, (FatalError,), rafts),
    "call": Target(call, (), calls),
    "journal": Target(journal, (DamagedFile, FatalError), journals),
    "file": Target(file, (DamagedFile, ConfigError), files),
    "pieces": Target(pieces, (), piece_samples),
    "manifest": Target(manifest, (DamagedFile, ConfigError), manifests),
    "state": Target(state, (FatalError,), states),
    "heads": Target(heads_file, (), heads_files),
    "who": Target(who, (DamagedFile, ConfigError), whos),
    "config_file": Target(config_file, (ConfigError,), config_files),
    "chaos_file": Target(chaos_file, (scenario.Mistake,), chaos_files),
    "certificate": Target(certificate, (ConfigError,), certificates),
    "batch": Target(batch, (HadelayError,), batches),
    "body": Target(body, (HadelayError,), bodies),
    "query": Target(query, (HadelayError,), queries),
    "answer": Target(answer, (), answers),
    "forwarded": Target(forwarded, (), forwarded_answers),
    "head": Target(head, (HadelayError,), heads),
    "text": Target(text, (HadelayError,), texts),
    "config": Target(config, (ConfigError,), configs),
}
if find_spec("pyarrow"):
    TARGETS["archive"] = Target(archive, (NotFound,), archives)
