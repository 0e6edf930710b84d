"""Client certificates of webhook calls: receivers that ask for one, over real TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from hadelay.platform.tls import Certificates
from hadelay.server.guard import Guard
from hadelay.server.webhooks.calls import CallRequest, Reply
from hadelay.server.webhooks.sender import Sender
from hadelay.settings.load import load
from tests.security.conftest import Pki
from tests.webhooks.receiver import Receiver, answers

GUARD = Guard(["127.0.0.0/8"])


def demanding(pki: Pki, clients: Pki) -> ssl.SSLContext:
    """TLS of a receiver that serves only callers with a certificate of the authority `clients`."""
    cert, key, _ = pki.files("receiver")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients.ca)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def call(sender: Sender, url: str, *, identified: bool = True) -> Reply:
    future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    sender.call(CallRequest(url, {}, b"x", 5.0, identified=identified), future.set_result)
    return await future


async def test_a_receiver_sees_the_certificate_of_its_caller(pki: Pki) -> None:
    caller = Certificates("webhooks", *pki.files("caller"), caller=True)
    sender = Sender(GUARD, "hadelay/test", certificates=caller)
    async with Receiver(answers(204), demanding(pki, pki)) as receiver:
        assert (await call(sender, receiver.url)).status == 204
        # A message's own URL at another origin gets no certificate: a publisher must not borrow hadelay's identity.
        assert (await call(sender, receiver.url, identified=False)).reason == "TLS error"
        assert len(receiver.calls) == 1
    await sender.close()


async def test_a_renewed_certificate_counts_for_new_connections(pki: Pki, strangers: Pki, tmp_path: Path) -> None:
    cert, key, _ = pki.copy("caller", tmp_path / "caller")
    caller = Certificates("webhooks", cert, key, pki.ca, caller=True)
    sender = Sender(GUARD, "hadelay/test", certificates=caller)
    async with Receiver(answers(204, "Connection: close"), demanding(pki, strangers)) as receiver:
        # With TLS 1.3 the receiver refuses the certificate after the handshake.
        assert (await call(sender, receiver.url)).reason in ("TLS error", "connection closed")
        strangers.copy("caller", tmp_path / "caller")
        assert caller.refresh()
        assert (await call(sender, receiver.url)).status == 204
    await sender.close()


@pytest.mark.parametrize("given", ["tls_cert", "tls_key", "tls_ca"])
def test_a_half_configured_certificate_is_refused(given: str) -> None:
    with pytest.raises(Exception, match=rf"webhooks\.{given}: needs"):
        load(None, {}, [f"webhooks.{given}=/x.pem"])
