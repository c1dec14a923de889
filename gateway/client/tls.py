"""TLS for clients of a gateway: they trust it as `SSL_CERT_FILE` says, which OpenSSL itself reads, and show it the
certificate that `PENSTOCK_CLIENT_CERT` names, if it asks for one (`tls.client_ca`)."""

from __future__ import annotations

import os
import ssl
from typing import Final

CLIENT_CERT: Final = "PENSTOCK_CLIENT_CERT"
"""Environment variable with the path of a PEM file: a certificate and its private key."""


def client_context() -> ssl.SSLContext:
    """The TLS context for connections to a gateway; raises `OSError` where the client's certificate cannot be used."""
    made, path = ssl.create_default_context(), os.environ.get(CLIENT_CERT)
    if path:
        try:
            made.load_cert_chain(path, password=_encrypted)
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise OSError(f"{CLIENT_CERT} {path!r}: {why}; it must hold a certificate and its key, as PEM") from None
    return made


def _encrypted() -> str:
    # Without this OpenSSL would ask on the terminal.
    raise ValueError("the private key is encrypted")
