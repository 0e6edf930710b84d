"""Operations of an AWS service. An operation is a function of the request (Ask) and of its JSON document, which is a
msgspec type with AWS's names of members. It returns the answer's document; None for an empty one; or an Answer that
another node has made.

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
#: Function that carries out an operation over several shards. Its first argument carries out the operation in this
#: shard.
Over = Callable[[Run, Ask, Any], Awaitable[Any]]


class Document(msgspec.Struct):
    """JSON document of a request."""

    @property
    def names(self) -> Mapping[str, str]:
        """Topic or job of the request, named as the path variables of routes (`topic`, `job`): it decides which shard
        the request belongs to. {} if the request belongs to no single shard. Raises AwsError."""
        return {}


class Operation(NamedTuple):
    kind: type[Document]
    run: Run
    over: Over | None = None

    async def carry_out(self, ask: Ask, document: Document) -> Any:
        """Run the operation here, forward it to the shard that it belongs to, or run it over all shards. Raises
        HadelayError."""
        if ask.router.here is not None:
            to = ask.router.of(document.names, ask.headers.get(SHARD))
            if to is not None:
                return await ask.forward(to)
            if self.over is not None and ask.call.router is not None:
                return await self.over(self.run, ask, document)
        return await self.run(ask, document)


class Operations:
    """Operations of a service. The key is the name of the operation in SQS; in EventBridge Scheduler, method and path
    with a blank between them."""

    def __init__(self) -> None:
        self.all: dict[str, Operation] = {}

    def add(self, name: str, kind: type[Document], over: Over | None = None) -> Callable[[F], F]:
        """Decorator that declares an operation, for the function that runs it. kind: type of the request's document.
        over: see Over."""

        def declare(run: F) -> F:
            self.all[name] = Operation(kind, run, over)
            return run

        return declare


async def everywhere(run: Run, ask: Ask, document: Document) -> list[Any]:
    """Run an operation in this shard, and send the request to all other shards; returns, for each shard, its document
    or its error, this shard first."""
    return await all_parts([run(ask, document), *map(ask.part, ask.router.others())])


def decoded(read: Callable[[], Any], wrong: Callable[[str, str], AwsError], unreadable: str) -> Any:
    """Read a request's JSON document with `read`. wrong: makes the error for an invalid member, from its name and the
    decoder's error text. unreadable: AWS's error code for a body that is no JSON. Raises AwsError."""
    try:
        return read()
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise wrong(path.lstrip(".").rstrip("`") or "document", text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AwsError(unreadable, f"the body is not valid JSON: {error}") from None


def said(member: str, text: str) -> str:
    return f"{member}: {plain(text, member)}"
