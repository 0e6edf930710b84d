"""Failed messages, grouped by their last error."""

from collections.abc import Iterable
from typing import NamedTuple

from hadelay.api.messages import Failure
from hadelay.words import error_group


class ErrorGroup(NamedTuple):
    """Messages with the same last error, apart from numbers in the error's text."""

    #: Text of the error, with # in place of each number.
    error: str
    #: Error text of the message that failed last, with its numbers.
    example: str
    number: int
    #: Times of the first and the last failure, in the API's format.
    first: str
    last: str


def error_of(last: Failure[str] | None) -> str:
    """Error group of a message. last: the message's last failed attempt; None if no attempt failed."""
    return error_group(None, None) if last is None else error_group(last.event, last.reason)


def example_of(last: Failure[str] | None) -> str:
    """The last error of a message, with its numbers."""
    return error_of(last) if last is None or not last.reason else last.reason


def grouped(failures: Iterable[tuple[Failure[str] | None, str]]) -> list[ErrorGroup]:
    """Group failed messages by their last errors; the largest group comes first. failures: for each message, its last
    failed attempt and the time of the failure."""
    found: dict[str, ErrorGroup] = {}
    for last, at in failures:
        error, example = error_of(last), example_of(last)
        group = found.get(error)
        if group is None:
            found[error] = ErrorGroup(error, example, 1, at, at)
            continue
        shown = example if at >= group.last else group.example
        found[error] = ErrorGroup(error, shown, group.number + 1, min(group.first, at), max(group.last, at))
    return sorted(found.values(), key=lambda group: -group.number)
