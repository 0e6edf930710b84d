"""Directories that tasks read and write: of this machine, or wherever pyarrow.fs reaches (s3://, gs://, hdfs://, file://).

What is written is there when it is whole: it is renamed then. Leaving it to the upload of an object store would not do:
pyarrow ends an upload when its file is closed, also by an exception, and what is half done takes the place of what was.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyarrow import fs

from hadelay import uris
from hadelay.errors import BadRequest

_LOCAL = fs.LocalFileSystem()


@lru_cache(maxsize=16)
def filesystem(uri: str) -> tuple[Any, str]:
    """(pyarrow's file system, the path in it); kept, as each has connections. BadRequest for one that is not known, or
    with a key in it."""
    if wrong := uris.problem(uri):
        raise BadRequest(wrong)
    try:
        found, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as error:
        raise BadRequest(f"{uri}: {error}") from None
    return found, path.rstrip("/")


def absolute(where: str) -> str:
    """What it means here, for tasks that run elsewhere. BadRequest for what is neither a path nor a known URI."""
    if wrong := uris.problem(where):
        raise BadRequest(wrong)
    return os.path.abspath(where) if where and "://" not in where else where


@dataclass(frozen=True)
class Location:
    """A directory, by path or URI. Names are relative, separated by slashes."""

    where: str

    def _at(self, name: str) -> tuple[Any, str]:
        """(pyarrow's file system, where it is in that)."""
        found, path = filesystem(self.where) if "://" in self.where else (_LOCAL, os.path.abspath(self.where))
        return found, f"{path}/{name}".rstrip("/")

    def path(self, name: str) -> str:
        """For messages; of a URI without its options."""
        where = self.where.partition("?")[0] if "://" in self.where else self.where
        return f"{where.rstrip('/')}/{name}"

    def below(self, name: str) -> str:
        """That directory, as `where`."""
        _, mark, options = self.where.partition("?") if "://" in self.where else ("", "", "")
        return f"{self.path(name)}{mark}{options}"

    def open(self, name: str) -> Any:
        """A file to read, at any place of it. FileNotFoundError."""
        found, path = self._at(name)
        return found.open_input_file(path)

    def load(self, name: str) -> bytes:
        """All of a file. FileNotFoundError."""
        with self.open(name) as file:
            return bytes(file.read())

    def _info(self, name: str) -> Any:
        """None if there is no such file."""
        found, path = self._at(name)
        info = found.get_file_info(path)
        return info if info.is_file else None

    def size(self, name: str) -> int | None:
        """None if there is no such file."""
        info = self._info(name)
        return None if info is None else int(info.size)

    def modified_ms(self, name: str) -> int:
        """Unix ms. FileNotFoundError."""
        info = self._info(name)
        if info is None:
            raise FileNotFoundError(self.path(name))
        return int(info.mtime_ns // 1_000_000)

    def list(self, directory: str) -> list[str] | None:
        """Names in it; None if there is no such directory."""
        found, path = self._at(directory)
        try:
            infos = found.get_file_info(fs.FileSelector(path, allow_not_found=True))
        except NotADirectoryError:
            return None
        if not infos and found.get_file_info(path).type != fs.FileType.Directory:
            return None
        return sorted(info.base_name for info in infos)

    def make(self, directory: str) -> None:
        found, path = self._at(directory)
        found.create_dir(path, recursive=True)

    def remove(self, name: str) -> None:
        found, path = self._at(name)
        found.delete_file(path)

    def walk(self) -> dict[str, tuple[int, int]]:
        """Every file below it: (bytes, when it was modified, Unix ms)."""
        found, path = self._at("")
        infos = found.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        return {i.path[len(path) + 1 :]: (int(i.size), int(i.mtime_ns // 1_000_000)) for i in infos if i.is_file}

    def write(self, name: str, data: bytes) -> None:
        """A file, whole or not at all."""
        with self.create(name) as file:
            file.write(data)

    def put(self, name: str, data: bytes) -> None:
        """Write a file at once. A failure may leave one that is cut off: for names that say how long it has to be."""
        found, path = self._at(name)
        with found.open_output_stream(path) as file:
            file.write(data)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A file to write, which is there, and durable, when it ends well."""
        if "://" not in self.where:
            part = self.path(_aside(name))
            try:
                with open(part, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # who reads it back reads the disk
                os.replace(part, self.path(name))
                directory = os.open(os.path.dirname(part), os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
            except BaseException as error:
                if os.path.exists(part):
                    os.unlink(part)
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = part  # of a disk that is full, say
                raise
            return
        there, path = self._at(name)
        _, part = self._at(_aside(name))
        opened = there.open_output_stream(part)
        try:
            with opened as file:
                yield file
            there.move(part, path)
        except BaseException:
            with suppress(OSError):  # what went wrong may go wrong here, too, and is what has to be told
                there.delete_file(part)
            raise


def _aside(name: str) -> str:
    """Name of a file until it is whole. Spark and pyarrow pass over names that begin with a dot."""
    directory, slash, base = name.rpartition("/")
    return f"{directory}{slash}.{base}.{uuid.uuid4().hex[:12]}"
