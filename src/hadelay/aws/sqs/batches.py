"""Operations on a message. Each also exists as an operation on a batch of up to ten entries, which succeed or fail one
by one."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import defstruct

from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError, translated
from hadelay.aws.sqs.protocol import CODES, Document, OfQueue, old_code, operations
from hadelay.errors import HadelayError

_MOST = 10
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
#: Function that runs an operation on messages of the queue with this URL. It returns, for each message, the members of
#: the answer, None without any, or the message's error.
Run = Callable[[Ask, str, Sequence[Any]], Awaitable[Sequence[dict[str, str] | HadelayError | None]]]


def add(name: str, message: type[Document]) -> Callable[[Run], Run]:
    """Decorator that declares an operation on one message, and the same on a batch, for the function that runs both.
    message: type with the members of the request about each message."""
    one: Any = defstruct(name, [("QueueUrl", str)], bases=(message,), namespace={"names": OfQueue.names}, kw_only=True)
    entry: Any = defstruct(f"{name}BatchRequestEntry", [("Id", str)], bases=(message,), kw_only=True)
    batch: Any = defstruct(f"{name}Batch", [("Entries", list[entry])], bases=(OfQueue,))

    def declare(run: Run) -> Run:
        @operations.add(name, one)
        async def single(ask: Ask, document: Any) -> Any:
            (found,) = await run(ask, document.QueueUrl, [document])
            if isinstance(found, HadelayError):
                raise found
            return found

        @operations.add(f"{name}Batch", batch)
        async def several(ask: Ask, document: Any) -> Any:
            ids = _checked([entry.Id for entry in document.Entries])
            answer: dict[str, list[Any]] = {"Successful": [], "Failed": []}
            for id_, found in zip(ids, await run(ask, document.QueueUrl, document.Entries), strict=True):
                if not isinstance(found, HadelayError):
                    answer["Successful"].append({"Id": id_, **(found or {})})
                    continue
                error = translated(found, CODES)
                failed = {"Id": id_, "Code": old_code(error.code), "Message": error.words}
                answer["Failed"].append(failed | {"SenderFault": error.http_status < 500})
            return answer

        return run

    return declare


def _checked(ids: list[str]) -> list[str]:
    """Check the ids of a batch's entries, and return them. Raises AwsError for a batch that SQS refuses as a whole."""
    if not ids:
        raise AwsError("EmptyBatchRequest", "Entries: the batch is empty")
    if len(ids) > _MOST:
        raise AwsError("TooManyEntriesInBatchRequest", f"Entries: {len(ids)} given; a batch has at most {_MOST}")
    for id_ in ids:
        if not _ID.fullmatch(id_):
            raise AwsError("InvalidBatchEntryId", f"Id: {id_[:80]!r}; 1 to 80 of A-Z a-z 0-9 _ -")
    if len(set(ids)) < len(ids):
        raise AwsError("BatchEntryIdsNotDistinct", "Entries: two entries have the same Id")
    return ids
