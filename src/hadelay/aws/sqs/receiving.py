"""ReceiveMessage: leases messages. Only the leader leases, so other nodes relay the unchanged request to the leader."""

import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any

from msgspec import Meta, field

from hadelay.api.consuming import Received
from hadelay.api.service import Leader, ReceiveRequest
from hadelay.api.text import parse_id, parse_instant
from hadelay.aws.arns import ACCOUNT, queue_arn
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs import values
from hadelay.aws.sqs.attributes import FIFO, SHORTEST_MS, find
from hadelay.aws.sqs.protocol import OfQueue, invalid, named, operations
from hadelay.aws.sqs.sending import TRACE, sequence
from hadelay.aws.sqs.values import SYSTEM
from hadelay.errors import HadelayError
from hadelay.http.answers import Answer
from hadelay.http.consume import hand_out

_FIRST, _SOURCE = "ApproximateFirstReceiveTimestamp", "DeadLetterQueueSourceArn"
#: Longest wait of a receive, in seconds, as in SQS.
_LONGEST_S = 20
#: Names of system attributes that a receive may ask for.
_KNOWN = frozenset(
    (
        "All", "SenderId", "SentTimestamp", "ApproximateReceiveCount", _FIRST, "SequenceNumber",
        "MessageDeduplicationId", "MessageGroupId", TRACE, _SOURCE,
    )
)  # fmt: skip


class ReceiveMessage(OfQueue):
    AttributeNames: list[str] = field(default_factory=list)
    MessageSystemAttributeNames: list[str] = field(default_factory=list)
    MessageAttributeNames: list[str] = field(default_factory=list)
    MaxNumberOfMessages: Annotated[int, Meta(ge=1, le=10)] | None = None
    VisibilityTimeout: int | None = None
    WaitTimeSeconds: Annotated[int, Meta(ge=0, le=_LONGEST_S)] | None = None
    ReceiveRequestAttemptId: Annotated[str, Meta(pattern=r"^[ -~]{1,128}\Z")] | None = None

    @property
    def names(self) -> Mapping[str, str]:
        return {}  # not forwarded as other operations: `hand_out` finds the shard's leader, since a receive may wait


@operations.add("ReceiveMessage", ReceiveMessage)
async def receive_message(ask: Ask, document: ReceiveMessage) -> Any:
    name = named(ask, document.QueueUrl, "consume")
    wait_s = document.WaitTimeSeconds
    if ask.router.owner(name) is None:
        queue = await find(ask, name, stale=True)
        wait_s = int(queue.own("ReceiveMessageWaitTimeSeconds", "0")) if wait_s is None else wait_s
    system = frozenset((*document.AttributeNames, *document.MessageSystemAttributeNames))
    if unknown := sorted(system - _KNOWN):
        raise AwsError("InvalidAttributeName", f"AttributeNames: there is no attribute {unknown[0][:80]!r}")
    request = ReceiveRequest(
        [name],
        ask.access.actor.token or "sqs",
        _request_id(ask, name, document.ReceiveRequestAttemptId),
        document.MaxNumberOfMessages or 1,
        1000 * (_LONGEST_S if wait_s is None else wait_s),
        check_timeout(ask, document.VisibilityTimeout),
        group_max=10 if name.endswith(FIFO) else 1,
        node=ask.relayed_by,
    )
    handed = await hand_out(ask.call, ask.access, request, lambda leader: _elsewhere(ask, leader, request.wait_ms))
    if isinstance(handed, Answer):
        return handed
    found = [
        await _message(ask, message, published_ms, system, document.MessageAttributeNames)
        for message, published_ms in zip(handed.messages, handed.published_ms, strict=True)
    ]
    handed.answered()
    return {"Messages": found} if found else {}


async def _elsewhere(ask: Ask, leader: Leader, wait_ms: int) -> Answer:
    if ask.relayed_by:
        return Answer(307, {"Location": leader.url + ask.call.target}, b"")
    return await ask.relay(leader, wait_ms)


def _request_id(ask: Ask, queue: str, attempt: str | None) -> bytes:
    """Idempotency id of a receive: the same in all tries of one call. An id that the client gives
    (ReceiveRequestAttemptId) counts for one queue only."""
    key = attempt.encode() if attempt is not None else ask.retry_key
    return os.urandom(16) if key is None else blake2b(queue.encode() + b"\0" + key, digest_size=16).digest()


def check_timeout(ask: Ask, seconds: int | None) -> int | None:
    """Check the visibility timeout of a request; returns it in ms, or None if the queue's timeout applies. Raises
    AwsError."""
    longest = ask.limits.max_lease_ms // 1000
    if seconds is None:
        return None
    if not 0 <= seconds <= longest:
        raise invalid(f"VisibilityTimeout: {seconds} is not allowed; 0 to {longest}")
    return 1000 * seconds or SHORTEST_MS


async def _message(
    ask: Ask, message: Received[str], published_ms: int, system: frozenset[str], names: list[str]
) -> dict[str, Any]:
    text, own = values.unpack(bytes(message.body), message.content_type, message.meta)
    found: dict[str, Any] = {
        "MessageId": message.id,
        "ReceiptHandle": message.lease,
        "MD5OfBody": values.md5(text),
        "Body": text,
    }
    if attributes := await _system(ask, message, published_ms, system):
        found["Attributes"] = attributes
    if chosen := values.wanted(own, names):
        found |= {"MessageAttributes": chosen, "MD5OfMessageAttributes": values.md5_of(chosen)}
    return found


async def _system(ask: Ask, message: Received[str], published_ms: int, wanted: frozenset[str]) -> dict[str, str]:
    if not wanted:
        return {}
    found = {"SenderId": ACCOUNT, "SentTimestamp": str(published_ms), "ApproximateReceiveCount": str(message.attempt)}
    if message.group is not None:
        found["MessageGroupId"] = message.group
    if message.topic.endswith(FIFO):
        found["SequenceNumber"] = sequence(parse_id(message.id))
    for name in ("MessageDeduplicationId", TRACE):
        if (text := message.meta.get(SYSTEM + name)) is not None:
            found[name] = text
    every = "All" in wanted
    if every or _FIRST in wanted:
        found[_FIRST] = str(await _first_ms(ask, message))
    if every or _SOURCE in wanted:
        source = ask.service.messages.died_in(parse_id(message.id), message.topic)
        if source is not None and ask.may_any(source):
            found[_SOURCE] = queue_arn(source)
    return {name: text for name, text in found.items() if every or name in wanted}


async def _first_ms(ask: Ask, message: Received[str]) -> int:
    """Time at which a message was first received, in Unix ms. A history keeps a limited number of events, so this is
    the first hand-out that the history still has."""
    if message.attempt > 1:
        try:
            view = await ask.service.messages.describe(parse_id(message.id), body=False, stale=True)
        except HadelayError:
            view = None
        for event in (view.history if view is not None else None) or ():
            if event.event == "leased":
                return parse_instant("at", event.at)
    return int(time.time() * 1000)
