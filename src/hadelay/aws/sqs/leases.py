"""DeleteMessage and ChangeMessageVisibility, and their batches: a receipt handle is a lease."""

from collections.abc import Sequence
from typing import Any

from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs.attributes import FIFO, find
from hadelay.aws.sqs.batches import Entry, check_entries, results
from hadelay.aws.sqs.protocol import Document, OfQueue, invalid, named, operations
from hadelay.aws.sqs.receiving import check_timeout
from hadelay.errors import HadelayError

Bad = dict[int, AwsError | HadelayError]


class DeleteMessage(OfQueue):
    ReceiptHandle: str


class DeleteEntry(Document):
    Id: str
    ReceiptHandle: str


class DeleteMessageBatch(OfQueue):
    Entries: list[DeleteEntry]


class ChangeMessageVisibility(DeleteMessage):
    VisibilityTimeout: int


class ChangeEntry(DeleteEntry):
    VisibilityTimeout: int | None = None


class ChangeMessageVisibilityBatch(OfQueue):
    Entries: list[ChangeEntry]


@operations.add("DeleteMessage", DeleteMessage)
async def delete_message(ask: Ask, document: DeleteMessage) -> None:
    bad = await _delete(ask, document.QueueUrl, [document.ReceiptHandle])
    if bad:
        raise bad[0]


@operations.add("DeleteMessageBatch", DeleteMessageBatch)
async def delete_message_batch(ask: Ask, document: DeleteMessageBatch) -> Any:
    check_entries(document.Entries)
    bad = await _delete(ask, document.QueueUrl, [entry.ReceiptHandle for entry in document.Entries])
    return results(document.Entries, _others(document.Entries, bad), bad)


@operations.add("ChangeMessageVisibility", ChangeMessageVisibility)
async def change_message_visibility(ask: Ask, document: ChangeMessageVisibility) -> None:
    bad = await _change(ask, document.QueueUrl, [(document.ReceiptHandle, document.VisibilityTimeout)])
    if bad:
        raise bad[0]


@operations.add("ChangeMessageVisibilityBatch", ChangeMessageVisibilityBatch)
async def change_message_visibility_batch(ask: Ask, document: ChangeMessageVisibilityBatch) -> Any:
    check_entries(document.Entries)
    wanted = [(entry.ReceiptHandle, entry.VisibilityTimeout) for entry in document.Entries]
    bad = await _change(ask, document.QueueUrl, wanted)
    return results(document.Entries, _others(document.Entries, bad), bad)


def _others(entries: Sequence[Entry], bad: Bad) -> dict[int, dict[str, str]]:
    return {at: {} for at in range(len(entries)) if at not in bad}


async def _foreign(ask: Ask, name: str, handles: Sequence[str]) -> Bad:
    """Errors of the handles that are no leases of this queue. Raises NotFound if there is no queue."""
    topics = await ask.call.service.consume.topic_of_each(list(handles))
    error = AwsError("ReceiptHandleIsInvalid", f"ReceiptHandle: this is no handle of a message of {name}")
    bad: Bad = {at: error for at, topic in enumerate(topics) if topic != name}
    if bad:
        await find(ask, name, stale=True)
    return bad


async def _delete(ask: Ask, url: str, handles: Sequence[str]) -> Bad:
    """Ack messages; returns the errors by position. A handle whose message was received again deletes nothing: as in
    SQS, that is an error in a FIFO queue alone."""
    name = named(ask, url, "consume")
    bad = await _foreign(ask, name, handles)
    places = [at for at in range(len(handles)) if at not in bad]
    if places:
        outcomes = await ask.call.service.consume.settle("ack", [handles[at] for at in places], None)
        for at, outcome in zip(places, outcomes, strict=True):
            if outcome == "lease_lost" and name.endswith(FIFO):
                bad[at] = invalid("ReceiptHandle: it has expired, and the message was or will be received again")
    return bad


async def _change(ask: Ask, url: str, wanted: Sequence[tuple[str, int | None]]) -> Bad:
    """Extend leases, or give messages back at once for a timeout of 0; returns the errors by position."""
    name = named(ask, url, "consume")
    bad = await _foreign(ask, name, [handle for handle, _ in wanted])
    by_ms: dict[int, list[int]] = {}
    for at, (_, seconds) in enumerate(wanted):
        try:
            if seconds is None:
                raise AwsError("MissingRequiredParameterException", "VisibilityTimeout: this member is required")
            lease_ms = check_timeout(ask, seconds) if seconds else 0
        except AwsError as error:
            bad[at] = error
        if at not in bad:
            by_ms.setdefault(lease_ms or 0, []).append(at)
    for lease_ms, places in by_ms.items():
        handles = [wanted[at][0] for at in places]
        if lease_ms:
            outcomes = await ask.call.service.consume.settle("extend", handles, lease_ms)
        else:
            outcomes = await ask.call.service.consume.settle("nack", handles, 0, "visibility timeout 0")
        for at, outcome in zip(places, outcomes, strict=True):
            if outcome in ("already_acked", "lease_lost"):
                bad[at] = AwsError("MessageNotInflight", "ReceiptHandle: the message is not in flight with this handle")
    return bad
