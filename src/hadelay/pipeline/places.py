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
from urllib.parse import parse_qsl, urlsplit

from pyarrow import fs

from hadelay.errors import BadRequest

#: In a URI it would stand in messages, lists of processes and Spark's event log.
_SECRETS = {"access_key", "secret_key", "session_token", "account_key", "sas_token", "tenant_secret"}


@lru_cache(maxsize=16)
def filesystem(uri: str) -> tuple[Any, str]:
    """(pyarrow's file system, the path in it); kept, as each has connections. BadRequest for one that is not known, or
    with a key in it."""
    parts = urlsplit(uri)
    if parts.password or _SECRETS & {name for name, _ in parse_qsl(parts.query)}:
        raise BadRequest(
            f"{parts.scheme}://…{parts.path}: a key has no place in a URI: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or what else the store's own tools read (~/.aws/credentials, the machine's role)"
        )
    try:
        found, path = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as error:
        raise BadRequest(f"{uri}: {error}") from None
    return found, path.rstrip("/")


def absolute(where: str) -> str:
    """What it means here, for tasks that run elsewhere."""
    return os.path.abspath(where) if where and "://" not in where else where


@dataclass(frozen=True)
class Place:
    """A directory, by path or URI. Names are relative, separated by slashes."""

    where: str

    def _remote(self, name: str) -> tuple[Any, str] | None:
        if "://" not in self.where:
            return None
        found, path = filesystem(self.where)
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

    def walk(self) -> dict[str, tuple[int, int]]:
        """Every file below it: (bytes, when it was modified, Unix ms)."""
        found, path = self._remote("") or (fs.LocalFileSystem(), os.path.abspath(self.where))
        infos = found.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        return {i.path[len(path) + 1 :]: (int(i.size), int(i.mtime_ns // 1_000_000)) for i in infos if i.is_file}

    def put(self, name: str, data: bytes) -> None:
        """Write a file at once. A failure may leave one that is cut off: for names that say how long it has to be."""
        found, path = self._remote(name) or (fs.LocalFileSystem(), os.path.abspath(self.path(name)))
        with found.open_output_stream(path) as file:
            file.write(data)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """A file to write, which is there, and durable, when it ends well."""
        remote = self._remote(name)
        if remote is None:
            part = self.path(f"{name}.{uuid.uuid4().hex[:12]}")
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
            except BaseException as error:
                if os.path.exists(part):
                    os.unlink(part)
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = part  # of a disk that is full, say
                raise
            return
        there, path = remote
        part = f"{path}.{uuid.uuid4().hex[:12]}"
        opened = there.open_output_stream(part)
        try:
            with opened as file:
                yield file
            there.move(part, path)
        except BaseException:
            with suppress(OSError):  # what went wrong may go wrong here, too, and is what has to be told
                there.delete_file(part)
            raise
