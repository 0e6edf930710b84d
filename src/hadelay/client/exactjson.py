"""Encodes values as JSON without silent changes. msgspec writes NaN and infinity as null, and values of many classes as
text: a reader would get another value, without an error."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

_JSON = (type(None), bool, int, float, str, list, dict)


def encode(value: Any, what: str) -> bytes:
    """Encode a value as JSON. what: the value's name in errors. ValueError for NaN and infinity, TypeError for a value
    of a class that has no JSON form."""
    encoded = msgspec.json.encode(value)
    if b"null" in encoded:
        refuse_nan(value, what)
    return encoded


def refuse_nan(value: Any, what: str) -> None:
    """Raise ValueError if there is a NaN or infinity in a value that msgspec can encode."""
    for where, found in _floats(value, what):
        if not math.isfinite(found):
            raise ValueError(f"{where}: JSON has no {found}, and null would arrive: pass None, or a text")


def _floats(value: Any, where: str) -> Iterator[tuple[str, float]]:
    """(path, value) of all floats in a value."""
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _floats(one, f"{where}.{name}")
    elif isinstance(value, list | tuple | set | frozenset):
        for n, one in enumerate(value):
            yield from _floats(one, f"{where}[{n}]")
    elif not isinstance(value, str | int | bytes | msgspec.Raw | None):
        plain = msgspec.to_builtins(value, str_keys=True)
        yield from _floats(plain, where) if isinstance(plain, dict | list | float) else ()


def changed(given: Any, got: Any, where: str) -> str:
    """Describe where a value that went through JSON differs from the given value; "" if it does not. A tuple may arrive
    as a list. A value that an annotation converts, such as a text to a datetime, is no difference."""
    if isinstance(given, dict) and isinstance(got, dict):
        if given.keys() != got.keys():
            other = next(iter(given.keys() - got.keys()))
            return f"{where}: the key {other!r} would arrive as text: pass keys that are texts"
        return next(filter(None, (changed(one, got[name], f"{where}.{name}") for name, one in given.items())), "")
    if (type(given) is tuple or isinstance(given, list)) and isinstance(got, list | tuple):
        pairs = enumerate(zip(given, got, strict=False))
        return next(filter(None, (changed(one, other, f"{where}[{n}]") for n, (one, other) in pairs)), "")
    same = type(given) is type(got)
    if given == got or (same and type(given).__eq__ is object.__eq__):  # type: ignore[comparison-overlap]
        return ""  # equal, or of a class without __eq__, whose values cannot be compared
    if same or type(got) in _JSON:
        kind = type(given).__name__
        return f"{where}: a {kind} would arrive as {got!r:.60}: annotate the parameter, or pass what JSON has"
    return ""
