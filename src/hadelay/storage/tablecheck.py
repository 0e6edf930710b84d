"""Reads all tables of an LMDB file and verifies each value, slowly, in a process of its own: reading a damaged page may
end a process by a signal. `python -m hadelay.storage.tablecheck PATH BYTES_PER_S` is that process."""

import os
import subprocess
import sys
import time
from contextlib import closing

from hadelay.errors import DamagedFile
from hadelay.storage.lmdbtables import verify_some

#: Interval, in seconds, at which the process checks whether the node still runs.
_LOOK_S = 1.0
#: Niceness of the process: the node comes first.
_NICE = 10


class TableCheck:
    """Runs the check of one file. `run` blocks, so call it in a thread; `stop` ends it from any thread."""

    def __init__(self, path: str, bytes_per_s: int) -> None:
        self._path, self._rate = path, bytes_per_s
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> tuple[int, str]:
        """Check the file in a process of its own; returns (bytes read, damage in words; "" if there is none). Raises
        OSError if the process cannot start."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._path, str(self._rate)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._stopped:
            self._process.kill()
        said, _ = self._process.communicate()
        code = self._process.returncode
        if self._stopped:
            return 0, ""
        size, _, damage = said.partition(" ")
        if code:
            return 0, f"{self._path}: reading its tables ended the process with code {code}"
        return int(size), damage.strip()

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.kill()


def main(path: str, bytes_per_s: int) -> None:
    os.nice(_NICE)
    parent, total, damage = os.getppid(), 0, ""
    try:
        with closing(verify_some(path)) as pieces:
            for size in pieces:
                total += size
                until = time.monotonic() + size / bytes_per_s
                while (left_s := until - time.monotonic()) > 0:
                    time.sleep(min(left_s, _LOOK_S))
                    if os.getppid() != parent:
                        return  # the node that started this process has ended: nobody waits for the result
    except DamagedFile as error:
        damage = str(error)
    print(total, damage)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
