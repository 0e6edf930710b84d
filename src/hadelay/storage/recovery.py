"""Bringing a directory back to its last checkpoint: files are cut to the lengths it names, the journal does the rest.

The cost is one look at the sizes of the files, whatever is in them. What was appended after the checkpoint is cut off,
torn or not: the journal still has it, and appending it again gives the same bytes. A file that is *shorter* than its
checkpoint says has lost bytes that were synced: that is damage, and not a crash.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.model import hour_from_name
from hadelay.platform.disk import Disk
from hadelay.storage.hours import file_checksums


def cut_hours(disk: Disk, directory: str, hours: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> None:
    """Make every hour file as long as its HOUR_ROW says, and remove those of hours that have none."""
    sizes = disk.sizes(directory)
    known = set(hours.tolist())
    for name, (length, _) in file_checksums(hours, rows):
        size = sizes.pop(name, 0)
        cut_file(disk, f"{directory}/{name}", size, length)
        if size > length and name.endswith(".idx"):
            sizes[name.removesuffix("idx") + "heads"] = 0  # they may be ahead of what is left: gone, see below
    for name in sizes:
        stem, _, suffix = name.partition(".")
        if suffix == "heads" and sizes[name] and hour_from_name(stem) in known:
            continue
        path = f"{directory}/{name}"
        if disk.exists(path):
            disk.unlink(path)


def cut_file(disk: Disk, path: str, size: int, length: int) -> None:
    if size < length:
        raise DamagedFile(path, size, f"the checkpoint knows {length} bytes; {WAY_OUT}")
    if size > length:
        file = disk.open(path)
        file.truncate(length)
        file.close()
