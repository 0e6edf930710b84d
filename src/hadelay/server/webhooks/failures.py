"""Reasons why webhook calls failed, in words for the histories of messages."""

import errno
import socket
import ssl

from hadelay.server.guard import AddressRefused


def failure(status: int) -> str:
    """Reason why a call failed that was answered with this HTTP status; "" for a success."""
    if 200 <= status < 300:
        return ""
    return f"redirect refused (HTTP {status})" if 300 <= status < 400 and status != 304 else f"HTTP {status}"


def why(error: BaseException) -> str:
    """Reason why a call got no answer, as one of a few fixed phrases: the message's owner can read it in the
    history."""
    if isinstance(error, AddressRefused):
        return "address refused"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "name not resolved"
    if isinstance(error, ssl.SSLError):
        return "TLS error"
    if isinstance(error, OSError) and error.errno in _ERRORS:
        return _ERRORS[error.errno]
    return "connection closed" if isinstance(error, ConnectionError) else "connection failed"


_ERRORS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "host unreachable",
    errno.ENETUNREACH: "network unreachable",
    errno.ECONNRESET: "connection closed",
    errno.EPIPE: "connection closed",
    errno.ETIMEDOUT: "timeout",
    errno.EMFILE: "too many open files",
}
