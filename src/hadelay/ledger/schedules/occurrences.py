"""Publishes the messages of schedules: each is a copy of a schedule's template, with the time of its occurrence. Also
cancels or replaces messages of schedules that are not due yet."""

from collections.abc import Iterable

import numpy as np
from google_crc32c import value as crc32c
from msgspec.structs import replace

from hadelay.codec.publishcommand import (
    CLIENT_KEY_ROW,
    GAP,
    GROUP_ROW,
    KEY_ROW,
    PUBLISH_ROW,
    RELATIVE,
    Publish,
    hash_group,
)
from hadelay.codec.results import PublishResult
from hadelay.codec.schedules import Made, State, Stored, decode_template, with_occurrence
from hadelay.ledger.hours.lookup import EntryRef, state_of
from hadelay.ledger.hours.transitions import FLAG_WAS_DUE, Leaving, settle
from hadelay.ledger.messages import publish
from hadelay.ledger.messages.copies import pending
from hadelay.ledger.state import Ledger
from hadelay.model import Event
from hadelay.model import State as MessageState


class Occurrences:
    """Messages of any number of schedules, published as one batch."""

    def __init__(self) -> None:
        self._rows: list[np.void] = []
        self._topics: dict[str, int] = {}
        self._locals: list[int] = []
        self._due_ms: list[int] = []
        self._payloads: list[bytes] = []
        self._crcs: list[int] = []
        #: (row, hash of its message group) of rows with a group.
        self._groups: list[tuple[int, int]] = []
        self._node = ""

    def add(self, stored: Stored, times: Iterable[tuple[int, int]]) -> None:
        """Add one message of a schedule for each pair (occurrence, due time in Unix ms)."""
        known = decode_template(stored.template)
        group = None if stored.spec.group is None else hash_group(stored.spec.group)
        row, self._node = known.rows[0], known.node
        payload, meta_size = bytearray(known.blob[len(GAP) :]), int(row["meta_size"])
        local = self._topics.setdefault(known.topics[0], len(self._topics))
        for occurrence, due_ms in times:
            with_occurrence(payload, meta_size, occurrence)
            if group is not None:
                self._groups.append((len(self._rows), group))
            self._rows.append(row)
            self._locals.append(local)
            self._due_ms.append(due_ms)
            self._crcs.append(crc32c(bytes(payload)))
            self._payloads.append(bytes(payload))

    def publish(self, ledger: Ledger, key: tuple[bytes, int] | None = None) -> tuple[list[int], list[int]]:
        """Publish the messages; returns a RowCode and an id for each of them."""
        if not self._rows:
            return [], []
        result = self.result(ledger, key)
        return result.codes.tolist(), result.ids.tolist()

    def result(self, ledger: Ledger, key: tuple[bytes, int] | None = None) -> PublishResult:
        count = len(self._rows)
        rows = np.array(self._rows, PUBLISH_ROW)
        rows["when_ms"], rows["payload_crc"], rows["topic"] = self._due_ms, self._crcs, self._locals
        rows["flags"] &= np.uint16(~RELATIVE & 0xFFFF)
        sizes = rows["meta_size"].astype(np.int64) + rows["body_size"] + len(GAP)
        keys = np.zeros(0 if key is None else 1, KEY_ROW)
        if key is not None:
            keys[0] = (*key, 0, count)
        blob = memoryview(GAP.join((b"", *self._payloads)))
        none = np.zeros(0, CLIENT_KEY_ROW)
        starts = np.cumsum(sizes) - sizes
        command = Publish(self._node, list(self._topics), rows, keys, none, starts, sizes, blob)
        if self._groups:
            command.groups = np.zeros(len(self._groups), GROUP_ROW)
            command.groups["row"], command.groups["group"] = zip(*self._groups, strict=True)
        return publish.apply_publish(ledger, command, limited=False)


def cancel_filed(ledger: Ledger, state: State, after_ms: int = -1) -> tuple[tuple[Made, ...], list[tuple[Made, int]]]:
    """Cancel the schedule's messages that are not due yet and whose occurrences are after after_ms, except those of
    triggers and backfills. Returns (its other remembered messages, cancelled messages with their due times)."""
    kept, cancelled = [], []
    for made in state.ring:
        entries = [] if made.manual or made.occurrence <= after_ms else [entry for entry, _ in pending(ledger, made.id)]
        if not entries or not all(_is_ahead(ledger, entry) for entry in entries):
            kept.append(made)
            continue
        for entry in entries:
            settle(ledger, Leaving(entry.hour, entry.rows), Event.CANCELLED)
        cancelled.append((made, int(entries[0].rows["deliver_at_ms"][0])))
    return tuple(kept), cancelled


def _is_ahead(ledger: Ledger, entry: EntryRef) -> bool:
    """Whether the message waits and was never due: it has no attempt, and no reschedule found it due (FLAG_WAS_DUE)."""
    row = entry.rows[0]
    untouched = not int(row["attempt"]) and not int(row["flags"]) & FLAG_WAS_DUE
    waits = state_of(ledger, entry, ledger.now_ms) in (MessageState.SCHEDULED, MessageState.BLOCKED)
    return untouched and waits and int(row["deliver_at_ms"]) > ledger.now_ms


def made_again(ledger: Ledger, new: Stored, state: State) -> State:
    """Replace the schedule's messages that are not due yet by messages of its new template, with the same due times."""
    kept, cancelled = cancel_filed(ledger, state)
    batch, times = Occurrences(), [(made.occurrence, due_ms) for made, due_ms in cancelled]
    batch.add(new, times)
    codes, ids = batch.publish(ledger)
    made = [Made(occurrence, id_, 0) for (occurrence, _), code, id_ in zip(times, codes, ids, strict=True) if not code]
    ring = sorted((*kept, *made), key=lambda one: one.occurrence)
    refused = len(times) - len(made)
    return replace(state, ring=tuple(ring), made=state.made - refused, refused=state.refused + refused)
