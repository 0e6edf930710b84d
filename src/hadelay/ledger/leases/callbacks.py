"""Callbacks: messages which report that another message was acked, or is dead (ADR 255).

An ack files a success callback, and a death files a failure callback, in the same apply: no crash can come between the
two. The topics are in the settings on_success and on_failure; a message names others in its meta if its topic's webhook
has `allow_per_message`. A callback itself has no callbacks (meta `re`), so that no two topics answer each other for
ever. Quotas do not hold for callbacks, as they do not hold for routed dead letters: the messages that they tell of have
ended, and nobody could repeat the publish.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.ackparts import AckResult, CallReply
from hadelay.codec.commandtypes import SettleLeases
from hadelay.codec.formats import I64, INDEX, REASON, Mask, Rows
from hadelay.codec.meta import CallbackMeta, Meta, callback_meta, pack
from hadelay.codec.publishcommand import GAP, decode_body, encode_publish
from hadelay.codec.records import decode_record
from hadelay.codec.results import LeaseOutcome, RowCode
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.hours.transitions import FLAG_CALLBACK, MOVE_BYTES, Leaving, failures_of, fitting
from hadelay.ledger.leases.grantrows import NamedLeases
from hadelay.ledger.limits.quotas import Room
from hadelay.ledger.messages.publish import apply_publish
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topicchanges import topic_or_new
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import MAX_REPLY, NONE32, Draft, encode_id
from hadelay.settings.kinds import TOPIC_NAME

#: Encodes JSON in ASCII, which is the same for every version of Python: replicas must not differ.
to_json = json.JSONEncoder(separators=(",", ":")).encode
_EPOCH = datetime.fromtimestamp(0, UTC)
#: Limit of the times that `instant` shows, in Unix ms: the end of the year 9999.
_MAX_MS = 253_402_300_800_000


class _Callback(NamedTuple):
    topic: str
    event: Literal["success", "failure"]
    #: Body of the callback, before it is encoded as JSON.
    document: dict[str, Any]
    #: Trace context (`traceparent`) of the message that the callback reports on.
    traceparent: str | None


def succeeded(ledger: Ledger, command: SettleLeases, done: Mask) -> None:
    """File a callback for each message that this ACK ended, if its topic or the message asks for one. done: per lease,
    whether the ack counted."""
    at = np.flatnonzero(done)
    leases = command.rows[at]
    replies = _results(command.results or {}) | (command.replies or {})
    callbacks = []
    for lease, hour, row in zip(at.tolist(), leases["hour"].tolist(), _entries(ledger, leases), strict=True):
        topic = ledger.topics[int(row["topic"])]
        target, meta = _asked(ledger, topic, hour, row, "success")
        if target:
            document = _success(topic, row, meta, replies.get(lease, _NO_REPLY))
            callbacks.append(_Callback(target, "success", document, meta.tp))
    _file(ledger, command.node, callbacks)


def died(ledger: Ledger, leaving: Leaving, topic: TopicState) -> None:
    """File a callback for each of these messages of the topic that have just died (INDEX rows of the last attempts), if
    the topic or the message asks for one."""
    callbacks = []
    for row in leaving.rows:
        target, meta = _asked(ledger, topic, leaving.hour, row, "failure")
        if target:
            callbacks.append(_Callback(target, "failure", _failure(ledger, topic, row, meta), meta.tp))
    _file(ledger, "", callbacks)


def read_bytes(ledger: Ledger, leased: Rows) -> I64:
    """Number of bytes of records that the callbacks about these messages read, per row. leased: rows with hour and
    index."""
    if not ledger.topics.calls_back:
        return np.zeros(len(leased), np.int64)
    rows = _entries(ledger, leased)
    calls = [number in ledger.topics.calls_back for number in rows["topic"].tolist()]
    return np.where(calls, rows["size"].astype(np.int64), 0)


def within_bytes(ledger: Ledger, found: Iterable[NamedLeases], outcomes: NDArray[np.uint8]) -> Iterator[NamedLeases]:
    """Limit the records that callbacks read in one command to MOVE_BYTES. Yields the leases within this limit; the
    others get the outcome AGAIN, and are left to the next command.

    outcomes: per row of the command, in: DONE for open leases."""
    left = MOVE_BYTES
    for grant, positions, where in found:
        costs = read_bytes(ledger, grant.rows[positions])
        count = fitting(costs, left, at_least=left == MOVE_BYTES)
        left = max(left - int(costs[:count].sum()), 0)
        named = np.arange(len(outcomes))[where]
        outcomes[named[count:]] = LeaseOutcome.AGAIN
        if count:
            yield NamedLeases(grant, positions[:count], named[:count])


def _entries(ledger: Ledger, leased: Rows) -> Rows:
    rows = np.zeros(len(leased), INDEX)
    for hour, where in rows_by_value(leased["hour"]):
        rows[where] = ledger.store.entries(hour, leased["index"][where])
    return rows


_NO_REPLY = CallReply(0, "", b"", False)


def _asked(
    ledger: Ledger, topic: TopicState, hour: int, row: np.void, event: Literal["success", "failure"]
) -> tuple[str, CallbackMeta]:
    """Returns (topic of the callback that the message or its topic asks for, "" for none; meta of the message). A
    message that was leased when its topic was deleted gets no callback: the present settings are those of a new topic
    with the same name."""
    if int(row["generation"]) < topic.born:
        return "", CallbackMeta()
    target = topic.settings.on_success if event == "success" else topic.settings.on_failure
    names_own = topic.names_own and int(row["flags"]) & FLAG_CALLBACK
    if target is None and not names_own:
        return "", CallbackMeta()
    record = ledger.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
    meta = callback_meta(decode_record(record).meta)
    if names_own:
        target = (meta.os if event == "success" else meta.of) or target
    return target if target and not meta.re and TOPIC_NAME.fullmatch(target) else "", meta


def _results(results: dict[int, AckResult]) -> dict[int, CallReply]:
    """Convert handlers' results to the form of webhooks' answers, which become the bodies of callbacks: position of a
    lease → answer."""
    return {
        lease: CallReply(0, "application/json", result.json[:MAX_REPLY], len(result.json) > MAX_REPLY)
        for lease, result in results.items()
    }


def _success(topic: TopicState, row: np.void, meta: CallbackMeta, reply: CallReply) -> dict[str, Any]:
    return {
        "id": encode_id(int(row["first_id"])), "topic": topic.name, "key": meta.key, "attempt": int(row["attempt"]) + 1,
        "status": reply.status or None, "content_type": reply.content_type or None, **_body(reply),
        "truncated": reply.truncated, "schedule": meta.sch,
        "occurrence": instant(meta.oc) if meta.sch is not None else None,
    }  # fmt: skip


def _body(reply: CallReply) -> dict[str, Any]:
    """The body of an answer as text, or as base64 if it is not UTF-8. A last character that the size limit cut is left
    out."""
    try:
        return {"body": reply.body.decode()}
    except UnicodeDecodeError as error:
        if reply.truncated and error.reason == "unexpected end of data":
            return {"body": reply.body[: error.start].decode()}
        return {"body": None, "body_base64": base64.b64encode(reply.body).decode()}


def _failure(ledger: Ledger, topic: TopicState, row: np.void, meta: CallbackMeta) -> dict[str, Any]:
    first_id = int(row["first_id"])
    errors = [
        {
            "event": event.name.lower(), "at": instant(at_ms), "attempt": attempt,
            "reason": None if reason == NONE32 else ledger.names.name(REASON, reason),
        }
        for at_ms, event, attempt, reason in failures_of(ledger, first_id)
    ]  # fmt: skip
    return {"id": encode_id(first_id), "topic": topic.name, "key": meta.key, "errors": errors}


def instant(ms: int) -> str | None:
    """RFC 3339 text of a time in Unix ms. None for a time out of range: the time is from meta, which publishers
    write."""
    if not 0 <= ms < _MAX_MS:
        return None
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@lru_cache(1_024)
def _meta(event: str, traceparent: str | None) -> bytes:
    return pack(Meta(ct="application/json", meta={"callback": event}, tp=traceparent, re=event))


def _file(ledger: Ledger, node: str, callbacks: list[_Callback]) -> None:
    """Publish callbacks, and count them: those filed, those of them beyond a quota, and those lost because their topic
    could not be created."""
    drafts, rooms = [], dict[str, Room]()
    for topic, event, document, traceparent in callbacks:
        found = topic_or_new(ledger, topic)
        if found is None:
            ledger.callbacks["lost"] += 1
            continue
        body, meta = to_json(document).encode(), _meta(event, traceparent)
        room = rooms.setdefault(topic, Room(found))
        size = len(GAP) + len(meta) + len(body)
        ledger.callbacks["over_quota"] += room.refusal(size, ()) != RowCode.OK
        room.take(size, ())
        drafts.append(Draft(topic, 0, True, 0, 0, meta, body))
    if drafts:
        codes = apply_publish(ledger, decode_body(encode_publish(node, drafts)), bounded=False).codes
        filed = int(np.count_nonzero(codes == RowCode.OK))
        ledger.callbacks["filed"] += filed
        ledger.callbacks["lost"] += len(drafts) - filed
