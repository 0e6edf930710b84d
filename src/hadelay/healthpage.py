"""Health pages of a relay process (bridge or outbox): threads of the process serve /healthz and /metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from hadelay.errors import ConfigError

#: Function that answers a request by its path: returns the HTTP status and the text.
Page = Callable[[str], tuple[int, str]]


@contextmanager
def served(page: Page, address: str) -> Iterator[int]:
    """Serve `page` by HTTP at host:port in threads; yields the port. ConfigError if the address cannot be bound."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            status, text = page(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    host, _, port = address.rpartition(":")
    try:
        server = ThreadingHTTPServer((host.strip("[]") or "127.0.0.1", int(port)), Handler)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--health {address}: {error}") from None
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
