"""Signatures as Standard Webhooks 1.0 has them (https://www.standardwebhooks.com). Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable


def headers(keys: Iterable[bytes], id: str, seconds: int, body: bytes) -> dict[str, str]:
    """Return the headers of a request, signed with each key in order. `seconds`: time of sending, since the epoch."""
    signed = f"{id}.{seconds}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)
    return {
        "Content-Type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }
