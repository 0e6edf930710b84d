"""Deliberate bugs in the ledger, in hand-outs and in the server."""

import dataclasses
import errno
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, patch

import numpy as np
from msgspec.structs import replace
from pyroaring import BitMap

from chaos.sim import replicas
from chaos.sim.mutations.table import CRASHES, Bug, Original, bug, stub
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import decode_entry, encode_entry
from hadelay.codec.meta import Filter
from hadelay.codec.results import GrantResult, LeaseOutcome, LeaseResult
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown
from hadelay.handout import owed
from hadelay.handout.dispatcher import Dispatcher
from hadelay.handout.windows import Windows
from hadelay.ledger.apply import _APPLY
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.hours.transitions import Leaving, log_events, settle
from hadelay.ledger.jobs import bulk
from hadelay.ledger.leases import dead, granting, settling, suspects
from hadelay.ledger.leases.grantrows import OpenGrant
from hadelay.ledger.messages import changes, idempotency, keys, publish, ttl
from hadelay.ledger.messages.keys import Decision
from hadelay.ledger.topics.topics import TopicBook
from hadelay.ledger.views import describe
from hadelay.model import Draft, Event, State
from hadelay.server import groupcommit
from hadelay.server.clustertime import ClusterClock
from hadelay.server.delivery import cursor, modes
from hadelay.server.delivery.grants import DeferredDeliveries, Grants
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.delivery.maintenance import LeaseExpiry, MaintenanceRunner
from hadelay.server.delivery.modes import IntervalHandout
from hadelay.server.delivery.topicexpiry import TopicExpiry
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.node import Node
from hadelay.server.service.files import Files
from hadelay.storage.heads import HeadsCache
from hadelay.storage.tables import Tables


def _published_as(change: Callable[[Draft], Draft]) -> tuple[Any, str, Callable[..., Any]]:
    """Patch (owner, name, function) with which every publish stores messages altered by `change`."""
    encode = vars(groupcommit)["encode_publish"]
    return groupcommit, "encode_publish", lambda node, drafts, *more: encode(node, [*map(change, drafts)], *more)


def _not_expired(ledger: Any, rows: Any, now_ms: int) -> Any:
    return np.zeros(len(rows), np.bool_)


def _nothing(*_: Any, **__: Any) -> None:
    pass


stub("deaf_wheel", "the wheel does not hear of new messages", "", ("forgotten",), (Dispatcher, "on_filed", _nothing))
stub(
    "ignored_cancel", "a cancelled message is still owed", "", ("I3 phantom, cancelled",),
    (changes, "settle", _nothing),
)  # fmt: skip
stub(
    "ignored_purge", "a purged message is still owed", "", ("I3 phantom, purged",),
    (TopicBook, "end", lambda topics, topic: topics.note_work(topic)),
)  # fmt: skip
stub(
    "no_ttl", "what is past its TTL is handed out", "kill pause", ("TTL, leased",), (granting, "expired", _not_expired),
    (settling, "expired", _not_expired), (owed, "expired", _not_expired), (ttl, "_expire", lambda *_: 0),
)  # fmt: skip
stub("kept_ttl", "a reschedule keeps the end of the TTL", "kill", ("TTL, ended",), (ttl, "begin_again", _nothing))
stub(
    "forgotten_key", "idempotency keys are forgotten", "reset kill", ("I8 duplicate, answered",),
    (idempotency, "remember", _nothing),
)  # fmt: skip
stub(
    "blind_key", "two messages of one client key are pending", "", ("one per key",),
    (keys, "_pending", lambda ledger, message_id: (None, False)),
)  # fmt: skip
stub(
    "ignored_filter", "who asks for tags gets others as well", "", ("filters",),
    (Filter, "may", lambda self, masks: np.ones(len(masks), np.bool_)), (Filter, "matches", lambda self, tags: True),
)  # fmt: skip
stub(
    "foreign_body", "a body is stored that nobody sent", "", ("I3 phantom",),
    _published_as(lambda d: replace(d, body=d.body[::-1])),
)  # fmt: skip
stub(
    "short_body", "the last byte of a body is lost", "", ("I3 phantom, body",),
    _published_as(lambda d: replace(d, body=d.body[:-1]) if len(d.body) > 5 else d),
)  # fmt: skip
stub(
    "lost_tags", "tags are stored for filters only", "", ("I3 phantom, tags",),
    _published_as(lambda d: replace(d, meta=b"")),
)  # fmt: skip
stub(
    "five_ms_early", "delays are 5 ms short", "", ("I9 early, delay",),
    _published_as(lambda d: replace(d, when_ms=d.when_ms - 5) if d.relative else d),
)  # fmt: skip
stub(
    "early_time_of_day", "a time of day is taken 600 ms early", "", ("I9 early, time of day",),
    _published_as(lambda d: d if d.relative else replace(d, when_ms=d.when_ms - 600)),
)  # fmt: skip
stub(
    "kept_poll", "the receive of a consumer that hung up goes on waiting", "", ("hang-ups",),
    (DeliveryLoop, "cancel_poll", _nothing),
)  # fmt: skip
stub("old_backup", "a backup is an old checkpoint", "backup", ("backup",), (Files, "_checkpoint", AsyncMock()))
stub(
    "shifted_twice", "what a job rescheduled keeps its generation", "kill", ("J1 jobs, twice",),
    (bulk, "_generations", lambda ledger, job, rows: rows["generation"]),
)  # fmt: skip
stub(
    "kept_letters", "a job counts dead letters as deleted, and keeps them", "", ("J2 jobs, complete",),
    (dead, "delete_letters", lambda ledger, leaving: len(leaving.rows)),
)  # fmt: skip
stub(
    "lost_result", "the result of an ack is lost", "", ("results",),
    (settling, "keep_results", lambda ledger, command, done: None),
)  # fmt: skip


stub(
    "polls_are_no_use", "a topic with expires_after ends although a consumer polls it", "", ("expires_after",),
    (TopicExpiry, "polled", _nothing),
)  # fmt: skip


@bug("the progress of a lease that ended is kept", "", "I2 conservation", at=(OpenGrant, "close"))
def kept_progress(close: Original, self: OpenGrant, positions: Any) -> None:
    progress = dict(self.progress)
    close(self, positions)
    self.progress = progress


stub("lost_timer", "no lease ever runs out", "", ("I15 liveness",), (LeaseExpiry, "add", _nothing))


@bug("apply raises an OSError that no disk raised", "", "I17 fail-stop, own error", at=(publish, "filed"))
def error_in_apply(filed: Original, ledger: Any, hours: Any, rows: Any, *more: Any) -> None:
    if (rows["index"] % 97 == 96).any():
        raise FileNotFoundError(errno.ENOENT, "no such file", "hours/1")
    filed(ledger, hours, rows, *more)


@bug("an ack is answered before its commit", CRASHES, "I5 resurrection", at=(GroupCommit, "propose"))
def answered_before_commit(propose: Original, self: GroupCommit, command: bytes, done: Any, term: int = 0) -> None:
    ((kind, body),) = decode_entry(encode_entry(0, [command]))[2]
    leases = decode(kind, body) if kind == Command.SETTLE else None
    if leases is None or leases.nack:
        propose(self, command, done, term)
        return
    propose(self, command, lambda result, error: None)
    done(LeaseResult(np.full(len(leases.rows), LeaseOutcome.DONE, np.uint8)), None)


@bug(
    "a message that its consumer ended as dead is tried again", "", "I5 resurrection, dead",
    at=(settling.ReturnedLeases, "__init__"),
)  # fmt: skip
def dead_is_retried(
    init: Original, self: Any, ledger: Any, failure: Any, delay_ms: int, *more: Any, **how: Any
) -> None:
    init(self, ledger, failure, max(delay_ms, -1), *more, **how)


@bug(
    "hand-outs precede their commit",
    "partition pause kill",
    "I6 double lease, attempts",
    at=(DeliveryLoop, "_make_handout"),
)
def dispatch_before_commit(_: Original, loop: DeliveryLoop, grants: Grants) -> IntervalHandout:
    return IntervalHandout(grants, loop._latency, loop.has_leader_lease)


@bug(
    "a grant of a leader that lost office reaches the next one",
    CRASHES,
    "I16 fenced leader, grant",
    at=(GroupCommit, "propose_as_leader"),
)
def unfenced_grant(_: Original, group_commit: GroupCommit, command: bytes, done: Any) -> None:
    group_commit.propose(command, done)


@bug(
    "grants ahead of their time are answered at once",
    "",
    "I9 early, cluster time",
    at=(DeferredDeliveries, "until_due"),
)
def not_deferred(
    _: Original, deferred: DeferredDeliveries, poll: Any, delivery: Any, release: Callable[[Any], None]
) -> None:
    release(delivery._replace(now_ms=deferred._term.now()))


@bug(
    "cluster time follows one wall clock", "clock_step", "I6 double lease, true time", at=(ClusterClock, "observe_wall")
)
def wall_clock_stamps(observe: Original, clock: ClusterClock, node: str, wall_ms: int, mono: float, *more: Any) -> None:
    observe(clock, node, wall_ms, mono, *more)
    if clock.leading and node == clock.node:
        clock._anchor(float(wall_ms), mono)


@bug("entries that are gone still take room of the windows", "", "I2 conservation", at=(Windows, "oldest"))
def room_of_the_gone(oldest: Original, windows: Windows, topic: Any) -> Any:
    size = windows.size
    try:
        return oldest(windows, topic)
    finally:
        windows.size = size


@bug("the cursor is ahead of what it stands for", "kill stop", "I10 late", at=(cursor, "encode_cursor"))
def cursor_ahead(encode: Original, hour: int, second: int, local: int) -> bytes:
    hours, seconds = divmod(second + 8, 3600)
    command: bytes = encode(hour + hours, seconds, local)
    return command


@bug("attempt numbers are used again", "", "I6 double lease, attempts", at=(granting, "_lease"))
def reused_attempt(lease: Original, ledger: Any, hour: int, rows: Any, *more: Any) -> None:
    lease(ledger, hour, rows, *more)
    rows["attempt"] = 1


@bug("an acked message is still owed", "", "I2 conservation", at=(settling, "settle"))
def dropped_ack(settle: Original, ledger: Any, leaving: Leaving, event: Any, **more: Any) -> None:
    hour, indexes = leaving.hour, leaving.rows["index"]
    if int(indexes[0]) % 7:
        settle(ledger, leaving, event, **more)
    else:
        log_events(ledger, hour, leaving.rows, event, node=leaving.node, previous=leaving.previous)
        ledger.hour_state(hour).leased -= BitMap(indexes)
        ledger.listener.on_filed(hour, ledger.store.entries(hour, indexes))


@bug("one message in 29 is never handed out", "", "I1 lost", at=(publish, "filed"))
def dropped_message(filed: Original, ledger: Any, hours: Any, rows: Any, *more: Any) -> None:
    filed(ledger, hours, rows, *more)
    lost = rows["index"] % 29 == 28
    for hour, where in rows_by_value(np.broadcast_to(hours, len(rows))[lost]):
        settle(ledger, Leaving(hour, rows[lost][where]), Event.CANCELLED)


@bug("max_attempts allows one attempt more", "", "attempts", at=(settling.ReturnedLeases, "_limits"))
def one_attempt_more(limits: Original, giving: Any, leased: Any) -> Any:
    return limits(giving, leased) + 1


@bug("max_wait counts from the last publish", "", "max_wait", at=(Decision, "_decide"))
def no_max_wait(decide: Original, decision: Decision, row: int, *more: Any) -> None:
    decide(decision, row, *more)
    decision._starts.pop(row, None)


@bug("a chain of replacements begins anew within one command", "", "max_wait", at=(Decision, "_decide"))
def new_chain(decide: Original, decision: Decision, row: int, key: bytes, *more: Any) -> None:
    earlier = decision._last.get(key)
    decide(decision, row, key, *more)
    if earlier is not None:
        decision._starts.pop(row, None)


@bug("keys of the window before are forgotten", "", "I8 duplicate, answered", at=(idempotency, "repeat"))
def one_window(repeat: Original, ledger: Any, *more: Any) -> Any:
    before, ledger.key_count_before = ledger.key_count_before, 0
    try:
        return repeat(ledger, *more)
    finally:
        ledger.key_count_before = before


@bug("the key index is ahead of the checkpoint", "kill", "I12 divergence, results", at=(Tables, "put"))
def keys_ahead(put: Original, tables: Tables, table: bytes, key: bytes, value: bytes) -> None:
    put(tables, table, key, value)
    if table.startswith(b"idem:"):
        tables.backend.commit([], [(table, key, value)])


@bug(
    "after a restart a second's chain ends too early", "kill stop", "I12 divergence, replicas", at=(HeadsCache, "_scan")
)
def wrong_local_index(scan: Original, heads: HeadsCache, hour: int, derived: Any, entries: int) -> None:
    scan(heads, hour, derived, entries - 1 if entries > derived.entries + 1 else entries)
    derived.entries = entries


@bug("idempotency keys live for a sixtieth of their time", CRASHES, "I8 duplicate, answered", at=(idempotency, "turn"))
def short_window(turn: Original, ledger: Any) -> None:
    window_ms = ledger.settings.idempotency_window_ms
    settings, ledger.settings = (
        ledger.settings,
        dataclasses.replace(ledger.settings, idempotency_window_ms=window_ms // 60),
    )
    try:
        turn(ledger)
    finally:
        ledger.settings = settings


@bug("what is given back behind its TTL is not written down", "kill", "TTL, written", at=(settling, "settle"))
def silent_expiry(settle: Original, ledger: Any, leaving: Leaving, event: Event, **more: Any) -> None:
    if event is Event.TTL_EXPIRED:
        ledger.hour_state(leaving.hour).leased -= BitMap(leaving.rows["index"])
        for number in leaving.rows["topic"].tolist():
            ledger.topics[number].leased -= 1
    else:
        settle(ledger, leaving, event, **more)


@bug("leases end half a second early", "", "I6 double lease, overlap")
def short_leases() -> Bug:
    apply_grant = _APPLY[Command.GRANT]

    def shorter(ledger: Any, command: Any) -> Any:
        known = set(ledger.grants)
        result = apply_grant(ledger, command)
        for key in ledger.grants.keys() - known:
            ledger.grants[key].rows["until_ms"] -= 500
        return result

    add = LeaseExpiry.add
    return [
        patch.dict(_APPLY, {Command.GRANT: shorter}),
        patch.object(LeaseExpiry, "add", lambda expiry, until_ms, key: add(expiry, until_ms - 500, key)),
    ]


@bug(
    "interval mode: what comes again after a take-over is not marked", CRASHES, "I6 double lease, interval",
    at=(modes, "first_time"), sync="interval",
)  # fmt: skip
def unmarked(first_time: Original, *args: Any) -> Any:
    delivery = first_time(*args)
    return delivery._replace(redelivered=np.zeros(len(delivery.redelivered), np.bool_))


@bug(
    "interval mode: whatever is due goes out ahead of its grant", CRASHES, "I6 double lease, bounds",
    at=(suspects, "goes_ahead"), sync="interval",
)  # fmt: skip
def unbounded_ahead(_: Original, *args: Any) -> bool:
    return True


@bug(
    "interval mode: a new leader marks all that was due", CRASHES, "I6 double lease, marks",
    at=(suspects, "of_term"), sync="interval",
)  # fmt: skip
def all_suspected(of_term: Original, ledger: Any) -> Any:
    return 0, of_term(ledger)[1]


@bug(
    "the recount of the localIndex leaves out a settled entry", "", "forgotten, localIndex",
    at=(Dispatcher, "recount"),
)  # fmt: skip
def left_out_of_the_count(recount: Original, core: Dispatcher) -> int | None:
    counted: int | None = recount(core)
    return counted - 1 if counted else counted


@bug("a repeated publish is answered with another id", "", "I8 duplicate, answered", at=(idempotency, "_answer"))
def second_answer(answer: Original, stored: bytes, fingerprint: int, first: int, count: int, result: Any) -> None:
    answer(stored, fingerprint, first, count, result)
    result.ids[first : first + count] += np.uint64(1)


@bug("a leader's clock runs a hundredth fast", "", "I9 early, clock", at=(ClusterClock, "_slew"))
def fast_clock(_: Original, clock: ClusterClock, agreed: float | None, mono: float) -> None:
    clock._anchor(clock.exact(mono), mono)
    clock._rate = 1.01


@bug("what a node answers depends on it", "", "I12 divergence, results", at=(_APPLY, Command.GRANT))
def other_results(apply_grant: Original, ledger: Any, command: Any) -> Any:
    result = apply_grant(ledger, command)
    if isinstance(result, GrantResult):
        result.until_ms += id(ledger) % 97
    return result


@bug("/metrics shows half of what waits", "", "I18 metrics honesty, waiting", at=(replicas, "measured"))
def few_waiting(measured: Original, node: Node) -> Any:
    shown = measured(node)
    shown["messages"]["waiting",] //= 2
    return shown


@bug("apply depends on the process", "", "I12 divergence, results")
def local_apply() -> Bug:
    resolve = publish._resolve
    processes: dict[int, int] = {}

    def rounded(ledger: Any, *rest: Any) -> Any:
        due_ms, too_far = resolve(ledger, *rest)
        return due_ms + (processes.setdefault(id(ledger), len(processes)) + hash("late")) % 50, too_far

    return [patch.object(publish, "_resolve", rounded)]


@bug("a batch counts as one message more", "", "I2 conservation", at=(publish, "_count"))
def miscounted(count: Original, ledger: Any, entries: Any) -> None:
    count(ledger, entries)
    if len(entries) > 4:
        ledger.topics[int(entries["topic"][0])].published += 1


@bug("a purged dead letter counts again when its hour is dropped", "", "I2 conservation", at=(dead, "_forget"))
def counted_twice(forget: Original, ledger: Any, hour: int, rows: Any) -> None:
    forget(ledger, hour, rows)
    for number, died_ms in rows[["topic", "deliver_at_ms"]].tolist():
        ledger.topics[number].dead -= died_ms <= ledger.topics[number].dead_mark_ms


@bug("a refused replacement cancels the pending message", "", "I1 lost", at=(Decision, "finish"))
def refused_replacement(finish: Original, decision: Decision) -> None:
    for row, before, first_id in decision._replaced:
        place = find_entry(decision.ledger, first_id)
        if before is None and not decision.batch.take[row] and place is not None:
            settle(decision.ledger, Leaving(place.hour, place.rows), Event.CANCELLED)
    finish(decision)


@bug("a repeated receive gets what was acked meanwhile", "", "I5 resurrection", at=(Grants, "_renewed"))
def acked_again(renewed: Original, grants_: Grants, poll: Any, delivery: Any, result: Any, error: Any) -> None:
    if isinstance(result, LeaseResult):
        result.outcomes[:] = LeaseOutcome.DONE
    renewed(grants_, poll, delivery, result, error)


@bug("the retention of an hour counts from its end", "", "stale read", at=(MaintenanceRunner, "_kept_until_ms"))
def early_retirement(kept_until_ms: Original, runner: MaintenanceRunner, hour: int) -> int:
    hour_state = runner._ledger.hours.get(hour)
    if hour_state is None:
        return int(kept_until_ms(runner, hour))
    settled_at_ms, hour_state.settled_at_ms = hour_state.settled_at_ms, 0
    try:
        return int(kept_until_ms(runner, hour))
    finally:
        hour_state.settled_at_ms = settled_at_ms


@bug("a settled message is forgotten in a tenth of its retention", "", "stale read", at=(describe, "_kept_ms"))
def brief_retention(kept_ms: Original, topic: Any) -> Any:
    return kept_ms(topic) // 10


@bug("a message that was acked is shown as cancelled", "", "reads", at=(describe, "state_of"))
def wrong_state(state_of: Original, *args: Any) -> State:
    found = state_of(*args)
    return State.CANCELLED if found is State.ACKED else found


@bug("a message beyond a quota is refused and stored", "", "I3 phantom, refused", at=(publish, "refuse_beyond_quotas"))
def refused_and_stored(refuse: Original, ledger: Any, batch: Any, *more: Any) -> None:
    take = batch.take.copy()
    refuse(ledger, batch, *more)
    batch.take[:] = take


@bug(
    "a batch whose outcome is unknown is sent again",
    "slow_sync kill",
    "I8 duplicate, handed out",
    at=(groupcommit._Batch, "answer"),
)
def sent_again(answer: Original, batch: Any, results: Any, error: HadelayError | None) -> None:
    answer(batch, results, NoLeader("again") if isinstance(error, OutcomeUnknown) else error)


@bug("/metrics shows twice as many acks", "", "I18 metrics honesty", at=(replicas, "measured"))
def boastful_metrics(measured: Original, node: Node) -> Any:
    shown = measured(node)
    shown["settled_messages_total"]["acked",] *= 2
    return shown
