"""Encodes the arguments of a task as JSON, and decodes them.

The JSON is an object by parameter name, so that a new version of a function may move its parameters. The types are
those of the annotations, checked by the publisher: a wrong call fails there, not in a worker at night.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from hadelay.client import exactjson


class Arguments:
    """Encodes and decodes the arguments of a task's function. Arguments that do not fit the function raise TypeError
    with the task's name."""

    def __init__(self, task: str, function: Callable[..., Any]) -> None:
        self.task, self._function = task, function
        self._signature = inspect.signature(function)

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[dict[str, Any]]:
        """Decoder of the arguments, made on first use: annotations may name classes that are defined after the
        function."""
        try:
            hints = typing.get_type_hints(self._function, include_extras=True)
            types = {name: _type(one, hints.get(name, Any)) for name, one in self._signature.parameters.items()}
            return msgspec.json.Decoder(typing.TypedDict("Parameters", types, total=False))  # type: ignore[operator]
        except (NameError, TypeError) as error:
            raise TypeError(f"{self.task}: its annotations cannot be used for JSON: {error}") from None

    def check(self) -> None:
        """Check that all annotations are types that JSON can carry."""
        _ = self._decoder

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Encode the arguments of a call as JSON. TypeError if the function does not take them."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
            encoded = exactjson.encode(given, "arguments")
            if other := exactjson.changed(given, self._decoder.decode(encoded), "arguments"):
                raise TypeError(other)
        except (TypeError, ValueError) as error:
            text = str(error)
            raise TypeError(text if text.startswith(self.task) else f"{self.task}: {text}") from None
        return encoded

    def decode(self, encoded: bytes | msgspec.Raw) -> inspect.BoundArguments:
        try:
            # Look for unknown names here, because a decoder of a TypedDict ignores them.
            given = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
            unknown = given.keys() - self._signature.parameters.keys()
            if unknown:
                raise TypeError(f"{self.task}: this version of the function has no parameter {min(unknown)!r}")
            return inspect.BoundArguments(self._signature, self._decoder.decode(encoded))
        except msgspec.ValidationError as error:
            raise TypeError(f"{self.task}: {error}") from None

    def returned(self, value: Any) -> Any:
        """Decode a result of the function from its JSON value, by the annotation of the return value."""
        return msgspec.convert(value, typing.get_type_hints(self._function, include_extras=True).get("return", Any))


def _type(parameter: inspect.Parameter, hint: Any) -> Any:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return list[hint]
    return dict[str, hint] if parameter.kind is parameter.VAR_KEYWORD else hint
