"""Control groups that give each process the same share of a core, so that many processes on few cores behave like
processes with cores of their own, only slower.

The groups are made below the controller `cpu` of cgroup v1 or v2, and removed at the end. A group of a run that was
killed is removed by the next run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.wrk_run import Missing

#: Directories that may have the controller, of version 1 and of version 2.
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PREFIX = "hadelay-bench-"
#: Length of a period in µs. A process that used its share waits for the next period, at most this long.
PERIOD_US = 10_000


class Shares:
    """Groups of one process each. root: directory of the controller."""

    def __init__(self, root: Path, *, second: bool) -> None:
        self.root, self.second = root, second
        self.groups: list[Path] = []

    def give(self, pid: int, share: float) -> None:
        """Limit a process and its threads to a share of a core."""
        group = self.root / f"{_PREFIX}{os.getpid()}-{len(self.groups)}"
        group.mkdir()
        self.groups.append(group)
        quota = round(PERIOD_US * share)
        if self.second:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        (group / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """End the limits: processes that are left go back to the group above."""
        while self.groups:
            _remove(self.groups.pop(), self.root)


def _remove(group: Path, root: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (root / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # a process that ends is still in it
            time.sleep(0.05)


def _left_over(root: Path) -> Iterable[Path]:
    """Groups of runs that are gone."""
    for group in root.glob(f"{_PREFIX}*"):
        owner = group.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            yield group


def _root() -> tuple[Path, bool]:
    """The directory of the controller, and whether its version is 2; Missing if there is none for us."""
    if (_V1 / "cpu.cfs_quota_us").exists():
        return _V1, False
    controllers = _V2 / "cgroup.subtree_control"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return _V2, True
    raise Missing("no control groups with the controller cpu in /sys/fs/cgroup: shares of a core cannot be limited")


@contextlib.contextmanager
def shares() -> Iterator[Shares]:
    """Missing if this user may make no groups."""
    root, second = _root()
    for group in _left_over(root):
        _remove(group, root)
    found = Shares(root, second=second)
    try:
        trial = root / f"{_PREFIX}{os.getpid()}-trial"
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise Missing(f"this user may make no control groups in {root}: {error.strerror}") from error
    try:
        yield found
    finally:
        found.remove()
