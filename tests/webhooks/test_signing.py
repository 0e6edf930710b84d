"""Signatures, checked by a verifier that is written from the specification and shares no code with the signer."""

from __future__ import annotations

import base64
import subprocess
import sys
import time

import pytest

from hadelay.webhooks import VerificationError, key_of, secret_problem, signature, verify
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


def test_each_secret_verifies_while_secrets_are_rotated() -> None:
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
def test_valid_and_invalid_secrets(secret: str, problem: str) -> None:
    found = secret_problem(secret)
    assert problem in found
    assert bool(problem) == bool(found)


def signed(secrets: list[str], age_s: float = 0, body: bytes = b"body") -> dict[str, str]:
    at_s = int(time.time() - age_s)
    value = signature([key_of(secret) for secret in secrets], "0ABC", at_s, body)
    return {"Webhook-Id": "0ABC", "Webhook-Timestamp": str(at_s), "Webhook-Signature": value}


def test_a_receiver_verifies_with_one_call() -> None:
    assert verify(signed([SECRET]), b"body", SECRET) == "0ABC"
    plain = "a plain text of 24 bytes"
    assert verify(signed([plain]), b"body", plain) == "0ABC"


def test_a_receiver_may_know_the_old_secret_the_new_one_or_both() -> None:
    for of_topic in ([SECRET], [OTHER, SECRET], [OTHER]):
        assert verify(signed(of_topic), b"body", [SECRET, OTHER])
    for of_receiver in (SECRET, OTHER):
        assert verify(signed([OTHER, SECRET]), b"body", of_receiver)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Webhook-Id": "0ABD"}, "no signature matches"),
        ({"Webhook-Timestamp": "1700000000"}, "no signature matches"),
        ({"Webhook-Signature": "v1,"}, "no signature matches"),
        ({"Webhook-Signature": "v1,grün"}, "webhook-signature is not ASCII"),
        ({"Webhook-Signature": ""}, "webhook-signature is missing"),
        ({"Webhook-Id": ""}, "webhook-id is missing"),
        ({"Webhook-Timestamp": "yesterday"}, "webhook-timestamp is not a time"),
        ({"Webhook-Timestamp": "9" * 5000}, "webhook-timestamp is not a time"),
        ({"Webhook-Timestamp": "-1"}, "webhook-timestamp is not a time"),
    ],
)
def test_a_changed_call_is_refused_with_a_reason(change: dict[str, str], reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        verify(signed([SECRET]) | change, b"body", SECRET)


def test_another_body_or_secret_is_refused() -> None:
    with pytest.raises(VerificationError, match="no signature matches"):
        verify(signed([SECRET]), b"Body", SECRET)
    with pytest.raises(VerificationError, match="no signature matches"):
        verify(signed([SECRET]), b"body", OTHER)
    with pytest.raises(VerificationError, match="webhook-signature is missing"):
        verify({"webhook-id": "0ABC", "webhook-timestamp": "1"}, b"body", SECRET)


def test_the_parts_of_a_call_cannot_be_divided_in_another_way() -> None:
    now = int(time.time())
    genuine = {"webhook-id": "0ABC", "webhook-timestamp": str(now)}
    genuine["webhook-signature"] = signature([key_of(SECRET)], "0ABC", now, f"{now}.rest".encode())
    assert verify(genuine, f"{now}.rest".encode(), SECRET) == "0ABC"
    with pytest.raises(VerificationError, match="is not the id of a message or an alert"):
        verify({**genuine, "webhook-id": f"0ABC.{now}"}, b"rest", SECRET)
    alert = "dead-mails.eu-1-0-7"
    headers = {**genuine, "webhook-id": alert, "webhook-signature": signature([key_of(SECRET)], alert, now, b"{}")}
    assert verify(headers, b"{}", SECRET) == alert


def test_a_call_of_another_time_is_refused() -> None:
    assert verify(signed([SECRET], age_s=290), b"body", SECRET)
    assert verify(signed([SECRET], age_s=-290), b"body", SECRET)
    with pytest.raises(VerificationError, match=r"31\d s ago; the limit is 300 s"):
        verify(signed([SECRET], age_s=310), b"body", SECRET)
    with pytest.raises(VerificationError, match="s ahead of this machine's clock"):
        verify(signed([SECRET], age_s=-310), b"body", SECRET)
    assert verify(signed([SECRET], age_s=310), b"body", SECRET, tolerance_s=400)
    with pytest.raises(VerificationError, match="limit is 5 s"):
        verify(signed([SECRET], age_s=10), b"body", SECRET, tolerance_s=5)


@pytest.mark.parametrize("secret", ["", [], [SECRET, ""], "short", "whsec_not base64 at all!"])
def test_a_receiver_without_a_proper_secret_refuses_everything(secret: str | list[str]) -> None:
    """An empty secret, of a missing environment variable for example, would verify calls that anyone can sign."""
    headers = {"webhook-id": "0ABC", "webhook-timestamp": str(int(time.time()))}
    forged = signature([b""], "0ABC", int(time.time()), b"body")
    with pytest.raises(ValueError, match=r"secret|base64"):
        verify({**headers, "webhook-signature": forged}, b"body", secret)


def test_a_parsed_body_is_no_body() -> None:
    with pytest.raises(TypeError, match="raw bytes of the request, not str"):
        verify(signed([SECRET]), "body", SECRET)  # type: ignore[arg-type]


def test_a_receiver_imports_the_standard_library_alone() -> None:
    code = (
        "import sys, hadelay.webhooks\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('numpy', 'aiohttp', 'msgspec', 'hadelay')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['hadelay', 'hadelay.version', 'hadelay.webhooks']\n"
