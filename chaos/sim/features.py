"""Model of callbacks, results, subscriptions, fills and bulk jobs, from the committed commands and their results alone.

Each check predicts what a command has to leave behind, by reading the stored entries and records; none of them calls
the code of the ledger that files callbacks, results or copies, or that judges the messages of a job.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from chaos.sim.transfers import Transfers
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command, SettleLeases
from hadelay.codec.formats import RECORD_SIZE
from hadelay.codec.jobcommands import ON_DEAD
from hadelay.codec.meta import copied_meta, tags_in, unpack
from hadelay.codec.records import decode_record
from hadelay.codec.results import Done, LeaseOutcome, LeaseResult, PublishResult, RowCode, TargetOutcome
from hadelay.codec.wire import Malformed
from hadelay.ledger.hours.lookup import find_entry, state_of, ttl_of
from hadelay.ledger.leases import callbacks
from hadelay.ledger.leases.ackresults import result_of
from hadelay.ledger.messages.copies import COPYOF
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, MAX_SUBSCRIPTIONS, SEPARATOR, State, encode_id, pack_id, unpack_id

#: Time, in ms, for which the result of an ack is kept if the topic has no retention.
_KEPT_MS = 24 * HOUR_MS
#: Commands that may change the settings of topics. Checks that need the settings before the entry skip entries with
#: such a command.
_CHANGES = (
    Command.AUDITED, Command.TOPIC_PUT, Command.TOPIC_DELETE, Command.SUBSCRIPTION_PUT, Command.SUBSCRIPTION_FILL,
)  # fmt: skip
_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)
_ENDED = (State.ACKED, State.CANCELLED, State.EXPIRED)
_Commands = list[tuple[int, Any]]


class Features:
    """Checks of one cluster's callbacks, results, subscriptions and bulk jobs. Call `begin` before an entry is applied
    for the first time, and `committed` after it."""

    def __init__(self, decide: Callable[..., None]) -> None:
        """decide: counts a checked case of a promise and notes a violation, see `Machines.decide`."""
        self._decide, self._transfers = decide, Transfers(decide)
        #: Message id → (result that its ack carried, Unix ms until which the result is kept).
        self.results: dict[int, tuple[bytes, int]] = {}
        self._copies: set[bytes] = set()
        self._count = 0
        self._dropped: dict[int, int] = {}
        #: For an entry whose first command is a step of a job: (job, its counts before, predicted counts, messages to
        #: change).
        self._step: tuple[int, Counter[str], Counter[str], list[int]] | None = None

    def begin(self, ledger: Ledger, now_ms: int, commands: _Commands) -> None:
        """Note, before the entry is applied, the state that `committed` compares with the state after the entry."""
        self._transfers.begin(ledger, now_ms, commands)
        self._count = ledger.store.count(now_ms // HOUR_MS)
        self._dropped = {topic.number: topic.dropped for topic in ledger.topics.all if SEPARATOR in topic.name}
        self._step = None
        if commands and commands[0][0] == Command.JOB_STEP:
            try:
                self._foresee(ledger, decode(Command.JOB_STEP, commands[0][1]), now_ms)
            except Malformed:
                return

    def committed(self, ledger: Ledger, commands: _Commands, results: list[Any]) -> None:
        """Check an entry that was just applied. commands, results: commands of the entry, and their results."""
        self._transfers.committed(ledger, commands, results)
        try:
            every = [(kind, decode(kind, body), result) for (kind, body), result in zip(commands, results, strict=True)]
        except Malformed:
            return  # skip an invalid command: only fuzz clients send such commands
        settles = [(c, r) for k, c, r in every if k == Command.SETTLE and not c.nack and isinstance(r, LeaseResult)]
        for command, result in settles:
            self._check_results(ledger, command, result)
        self._check_step(ledger, every)
        self._check_fills(ledger)
        for kind, command, result in every:
            if kind in (Command.CANCEL, Command.RESCHEDULE) and getattr(result, "copies", None):
                self._check_joint(result)
            elif kind == Command.AUDITED and command.kind == Command.TOPIC_DELETE and isinstance(result, Done):
                self._check_deleted(ledger, decode(command.kind, command.body).topic)
        if not any(kind in _CHANGES for kind, _ in commands):
            self._check_callbacks(ledger, settles)
            for kind, command, result in every:
                if kind == Command.PUBLISH and isinstance(result, PublishResult):
                    self._check_published(ledger, command, result)
            self._check_dropped(ledger, every)

    def kept(self, ledger: Ledger) -> None:
        """Check at the end of a run: each result whose retention is not over can be read."""
        for message_id, (wanted, until_ms) in self.results.items():
            if until_ms > ledger.now_ms:
                found = result_of(ledger, message_id)
                text = f"the result of {message_id:x} is {found!r}, not {wanted!r}, at {ledger.now_ms} of {until_ms}"
                self._decide("results", found != wanted, text, message_id)

    def _check_results(self, ledger: Ledger, command: SettleLeases, result: LeaseResult) -> None:
        """Results: an ack that takes effect stores the result that it carried."""
        for lease, wanted in {lease: one.json for lease, one in (command.results or {}).items()}.items():
            row = _entry(ledger, command.rows[lease])
            if row is not None and result.outcomes[lease] == LeaseOutcome.DONE:
                first_id, topic = int(row["first_id"]), ledger.topics[int(row["topic"])]
                self.results[first_id] = wanted, ledger.now_ms + topic.config.get("retention_ms", _KEPT_MS)
                found = result_of(ledger, first_id)
                text = f"the ack of {first_id:x} carried {wanted!r}, and {found!r} is stored"
                self._decide("results", found != wanted, text, first_id)

    def _check_callbacks(self, ledger: Ledger, settles: list[tuple[SettleLeases, LeaseResult]]) -> None:
        """C1: the success callbacks that an entry stores are those that its acks ask for, with the right contents; and
        the last error in a failure callback is that of this entry."""
        if not ledger.topics.calls_back:
            return
        wanted = Counter(one for command, result in settles for one in _asked(ledger, command, result))
        filed = Counter[str]()
        for topic, document in self._filed(ledger):
            if "errors" in document:
                last = document["errors"][-1:]
                text = f"a failure callback of {document['id']} at {ledger.now_ms} ends with {last}"
                self._decide("C1 callbacks", not last or last[0]["at"] != _instant(ledger), text)
            else:
                filed[_outcome(topic, document)] += 1
        text = f"callbacks {sorted((filed - wanted).elements())} instead of {sorted((wanted - filed).elements())}"
        self._decide("C1 callbacks", filed != wanted, text)

    def _filed(self, ledger: Ledger) -> Iterator[tuple[str, dict[str, Any]]]:
        """(topic, document) of each callback that the entry stored. Callbacks are due at once, so they are in the
        present hour."""
        hour = ledger.now_hour
        for row in ledger.store.entries(hour, slice(self._count, ledger.store.count(hour))):
            if int(row["first_id"]) == pack_id(ledger.group, hour, int(row["index"])):
                record = decode_record(_record(ledger, hour, row))
                if unpack(record.meta).re:
                    yield ledger.topics[int(row["topic"])].name, json.loads(record.body)

    def _check_published(self, ledger: Ledger, command: Any, result: PublishResult) -> None:
        """F1: a stored message has a copy in each subscription whose filter its tags pass, and in its topic's own
        queue; a full subscription that drops copies does not refuse the publish; and a replaced message waits in no
        queue."""
        for n, row in enumerate(command.rows):
            name, size = command.topics[int(row["topic"])], int(row["meta_size"])
            start = int(command.starts[n]) + RECORD_SIZE
            topic, meta = ledger.topic(name), bytes(command.blob[start : start + size])
            passing = [
                each for each in ledger.topics.all
                if each.exists and each.name.startswith(name + SEPARATOR)
                and (each.filter is None or each.filter.matches(tags_in(meta)))
            ]  # fmt: skip
            bounded = [
                each for each in passing if (each.settings.max_messages, each.settings.max_bytes) != (None, None)
            ]
            code, message_id = int(result.codes[n]), int(result.ids[n])
            if code == RowCode.SUBSCRIPTION_FULL:
                drops = all(each.settings.on_full == "drop" for each in bounded)
                # Check only the first refused row: apply then refuses all later rows with client keys for the same
                # reason.
                first = RowCode.SUBSCRIPTION_FULL not in result.codes[:n]
                self._decide(
                    "F1 fan-out, copies",
                    first and drops,
                    f"a row of {name} is refused, and no subscription refuses any",
                )
            if code != RowCode.OK or result.duplicate[n] or topic is None:
                continue
            if result.others is not None and result.others[n]:
                self._check_replaced(ledger, int(result.others[n]), message_id)
            if passing:
                found = {ledger.topics[number].name for number, _ in _copies(ledger, message_id)}
                copies = found - {name}
                wrong = not {each.name for each in passing if each not in bounded} <= copies
                wrong |= not copies <= {each.name for each in passing}
                wrong |= (name in found) != (topic.settings.own_queue or not copies)
                text = f"{message_id:x} of {name} is in {sorted(found)}, and passes {[each.name for each in passing]}"
                self._decide("F1 fan-out, copies", wrong, text, message_id)
                missing = Counter(each.number for each in bounded if each.name not in copies)
                self._dropped.update({number: self._dropped.get(number, 0) + 1 for number in missing})

    def _check_replaced(self, ledger: Ledger, old: int, new: int) -> None:
        for _, copy in _copies(ledger, old):
            place = find_entry(ledger, copy)
            waits = place is not None and state_of(ledger, place, ledger.now_ms) in _WAITING
            self._decide("F1 fan-out, copies", waits, f"{copy:x} waits, and {new:x} replaced {old:x}", copy, new)

    def _check_dropped(self, ledger: Ledger, every: Iterable[tuple[int, Any, Any]]) -> None:
        """F1: each copy that a full subscription drops is counted. Entries of fills are skipped, because fills count
        their own dropped copies."""
        if ledger.fills or any(kind == Command.JOB_STEP for kind, _, _ in every):
            return
        for number, wanted in self._dropped.items():
            topic = ledger.topics[number]
            text = f"{topic.name} counts {topic.dropped} dropped copies, not {wanted}"
            self._decide("F1 fan-out, copies", topic.dropped < wanted, text)

    def _check_joint(self, result: Any) -> None:
        """F1: the outcome reported for a message is that of all its copies, or `partial` if the outcomes of the copies
        differ."""
        for outcome, copies in zip(result.outcomes.tolist(), result.copies, strict=True):
            if copies:
                each = {int(one) for _, _, one in copies}
                wrong = outcome != (TargetOutcome.PARTIAL if len(each) > 1 else min(each))
                self._decide("F1 fan-out, copies", wrong, f"the outcomes {copies} are reported as {outcome}")

    def _check_deleted(self, ledger: Ledger, name: str) -> None:
        """F1: no subscription outlives its topic."""
        left = [each.name for each in ledger.topics.all if each.exists and each.name.startswith(name + SEPARATOR)]
        self._decide("F1 fan-out, copies", bool(left), f"{name} is deleted, and {left} exist")

    def _check_fills(self, ledger: Ledger) -> None:
        """F1: a copy that a fill makes has the TTL of its message, or else of its subscription."""
        if ledger.filled_copies <= len(self._copies):
            return
        for raw, _ in ledger.tables.range(COPYOF, limit=1 << 20):
            if raw in self._copies:
                continue
            self._copies.add(raw)
            copy = int.from_bytes(raw, "little")
            place = find_entry(ledger, copy)
            if place is None:
                continue
            row = place.rows[0]
            to = ledger.topics[int(row["topic"])]
            own_ms = copied_meta(decode_record(_record(ledger, place.hour, row)).meta).ttl
            ttl_ms = own_ms if own_ms > 0 else to.settings.ttl_ms or 0
            found = ttl_of(ledger, copy)
            wrong = (0 if found is None else found[1]) != ttl_ms
            self._decide(
                "F1 fan-out, copies", wrong, f"the copy {copy:x} has the TTL {found}, its message {own_ms} ms", copy
            )

    def _foresee(self, ledger: Ledger, step: Any, now_ms: int) -> None:
        job = ledger.jobs.get(step.job)
        if job is None or job.spec.action == "fill":
            return
        on_dead, wanted, changed = job.spec.action in ON_DEAD, Counter[str](), list[int]()
        for message_id in step.ids:
            place = find_entry(ledger, message_id)
            if place is None:
                wanted["settled"] += 1
                continue
            row, state = place.rows[0], state_of(ledger, place, now_ms)
            meant = int(row["generation"]) < job.topics.get(int(row["topic"]), 0)
            if state in _ENDED or (state is State.DEAD and not on_dead):
                wanted["settled"] += 1
            elif meant and state is State.LEASED and not on_dead:
                wanted["leased"] += 1
            elif meant and (state is State.DEAD if on_dead else state in _WAITING):
                wanted["changed"] += 1
                changed.append(message_id)
            else:
                wanted["moved"] += 1
        self._step = step.job, _counts(job), wanted, changed

    def _check_step(self, ledger: Ledger, every: list[tuple[int, Any, Any]]) -> None:
        """J1: the counts of a job agree with the states of the messages before its step; and messages whose due time
        the job changed still wait."""
        if self._step is None or not isinstance(every[0][2], Done):
            return
        number, before, wanted, changed = self._step
        job = ledger.jobs[number]
        found = _counts(job)
        found.subtract(before)
        text = f"step of job {number} ({job.spec.action}): counted {dict(found)}, not {dict(wanted)}"
        self._decide("J1 jobs, counts", +found != +wanted, text, *changed)
        if job.spec.action in ("reschedule", "deliver_now") and len(every) == 1:
            for message_id in changed:
                place = find_entry(ledger, message_id)
                state = None if place is None else state_of(ledger, place, ledger.now_ms)
                text = f"job {number} gave {message_id:x} another due time, and it is {state}"
                self._decide("J1 jobs, counts", state not in (*_WAITING, State.EXPIRED), text, message_id)


def _counts(job: Any) -> Counter[str]:
    return Counter(changed=job.done + job.refused, leased=job.leased, settled=job.settled, moved=job.moved)


def _entry(ledger: Ledger, lease: np.void) -> Any:
    """Index entry of the message of a lease. Reading it after apply is safe, because index entries never change."""
    hour, index = int(lease["hour"]), int(lease["index"])
    return ledger.store.entries(hour, slice(index, index + 1))[0] if index < ledger.store.count(hour) else None


def _record(ledger: Ledger, hour: int, row: np.void) -> bytes:
    return bytes(ledger.store.record(hour, int(row["offset"]), int(row["size"]), verify=True))


def _asked(ledger: Ledger, command: SettleLeases, result: LeaseResult) -> Iterator[str]:
    """Success callbacks that the acks of a command have to store, each as a text."""
    bodies = {lease: one.json for lease, one in (command.results or {}).items()}
    limit = vars(callbacks)["MAX_REPLY"]  # read the limit at run time: run.py replaces it by a small one
    answers = command.replies or {}
    for lease in np.flatnonzero(result.outcomes == LeaseOutcome.DONE).tolist():
        row = _entry(ledger, command.rows[lease])
        if row is None:
            continue
        topic = ledger.topics[int(row["topic"])]
        meta = unpack(decode_record(_record(ledger, int(command.rows[lease]["hour"]), row)).meta)
        to = (meta.os if topic.names_own else None) or topic.settings.on_success
        if to is None or meta.re or int(row["generation"]) < topic.born:
            continue
        body = answers[lease].body if lease in answers else bodies.get(lease, b"")[:limit]
        document = {"id": encode_id(int(row["first_id"])), "topic": topic.name, "attempt": int(row["attempt"]) + 1}
        yield _outcome(to, document | {"body": body.decode()})


def _outcome(topic: str, document: dict[str, Any]) -> str:
    body = document.get("body")
    if body is None:
        body = base64.b64decode(document.get("body_base64", "")).decode(errors="replace")
    return f"{topic}: {document['id']} of {document['topic']}, attempt {document['attempt']}, {body!r}"


def _copies(ledger: Ledger, message_id: int) -> list[tuple[int, int]]:
    """(topic, id) of a message and of the copies that were stored with it. Copies share the message's record, and have
    the next ids."""
    _, hour, index = unpack_id(message_id)
    rows = ledger.store.entries(hour, slice(index, index + 1 + MAX_SUBSCRIPTIONS))
    found = list[tuple[int, int]]()
    for n, row in enumerate(rows):
        if int(row["first_id"]) != message_id + n or row["offset"] != rows[0]["offset"]:
            break
        found.append((int(row["topic"]), message_id + n))
    return found


def _instant(ledger: Ledger) -> str:
    text = np.datetime_as_string(np.datetime64(ledger.now_ms, "ms"), unit="ms")
    return f"{text}Z"
