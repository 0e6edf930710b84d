"""The protocol REST JSON of EventBridge Scheduler: finds an operation by method and path, decodes its document, and
writes errors."""

import re
from functools import partial
from typing import Any

import msgspec

from hadelay.aws import operations as base
from hadelay.aws.door import ERROR_TYPE, Ask, Protocol
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Operation, Operations, decoded, said
from hadelay.errors import Conflict, HadelayError, LimitReached, NotFound
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.decoding import parse_query

_JSON = "application/json"
MISSING = "ResourceNotFoundException"
#: Variable in a path → member of the document with the variable's value.
_IN_PATH = {"name": "Name", "key": "ResourceArn"}
#: Pattern in the header amz-sdk-request that shows a repeated request: an attempt number other than 1.
_REPETITION = re.compile(r"attempt=(?!1\b)\d+")
#: Error code of this API → HTTP status. Errors with other codes keep their own status.
_STATUS = {
    MISSING: 404, "ConflictException": 409, "ServiceQuotaExceededException": 402,
    "ThrottlingException": 429, "ValidationException": 400,
}  # fmt: skip
#: Error code that all AWS services share, or that SQS has → code of this API for the same error.
_OWN_CODE = {
    "ServiceUnavailable": "InternalServerException",
    "InternalFailure": "InternalServerException",
    "InvalidParameterValueException": "ValidationException",
}


class Document(base.Document, rename="pascal", omit_defaults=True, forbid_unknown_fields=True):
    """JSON document of a request, with AWS's names of members. Unknown members are refused, so that none is ignored
    silently."""


operations = Operations()


async def handle(operation: Operation, ask: Ask) -> Answer:
    """Decode the request's document, run the operation, and encode the answer. Raises HadelayError."""
    read = partial(_document, ask, operation.kind)
    document = decoded(read, lambda member, text: invalid(said(member, text)), "ValidationException")
    try:
        found = await operation.carry_out(ask, document)
    except LimitReached as error:
        if error.retry_after_ms is not None:
            raise
        raise AwsError("ServiceQuotaExceededException", error.detail) from None
    return found if isinstance(found, Answer) else Answer(200, {"Content-Type": _JSON}, msgspec.json.encode(found))


def _document(ask: Ask, kind: type[base.Document]) -> base.Document:
    """The document of a request. Its members are in the path, and in the body of a POST or PUT, or else in the
    query."""
    by_query = ask.call.request.method not in ("POST", "PUT")
    members = _query(ask.call) if by_query else msgspec.json.decode(ask.body or b"{}")
    for variable, text in ask.call.path.items():
        member = _IN_PATH[variable]
        if isinstance(members, dict) and members.setdefault(member, text) != text:
            raise invalid(f"{member}: not that of the path, {text[:80]!r}")
    return msgspec.convert(members, kind, strict=not by_query)


def _query(call: Call) -> dict[str, Any]:
    """Members in a query: groupName in a query is the member GroupName. TagKeys, which may be repeated, becomes a
    list."""
    found: dict[str, Any] = {}
    for name, value in parse_query(call.target.partition("?")[2]):
        name = name[:1].upper() + name[1:]
        if name == "TagKeys":
            found.setdefault(name, []).append(value)
        elif name in found:
            raise invalid(f"{name[:80]} is given twice")
        else:
            found[name] = value
    return found


def repeats(ask: Ask) -> bool:
    """Whether a header of the SDK says that this request repeats an earlier one."""
    return _REPETITION.search(ask.headers.get("amz-sdk-request", "")) is not None


def invalid(words: str) -> AwsError:
    """AWS's error for an invalid value. words: name of the member, and what is wrong."""
    return AwsError("ValidationException", words)


def missing(words: str) -> AwsError:
    return AwsError(MISSING, words)


def is_missing(error: HadelayError) -> bool:
    """Whether the error only says that a shard does not have the name."""
    return isinstance(error, NotFound) or (isinstance(error, AwsError) and error.code == MISSING)


def _refusal(call: Call, error: AwsError) -> Answer:
    code = _OWN_CODE.get(error.code, error.code)
    headers = {"Content-Type": _JSON, ERROR_TYPE: code}
    return Answer(_STATUS.get(code, error.http_status), headers, msgspec.json.encode({"Message": error.words}))


PROTOCOL = Protocol(_refusal, {NotFound: MISSING, Conflict: "ConflictException"})
