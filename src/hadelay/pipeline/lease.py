"""Leases on the hours of an archive: one run at a time writes an hour.

A run writes a lease, lists the hour's leases, and goes on if it finds no other: of two runs at least one sees the
other's. This needs no conditional write, which pyarrow lacks, but listings that include every earlier write: S3, GCS,
Azure, HDFS and file systems have them. A lease that is not renewed ends, by the clock of the store.
"""

import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hadelay.model import hour_name
from hadelay.storage.locations import Location

#: _RENEW_S: interval of renewals, in seconds. _ENDS_S: time, in seconds, after which a lease without a renewal ends.
_RENEW_S, _ENDS_S = 20.0, 120.0
#: Two runs that write leases of one hour within this time, in ms, may have seen each other's lease: both try again.
_TOGETHER_MS = 2_000
_ATTEMPTS = 5


class Busy(Exception):
    """Another run has the lease on this hour, and may be writing it."""


class Lease:
    def __init__(self, location: Location, name: str) -> None:
        self._location, self._name = location, name
        since = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
        self._data = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode()
        self._ended = threading.Event()
        self._renew()

    def _renew(self) -> None:
        began = time.monotonic()
        self._location.write(self._name, self._data)
        self._renewed = began

    def check(self) -> None:
        """Raises Busy if the lease may have ended, because this process stood still or the store did not answer."""
        if time.monotonic() - self._renewed > _ENDS_S - _RENEW_S:
            raise Busy("this run could not renew its lease in time, and another may have taken it: run it again")

    def keep(self) -> None:
        """Renew the lease until it is given back."""
        while not self._ended.wait(_RENEW_S):
            with suppress(OSError):
                self._renew()

    def give_back(self) -> None:
        self._ended.set()
        with suppress(OSError):  # if removing fails, the lease expires
            self._location.remove(self._name)


@contextmanager
def lease(location: Location, hour: int, run: str) -> Iterator[Lease]:
    """Context that holds a lease on an hour of an archive, and renews it. Raises Busy if another run has the lease,
    and OSError from the store. Tasks of one run may share an hour, because they write the same files."""
    location.make("_lease")
    for attempt in range(_ATTEMPTS):
        name = f"_lease/{hour_name(hour)}.{run}.{uuid.uuid4().hex[:8]}"
        mine = Lease(location, name)
        try:
            other, is_new = _other(location, hour, run, name)
        except BaseException:
            mine.give_back()
            raise
        if not other:
            break
        mine.give_back()
        if not is_new or attempt + 1 == _ATTEMPTS:
            raise Busy(other)
        time.sleep(random.uniform(0.05, 0.5) * (attempt + 1))
    renewing = threading.Thread(target=mine.keep, daemon=True, name=name)
    renewing.start()
    try:
        yield mine
    finally:
        mine.give_back()
        renewing.join()


def _other(location: Location, hour: int, run: str, name: str) -> tuple[str, bool]:
    """Find another run's lease of the hour: (error text or "", whether both leases may have been written together)."""
    now_ms = location.modified_ms(name)
    for there in location.list("_lease") or ():
        if not there.startswith(f"{hour_name(hour)}.") or there.startswith(f"{hour_name(hour)}.{run}."):
            continue
        other = f"_lease/{there}"
        try:
            age_ms = now_ms - location.modified_ms(other)
            if age_ms > _ENDS_S * 1000:
                location.remove(other)
                continue
        except FileNotFoundError:
            continue
        try:
            said = json.loads(location.load(other))
            who = f"process {said['pid']} of {said['host']}, since {said['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            who = there  # the lease is unreadable: show the name of its file instead
        ends = max(0.0, _ENDS_S - age_ms / 1000)
        what = f"another run writes it: {who}; when that has died, its lease ends in {ends:.0f} s"
        return what, abs(age_ms) <= _TOGETHER_MS
    return "", False
