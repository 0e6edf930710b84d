"""Checks documents and forms against their declared types: an error of msgspec becomes BadRequest, in plain words."""

import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec

from hadelay.api.base import Request, decode_hook
from hadelay.api.text import suggest
from hadelay.errors import BadRequest
from hadelay.words import plain

#: Limit of the characters of an unknown name that an error shows and compares with known names.
SHOWN = 64
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `(.*)`)?$")


def refuse_unknown(what: str, name: str, known: Iterable[str], where: str = "") -> NoReturn:
    name = name if len(name) <= SHOWN else name[: SHOWN - 1] + "…"
    raise BadRequest(f"unknown {what} {name!r}{where}{suggest(name, known)}")


@cache
def names_of(kind: type[Request] | None) -> set[str]:
    return {f.encode_name for f in msgspec.structs.fields(kind)} if kind else set()


def decoded(decode: Callable[[Any], Any], data: Any, kind: type[Request]) -> Any:
    """Run decode(data) of msgspec; a refusal becomes BadRequest, with a suggestion for a mistyped field of `kind`."""
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN_FIELD.match(str(error))
        if unknown:
            where = f" at {unknown[2]}" if unknown[2] else ""
            known = () if "." in where else names_of(kind)  # names_of has no nested fields: suggest none
            refuse_unknown("field", unknown[1], known, where)
        raise BadRequest(in_words("body", error, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from None


def converted(values: dict[str, Any], kind: type[Request]) -> Any:
    """Convert the values of a form, which are text, to a document of the API. Raises BadRequest."""
    return decoded(partial(msgspec.convert, type=kind, strict=False, dec_hook=decode_hook), values, kind)


def in_words(where: str, error: msgspec.ValidationError, kind: type[Request]) -> str:
    """Text of the refusal for an error of msgspec. Like all refusals, it begins with the name of the invalid field."""
    text, _, path = str(error).partition(" - at `$")
    member = (path[1:] if path.startswith(".") else where + path).rstrip("`")
    of = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}.get(member.partition("[")[0])
    return f"{member}: {plain(text, member, _choices(of) if of else ())}"


def _choices(kind: Any) -> list[str]:
    """Values of a Literal type, or of the Literal types in a union."""
    inner = get_args(kind)
    return [str(word) for word in inner] if get_origin(kind) is Literal else [w for one in inner for w in _choices(one)]
