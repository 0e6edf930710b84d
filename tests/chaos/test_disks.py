"""The harness's own disks, by root."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chaos import tools
from chaos.disks import NOTHING_FLUSHED, Disk


@pytest.mark.skipif(any(map(tools.missing, ("root", "mkfs"))), reason="mounts a file system: root and mkfs.ext4")
def test_a_power_cut_does_not_bring_back_what_filled_the_disk(tmp_path: Path) -> None:
    disk = Disk(tmp_path, "n1", 32)
    try:
        disk.make()
        disk.fill()
        disk.sync()
        assert not shutil.disk_usage(disk.mount).free
        disk.unfill()
        disk.cut_power(NOTHING_FLUSHED)
        for _ in range(2):  # healing is harmless where there is nothing to heal
            disk.detach()
        disk.attach()
        assert shutil.disk_usage(disk.mount).free > 16 << 20
    finally:
        disk.remove()
