"""Hours that are in the archive of `retention.archive`, for people who look at the cluster (the console)."""

import asyncio
from collections.abc import Container
from contextlib import suppress

import structlog

from hadelay.server.node import Node
from hadelay.server.service.part import Service
from hadelay.storage.manifests import Catalogue, load_catalogue, open_archive

#: Shortest time between two reads of the archive's catalogue; and timeout of a caller that waits for the first read;
#: both in seconds.
_FRESH_S, _WAIT_S = 60.0, 0.5

log = structlog.get_logger("hadelay")


class ArchiveService(Service):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._where, self._runtime = node.config.retention.archive, node.runtime
        self._catalogue: Catalogue | None = None
        self._reading = self._failed = False
        self._read_at = -_FRESH_S
        #: Event that is set once the archive was read for the first time, or could not be read.
        self._looked = asyncio.Event()

    async def look(self) -> tuple[Container[int], str]:
        """Read the archive's catalogue in a thread, at most once a minute. Returns (hours in the catalogue, state).
        States: "" for a node without an archive; "reading"; "unreadable" (the hours are those of an earlier read);
        "known"."""
        runtime = self._runtime
        if not self._where:
            return (), ""
        if not self._reading and runtime.monotonic() >= self._read_at + _FRESH_S:
            self._reading = True
            runtime.in_thread("archive", self._load, self._loaded)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), _WAIT_S)
        hours = () if self._catalogue is None else self._catalogue.hours
        return hours, "unreadable" if self._failed else "reading" if self._catalogue is None else "known"

    def _load(self) -> Catalogue:
        return load_catalogue(open_archive(self._where), self._catalogue)

    def _loaded(self, found: Catalogue | None, error: BaseException | None) -> None:
        self._reading, self._failed, self._read_at = False, error is not None, self._runtime.monotonic()
        self._looked.set()
        if error is None:
            self._catalogue = found
        else:
            # The location and the error may hold credentials of an object store: pages do not show the error.
            log.warning("archive_unreadable", error=str(error))
