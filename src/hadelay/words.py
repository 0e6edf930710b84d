"""Texts for people: durations, and error texts of msgspec's decoder in plain words, for the sender of the value."""

import re
from collections.abc import Sequence

#: Type names in msgspec's error texts → plain words.
_TYPES = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null", "bytes": "bytes",
}  # fmt: skip
#: Settings that may be written in more than one way → examples of their values for error texts.
_FORMS = {"backoff": 'a list, ["1s", "30s"], or {"min": "1s", "max": "1h"}'}
_EXPECTED = re.compile(r"[Ee]xpected `([^`]+)`(?:, got `(\w+)`)?")
#: Pattern of msgspec's error text about the limit of a number, or of a length.
_LIMIT = re.compile(r"[Ee]xpected `(\w+)` (of length )?(>=|<=|<|>) (\S+)")
_LIMITS = {">=": "at least", "<=": "at most", "<": "less than", ">": "more than"}
_MISSING = re.compile(r"[Oo]bject missing required field `([^`]+)`")
_NUMBERS = re.compile(r"\d+")
_CHOICE = re.compile(r"[Ii]nvalid enum value (.+)")


def plain(text: str, member: str = "", choices: Sequence[str] = ()) -> str:
    """Rewrite `text`, the message of a msgspec.ValidationError without its path, in plain words. member: name of the
    wrong member. choices: valid values of an enum."""
    if missing := _MISSING.fullmatch(text):
        return f"{missing[1]} is missing"
    if choice := _CHOICE.fullmatch(text):
        return f"{choice[1]}: choose {either(choices)}" if choices else f"{choice[1]} is not one of the allowed words"
    if expected := _EXPECTED.fullmatch(text):
        wanted = _FORMS.get(member) or either([_TYPES.get(name, name) for name in expected[1].split(" | ")])
        got = _TYPES.get(expected[2] or "", expected[2])
        return f"expected {wanted}" + (f", not {got}" if got else "")
    if limit := _LIMIT.fullmatch(text):
        unit = {"str": " characters", "array": " items"}.get(limit[1], "") if limit[2] else ""
        return f"expected {_TYPES.get(limit[1], limit[1])}, {_LIMITS[limit[3]]} {limit[4]}{unit}"
    return f"{text[0].lower()}{text[1:]}"


def either(words: Sequence[str]) -> str:
    """Join words as "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def error_group(event: str | None, reason: str | None) -> str:
    """Group of dead letters by their last error: its reason with # in place of each number, so that 30 s and 31 s are
    one group. event: event that ended the last attempt, used if there is no reason; None if no attempt failed."""
    if reason:
        return _NUMBERS.sub("#", reason)
    return "no attempt failed" if event is None else event.replace("_", " ")


def span(ms: float) -> str:
    """A duration for people, in its two largest units: 850 ms, 12 s, 2 h 3 min, 3 d 4 h."""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    left, parts = int(ms // 1_000), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next(n for n, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[first : first + 2]))
