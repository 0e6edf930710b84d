"""Calls between nodes over the node link: a request with one answer or error; and notes, which get no answer.

    message := msgpack [number, op, payload]     kind CALL       number 0: a note
               msgpack [number, payload]         kind REPLY
               msgpack [number, type, detail, retry_after_ms, extra]     kind REFUSAL

A call whose answer cannot come any more (link down, too late) ends as OutcomeUnknown; a call that could not be sent
ends as NoLeader: nothing happened. docs/spec/node-link.md describes how results and arrays are encoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import msgpack
import numpy as np

from hadelay import errors
from hadelay.codec import results
from hadelay.errors import BadRequest, HadelayError, NoLeader, OutcomeUnknown
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.ports import Done

CALL, REPLY, REFUSAL = 64, 65, 66

Reply = Done
#: Function that handles a call or note: handler(peer, payload, reply). For a note, calling `reply` does nothing.
Handler = Callable[[str, Any, Reply], None]


class Link:
    """Calls and notes between this node and the others. send: sends a message to a peer; returns False when there is no
    link to the peer."""

    def __init__(self, runtime: Runtime, send: Callable[[str, int, bytes], bool]) -> None:
        self.runtime = runtime
        self.handlers: dict[str, Handler] = {}
        self._send = send
        # Calls are numbered from a random number on: a late answer to a call of this node's previous process must match
        # no call of this process.
        self._numbers = count(1 + runtime.random.getrandbits(62))
        self._waiting: dict[int, tuple[str, Reply, Handle]] = {}

    def call(self, peer: str, op: str, payload: Any, timeout_s: float, done: Reply) -> None:
        number = next(self._numbers)
        if not self._send(peer, CALL, _pack([number, op, payload])):
            done(None, NoLeader(f"there is no link to node {peer}", retry_after_ms=200))
            return
        timer = self.runtime.call_later(timeout_s, self._late, number, peer)
        self._waiting[number] = (peer, done, timer)

    def note(self, peer: str, op: str, payload: Any) -> bool:
        return self._send(peer, CALL, _pack([0, op, payload]))

    def link_down(self, peer: str) -> None:
        for number in [n for n, (to, _, _) in self._waiting.items() if to == peer]:
            self._finish(number, None, OutcomeUnknown(f"the link to node {peer} broke before it answered"))

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        """Handle a message from a peer. It never raises: a malformed message gets a refusal, or no answer."""
        try:
            message = msgpack.unpackb(payload, ext_hook=_unpack_ext, strict_map_key=False)
            if kind == CALL:
                number, op, argument = message
                self._serve(peer, number, op, argument)
            elif kind == REPLY:
                self._finish(message[0], message[1], None)
            elif kind == REFUSAL:
                self._finish(message[0], None, _error(*message[1:]))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError, msgpack.UnpackException):
            return

    def _serve(self, peer: str, number: int, op: str, argument: Any) -> None:
        def reply(result: Any, error: HadelayError | None) -> None:
            if not number:
                return
            if error is None:
                self._send(peer, REPLY, _pack([number, result]))
            else:
                self._send(peer, REFUSAL, _pack([number, error.type, error.detail, error.retry_after_ms, error.extra]))

        handler = self.handlers.get(op)
        if handler is None:
            reply(None, BadRequest(f"this node does not know the call {op!r}: it runs another version"))
        else:
            handler(peer, argument, reply)

    def _late(self, number: int, peer: str) -> None:
        self._finish(number, None, OutcomeUnknown(f"node {peer} did not answer in time"))

    def _finish(self, number: int, result: Any, error: HadelayError | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            _, done, timer = waiting
            timer.cancel()
            done(result, error)


_ERRORS = {c.type: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HadelayError)}
#: Name of a result class in messages → the class. The names never change; fields are sent in the class's order.
_RESULTS = {
    "PublishResult": results.PublishResult,
    "GrantResult": results.GrantResult,
    "LeaseResult": results.LeaseResult,
    "ExpireResult": results.ExpireResult,
    "CancelResult": results.CancelResult,
    "RedriveResult": results.RedriveResult,
    "RescheduleResult": results.RescheduleResult,
    "Progress": results.JobResult,
    "JobBegun": results.JobBegun,
    "Done": results.Done,
    "Refused": results.Refused,
}
_NAMES = {kind: name for name, kind in _RESULTS.items()}
_ARRAY, _RESULT = 1, 2
#: Limit of the depth of results within results: deeper ones would overflow the C stack before Python's recursion limit.
_DEEPEST = 8
#: Data types of arrays that are allowed in results, as texts: numpy would evaluate some other texts as Python code.
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("?", "<u1", "<u2", "<u4", "<u8", "<i4", "<i8"))}


def _error(kind: str, detail: str, retry_after_ms: int | None, extra: dict[str, Any]) -> HadelayError:
    cls = _ERRORS.get(kind, HadelayError)
    if cls is errors.DamagedFile:
        cls = HadelayError
    return cls(detail, retry_after_ms=retry_after_ms, **extra)


def _pack(value: Any) -> bytes:
    return msgpack.packb(value, default=_default)  # type: ignore[no-any-return]


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    if (name := _NAMES.get(type(value))) is not None:
        fields = [getattr(value, f.name) for f in dataclasses.fields(value)]
        if isinstance(value, results.RescheduleResult | results.CancelResult):
            # leave out trailing None: nodes older than message groups, or than subscriptions, expect fewer fields
            while fields[-1] is None:
                fields.pop()
        return msgpack.ExtType(_RESULT, _pack([name, *fields]))
    if isinstance(value, memoryview):
        return bytes(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent over the node link")


def _unpack_ext(code: int, data: bytes, depth: int = 0) -> Any:
    if code == _ARRAY:
        dtype, raw = msgpack.unpackb(data)
        return np.frombuffer(raw, _DTYPES[dtype])
    if code == _RESULT:
        if depth == _DEEPEST:
            raise ValueError("a result is nested too deeply")
        name, *fields = msgpack.unpackb(data, ext_hook=partial(_unpack_ext, depth=depth + 1), strict_map_key=False)
        return _RESULTS[name](*fields)
    raise ValueError(f"unknown MessagePack extension type {code}")
