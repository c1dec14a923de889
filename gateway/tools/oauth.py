"""Servers that require OAuth, below an address of the gateway (RFC 9728).

A refused client looks for the server's metadata and checks that they name the very URL that it calls. So three values
of the server's are replaced by the gateway's, if they are of the server's origin:

    WWW-Authenticate of a 401 or 403     the URL in `resource_metadata`
    /.well-known/oauth-protected-resource/ADDRESS/mcp/NAME     is requested from the server; if it has none for its
                                                               path, from the root of its host
    the metadata                         `resource`

The authorization server is the server's own, and clients go to it directly. It sees the gateway's URL as the resource
of a token; one with a list of resources must have that URL in it, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import orjson

from penstock.gateway.tools.servers import OWN, WELL_KNOWN, ServerPool
from penstock.gateway.traffic.calls.call_request import AddressError, CallAddress, CallRequest, from_path
from penstock.gateway.traffic.calls.conversations import new_rollout
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.dialects.loose_json import loads, obj, text
from penstock.gateway.wire.dialects.mcp import PREFIX
from penstock.gateway.wire.http.client_connection import ConnectionHints
from penstock.gateway.wire.http.request import ClientFault, Headers, HttpRequest
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import HeldFraming

_NAMED: Final = re.compile(rb'(?im)^(www-authenticate:[^\r\n]*?resource_metadata=")([^"\r\n]*)(")')
_FORWARDED: Final = re.compile(r'(?:^|[;,])\s*([A-Za-z]+)=(?:"([^"\\]*)"|([^;,"\s]*))')
_TOLD: Final = {
    "proto": re.compile("(?i)https?"),
    "host": re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d+)?"),
}
_READS: Final = ("GET", "HEAD", "OPTIONS")
_LONGEST: Final = 1 << 20
"""Largest document that is changed, in bytes."""


def origin_of(headers: Headers, scheme: str) -> str:
    """The scheme and host that a client calls. Proxies on the way report them, the first proxy by `Forwarded` (RFC
    7239) or by `X-Forwarded-Proto` and `X-Forwarded-Host`; otherwise they are `scheme` and `Host`. An invalid scheme or
    host counts as not reported."""
    said: dict[bytes, str] = {}
    for low, _, value in headers:
        # Each proxy appends its value.
        said[low] = f"{said[low]}, {value.decode('latin-1')}" if low in said else value.decode("latin-1")
    told = [(name.lower(), quoted or plain) for name, quoted, plain in _FORWARDED.findall(said.get(b"forwarded", ""))]
    told += [(name, said.get(b"x-forwarded-" + name.encode(), "").partition(",")[0].strip()) for name in _TOLD]
    known = {name: value for name, value in reversed(told) if name in _TOLD and _TOLD[name].fullmatch(value)}
    return f"{known.get('proto', scheme).lower()}://{known.get('host', said.get(b'host', ''))}"


class PublicUrls:
    """The URLs of a server as one client must see them."""

    def __init__(self, request: HttpRequest, below: str, server: ServerPool, scheme: str = "http") -> None:
        """`below`: the path of the request below the address of its rollout; `scheme`: that of the gateway's
        own port."""
        path, mark, query = request.target.decode("latin-1").removeprefix(WELL_KNOWN).partition("?")
        self._origin = origin_of(request.headers, scheme)
        self._endpoint, own, _ = path.partition(OWN)
        """The path that the client calls, as it writes it: clients compare it character by character."""
        self._query = "" if own else mark + query
        self.address = path.removesuffix(below.partition("?")[0].removeprefix(WELL_KNOWN))
        """The path before that of a server: the address of the rollout."""
        self._server = server

    def challenge(self, head: bytes) -> bytes:
        """The head of a refusal whose challenges name metadata that are reached through the gateway."""
        return _NAMED.sub(lambda found: found[1] + self.metadata(found[2].decode("latin-1")).encode() + found[3], head)

    def metadata(self, url: str) -> str:
        """The gateway's URL for the URL of the server's metadata, or that URL itself if the gateway has none."""
        path = self._of_server(url)
        if path is not None and path.rstrip("/") in (WELL_KNOWN, WELL_KNOWN + self._server.path.rstrip("/")):
            return f"{self._origin}{WELL_KNOWN}{self._endpoint}{self._query}"
        ours = None if path is None else self._server.register_path(url)
        return url if ours is None else f"{self._origin}{self._endpoint}{OWN}{self._server.own_path(ours)}"

    def document(self, body: bytes) -> bytes:
        """Metadata with the server's address at the gateway as their resource; any other document unchanged."""
        found = obj(loads(body))
        resource = text(found.get("resource"))
        if resource is None or "authorization_servers" not in found or self._of_server(resource) is None:
            return body
        return orjson.dumps(found | {"resource": self._origin + self._endpoint + self._query})

    def _of_server(self, url: str) -> str | None:
        """The path of a URL of the server; None for a URL of another host."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return None
        return parts.path if f"{parts.scheme}://{parts.netloc}" == self._server.origin else None


class DocumentFraming(HeldFraming):
    """Metadata of a server, changed as a whole."""

    def __init__(self, changed: Callable[[bytes], bytes], chunked: bool) -> None:
        super().__init__(chunked, _LONGEST)
        self._changed = changed

    def finish(self, connection: UpstreamConnection, body: bytes) -> tuple[bytes, bytes] | None:
        made = self._changed(body)
        return None if made is body else (self._head, made)


def is_rewritable(connection: UpstreamConnection) -> bool:
    """True if an answer is a JSON document that is small enough and can be read."""
    lengths = [value for name, value in connection.headers if name.lower() == b"content-length"]
    small = all(value.isdigit() and int(value) <= _LONGEST for value in lengths)
    return (
        connection.status == 200 and connection.content_type.startswith(b"application/json")
        and connection.encoding is None and small
    )  # fmt: skip


def metadata_call(request: HttpRequest, hints: ConnectionHints) -> CallRequest | None:
    """The call that asks for the metadata of a server; None for any other request. Raises `ClientFault` if the request
    names no server. Clients ask for metadata without a key."""
    target = request.target.decode("latin-1")
    if not target.startswith(WELL_KNOWN):
        return None
    if request.method not in _READS:
        raise ClientFault(400, "method", f"metadata are asked for by GET, not {request.method}", "method")
    try:
        address, below = from_path(target.removeprefix(WELL_KNOWN).partition("?")[0])
    except AddressError as error:
        raise ClientFault(400, "address", str(error), error.part) from None
    if not below.startswith(PREFIX):
        raise ClientFault(404, "path", f"metadata are those of one server: ask for {WELL_KNOWN}{PREFIX}NAME", "path")
    address = address or CallAddress(hints.last or new_rollout(), origin="implicit")
    return CallRequest(address, find("GET", below), WELL_KNOWN + below, b"")
