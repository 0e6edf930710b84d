"""Operations of an AWS service: functions of an Ask and of a document, which is a msgspec type with AWS's names of
members. An operation returns the answer's document; None for an empty one; or an Answer that another node has made.

With several shards, an operation belongs to the shard of the queue or task that its document names, which answers it
whole. An operation `over` shards is carried out in the node that was asked, which has other shards do their parts.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.http.forwarding.heads import SHARD
from hadelay.http.parts import all_parts
from hadelay.words import plain

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
Run = Callable[[Ask, Any], Awaitable[Any]]
#: Carries out an operation over several shards. It gets the function that carries out the operation in this one.
Over = Callable[[Run, Ask, Any], Awaitable[Any]]


class Document(msgspec.Struct):
    """Document of a request."""

    @property
    def names(self) -> Mapping[str, str]:
        """The topic or the job to whose shard the request belongs, as variables of a path; {} if it belongs to no
        single shard. Raises AwsError."""
        return {}


class Operation(NamedTuple):
    kind: type[Document]
    run: Run
    over: Over | None = None

    async def carry_out(self, ask: Ask, document: Document) -> Any:
        """Run the operation, or have other shards do so. Raises HadelayError."""
        if ask.router.here is not None:
            to = ask.router.of(document.names, ask.headers.get(SHARD))
            if to is not None:
                return await ask.forward(to)
            if self.over is not None and ask.call.router is not None:
                return await self.over(self.run, ask, document)
        return await self.run(ask, document)


class Operations:
    """Operations of a service, by their names, or by method and path with a blank between them."""

    def __init__(self) -> None:
        self.all: dict[str, Operation] = {}

    def add(self, name: str, kind: type[Document], over: Over | None = None) -> Callable[[F], F]:
        """Declare an operation: a decorator of the function that runs it. kind: type of the request's document."""

        def declare(run: F) -> F:
            self.all[name] = Operation(kind, run, over)
            return run

        return declare


async def everywhere(run: Run, ask: Ask, document: Document) -> list[Any]:
    """What all shards answer, this one first: of each the document, or its error."""
    return await all_parts([run(ask, document), *map(ask.part, ask.router.others())])


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
