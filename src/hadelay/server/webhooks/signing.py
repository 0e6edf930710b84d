"""Standard Webhooks 1.0 signatures (standardwebhooks.com): `v1,` and base64 of HMAC-SHA256 over `id.timestamp.body`.

Over bytes: a body is signed as it is sent, whatever its encoding. Several secrets mean several signatures, so that a
receiver that knows any of them can verify: the old secret is taken away once every receiver has the new one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

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


@lru_cache(maxsize=1024)
def _begun(key: bytes) -> tuple[Any, Any]:
    """HMAC's two hashes with the key already in them: a third of what hmac.digest costs."""
    block = key.ljust(64, b"\0") if len(key) <= 64 else hashlib.sha256(key).digest().ljust(64, b"\0")
    return tuple(hashlib.sha256(bytes(byte ^ pad for byte in block)) for pad in (0x36, 0x5C))  # type: ignore[return-value]


def _hmac_sha256(key: bytes, message: bytes) -> bytes:
    inner, outer = (begun.copy() for begun in _begun(key))
    inner.update(message)
    outer.update(inner.digest())
    digest: bytes = outer.digest()
    return digest


def signature(keys: Sequence[bytes], webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature per key, separated by spaces."""
    signed = f"{webhook_id}.{timestamp_s}.".encode() + body
    digests = [_hmac_sha256(key, signed) for key in keys]
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
