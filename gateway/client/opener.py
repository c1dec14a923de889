"""Requests to a gateway with the standard library alone."""

from __future__ import annotations

from http.client import HTTPMessage
from typing import IO
from urllib.request import BaseHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from penstock.gateway.client.tls import client_context


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
