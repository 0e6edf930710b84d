"""Reader of other programs' pickles that runs none of their code, and limits memory and time.

A few bytes can ask for gigabytes: by the number of a memo entry, by a length, or by values that contain one another
many times. So `read` first goes through the opcodes, and computes how large each value would be if nothing were shared.
"""

import io
import pickle
import pickletools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

#: Content type of a body that is an unchanged pickle.
PICKLE = "application/x-python-pickle"
_KNOWN = {("datetime", "datetime"), ("datetime", "timedelta"), ("datetime", "timezone"), ("datetime", "date")}
#: Limits of a pickle: its bytes, its opcodes, size of a value (number of its parts plus bytes of its texts), and
#: nesting depth.
_MOST_BYTES, _MOST_OPCODES, _MOST_SIZE, _MOST_DEPTH = 16 << 20, 500_000, 32 << 20, 200
_PUTS, _GETS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")), frozenset(("GET", "BINGET", "LONG_BINGET"))


class Unknown:
    """Placeholder for an object whose class is not imported."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TooMuch(ValueError):
    """The pickle exceeds a limit."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        return type(name, (Unknown,), {"__module__": module})


class _Size(NamedTuple):
    """Size and nesting depth of a value that a pickle would make."""

    size: int
    depth: int


def read(data: bytes) -> Any:
    """Decode a pickle; `Unknown` stands for objects of classes that are not imported. Raises ValueError for bytes that
    are no pickle, and TooMuch for a pickle beyond the limits."""
    try:
        _check(data)
        found = _Reader(io.BytesIO(data)).load()
    except TooMuch:
        raise
    except Exception as error:  # any type of error is possible, as the bytes are untrusted
        raise ValueError(f"not a pickle: {error}") from None
    _check_parts(found)
    return found


def _check(data: bytes) -> None:
    """Compute the size of each value of a pickle without loading it. Raises TooMuch for a pickle beyond the limits, and
    other errors for bytes that are no pickle. A list that grows after it became part of another value counts there with
    its earlier size: `_check_parts` finds such values."""
    if len(data) > _MOST_BYTES:
        raise TooMuch(f"its pickle has {len(data)} bytes; at most {_MOST_BYTES} are read")
    stack: list[_Size | None] = []
    memo: dict[int, _Size] = {}
    found: Iterator[tuple[Any, Any, int | None]] = pickletools.genops(data)
    for count, (opcode, arg, _) in enumerate(found):
        if count >= _MOST_OPCODES:
            raise TooMuch(f"its pickle has more than {_MOST_OPCODES} opcodes, the limit")
        if opcode.name in _PUTS:
            number = len(memo) if opcode.name == "MEMOIZE" else int(arg)
            if number > _MOST_OPCODES:
                raise TooMuch(f"its pickle has the memo number {number}; at most {_MOST_OPCODES} is allowed")
            memo[number] = stack[-1] or _Size(0, 0)
        elif opcode.name in _GETS:
            stack.append(memo[int(arg)])
        elif opcode.name == "DUP":
            stack.append(stack[-1])
        else:
            _step(stack, opcode, arg)


def _step(stack: list[_Size | None], opcode: Any, arg: Any) -> None:
    """Apply an opcode to a stack that has sizes in place of values; None stands for a mark."""
    taken: list[_Size] = []
    wanted = len(opcode.stack_before)
    if pickletools.markobject in opcode.stack_before:
        wanted = [*opcode.stack_before].index(pickletools.markobject)
        while (top := stack.pop()) is not None:
            taken.append(top)
    for _ in range(wanted):
        taken.append(stack.pop() or _Size(0, 0))
    own = len(arg) if isinstance(arg, str | bytes | bytearray) else 0
    size = _Size(1 + own + sum(one.size for one in taken), 1 + max((one.depth for one in taken), default=0))
    if size.size > _MOST_SIZE or size.depth > _MOST_DEPTH:
        raise TooMuch(f"its pickle makes a value of more than {_MOST_SIZE} parts and bytes, or {_MOST_DEPTH} deep")
    for one in opcode.stack_after:
        stack.append(None if one is pickletools.markobject else size)


def _check_parts(value: Any) -> None:
    """Raise TooMuch for a loaded value with too many parts or bytes of texts. A part that occurs several times is
    counted each time, so a value that contains itself always exceeds the limit."""
    parts, size, waiting = 0, 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str | bytes | bytearray):
            size += len(one)
        elif isinstance(one, list | tuple | dict | set | frozenset):
            parts += 1 + len(one)
            if parts <= _MOST_OPCODES:
                waiting += [*one, *one.values()] if isinstance(one, dict) else one
        if parts > _MOST_OPCODES or size > _MOST_SIZE:
            raise TooMuch(f"its pickle makes a value of more than {_MOST_OPCODES} parts, or {_MOST_SIZE} bytes")


def call_of(func: Any, args: Any, kwargs: Any, pickled: bytes) -> tuple[bytes, str]:
    """Encode a call. Returns (body, content type): JSON with func, args and kwargs, or the pickle itself if JSON would
    change them."""
    call = {"func": func, "args": args, "kwargs": kwargs}
    try:
        found = msgspec.json.encode(call)
        same = msgspec.json.decode(found) == call | {"args": [*args]}
    except (TypeError, ValueError, OverflowError, RecursionError):
        return pickled, PICKLE
    return (found, "application/json") if same else (pickled, PICKLE)
