"""Verifies the calls that hadelay makes to webhooks (docs/howto/webhooks.md), and signs them.

The signature is that of Standard Webhooks 1.0 (standardwebhooks.com): `v1,` and base64 of HMAC-SHA256 over
`id.timestamp.body`, with the body as it is sent. Several secrets give several signatures. A receiver needs no other
part of hadelay, so this module imports the standard library alone.
"""

import base64
import binascii
import contextlib
import hmac
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

PREFIX = "whsec_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64
_ID, _TIMESTAMP, _SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"


class VerificationError(Exception):
    """The call is forged, changed, too old, or signed with another secret: answer 401, and do nothing else."""


def verify(headers: Mapping[str, str], body: bytes, secret: str | Sequence[str], *, tolerance_s: float = 300) -> str:
    """Verify the signature and the age of a call; returns its `webhook-id`.

    The id is the same at each attempt, so a receiver that remembers the id for longer than `tolerance_s` also refuses
    replays. The signature covers the id, the timestamp and the body, and no other header.

    headers: of the request, in any case. body: the raw bytes of the request, before a framework parses them. secret:
    the topic's, or several while it changes: one of them has to match. tolerance_s: limit of the difference between the
    clocks, in both directions.

    Raises VerificationError for a call to refuse, ValueError for a secret that no topic can have, and TypeError for a
    body that is not bytes.
    """
    if not isinstance(body, bytes):
        raise TypeError(f"body must be the raw bytes of the request, not {type(body).__name__}")
    secrets = [secret] if isinstance(secret, str) else list(secret)
    if not secrets:
        raise ValueError("secret is empty")
    for one in secrets:
        if problem := secret_problem(one):
            raise ValueError(problem)
    found = {name.lower(): value for name, value in headers.items()}
    for name in (_ID, _TIMESTAMP, _SIGNATURE):
        if not (value := found.get(name)) or not value.isascii():
            raise VerificationError(f"the header {name} is {'not ASCII' if value else 'missing'}")
    if "." in found[_ID] and not found[_ID].startswith("dead-"):
        # Refuse an id with a dot, unless it is an alert's (dead-…), because the signature covers `id.timestamp.body`.
        # If a body begins with a time and a dot, an attacker could send this time as the timestamp, the real id and
        # timestamp as the id, and the rest as the body: the signature would match. Ids of messages have no dot, and the
        # bodies of alerts begin with a brace.
        raise VerificationError(f"{_ID} is not the id of a message or an alert")
    if not re.fullmatch(r"\d{1,12}", found[_TIMESTAMP]):
        raise VerificationError(f"{_TIMESTAMP} is not a time in Unix seconds")
    timestamp_s = int(found[_TIMESTAMP])
    expected = signature([key_of(one) for one in secrets], found[_ID], timestamp_s, body).split()
    given = found[_SIGNATURE].split()
    if not any(hmac.compare_digest(ours, theirs) for ours in expected for theirs in given):
        raise VerificationError("no signature matches: the secret is another one, or the body was changed")
    age_s = time.time() - timestamp_s
    if abs(age_s) > tolerance_s:
        when = f"{age_s:.0f} s ago" if age_s > 0 else f"{-age_s:.0f} s ahead of this machine's clock"
        raise VerificationError(f"the call was signed {when}; the limit is {tolerance_s:g} s")
    return found[_ID]


def key_of(secret: str) -> bytes:
    """The signing key of a secret: the decoded base64 after `whsec_`, else the bytes of the secret itself."""
    if secret.startswith(PREFIX):
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    return secret.encode()


def secret_problem(secret: str) -> str:
    """Describe what is wrong with a secret; "" for a valid secret."""
    key = key_of(secret)
    if secret.startswith(PREFIX) and key == secret.encode():
        return f"a secret that begins with {PREFIX} goes on with base64; this one does not"
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        return f"a secret has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, this one {len(key)}"
    return ""


def new_secret_problem(secret: str) -> str:
    """Describe what is wrong with a secret that is to be set; "" for a valid one. A new secret needs the prefix,
    because the libraries of Standard Webhooks take each secret for base64. Topics may still have secrets without the
    prefix, which were set before this rule; those libraries cannot verify their calls."""
    if secret.startswith(PREFIX):
        return secret_problem(secret)
    size = f"{MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes"
    same = f'{PREFIX}$(printf %s "$TEXT" | base64 -w0)'
    return f"a secret is {PREFIX} and base64 of {size} (Standard Webhooks); the bytes of a text as key: {same}"


@lru_cache(maxsize=1024)
def _keyed(key: bytes) -> hmac.HMAC:
    """An HMAC hash that is initialized with the key: copying this hash costs less than creating another."""
    return hmac.new(key, digestmod="sha256")


def _hmac_sha256(key: bytes, message: bytes) -> bytes:
    keyed = _keyed(key).copy()
    keyed.update(message)
    return keyed.digest()


def signature(keys: Sequence[bytes], webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature per key, separated by spaces."""
    signed = f"{webhook_id}.{timestamp_s}.".encode() + body
    return " ".join(f"v1,{base64.b64encode(_hmac_sha256(key, signed)).decode()}" for key in keys)
