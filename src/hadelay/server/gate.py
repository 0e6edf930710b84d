"""Deletion waits for the archive: a leader proposes to delete an hour only once the archive holds all of it.

A thread checks the archive, which may be far away. A proof counts for a minute only: the archive can be damaged later,
and then the hour is the only copy.
"""

import logging
from collections.abc import Callable
from itertools import takewhile

from hadelay.model import hour_name
from hadelay.platform.runtime import Runtime
from hadelay.storage.manifests import Catalogue, Directory, Files, SourceFiles, load_catalogue, unproven

log = logging.getLogger(__name__)

#: Seconds for which a proof counts.
_BELIEVED_S = 60.0
#: Limit of hours that one check proves: so many hours are deleted well before the proof expires.
_AT_ONCE = 100
#: Seconds between two log lines about hours that stay.
_TELL_S = 3600.0


class Gate:
    """woken: called when hours may be deleted."""

    def __init__(self, where: str, runtime: Runtime, woken: Callable[[], None]) -> None:
        self._where, self._runtime, self._woken = where, runtime, woken
        self._proven: dict[int, SourceFiles] = {}
        self._proven_at = self._told_at = -_TELL_S
        self._waiting: dict[int, SourceFiles] = {}
        self._asking = self._stopped = False
        #: The archive's catalogue as the thread read it last.
        self._catalogue: Catalogue | None = None

    def stop(self) -> None:
        """End a running check after its present hour."""
        self._stopped = True

    def holds(self, hour: int, source: SourceFiles) -> bool:
        """The archive holds the hour as it is here. False: not known; the next `ask` checks the hour, too."""
        if self._runtime.monotonic() < self._proven_at + _BELIEVED_S and self._proven.get(hour) == source:
            return True
        self._waiting[hour] = source
        return False

    def ask(self) -> None:
        """Check the hours that wait, unless a check is running."""
        if self._waiting and not self._asking:
            self._asking = True
            wanted = sorted(self._waiting.items())
            self._runtime.in_thread("archive", lambda: self._check(wanted), self._checked)
        self._waiting = {}

    def _check(self, wanted: list[tuple[int, SourceFiles]]) -> tuple[dict[int, SourceFiles], str]:
        going = takewhile(lambda _: not self._stopped, wanted)
        archive = open_archive(self._where)
        self._catalogue = load_catalogue(archive, self._catalogue)
        found = unproven(archive, self._catalogue, going, _AT_ONCE)
        stays = {hour: why for hour, why in found.items() if why}
        first = next(iter(stays.items()), None)
        said = f"{len(stays)} hours, the first of them {hour_name(first[0])}: {first[1]}" if first else ""
        return {hour: source for hour, source in wanted if found.get(hour) == ""}, said

    def _checked(self, result: tuple[dict[int, SourceFiles], str] | None, error: BaseException | None) -> None:
        self._asking = False
        proven, said = result or ({}, f"the archive cannot be read: {error}")
        now = self._runtime.monotonic()
        if said and now >= self._told_at + _TELL_S:
            self._told_at = now
            log.warning("not_archived", extra={"archive": self._where, "stays": said})
        if proven:
            self._proven, self._proven_at = proven, now
            self._woken()


def open_archive(where: str) -> Files:
    """The files in a directory or at a URI. BadRequest for an unknown kind of URI."""
    where = where.removeprefix("file://")
    if "://" not in where:
        return Directory(where)
    from hadelay.storage.locations import Location

    return Location(where)
