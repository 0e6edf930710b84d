"""Operations of an AWS service: functions of an Ask and of a document, which is a msgspec type with AWS's names of
members. An operation returns the answer's document; None for an empty one; or an Answer that another node has made.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.words import plain

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


class Operation(NamedTuple):
    kind: type[msgspec.Struct]
    run: Callable[[Ask, Any], Awaitable[Any]]


class Operations:
    """Operations of a service, by what requests name them with."""

    def __init__(self) -> None:
        self.all: dict[Any, Operation] = {}

    def add(self, *key: Any) -> Callable[[F], F]:
        """Declare an operation: a decorator of the function that runs it. key: the operation's name, or its method and
        path, followed by the type of the request's JSON document."""

        def declare(run: F) -> F:
            self.all[key[0] if len(key) == 2 else key[:-1]] = Operation(key[-1], run)
            return run

        return declare


def decoded(read: Callable[[], Any], wrong: Callable[[str, str], AwsError], unreadable: str) -> Any:
    """Read a request's JSON document with `read`. wrong: makes the error from a member's name and what is wrong with
    it. unreadable: AWS's error code for a body that is no JSON. Raises AwsError."""
    try:
        return read()
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise wrong(path.lstrip(".").rstrip("`") or "document", text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AwsError(unreadable, f"the body is not valid JSON: {error}") from None


def said(member: str, text: str) -> str:
    return f"{member}: {plain(text, member)}"
