"""AWS JSON 1.0 as SQS speaks it: operations by name, documents, and errors with the codes of both protocols of SQS."""

import re
from collections.abc import Mapping
from functools import partial
from html import escape

import msgspec

from hadelay.api.text import check_topic
from hadelay.aws import arns
from hadelay.aws import operations as base
from hadelay.aws.door import Ask, Protocol, new_id
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Operations, decoded, said
from hadelay.errors import BadRequest, Conflict, Impossible, LimitReached, NotFound, TooLarge
from hadelay.http.answers import Answer
from hadelay.http.call import Call

_JSON = "application/x-amz-json-1.0"
_TARGET = "AmazonSQS."
_MISSING = re.compile(r"Object missing required field `(\w+)`|.+, got `null`")
#: A value of the right type that a document's limits refuse; other errors are of the type.
_BEYOND = re.compile(r"Expected `\w+` (of length )?([<>]|matching)")
#: Beginning of SQS's errors in XML.
_XML = '<?xml version="1.0"?><ErrorResponse xmlns="http://queue.amazonaws.com/doc/2012-11-05/"><Error><Type>'
#: Codes of the old Query protocol for codes of the JSON protocol, where they differ: SDKs compare them, too.
_OLD_CODES = {
    "QueueDoesNotExist": "AWS.SimpleQueueService.NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    "InvalidParameterValueException": "InvalidParameterValue",
    "MissingRequiredParameterException": "MissingParameter",
    "UnknownOperationException": "InvalidAction",
} | {
    code: f"AWS.SimpleQueueService.{code}"
    for code in (
        "BatchEntryIdsNotDistinct", "BatchRequestTooLong", "EmptyBatchRequest", "InvalidBatchEntryId",
        "MessageNotInflight", "PurgeQueueInProgress", "TooManyEntriesInBatchRequest", "UnsupportedOperation",
    )
}  # fmt: skip


class Document(base.Document):
    """A request's document. SQS ignores members that it does not know."""


class OfQueue(Document):
    QueueUrl: str

    @property
    def names(self) -> Mapping[str, str]:
        return {"topic": arns.queue_of_url(self.QueueUrl)}


class Named(Document):
    QueueName: str

    @property
    def names(self) -> Mapping[str, str]:
        return {"topic": self.QueueName}


operations = Operations()


async def handle(ask: Ask) -> Answer:
    """Run the operation that a request names. Raises HadelayError."""
    target = ask.headers.get("X-Amz-Target", "")
    if not target:
        raise AwsError(
            "UnsupportedOperation",
            "this is SQS's old Query protocol, or no request of an SDK (it has no X-Amz-Target): use an SDK of "
            "November 2023 or later, which speaks AWS JSON 1.0",
        )
    operation = operations.all.get(target.removeprefix(_TARGET)) if target.startswith(_TARGET) else None
    if operation is None:
        raise AwsError("UnknownOperationException", f"X-Amz-Target: there is no operation {target[:80]!r} here")
    decode = partial(msgspec.json.decode, ask.body or b"{}", type=operation.kind)
    found = await operation.carry_out(ask, decoded(decode, _wrong, "SerializationException"))
    if isinstance(found, Answer):
        return found
    return Answer(200, {"Content-Type": _JSON}, msgspec.json.encode({} if found is None else found))


def _wrong(member: str, text: str) -> AwsError:
    if missing := _MISSING.fullmatch(text):
        return AwsError("MissingRequiredParameterException", f"{missing[1] or member}: this member is required")
    code = "InvalidParameterValueException" if _BEYOND.match(text) else "SerializationException"
    return AwsError(code, said(member, text))


def invalid(words: str) -> AwsError:
    """The error of a member with an invalid value."""
    return AwsError("InvalidParameterValueException", words)


def old_code(code: str) -> str:
    """A code as the Query protocol has it; in batch results, both protocols have this code."""
    return _OLD_CODES.get(code, code)


def _refusal(call: Call, error: AwsError) -> Answer:
    old, fault = old_code(error.code), "Sender" if error.http_status < 500 else "Receiver"
    if not call.request.headers.get("X-Amz-Target"):
        text = (
            f"{_XML}{fault}</Type><Code>{old}</Code><Message>{escape(error.words)}</Message><Detail/></Error>"
            f"<RequestId>{new_id()}</RequestId></ErrorResponse>"
        )
        return Answer(error.http_status, {"Content-Type": "text/xml"}, text.encode())
    body = msgspec.json.encode({"__type": f"com.amazonaws.sqs#{error.code}", "message": error.words})
    return Answer(error.http_status, {"Content-Type": _JSON, "x-amzn-query-error": f"{old};{fault}"}, body)


#: Codes of SQS for errors of the services.
CODES = {
    NotFound: "QueueDoesNotExist",
    LimitReached: "RequestThrottled",
    TooLarge: "InvalidParameterValueException",
    BadRequest: "InvalidParameterValueException",
    Impossible: "InvalidParameterValueException",
    Conflict: "UnsupportedOperation",
}
PROTOCOL = Protocol(_refusal, CODES)


def named(ask: Ask, url: str, scope: str = "") -> str:
    """Name of the queue of a URL. scope: needed for the queue; "" for any scope. Raises AwsError, Forbidden."""
    name = check_topic(arns.queue_of_url(url))
    if scope:
        ask.access.need(scope, name)
    else:
        ask.need_any(name)
    return name


def need_own_shard(ask: Ask, member: str, queue: str, other: str) -> None:
    """Raises AwsError if a queue that `member` names is in another shard than the queue `other`, which is here."""
    if (shard := ask.router.owner(queue)) is not None:
        raise invalid(
            f"{member}: {queue!r} belongs to shard {shard}, and {other!r} to shard {ask.router.here}; messages stay in "
            "their shard. `hadelay shards pin NAME SHARD` gives a new name to a shard, before its queue is created"
        )
