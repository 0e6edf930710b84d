"""The protocol AWS JSON 1.0 of SQS: finds an operation by name, decodes its document, and writes errors with the codes
of AWS JSON and of the older Query protocol."""

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
#: Pattern of the decoder's error about a value that has the right type, but is beyond a limit; any other error is about
#: a type.
_BEYOND = re.compile(r"Expected `\w+` (of length )?([<>]|matching)")
#: Beginning of an error in XML, for clients that speak the Query protocol.
_XML = '<?xml version="1.0"?><ErrorResponse xmlns="http://queue.amazonaws.com/doc/2012-11-05/"><Error><Type>'
#: Error code of AWS JSON → code of the older Query protocol, where they differ: some SDKs compare the older code.
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
    """JSON document of a request. Unknown members are ignored, as in SQS."""


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
    """AWS's error for an invalid value. words: name of the member, and what is wrong."""
    return AwsError("InvalidParameterValueException", words)


def old_code(code: str) -> str:
    """Error code of the Query protocol for a code of AWS JSON. In results of a batch, both protocols use this code."""
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


#: Class of an error of hadelay → error code of SQS.
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
    """Name of the queue that a URL names. scope: scope that the token needs for the queue; "": any one is enough.
    Raises AwsError, Forbidden."""
    name = check_topic(arns.queue_of_url(url))
    if scope:
        ask.access.need(scope, name)
    else:
        ask.need_any(name)
    return name


def need_own_shard(ask: Ask, member: str, queue: str, other: str) -> None:
    """Raises AwsError if `queue` is in another shard than the queue `other`, which is in this shard. member: field of
    the request that names `queue`."""
    if (shard := ask.router.owner(queue)) is not None:
        raise invalid(
            f"{member}: {queue!r} belongs to shard {shard}, and {other!r} to shard {ask.router.here}; messages stay in "
            "their shard. `hadelay shards pin NAME SHARD` gives a new name to a shard, before its queue is created"
        )
