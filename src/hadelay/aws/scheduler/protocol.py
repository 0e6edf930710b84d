"""REST JSON as EventBridge Scheduler speaks it: operations by method and path, their documents, and errors."""

import re
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from hadelay.aws import operations as base
from hadelay.aws.door import Ask, Protocol
from hadelay.aws.errors import AwsError
from hadelay.aws.operations import Operation, Operations, decoded, said
from hadelay.errors import Conflict, LimitReached, NotFound
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.decoding import parse_query

_JSON = "application/json"
MISSING = "ResourceNotFoundException"
_NAME = re.compile(r"[0-9A-Za-z_.-]{1,64}", re.ASCII)
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
    """Run an operation. Its document is the body, or the query of a request without body. Raises AwsError."""
    if ask.call.request.method in ("POST", "PUT"):
        read = partial(msgspec.json.decode, ask.body or b"{}", type=operation.kind)
    else:
        read = partial(msgspec.convert, _query(ask.call), operation.kind, strict=False)
    document = decoded(read, lambda member, text: invalid(said(member, text)), "ValidationException")
    try:
        found = await operation.carry_out(ask, document)
    except LimitReached as error:
        if error.retry_after_ms is not None:
            raise
        raise AwsError("ServiceQuotaExceededException", error.detail) from None
    return found if isinstance(found, Answer) else Answer(200, {"Content-Type": _JSON}, msgspec.json.encode(found))


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


def path_name(ask: Ask, same: str | None = None) -> str:
    """The name in the path. same: the name in the document, if there is one. Raises AwsError."""
    name = ask.call.path["name"]
    if not _NAME.fullmatch(name) or same not in (None, name):
        raise invalid(f"Name: {name[:80]!r}: 1 to 64 of A-Z a-z 0-9 - _ .")
    return name


def repeats(ask: Ask) -> bool:
    """Whether the SDK says that it repeats a request."""
    return _REPETITION.search(ask.call.request.headers.get("amz-sdk-request", "")) is not None


def invalid(words: str) -> AwsError:
    """The error of a member with an invalid value."""
    return AwsError("ValidationException", words)


def missing(words: str) -> AwsError:
    return AwsError(MISSING, words)


def refused(found: Iterable[Answer]) -> Answer | None:
    """The first refusal in the answers of several shards; but shards that know nothing of the name refuse nothing."""
    return next((one for one in found if one.status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND)), None)


def _refusal(call: Call, error: AwsError) -> Answer:
    code = _OWN_CODE.get(error.code, error.code)
    headers = {"Content-Type": _JSON, "x-amzn-ErrorType": code}
    return Answer(_STATUS.get(code, error.status), headers, msgspec.json.encode({"Message": error.words}))


PROTOCOL = Protocol(_refusal, {NotFound: MISSING, Conflict: "ConflictException"})
