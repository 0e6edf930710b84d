"""Certificates of this node, loaded from files and reloaded when the files change (ADR 120).

Connections keep their certificate; new connections use the latest one. Files that do not match, such as in the middle
of a rotation, are logged and ignored.
"""

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

#: OpenSSL errors for bytes that are not TLS.
_NOT_TLS = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "HTTPS_PROXY_REQUEST"))


#: Pattern of a certificate's validity in DER: notBefore and notAfter, the only adjacent times in X.509. Types: UTCTime,
#: and from 2050 on GeneralizedTime.
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z")


class Certificates:
    """Certificate, key and trusted certificate authority (CA): PEM files of one section of the configuration.

    mutual: for the node link, where both sides must show a certificate of the CA `ca`; `names_of` returns its names.
    caller: for webhook calls, where this side is the client, and trusts the system's CAs besides `ca`. Otherwise only
    the server shows a certificate, which clients verify with `ca` or, if empty, the system's CAs.
    ConfigError names the configuration key.
    """

    def __init__(
        self, section: str, cert: str, key: str, ca: str = "", *, mutual: bool = False, caller: bool = False
    ) -> None:
        self.section, self.mutual, self._caller = section, mutual, caller
        self.paths = {"tls_cert": cert, "tls_key": key} | ({"tls_ca": ca} if ca else {})
        self._seen = self._look()
        self._read()
        #: TLS context of a listening server. Each handshake uses `server` instead, which has the latest certificate.
        self.listening = _server_context(cert, key)
        self.listening.sni_callback = self._choose

    def refresh(self) -> bool:
        """Reload the PEM files if they have changed. True if new connections get a new certificate or CA."""
        try:
            seen = self._look()
            if seen == self._seen:
                return False
            self._seen = seen
            self._read()
        except ConfigError as error:
            # Certificate and key do not fit each other while an operator replaces both: the next refresh sees the
            # second change.
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
            what = "the key is for another certificate" if error.reason == "KEY_VALUES_MISMATCH" else _plain(error)
            raise ConfigError(f"{self.section}.tls_cert: {cert}, with the key {key}: {what}") from None
        try:
            # With `cafile`, the system's CAs are not trusted.
            client = ssl.create_default_context(cafile=None if self._caller else ca)
            if self._caller and ca:
                client.load_verify_locations(ca)
            if self.mutual:
                server.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{self.section}.tls_ca: {ca}: {_plain(error)}") from None
        if self.mutual:
            server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3
            server.verify_mode = ssl.CERT_REQUIRED
            # Send no session tickets: in a resumed session, the peer would not show its certificate again.
            server.num_tickets = 0
            client.check_hostname = False
            client.load_cert_chain(cert, key, password="")
        if self._caller:
            client.set_alpn_protocols(["http/1.1"])
            client.load_cert_chain(cert, key, password="")
        self.server, self.client = server, client
        with open(cert) as file:
            #: End of the certificate's validity, Unix time in seconds; open connections continue afterwards.
            self.expires_s = _expires_s(file.read())


class Decrypted(asyncio.BufferedProtocol):
    """Adapter between TLS and `inner`, an asyncio.Protocol, with one receive buffer. A new buffer of 256 KiB per read
    would be more than half of the cost of TLS for a small request."""

    #: Receive buffer shared by all connections: received bytes are copied out of the buffer at once.
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
    # With an empty password, loading an encrypted key fails; without a password, OpenSSL would ask on the terminal.
    context.load_cert_chain(cert, key, password="")
    return context


def names_of(certificate: Mapping[str, Any] | None) -> set[str]:
    """Names in a verified certificate of ssl.getpeercert(): DNS names (subjectAltName) and the common name."""
    certificate = certificate or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    return names | {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}


def in_words(error: ssl.SSLError) -> str:
    """Reason of a failed handshake, for the operator."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other side's certificate is not accepted: {error.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other side shows no certificate"
    if reason in _NOT_TLS:
        return "the other side does not use TLS"
    if "ALERT" in reason:
        why = reason.lower().partition("alert_")[2].replace("_", " ")
        return f"the other side does not accept this node's certificate: {why}"
    return _plain(error)


def _expires_s(pem: str) -> float:
    """End of validity of the first certificate in Unix s; `ssl` gives this only for a verified peer certificate."""
    first = pem[pem.index("-----BEGIN") :].partition("-----END CERTIFICATE-----")
    found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first[0] + first[1]))
    assert found is not None, "OpenSSL accepts only certificates with a validity"
    short, long = found.groups()
    century = b"" if long else b"20" if short < b"50" else b"19"
    text = (century + (long or short)).decode()
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def _plain(error: ssl.SSLError) -> str:
    return error.reason.lower().replace("_", " ") if error.reason else "not PEM"
