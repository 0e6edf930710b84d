"""Batches: up to ten entries, each with an id of its own, which succeed or fail one by one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hadelay.aws.errors import AwsError, translated
from hadelay.aws.sqs.protocol import CODES, old_code
from hadelay.errors import HadelayError

_MOST = 10
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")


class Entry(Protocol):
    """An entry of a batch."""

    @property
    def Id(self) -> str: ...


def check_entries(entries: Sequence[Entry]) -> None:
    """Raises AwsError for a batch that SQS refuses as a whole."""
    if not entries:
        raise AwsError("EmptyBatchRequest", "Entries: the batch is empty")
    if len(entries) > _MOST:
        raise AwsError("TooManyEntriesInBatchRequest", f"Entries: {len(entries)} given; a batch has at most {_MOST}")
    for entry in entries:
        if not _ID.fullmatch(entry.Id):
            raise AwsError("InvalidBatchEntryId", f"Id: {entry.Id[:80]!r}; 1 to 80 of A-Z a-z 0-9 _ -")
    if len({entry.Id for entry in entries}) < len(entries):
        raise AwsError("BatchEntryIdsNotDistinct", "Entries: two entries have the same Id")


def results(entries: Sequence[Entry], good: Mapping[int, Any], bad: Mapping[int, AwsError | HadelayError]) -> Any:
    """The answer to a batch. good, bad: by position; what a successful entry has besides its id, or its error."""
    failed = []
    for at, found in sorted(bad.items()):
        error = found if isinstance(found, AwsError) else translated(found, CODES)
        fault = error.status < 500
        failed.append(
            {"Id": entries[at].Id, "SenderFault": fault, "Code": old_code(error.code), "Message": error.words}
        )
    return {"Successful": [{"Id": entries[at].Id, **good[at]} for at in sorted(good)], "Failed": failed}
