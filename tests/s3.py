"""An S3 server on loopback, for pyarrow's own client: objects are files in a directory, and it can be told to fail."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import localbucket
import pytest

#: An object whose key ends with a slash, which pyarrow writes for a directory, has this name in its file.
_DIRECTORY = "%directory%"


class Store:
    def __init__(self, root: Path) -> None:
        #: Where the objects of the bucket lie.
        self.bucket = root / "bucket"
        self.bucket.mkdir(parents=True)
        self.requests: list[tuple[str, str]] = []
        #: By method and path: the status of a refusal; None for no answer at all; 0 for the request to be served. The
        #: client gives up at once for 403, and after six seconds for 500 or None.
        self.fault: Callable[[str, str], int | None] = lambda method, path: 0
        store = self

        class Handler(localbucket.S3Handler):  # type: ignore[misc]
            data_root = root
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None: ...

            def _dispatch(self, action: Any) -> None:
                store.requests.append((self.command, self.path))
                fault = store.fault(self.command, self.path)
                if fault is None:
                    self.close_connection = True
                elif fault:
                    self._read_body()
                    code = {403: "AccessDenied", 500: "InternalError"}[fault]
                    self._send_error(localbucket.S3Error(HTTPStatus(fault), code, "by the test"))
                else:
                    super()._dispatch(action)

            def _object_path(self, bucket: str, key: str) -> Any:
                return super()._object_path(bucket, key + _DIRECTORY if key.endswith("/") else key)

            def _list_entries(self, *words: Any) -> Any:
                contents, *others = super()._list_entries(*words)
                return [(key.removesuffix(_DIRECTORY), path) for key, path in contents], *others

            def _add_list_entries(self, root: Any, contents: Any, prefixes: Any, encode: Any) -> None:
                for entry in contents:
                    page = ET.Element("page")
                    with suppress(FileNotFoundError):  # deleted since it was listed
                        super()._add_list_entries(page, [entry], [], encode)
                        root.extend(page)
                super()._add_list_entries(root, [], prefixes, encode)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def uri(self, path: str) -> str:
        return f"s3://bucket/{path}?endpoint_override=127.0.0.1:{self._server.server_port}&scheme=http"

    def objects(self, path: str = "") -> dict[str, bytes]:
        """By name below that path."""
        root = self.bucket / path
        files = (file for file in sorted(root.rglob("*")) if file.is_file() and file.name != _DIRECTORY)
        return {str(file.relative_to(root)): file.read_bytes() for file in files}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


#: For the client: any key will do.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "a-secret-key",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def serve(root: Path) -> Iterator[Store]:
    store = Store(root)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        try:
            yield store
        finally:
            store.close()
