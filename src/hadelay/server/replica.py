"""The state of a node: the ledger in memory, and the files below it."""

from __future__ import annotations

from hadelay.ledger import checkpoint
from hadelay.ledger.state import Ledger
from hadelay.storage.store import Storage


class Replica:
    """An installed snapshot replaces `ledger` and `storage`, so parts of a node keep the replica instead."""

    def __init__(self, storage: Storage) -> None:
        self.load(storage)

    def load(self, storage: Storage) -> None:
        self.storage = storage
        self.ledger = Ledger(storage.identity.group, storage.hours, storage.tables, storage.names)
        if storage.core_blob:
            checkpoint.load(self.ledger, storage.core_blob, storage.hour_blobs())
