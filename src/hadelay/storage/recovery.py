"""Recovery to the last checkpoint: cut all files to the checkpoint's lengths; the journal replays the later entries.

Recovery reads only the sizes of the files. Appending the entries again gives the same bytes, so all bytes after the
checkpoint are cut, torn or not. A file *shorter* than its checkpoint length has lost synced bytes, which is damage.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.model import hour_from_name
from hadelay.platform.disk import Disk
from hadelay.storage.hours import file_checksums


def cut_hours(disk: Disk, directory: str, hours: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> None:
    """Cut every hour file to the length in its HOUR_ROW; remove files of hours without a HOUR_ROW."""
    sizes = disk.sizes(directory)
    known = set(hours.tolist())
    for name, (length, _) in file_checksums(hours, rows):
        size = sizes.pop(name, 0)
        cut_file(disk, f"{directory}/{name}", size, length)
        if size > length and name.endswith(".idx"):
            sizes[name.removesuffix("idx") + "heads"] = 0  # may be ahead of the cut index: removed below
    for name in sizes:
        stem, _, suffix = name.partition(".")
        if suffix == "heads" and sizes[name] and hour_from_name(stem) in known:
            continue
        path = f"{directory}/{name}"
        if disk.exists(path):
            disk.unlink(path)


def cut_file(disk: Disk, path: str, size: int, length: int) -> None:
    if size < length:
        raise DamagedFile(path, size, f"the file ends here; the checkpoint says {length} bytes; {WAY_OUT}")
    if size > length:
        file = disk.open(path)
        file.truncate(length)
        file.close()
