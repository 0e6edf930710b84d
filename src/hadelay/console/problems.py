"""Errors in words for people, shown at the field of a form that is wrong; and messages that a redirect carries to the
next page."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Container

import msgspec

from hadelay.errors import BadRequest, HadelayError

#: Limit of the characters of a text that a redirect carries.
_MOST = 400
#: Beginning of an error's text that names a field, such as "lifetime: …" or "filter.tags: …".
_FIELD = re.compile(r"([a-z_.]+): (?=\S)")
#: Pattern of the first word of a text, if the word may get a capital letter: names of settings and numbers do not
#: match.
_WORD = re.compile(r"[a-z]+(?=[ ,:;])")


class Wrong(BadRequest):
    """A field of a form has an invalid value. The page shows the text at this field."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(words)
        self.field = field


class Problem(msgspec.Struct, frozen=True):
    """A problem in words for people. field: name of the form's field with the problem; "" for the form as a whole."""

    words: str
    field: str = ""


class Flash(msgspec.Struct, array_like=True, frozen=True):
    """Texts that the next page shows once: the outcome of an action, its problem, and the name and secrets of a token
    that it created."""

    notice: str = ""
    problem: Problem = Problem("")
    made: str = ""
    secret: str = ""
    aws_id: str = ""
    aws_secret: str = ""

    def to_cookie(self) -> str:
        short = msgspec.structs.replace(
            self, notice=self.notice[:_MOST], problem=Problem(self.problem.words[:_MOST], self.problem.field[:64])
        )
        return urlsafe_b64encode(msgspec.json.encode(short)).decode().rstrip("=")

    @classmethod
    def from_cookie(cls, text: str | None) -> "Flash":
        try:
            return _FLASH.decode(urlsafe_b64decode((text or "") + "=" * (-len(text or "") % 4)))
        except (Base64Error, ValueError, msgspec.DecodeError):
            return cls()


_FLASH = msgspec.json.Decoder(Flash)


def problem_of(error: HadelayError, fields: Container[str] = ()) -> Problem:
    """Describe an error in words for people. fields: names of the form's fields; if the error's text begins with one of
    them, the problem is shown at this field."""
    words, field = error.detail or error.title, getattr(error, "field", "")
    if not field and (found := _FIELD.match(words)) is not None:
        name = next((name for name in (found[1], found[1].rpartition(".")[2]) if name in fields), "")
        field, words = name, words[found.end() :] if name else words
    words = sentence(words)
    if not error.outcome_known:
        words += " It is not known whether this was done: look before you repeat it."
    elif error.retryable:
        words += " Nothing was changed: the same may work in a moment."
    return Problem(words, field)


def sentence(words: str) -> str:
    """Make a sentence of an error text of the API."""
    words = words.strip()
    if _WORD.match(words):
        words = words[0].upper() + words[1:]
    return words if words.endswith((".", "?", "!")) else f"{words}."
