"""Publishes the messages of schedules: copies of the schedules' templates, each with its occurrence."""

from collections.abc import Iterable

import numpy as np
from google_crc32c import value as crc32c

from hadelay.codec.publishcommand import (
    CLIENT_KEY_ROW,
    GAP,
    GROUP_ROW,
    KEY_ROW,
    PUBLISH_ROW,
    RELATIVE,
    Publish,
    hash_group,
    with_groups,
)
from hadelay.codec.results import PublishResult
from hadelay.codec.schedules import Stored, decode_template, with_occurrence
from hadelay.ledger import publish
from hadelay.ledger.state import Ledger


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
        """Add a message of a schedule per (occurrence, due time in Unix ms)."""
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
        """(RowCode, id) per message."""
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
            groups = np.zeros(len(self._groups), GROUP_ROW)
            groups["row"], groups["group"] = zip(*self._groups, strict=True)
            command = with_groups(command, groups)
        return publish.apply_publish(ledger, command, limited=False)
