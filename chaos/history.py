"""What the outside saw: requests, answers, hand-outs and faults, in seconds on this machine's monotonic clock since the
run began; times named `_ms` are cluster time as a node told it. Kept in memory for the checkers, and as it comes in
`history.jsonl`, from which `report` reads it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hadelay.testing.history import number_of

__all__ = ["Given", "History", "Put", "body_of", "number_of", "term_of"]

#: Crockford's alphabet, as the digits that int() reads.
_DIGITS = str.maketrans("0123456789ABCDEFGHJKMNPQRSTVWXYZ", "0123456789abcdefghijklmnopqrstuv")


def body_of(number: int, size: int) -> bytes:
    """A payload that says which message it is and whether it is whole (`number_of`)."""
    return number.to_bytes(4, "little") + bytes([number & 0xFF]) * size


def term_of(lease: str) -> int:
    """Of the grant that the lease is of: 145 bits in base 32, group u8 and term u32 first (docs/spec/commands.md)."""
    return int(lease.translate(_DIGITS), 32) >> 105 & 0xFFFF_FFFF


@dataclass(slots=True)
class Put:
    """A message that a publisher wanted stored."""

    n: int
    delay_s: float
    size: int
    asked: float
    #: Of the first yes.
    stored: float | None = None
    id: str | None = None
    #: Answered "nothing happened" and not tried again.
    refused: bool = False
    cancel_asked: float | None = None
    cancelled: float | None = None
    #: How many nodes completed a sync between `asked` and `stored`, where somebody counts them.
    syncs: int | None = None


@dataclass(slots=True)
class Given:
    """A message handed to a consumer. `asked`: when its receive began, `got`: when the answer was here."""

    id: str
    n: int
    attempt: int
    consumer: str
    request: str
    asked: float
    got: float
    now_ms: int
    until_ms: int
    due_ms: int
    redelivered: bool
    whole: bool
    #: In which the lease was granted.
    term: int
    nack_asked: float | None = None
    acked: float | None = None


@dataclass
class History:
    clock: Callable[[], float] = lambda: 0.0
    file: BinaryIO | None = None
    puts: dict[int, Put] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    #: Two ids that one idempotency key was answered with: (number, first, other).
    second_ids: list[tuple[int, str, str]] = field(default_factory=list)
    #: Everything else: faults, leaders, failovers, ends of processes; each {"e": …, "t": …}.
    events: list[dict[str, Any]] = field(default_factory=list)
    _held: dict[tuple[str, int, str], Given] = field(default_factory=dict)
    _encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

    def record(self, event: str, **fields: Any) -> None:
        line = {"e": event, **fields}
        if self.file is not None:
            self.file.write(self._encode(line) + b"\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        handler = getattr(self, "_on_" + line["e"].replace("-", "_"), None)
        if handler is None:
            self.events.append(line)
        else:
            handler(**{name: value for name, value in line.items() if name != "e"})

    @classmethod
    def read(cls, path: Path) -> History:
        history = cls()
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    history._take(msgspec.json.decode(line))
        return history

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["e"] == event]

    def met(self) -> set[str]:
        """The crash points at which a node ended."""
        return {event["at"] for event in self.of("crash") if event["nodes"]}

    def _on_put(self, **fields: Any) -> None:
        self.puts[fields["n"]] = Put(**fields)

    def _on_stored(self, n: int, t: float, id: str, syncs: int | None = None) -> None:
        put = self.puts[n]
        if put.id is None:
            put.stored, put.id, put.syncs = t, id, syncs
        elif put.id != id:
            self.second_ids.append((n, put.id, id))

    def _on_refused(self, n: int, why: str) -> None:
        self.puts[n].refused = True

    def _on_cancel(self, n: int, t: float) -> None:
        self.puts[n].cancel_asked = t

    def _on_cancelled(self, n: int, t: float) -> None:
        self.puts[n].cancelled = t

    def _on_given(self, **fields: Any) -> None:
        given = Given(**fields)
        self.given.append(given)
        self._held[given.id, given.attempt, given.request] = given

    def _on_nack(self, id: str, attempt: int, request: str, t: float) -> None:
        self._held[id, attempt, request].nack_asked = t

    def _on_acked(self, id: str, attempt: int, request: str, t: float) -> None:
        given = self._held.pop((id, attempt, request), None)
        if given is not None:
            given.acked = t
