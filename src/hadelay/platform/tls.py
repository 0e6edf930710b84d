"""The certificates of this node: read from files, and read again when these change (ADR 120).

A connection keeps what it was made with; the next one gets what the files say then. Files that do not fit together,
such as half of a rotation, change nothing, and a line in the log says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hadelay.errors import ConfigError

log = logging.getLogger(__name__)

#: Alerts and errors of OpenSSL that say: this is no TLS at all.
_NOT_TLS = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "HTTPS_PROXY_REQUEST"))


#: notBefore and notAfter, the only two times in X.509 that follow one another: UTCTime, from 2050 on GeneralizedTime.
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z")


class Certificates:
    """One certificate, its key, and the authority it trusts: PEM files of one section of the configuration.

    mutual: of a link between nodes. Whoever connects has to show a certificate of the authority `ca`, in either
    direction; whose it is, `names_of` says. Otherwise only the server shows one, and clients check it as usual, against
    `ca` or, when that is empty, what the system trusts. Raises ConfigError that names the key.
    """

    def __init__(self, section: str, cert: str, key: str, ca: str = "", *, mutual: bool = False) -> None:
        self.section, self.mutual = section, mutual
        self.paths = {"tls_cert": cert, "tls_key": key} | ({"tls_ca": ca} if ca else {})
        self._seen = self._look()
        self._read()
        #: For a server that keeps one context for good: each handshake gets `server` as it is then.
        self.listening = _server_context(cert, key)
        self.listening.sni_callback = self._choose

    def refresh(self) -> bool:
        """Read the files again if they changed. True when the next connection gets something new."""
        try:
            seen = self._look()
            if seen == self._seen:
                return False
            self._seen = seen
            self._read()
        except ConfigError as error:
            # The other half may be on its way; it changes what `_look` sees once more.
            log.warning("certificate_not_read", extra={"reason": str(error)})
            return False
        return True

    def _choose(self, handshake: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self.server

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for name, path in self.paths.items():
            try:
                with open(path, "rb"):
                    stat = os.stat(path)
            except OSError as error:
                raise ConfigError(f"{self.section}.{name}: {path}: {error.strerror}") from None
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)

    def _read(self) -> None:
        cert, key, ca = self.paths["tls_cert"], self.paths["tls_key"], self.paths.get("tls_ca")
        try:
            server = _server_context(cert, key)
        except ssl.SSLError as error:
            what = "the key is not that of the certificate" if error.reason == "KEY_VALUES_MISMATCH" else _plain(error)
            raise ConfigError(f"{self.section}.tls_cert: {cert}, with the key {key}: {what}") from None
        try:
            # With `cafile` nothing else is trusted.
            client = ssl.create_default_context(cafile=ca)
            if self.mutual:
                server.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{self.section}.tls_ca: {ca}: {_plain(error)}") from None
        if self.mutual:
            server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3
            server.verify_mode = ssl.CERT_REQUIRED
            # A session that is resumed would not show its certificate again.
            server.num_tickets = 0
            client.check_hostname = False
            client.load_cert_chain(cert, key, password="")
        self.server, self.client = server, client
        with open(cert) as file:
            #: When the certificate is over, Unix time; nobody connects after that, and who is connected stays so.
            self.expires_s = _expires_s(file.read())


class Decrypted(asyncio.BufferedProtocol):
    """Between TLS and `inner`, an asyncio.Protocol: what was decrypted is put here, and not each time into a new buffer
    of 256 KiB. That is more than half of what TLS costs a small request."""

    #: Of all connections: whatever is put here is taken at once.
    _buffer = memoryview(bytearray(256 << 10))

    def __init__(self, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self.connection_made = inner.connection_made  # type: ignore[method-assign]
        self.connection_lost = inner.connection_lost  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.inner.data_received(bytes(self._buffer[:nbytes]))


def _server_context(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A password that is wrong: a key that wants one must not ask for it on a terminal.
    context.load_cert_chain(cert, key, password="")
    return context


def names_of(certificate: Mapping[str, Any] | None) -> set[str]:
    """Whose a verified certificate is, by ssl.getpeercert(): DNS names (subjectAltName) and the common name."""
    certificate = certificate or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    return names | {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}


def in_words(error: ssl.SSLError) -> str:
    """Why a handshake failed, for the operator."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate it shows is not accepted: {error.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    if reason in _NOT_TLS:
        return "it does not speak TLS"
    if "ALERT" in reason:
        why = reason.lower().partition("alert_")[2].replace("_", " ")
        return f"it does not accept the certificate of this node: {why}"
    return _plain(error)


def _expires_s(pem: str) -> float:
    """Of the first certificate; `ssl` tells it only of those that are accepted."""
    first = pem[pem.index("-----BEGIN") :].partition("-----END CERTIFICATE-----")
    found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first[0] + first[1]))
    assert found is not None, "OpenSSL has read it, so it has a time"
    short, long = found.groups()
    century = b"" if long else b"20" if short < b"50" else b"19"
    text = (century + (long or short)).decode()
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def _plain(error: ssl.SSLError) -> str:
    return error.reason.lower().replace("_", " ") if error.reason else "not PEM"
