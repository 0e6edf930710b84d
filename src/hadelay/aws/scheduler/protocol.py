"""REST JSON as EventBridge Scheduler speaks it: operations by method and path, their documents, and errors."""

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
#: Variables of paths → members of documents.
_IN_PATH = {"name": "Name", "key": "ResourceArn"}
#: Pattern of the header amz-sdk-request of a repeated request: an attempt number other than 1.
_REPETITION = re.compile(r"attempt=(?!1\b)\d+")
#: HTTP status of the API's own codes; other codes keep the status of the error.
_STATUS = {
    MISSING: 404, "ConflictException": 409, "ServiceQuotaExceededException": 402,
    "ThrottlingException": 429, "ValidationException": 400,
}  # fmt: skip
#: The API's codes for those of the door and of SQS.
_OWN_CODE = {
    "ServiceUnavailable": "InternalServerException",
    "InternalFailure": "InternalServerException",
    "InvalidParameterValueException": "ValidationException",
}


class Document(base.Document, rename="pascal", omit_defaults=True, forbid_unknown_fields=True):
    """A document of the API, with its names of members. Unknown members are refused: nothing is left out in silence."""


operations = Operations()


async def handle(operation: Operation, ask: Ask) -> Answer:
    """Run an operation. Raises HadelayError."""
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
    """The document of a request: the members of its body, or of its query if it has no body, and those in its path."""
    by_query = ask.call.request.method not in ("POST", "PUT")
    members = _query(ask.call) if by_query else msgspec.json.decode(ask.body or b"{}")
    for variable, text in ask.call.path.items():
        member = _IN_PATH[variable]
        if isinstance(members, dict) and members.setdefault(member, text) != text:
            raise invalid(f"{member}: not that of the path, {text[:80]!r}")
    return msgspec.convert(members, kind, strict=not by_query)


def _query(call: Call) -> dict[str, Any]:
    """The query by its names as members have them (groupName is GroupName); TagKeys is a list."""
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
    """Whether the SDK says that it repeats a request."""
    return _REPETITION.search(ask.headers.get("amz-sdk-request", "")) is not None


def invalid(words: str) -> AwsError:
    """The error of a member with an invalid value."""
    return AwsError("ValidationException", words)


def missing(words: str) -> AwsError:
    return AwsError(MISSING, words)


def is_missing(error: HadelayError) -> bool:
    """Whether a shard knows nothing of the name."""
    return isinstance(error, NotFound) or (isinstance(error, AwsError) and error.code == MISSING)


def _refusal(call: Call, error: AwsError) -> Answer:
    code = _OWN_CODE.get(error.code, error.code)
    headers = {"Content-Type": _JSON, ERROR_TYPE: code}
    return Answer(_STATUS.get(code, error.http_status), headers, msgspec.json.encode({"Message": error.words}))


PROTOCOL = Protocol(_refusal, {NotFound: MISSING, Conflict: "ConflictException"})
