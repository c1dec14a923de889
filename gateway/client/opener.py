"""What asks a gateway with the standard library alone."""

from __future__ import annotations

from http.client import HTTPMessage
from typing import IO
from urllib.request import BaseHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from penstock.gateway.client.tls import client_context


class _NoRedirect(HTTPRedirectHandler):
    """A redirection is an error: the library would send the key along, to whatever host it names."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """None means that it is not followed."""


def fits_a_header(key: str) -> bool:
    """Whether a key can be sent. What the library says of one that cannot has the key in it."""
    return key.isascii() and key.isprintable()


def opener(url: str, *handlers: BaseHandler) -> OpenerDirector:
    """For a URL. Raises `OSError` where the client's certificate cannot be used."""
    tls = [HTTPSHandler(context=client_context())] if url.startswith("https:") else []
    return build_opener(*tls, _NoRedirect(), *handlers)
