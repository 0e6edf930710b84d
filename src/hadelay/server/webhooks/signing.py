"""Standard Webhooks 1.0 signatures (standardwebhooks.com): `v1,` and base64 of HMAC-SHA256 over `id.timestamp.body`.

Over bytes: a body is signed as it is sent, whatever its encoding. Several secrets mean several signatures, so that a
receiver that knows any of them can verify: the old secret is taken away once every receiver has the new one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64


def key_of(secret: str) -> bytes:
    """The key that a secret stands for: what the base64 after `whsec_` says, else the text itself."""
    if secret.startswith(PREFIX):
        with contextlib.suppress(binascii.Error):
            return base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    return secret.encode()


def secret_problem(secret: str) -> str:
    """What is wrong with a secret that somebody wants to use; empty if nothing is."""
    key = key_of(secret)
    if secret.startswith(PREFIX) and key == secret.encode():
        return f"after {PREFIX} comes base64"
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        return f"a secret has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, this one {len(key)}"
    return ""


def signature(keys: Sequence[bytes], webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature per key, separated by spaces."""
    signed = f"{webhook_id}.{timestamp_s}.".encode() + body
    digests = [hmac.digest(key, signed, "sha256") for key in keys]
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
