"""Directories that tasks read and write: local ones, and those that pyarrow.fs reaches (s3://, gs://, hdfs://, file://).

A file gets its name, by a rename, when it is complete. The upload of an object store is not enough: pyarrow finishes an
upload when its file is closed, also by an exception, and an incomplete file would replace the earlier one.
"""

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
from hadelay.platform.disk import Disk

_LOCAL = fs.LocalFileSystem()


@lru_cache(maxsize=16)
def filesystem(uri: str) -> tuple[Any, str]:
    """Find pyarrow's file system for a URI; returns (file system, path in it). Cached, because each file system has
    connections. Raises BadRequest for an unknown URI, or one with a secret."""
    if wrong := uris.problem(uri):
        raise BadRequest(wrong)
    try:
        found, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as error:
        raise BadRequest(f"{uri}: {error}") from None
    return found, path.rstrip("/")


def absolute(where: str) -> str:
    """Make a path absolute, for tasks in other directories; URIs stay. BadRequest for an unknown URI."""
    if wrong := uris.problem(where):
        raise BadRequest(wrong)
    return os.path.abspath(where) if where and "://" not in where else where


@contextmanager
def _readable(directory: str) -> Iterator[None]:
    """Context manager that refuses names of files which pyarrow cannot decode."""
    try:
        yield
    except UnicodeDecodeError as error:
        name = ascii(error.object)[1:]
        raise BadRequest(f"{directory}: the name {name} of a file is not UTF-8: rename it, or move it away") from None


@dataclass(frozen=True)
class Location:
    """A directory, by path or URI. Names are relative, separated by slashes."""

    where: str

    def _at(self, name: str) -> tuple[Any, str]:
        """pyarrow's file system for a file, and the file's path in it."""
        found, path = filesystem(self.where) if "://" in self.where else (_LOCAL, os.path.abspath(self.where))
        return found, f"{path}/{name}".rstrip("/")

    def path(self, name: str) -> str:
        """The full path of a file, to show in messages; the options of a URI are left out."""
        where = self.where.partition("?")[0] if "://" in self.where else self.where
        return f"{where.rstrip('/')}/{name}"

    def below(self, name: str) -> str:
        """Path or URI of a subdirectory."""
        _, mark, options = self.where.partition("?") if "://" in self.where else ("", "", "")
        return f"{self.path(name)}{mark}{options}"

    def open(self, name: str) -> Any:
        """Open a file for random reads. FileNotFoundError if the file does not exist."""
        found, path = self._at(name)
        return found.open_input_file(path)

    def load(self, name: str) -> bytes:
        """Read all bytes of a file. FileNotFoundError if the file does not exist."""
        with self.open(name) as file:
            return bytes(file.read())

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if the file does not exist."""
        found, path = self._at(name)
        info = found.get_file_info(path)
        return int(info.size) if info.is_file else None

    def modified_ms(self, name: str) -> int:
        """Time of a file's last change, Unix ms. FileNotFoundError if the file does not exist."""
        found, path = self._at(name)
        info = found.get_file_info(path)
        if not info.is_file:
            raise FileNotFoundError(self.path(name))
        return int(info.mtime_ns // 1_000_000)

    def list(self, directory: str) -> list[str] | None:
        """Names of the entries of a directory, ascending; None if the directory does not exist."""
        found, path = self._at(directory)
        try:
            infos = found.get_file_info(fs.FileSelector(path, allow_not_found=True))
        except NotADirectoryError:
            return None
        if not infos and found.get_file_info(path).type != fs.FileType.Directory:
            return None
        with _readable(self.path(directory)):
            return sorted(info.base_name for info in infos)

    def make(self, directory: str) -> None:
        found, path = self._at(directory)
        found.create_dir(path, recursive=True)

    def move(self, name: str, to: str) -> None:
        """Rename a file, perhaps into another directory, which is made if it is missing."""
        self.make(to.rpartition("/")[0])
        found, path = self._at(name)
        found.move(path, self._at(to)[1])

    def remove(self, name: str) -> None:
        found, path = self._at(name)
        found.delete_file(path)

    def walk(self) -> dict[str, tuple[int, int]]:
        """Find all files in the directory and its subdirectories: returns name → (size in bytes, time of the last
        change in Unix ms)."""
        found, path = self._at("")
        infos = found.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        with _readable(self.path("")):
            return {i.path[len(path) + 1 :]: (int(i.size), int(i.mtime_ns // 1_000_000)) for i in infos if i.is_file}

    def write(self, name: str, data: bytes) -> None:
        """Write a file: complete, or not at all."""
        with self.create(name) as file:
            file.write(data)

    def put(self, name: str, data: bytes) -> None:
        """Write a file in place, without a rename. If writing fails, a shorter file may be left; so use names that
        contain the length."""
        found, path = self._at(name)
        with found.open_output_stream(path) as file:
            file.write(data)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Context manager that creates a file. If the block ends without an error, the file gets its name and is
        durable."""
        found, path = self._at(name)
        _, part = self._at(_aside(name))
        local = found is _LOCAL
        file = open(part, "wb") if local else found.open_output_stream(part)  # noqa: SIM115 (closed below)
        try:
            with file:
                yield file
                if local:
                    file.flush()
                    os.fsync(file.fileno())
                    # Drop the file from the page cache, so that later reads verify the disk.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found.move(part, path)
        except BaseException as error:
            with suppress(OSError):  # ignore errors of the cleanup: the error that caused it is raised
                found.delete_file(part)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = part  # add the file's name, which the OSError of a failed write lacks
            raise
        if local:
            Disk().sync_dir(os.path.dirname(path))


def _aside(name: str) -> str:
    """Name of a file until it is complete. Spark and pyarrow ignore names that begin with a dot."""
    directory, slash, base = name.rpartition("/")
    return f"{directory}{slash}.{base}.{uuid.uuid4().hex[:12]}"
