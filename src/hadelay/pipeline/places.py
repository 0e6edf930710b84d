"""Directories that tasks read and write: of this machine, or wherever pyarrow.fs reaches (s3://, gs://, hdfs://, file://).

What is written is there when it is whole: by rename, and in an object store by its upload.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyarrow import fs

from hadelay.errors import BadRequest

#: An upload that is not finished cannot be seen, and a rename would be a copy.
_UPLOADS = {"s3", "gcs", "abfs"}


@lru_cache(maxsize=16)
def filesystem(uri: str) -> tuple[Any, str]:
    """(pyarrow's file system, the path in it); kept, as each has connections. BadRequest for one that is not known."""
    try:
        found, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as error:
        raise BadRequest(f"{uri}: {error}") from None
    return found, path.rstrip("/")


@dataclass(frozen=True)
class Place:
    """A directory, by path or URI. Names are relative, separated by slashes."""

    where: str

    def _remote(self, name: str) -> tuple[Any, str] | None:
        if "://" not in self.where:
            return None
        found, path = filesystem(self.where)
        return found, f"{path}/{name}"

    def path(self, name: str) -> str:
        """For messages, and for Spark."""
        return f"{self.where.rstrip('/')}/{name}"

    def open(self, name: str) -> Any:
        """A file to read, at any place of it. FileNotFoundError."""
        remote = self._remote(name)
        return open(self.path(name), "rb") if remote is None else remote[0].open_input_file(remote[1])

    def size(self, name: str) -> int | None:
        """None if there is no such file."""
        remote = self._remote(name)
        if remote is not None:
            info = remote[0].get_file_info(remote[1])
            return int(info.size) if info.is_file else None
        try:
            return os.path.getsize(self.path(name))
        except FileNotFoundError:
            return None

    def modified_ms(self, name: str) -> int:
        """Unix ms. FileNotFoundError."""
        remote = self._remote(name)
        if remote is None:
            return int(os.path.getmtime(self.path(name)) * 1000)
        info = remote[0].get_file_info(remote[1])
        if not info.is_file:
            raise FileNotFoundError(self.path(name))
        return int(info.mtime_ns // 1_000_000)

    def list(self, directory: str) -> list[str] | None:
        """Names in it; None if there is no such directory."""
        remote = self._remote(directory)
        if remote is None:
            try:
                return sorted(os.listdir(self.path(directory)))
            except (FileNotFoundError, NotADirectoryError):
                return None
        infos = remote[0].get_file_info(fs.FileSelector(remote[1], allow_not_found=True))
        if not infos and remote[0].get_file_info(remote[1]).type != fs.FileType.Directory:
            return None
        return sorted(info.base_name for info in infos)

    def make(self, directory: str) -> None:
        remote = self._remote(directory)
        if remote is None:
            os.makedirs(self.path(directory), exist_ok=True)
        else:
            remote[0].create_dir(remote[1], recursive=True)

    def remove(self, name: str) -> None:
        remote = self._remote(name)
        if remote is None:
            os.unlink(self.path(name))
        else:
            remote[0].delete_file(remote[1])

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A file to write, which is there, and durable, when it ends well."""
        remote = self._remote(name)
        if remote is None:
            part = self.path(f"{name}.{os.getpid()}")
            try:
                with open(part, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, self.path(name))
                directory = os.open(os.path.dirname(part), os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
            except BaseException:
                if os.path.exists(part):
                    os.unlink(part)
                raise
            return
        there, path = remote
        part = path if there.type_name in _UPLOADS else f"{path}.{os.getpid()}"
        try:
            with there.open_output_stream(part) as file:
                yield file
            if part != path:
                there.move(part, path)
        except BaseException:
            if there.get_file_info(part).is_file:
                there.delete_file(part)
            raise
