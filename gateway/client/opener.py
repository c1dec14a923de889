"""Requests to a gateway with the standard library alone, and the TLS of all clients."""

from __future__ import annotations

import os
import ssl
from http.client import HTTPMessage
from typing import IO, Final
from urllib.request import BaseHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener


class _NoRedirect(HTTPRedirectHandler):
    """Treats a redirection as an error: the library would send the key along, to whatever host it names."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Returns None, so that the redirection is not followed."""


def fits_a_header(key: str) -> bool:
    """True if a key can be sent in a header. The library's own error for one that cannot contains the key."""
    return key.isascii() and key.isprintable()


def opener(url: str, *handlers: BaseHandler) -> OpenerDirector:
    """An opener for a URL. Raises `OSError` where the client's certificate cannot be used."""
    tls = [HTTPSHandler(context=client_context())] if url.startswith("https:") else []
    return build_opener(*tls, _NoRedirect(), *handlers)


# Clients trust a gateway as `SSL_CERT_FILE` says, which OpenSSL itself reads, and show it the certificate that
# `PENSTOCK_CLIENT_CERT` names, if it asks for one (`tls.client_ca`).

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
