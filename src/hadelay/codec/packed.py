"""Values whose bytes are a msgpack array: bodies of commands without columns, rows of tables, rows of checkpoints.

The fields of a struct, in their order, are the elements of the array. Decoding checks their number, types and limits.
PUBLISH, GRANT, SETTLE and other commands of columns have layouts of their own (codec/commands.py).
"""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from hadelay.codec.wire import MAX_NAME, Malformed, WireReader

U8 = Annotated[int, Meta(ge=0, lt=1 << 8)]
U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
U64 = Annotated[int, Meta(ge=0)]
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: Text that is not empty; Packed limits its size to MAX_NAME bytes.
Name = Annotated[str, Meta(min_length=1)]


class Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of values whose bytes are a msgpack array. A subclass raises ValueError in `__post_init__` for a value that
    its types allow but nobody may send; the method runs when a value is made, and when one is decoded."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is str:
                check_size(value)

    def pack(self) -> bytes:
        return _encode(self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """Decode a value. Raises Malformed."""
        return decoder(cls)(data)  # type: ignore[no-any-return]

    @classmethod
    def read(cls, reader: WireReader) -> Self:
        """Decode a value from all bytes that the reader has left. Raises Malformed."""
        return cls.unpack(reader.rest())


_encode = msgspec.msgpack.Encoder().encode


@cache
def decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    """The function that decodes a value of the type from msgpack, and raises Malformed."""
    decode = msgspec.msgpack.Decoder(kind).decode
    name = getattr(kind, "__name__", str(kind))

    def checked(data: bytes | memoryview) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise Malformed(f"not a {name}: {error}") from error

    return checked


def check_size(text: str) -> None:
    """Raise ValueError for a text of more than MAX_NAME bytes."""
    if len(text) > MAX_NAME or not (text.isascii() or len(text.encode()) <= MAX_NAME):
        raise ValueError(f"a text must have at most {MAX_NAME} bytes")
