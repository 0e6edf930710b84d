"""One answer to a request whose parts are answered one by one."""

from collections.abc import Callable
from typing import Any

from hadelay.errors import HadelayError


def gather(count: int, done: Callable[[list[Any], list[HadelayError]], None]) -> Callable[[int, Any, Any], None]:
    """Make a callback answered(number of a part, result, error), which collects the answers of `count` parts and then
    calls done(results, errors). The result of a part that failed is None."""
    results: list[Any] = [None] * count
    errors: list[HadelayError] = []
    missing = count

    def answered(n: int, result: Any, error: HadelayError | None) -> None:
        nonlocal missing
        results[n] = result
        if error is not None:
            errors.append(error)
        missing -= 1
        if not missing:
            done(results, errors)

    return answered
