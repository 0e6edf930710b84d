"""Message attributes: their checks, their MD5 as SDKs compute it, and where they are kept.

A message without message attributes is its text, of the type text/plain. A message with some is an envelope, JSON of
the type ENVELOPE: {"body": text, "attributes": {name: {"type": "String", "value": text}}}; the value of a Binary is in
base64, as `binary`. So attributes may be as large as a message, and a consumer without SQS can read them.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from hadelay.aws.errors import AwsError
from hadelay.aws.sqs.protocol import Document, invalid

TEXT, ENVELOPE = "text/plain", "application/vnd.hadelay.sqs+json"
#: Prefix of message attributes that set options of the publish; they are not stored with the message.
OPTION = "hadelay."
#: Limits of SQS: number of attributes, and characters of a name and of a type.
_MOST, _LONGEST = 10, 256
_NAME = re.compile(r"(?!(?i:aws|amazon)\.)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TYPE = re.compile(r"(String|Number|Binary)(\..+)?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
#: Characters that SQS refuses, since XML 1.0 has no way to write them.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Value(Document, omit_defaults=True):
    """Value of a message attribute, as SDKs send and read it."""

    DataType: str
    StringValue: str | None = None
    BinaryValue: bytes | None = None

    @property
    def raw(self) -> bytes:
        return (self.StringValue or "").encode() if self.BinaryValue is None else self.BinaryValue


class _Kept(msgspec.Struct, omit_defaults=True):
    type: str
    value: str | None = None
    binary: bytes | None = None


class _Envelope(msgspec.Struct, omit_defaults=True):
    body: str
    attributes: dict[str, _Kept] = {}


Values = Mapping[str, Value]


def check_text(text: str, member: str) -> str:
    """Return the text. Raises AwsError if it has a character that SQS forbids."""
    if not text.isprintable() and (wrong := _FORBIDDEN.search(text)):
        raise AwsError(
            "InvalidMessageContents",
            f"{member}: the character U+{ord(wrong[0]):04X} at {wrong.start()} is not allowed: send base64 instead",
        )
    return text


def check_values(values: Values) -> None:
    """Raises AwsError for attributes that SQS refuses."""
    if not values:
        return
    if sum(not name.startswith(OPTION) for name in values) > _MOST:
        raise invalid(f"MessageAttributes: {len(values)} given; a message has at most {_MOST}")
    for name, value in values.items():
        where = f"MessageAttributes.{name[:80]}"
        if len(name) > _LONGEST or not _NAME.fullmatch(name):
            raise invalid(
                f"{where}: a name has 1 to {_LONGEST} of A-Z a-z 0-9 _ - and single dots between them, and does not "
                "begin with AWS. or Amazon."
            )
        kind = _TYPE.fullmatch(value.DataType)
        if kind is None or len(value.DataType) > _LONGEST:
            raise invalid(f"{where}.DataType: {value.DataType[:40]!r}; String, Number or Binary, or one with a suffix")
        binary = kind[1] == "Binary"
        if not value.raw or (value.BinaryValue is not None) != binary:
            raise invalid(f"{where}: a {kind[1]} needs {'BinaryValue' if binary else 'StringValue'}, not empty")
        if kind[1] == "Number" and not _NUMBER.fullmatch(value.StringValue or ""):
            raise invalid(f"{where}.StringValue: {(value.StringValue or '')[:40]!r} is not a number")
        check_text(value.StringValue or "", where)


def md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def md5_of(values: Values) -> str:
    """MD5 of attributes, as SDKs check it: over the attributes sorted by name; of each, name, type and value with their
    lengths, and one byte that tells text from bytes."""
    digest = hashlib.md5(usedforsecurity=False)
    for name in sorted(values):
        value = values[name]
        for part in (name.encode(), value.DataType.encode()):
            digest.update(len(part).to_bytes(4, "big") + part)
        raw = value.raw
        digest.update(bytes([1 if value.BinaryValue is None else 2]) + len(raw).to_bytes(4, "big") + raw)
    return digest.hexdigest()


def size_of(text: str, values: Values) -> int:
    """Size of a message in bytes, as SQS counts it: the text, and names, types and values of the attributes."""
    size = len(text.encode())
    for name, value in values.items():
        size += len(name.encode()) + len(value.DataType.encode()) + len(value.raw)
    return size


def pack(text: str, values: Values) -> tuple[bytes, str]:
    """Body and content type of a message to publish."""
    kept = {name: value for name, value in values.items() if not name.startswith(OPTION)} if values else {}
    if not kept:
        return text.encode(), TEXT
    found = {name: _Kept(one.DataType, one.StringValue, one.BinaryValue) for name, one in kept.items()}
    return msgspec.json.encode(_Envelope(text, found)), ENVELOPE


_decode = msgspec.json.Decoder(_Envelope).decode


def unpack(body: bytes, content_type: str, meta: Mapping[str, str]) -> tuple[str, dict[str, Value]]:
    """Text and attributes of a received message, which may have been published without SQS. Then its meta fields become
    attributes, except those with a prefix of hadelay; a body that is no text is in base64, as the attribute
    hadelay.encoding says."""
    if content_type == ENVELOPE:
        try:
            found = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        else:
            return found.body, {name: Value(one.type, one.value, one.binary) for name, one in found.attributes.items()}
    own = {name: Value("String", text) for name, text in meta.items() if text and not name.startswith((SYSTEM, OPTION))}
    try:
        text = body.decode()
        if not _FORBIDDEN.search(text):
            return text, own
    except UnicodeDecodeError:
        pass
    return msgspec.json.decode(msgspec.json.encode(body), type=str), own | {
        "hadelay.encoding": Value("String", "base64")
    }


#: Prefix of the names under which a message's meta keeps system attributes of SQS.
SYSTEM = "sqs."


def wanted(values: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Select the attributes that a receive asks for: by name, by a prefix ("trace.*"), or all."""
    exact, prefixes = set[str](), list[str]()
    for name in names:
        if name in ("All", ".*"):
            return dict(values)
        prefixes.append(name[:-1]) if name.endswith(".*") else exact.add(name)
    return {name: one for name, one in values.items() if name in exact or name.startswith(tuple(prefixes))}
