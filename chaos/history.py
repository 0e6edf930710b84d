"""What clients saw: requests, answers, hand-outs and faults, in seconds on this machine's monotonic clock since the
start of the run. Times named `_ms` are cluster time as a node stated it. Checkers read the history from memory;
`history.jsonl` gets each event at once, and `report` reads the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec

from chaos.sim.history import number_of

__all__ = ["Given", "History", "Put", "Redrive", "body_of", "checksum", "number_of", "term_of", "unix_ms"]

#: Translation of Crockford's base 32 digits, used in lease tokens, to the digits that int() reads.
_DIGITS = str.maketrans("0123456789ABCDEFGHJKMNPQRSTVWXYZ", "0123456789abcdefghijklmnopqrstuv")


def body_of(number: int, size: int) -> bytes:
    """Body with the message's number and a checksum (read by `number_of`)."""
    return number.to_bytes(4, "little") + bytes([number & 0xFF]) * size


def term_of(lease: str) -> int:
    """Raft term of the grant behind a lease token: 145 bits in base 32, group u8 and term u32 first
    (docs/spec/commands.md)."""
    return int(lease.translate(_DIGITS), 32) >> 105 & 0xFFFF_FFFF


def unix_ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def checksum(body: bytes) -> str:
    """Length and CRC-32 of a body: a history keeps these instead of the body."""
    return f"{len(body)}:{crc32(body):08x}"


@dataclass(slots=True)
class Put:
    """A message that a publisher sent, and the answers to it."""

    n: int
    delay_s: float
    size: int
    asked: float
    topic: str = ""
    key: str | None = None
    tags: Sequence[str] = ()
    #: TTL in seconds; 0: no TTL.
    ttl_s: float = 0.0
    #: Time of the first answer that confirmed the publish.
    stored: float | None = None
    id: str | None = None
    #: Number of answers that confirmed the publish.
    answers: int = 0
    #: Due time from the receipt, in cluster time (Unix ms).
    due_ms: int | None = None
    #: True if the cluster refused the publish definitely and the client did not retry.
    refused: bool = False
    cancel_asked: float | None = None
    cancelled: float | None = None
    #: Reschedule of the message: time of the request, delay, time of the answer, and due time in the answer.
    move_asked: float | None = None
    move_delay_s: float = 0.0
    moved: float | None = None
    moved_due_ms: int | None = None
    #: Number of nodes that synced their journals between the publish (`asked`) and its confirmation (`stored`); None if
    #: syncs are not counted.
    syncs: int | None = None

    @property
    def body(self) -> bytes:
        return body_of(self.n, self.size)


@dataclass(slots=True)
class Given:
    """One hand-out of a message to a consumer. `asked`: start of the receive; `got`: time of the answer."""

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
    #: Length and CRC-32 of the received body (`checksum`).
    body: str
    #: Raft term in which the lease was granted.
    term: int
    topic: str = ""
    key: str | None = None
    tags: Sequence[str] = ()
    #: Tag filters of the receive: `every` is its `tags` (all required), `some` its `any_tags` (one required).
    every: Sequence[str] = ()
    some: Sequence[str] = ()
    nack_asked: float | None = None
    ack_asked: float | None = None
    acked: float | None = None
    #: Time of the first request to extend the lease, length of the extension, and time of its confirmation.
    extend_asked: float | None = None
    extend_s: float = 0.0
    extended: float | None = None


@dataclass(slots=True)
class Redrive:
    """A dead letter: times when a list showed it, its redrive was requested, and the redrive was confirmed."""

    seen: float
    attempt: int
    asked: float | None = None
    redriven: float | None = None

    @property
    def unsure(self) -> bool:
        """True if the redrive was requested and not confirmed: it may take effect later, or twice."""
        return self.asked is not None and self.redriven is None


@dataclass
class History:
    clock: Callable[[], float] = lambda: 0.0
    file: BinaryIO | None = None
    puts: dict[int, Put] = field(default_factory=dict)
    given: list[Given] = field(default_factory=list)
    #: Contradictory answers: one idempotency key got two ids: (message number, first id, other id).
    second_ids: list[tuple[int, str, str]] = field(default_factory=list)
    #: Dead letters and their redrives, by message id, in order of time.
    redrives: dict[str, list[Redrive]] = field(default_factory=dict)
    #: Message id → (state found when the message was looked up, end of its TTL in cluster time).
    ends: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    #: Events that are not about one message, such as faults and new leaders, each {"e": type, "t": seconds, …}.
    events: list[dict[str, Any]] = field(default_factory=list)
    _of: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _leased: dict[tuple[str, int, str], Given] = field(default_factory=dict)
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
            self._of.setdefault(line["e"], []).append(line)
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
        return self._of.get(event, [])

    def met(self) -> set[str]:
        """Names of the crash points at which a node ended."""
        return {event["at"] for event in self.of("crash") if event["nodes"]}

    def _on_put(self, tags: Sequence[str] = (), **fields: Any) -> None:
        self.puts[fields["n"]] = Put(tags=tuple(tags), **fields)

    def _on_stored(self, n: int, t: float, id: str, due_ms: int | None = None, syncs: int | None = None) -> None:
        put = self.puts[n]
        put.answers += 1
        if put.id is None:
            put.stored, put.id, put.due_ms, put.syncs = t, id, due_ms, syncs
        elif put.id != id:
            self.second_ids.append((n, put.id, id))

    def _on_refused(self, n: int, why: str) -> None:
        self.puts[n].refused = True

    def _on_cancel(self, n: int, t: float) -> None:
        self.puts[n].cancel_asked = t

    def _on_cancelled(self, n: int, t: float) -> None:
        self.puts[n].cancelled = t

    def _on_move(self, n: int, t: float, delay_s: float) -> None:
        self.puts[n].move_asked, self.puts[n].move_delay_s = t, delay_s

    def _on_moved(self, n: int, t: float, due_ms: int) -> None:
        self.puts[n].moved, self.puts[n].moved_due_ms = t, due_ms

    def _on_asked_for(self, id: str, t: float, state: str, ended_ms: int | None = None) -> None:
        self.ends[id] = state, ended_ms

    def _on_given(
        self, tags: Sequence[str] = (), every: Sequence[str] = (), some: Sequence[str] = (), **fields: Any
    ) -> None:
        # Store tuples: all empty tuples are one object, which saves memory with a million hand-outs.
        given = Given(tags=tuple(tags), every=tuple(every), some=tuple(some), **fields)
        self.given.append(given)
        self._leased[given.id, given.attempt, given.request] = given

    def _on_nack(self, id: str, attempt: int, request: str, t: float) -> None:
        self._leased[id, attempt, request].nack_asked = t

    def _on_ack(self, id: str, attempt: int, request: str, t: float) -> None:
        self._leased[id, attempt, request].ack_asked = t

    def _on_acked(self, id: str, attempt: int, request: str, t: float) -> None:
        given = self._leased.pop((id, attempt, request), None)
        if given is not None:
            given.acked = t

    def _on_extend(self, id: str, attempt: int, request: str, t: float, lease_s: float) -> None:
        given = self._leased[id, attempt, request]
        given.extend_asked, given.extend_s = t, lease_s

    def _on_extended(self, id: str, attempt: int, request: str, t: float) -> None:
        self._leased[id, attempt, request].extended = t

    def _on_dead(self, id: str, attempt: int, t: float) -> None:
        self.redrives.setdefault(id, []).append(Redrive(t, attempt))

    def _on_redrive(self, id: str, t: float) -> None:
        self.redrives[id][-1].asked = t

    def _on_redriven(self, id: str, t: float) -> None:
        self.redrives[id][-1].redriven = t
