"""Signatures, checked by a verifier that is written from the specification and shares no code with the signer."""

from __future__ import annotations

import base64

import pytest

from hadelay.server.webhooks.calls import key_of, secret_problem, signature
from tests.webhooks.receiver import verified_by

KEY = bytes(range(24))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OTHER = "whsec_" + base64.b64encode(bytes(32)).decode()


def test_the_example_of_the_specification() -> None:
    """From the test vectors of the Standard Webhooks libraries."""
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = signature([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("body", [b"", b"text", bytes(range(256)), "grüße".encode()])
def test_bodies_are_signed_as_they_are(body: bytes) -> None:
    signed = signature([KEY], "0ABC", 1_700_000_000, body)
    headers = {"webhook-id": "0ABC", "webhook-timestamp": "1700000000", "webhook-signature": signed}
    assert verified_by(SECRET, headers, body)
    assert not verified_by(SECRET, headers, body + b"x")
    assert not verified_by(SECRET, {**headers, "webhook-id": "0ABD"}, body)
    assert not verified_by(SECRET, {**headers, "webhook-timestamp": "1700000001"}, body)
    assert not verified_by(OTHER, headers, body)


def test_while_secrets_are_rotated_each_of_them_verifies() -> None:
    signed = signature([key_of(SECRET), key_of(OTHER)], "0ABC", 1, b"x")
    headers = {"webhook-id": "0ABC", "webhook-timestamp": "1", "webhook-signature": signed}
    assert len(signed.split()) == 2
    assert verified_by(SECRET, headers, b"x")
    assert verified_by(OTHER, headers, b"x")


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        (SECRET, ""),
        ("a plain text of 24 bytes", ""),
        ("whsec_" + base64.b64encode(bytes(64)).decode(), ""),
        ("whsec_" + base64.b64encode(bytes(23)).decode(), "24 to 64 bytes, this one 23"),
        ("whsec_" + base64.b64encode(bytes(65)).decode(), "24 to 64 bytes, this one 65"),
        ("whsec_not base64 at all!", "base64"),
        ("short", "this one 5"),
    ],
)
def test_what_a_secret_may_be(secret: str, problem: str) -> None:
    found = secret_problem(secret)
    assert problem in found
    assert bool(problem) == bool(found)
