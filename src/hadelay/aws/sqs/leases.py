"""DeleteMessage and ChangeMessageVisibility, and their batches: a receipt handle is a lease."""

from collections.abc import Iterable, Mapping, Sequence

from hadelay.api.service import SettleKind
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs import batches
from hadelay.aws.sqs.attributes import FIFO, find
from hadelay.aws.sqs.protocol import Document, invalid, named
from hadelay.aws.sqs.receiving import check_timeout
from hadelay.errors import HadelayError

#: For each message of a request: its error, or None.
Errors = list[HadelayError | None]


class Handle(Document):
    ReceiptHandle: str


class Visibility(Handle):
    VisibilityTimeout: int | None = None


async def _foreign(ask: Ask, name: str, messages: Sequence[Handle]) -> Errors:
    """For each receipt handle: an error if it is not the lease of a message of the queue `name`, else None. Raises
    NotFound if there is no such queue."""
    topics = await ask.service.consume.topic_of_each([message.ReceiptHandle for message in messages])
    if any(topic != name for topic in topics):
        await find(ask, name, stale=True)
    error = AwsError("ReceiptHandleIsInvalid", f"ReceiptHandle: this is no handle of a message of {name}")
    return [None if topic == name else error for topic in topics]


async def _settle(
    ask: Ask, kind: SettleKind, handles: Mapping[int, str], value_ms: int | None = None, reason: str = ""
) -> Iterable[tuple[int, str]]:
    """Settle leases. handles: position in the request → receipt handle. Returns pairs of a position and its outcome."""
    leases = list(handles.values())
    outcomes = await ask.service.consume.settle(kind, leases, value_ms, reason) if leases else []
    return zip(handles, outcomes, strict=True)


@batches.add("DeleteMessage", Handle)
async def delete_messages(ask: Ask, url: str, messages: Sequence[Handle]) -> Errors:
    """Ack messages. A handle whose message was leased again acks nothing; as in SQS, only a FIFO queue answers it with
    an error."""
    name = named(ask, url, "consume")
    errors = await _foreign(ask, name, messages)
    handles = {at: message.ReceiptHandle for at, message in enumerate(messages) if errors[at] is None}
    for at, outcome in await _settle(ask, "ack", handles):
        if outcome == "lease_lost" and name.endswith(FIFO):
            errors[at] = invalid("ReceiptHandle: it has expired, and the message was or will be received again")
    return errors


@batches.add("ChangeMessageVisibility", Visibility)
async def change_visibility(ask: Ask, url: str, messages: Sequence[Visibility]) -> Errors:
    """Extend leases. A timeout of 0 gives the message back: it is ready at once."""
    name = named(ask, url, "consume")
    errors = await _foreign(ask, name, messages)
    by_ms: dict[int | None, dict[int, str]] = {}
    for at, message in enumerate(messages):
        seconds = message.VisibilityTimeout
        try:
            if seconds is None:
                raise AwsError("MissingRequiredParameterException", "VisibilityTimeout: this member is required")
            lease_ms = check_timeout(ask, seconds) if seconds else 0
        except AwsError as error:
            errors[at] = error
        if errors[at] is None:
            by_ms.setdefault(lease_ms, {})[at] = message.ReceiptHandle
    for lease_ms, handles in by_ms.items():
        how = ("extend", handles, lease_ms) if lease_ms else ("nack", handles, 0, "visibility timeout 0")
        for at, outcome in await _settle(ask, *how):
            if outcome in ("already_acked", "lease_lost"):
                what = "ReceiptHandle: the message is not in flight with this handle"
                errors[at] = AwsError("MessageNotInflight", what)
    return errors
