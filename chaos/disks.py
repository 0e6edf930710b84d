"""One disk per node: an ext4 file system in a file, which can be full, stall, or lose power."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from chaos import tools
from chaos.scenario import Mistake

_FREEZE, _THAW = 0xC0045877, 0xC0045878
_EXT4_SHUTDOWN = 0x8004587D
#: Flags of the ioctl that shuts ext4 down: drop all data outside ext4's journal; or write that journal first, so that
#: metadata are newer than data.
NOTHING_FLUSHED, METADATA_FLUSHED = 2, 1


class Disk:
    def __init__(self, directory: Path, name: str, mib: int) -> None:
        self.image = directory / f"{name}.img"
        self.mount = directory / f"hdchaos.{os.getpid()}.{name}"
        self._mib = mib

    def make(self) -> None:
        with open(self.image, "wb") as image:
            image.truncate(self._mib << 20)
        tools.run("mkfs.ext4", "-q", "-F", "-m", "0", self.image)
        self.mount.mkdir()
        self.attach()

    def attach(self) -> None:
        # Mount with commit=600, so that unsynced data stay in memory until a power cut drops them.
        if self.mount.is_mount():
            return
        tools.run("mount", "-o", "loop,commit=600", self.image, self.mount)

    def detach(self) -> None:
        if self.mount.is_mount():
            tools.run("umount", self.mount)

    def remove(self) -> None:
        if self.mount.is_mount():
            with contextlib.suppress(OSError):
                self.thaw()
            try:
                self.detach()
            except Mistake:
                tools.run("umount", "-l", self.mount)
        self.image.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.mount.rmdir()

    def fill(self) -> None:
        with open(self._ballast, "ab") as ballast:
            size = 16 << 20
            while size >= 4096:
                try:
                    os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, size)
                except OSError:
                    size //= 2

    def unfill(self) -> None:
        self._ballast.unlink(missing_ok=True)
        self.sync()

    def sync(self) -> None:
        """Sync the disk, so that a later power cut does not undo changes that chaos itself made."""
        tools.run("sync", "--file-system", self.mount)

    @property
    def _ballast(self) -> Path:
        return self.mount / "ballast"

    def freeze(self) -> None:
        self._ioctl(_FREEZE, 0)

    def thaw(self) -> None:
        self._ioctl(_THAW, 0)

    def cut_power(self, how: int) -> None:
        self._ioctl(_EXT4_SHUTDOWN, how)

    def _ioctl(self, request: int, argument: int) -> None:
        handle = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, request, struct.pack("i", argument))
        finally:
            os.close(handle)
