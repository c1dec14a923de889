"""TLS on the agents' side: the certificate of `[tls]`, read again when its files have changed, without a restart.

The listener has one context for good (`ServerTls`), which only holds the current one: each connection asks it for its
TLS, and gets that of the context which it holds then. So a new certificate, and a new `client_ca`, are for new
connections; existing ones go on with theirs. (A second `load_cert_chain` into one context would leave a certificate of
another kind of key in it, and its `client_ca` could only grow.)

Files are read once a second, in a thread. A change counts when the second read finds it the same, since files are often
written one after the other. Then it is tried; if it is wrong, the log says why and the old one stays.

An expired or not yet valid certificate does not prevent a start: the gateway warns and serves, since its renewal needs
no restart then, and the Unix socket and clients that check nothing are served meanwhile. But it never replaces another
one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.gateway.config import ConfigError
from penstock.gateway.model.answers import ErrorAnswer, Problem
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.tls_settings import TlsSettings
from penstock.gateway.wire.http.certificates import file_of, load_authorities, load_pair, validity

_SETTINGS: Final = "tls.certificate", "tls.key"
_PLAIN: Final = "this port of the Penstock gateway speaks HTTPS: write https:// in place of http://"
"""The answer to a client of plain HTTP."""
_log = logging.getLogger("penstock.tls")


class _Connection(ssl.SSLObject):
    """The TLS of one connection. A failed handshake is reported to the client, which then closes: by an alert, or to
    plain HTTP, by an HTTP answer. The loop would close before anything is sent; so it is told to read on, once."""

    outgoing: ssl.MemoryBIO
    """Bytes for the client."""
    _failed = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self._failed:
                raise
            self._failed = True
            if error.reason == "HTTP_REQUEST":
                self.outgoing.write(_plain())
            raise ssl.SSLWantReadError from error


class ServerTls(ssl.SSLContext):
    """The context of the listener."""

    def __new__(cls, settings: TlsSettings, certificate: Path, metrics: Metrics) -> ServerTls:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, settings: TlsSettings, certificate: Path, metrics: Metrics) -> None:
        """Read the files; raises `ConfigError`."""
        self._settings, self._certificate, self._metrics = settings, certificate, metrics
        self._seen: list[bytes] | str = self._read()
        self._tried: list[bytes] | str = self._seen
        self._current, metrics.certificate_expires_timestamp_seconds, problem = self._made()
        self._looking: asyncio.Future[None] | None = None
        if problem is not None:
            _log.warning("%s; clients that check it will refuse it, until there is another in its file", problem)

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Return the TLS of a new connection."""
        made = self._current.wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, _Connection)
        made.outgoing = outgoing
        return made

    def check_files(self) -> None:
        """Begin to check the files for changes, unless a check is in progress."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))

    async def stop(self) -> None:
        """Wait for the check in progress."""
        if self._looking is not None:
            await asyncio.wait([self._looking])

    def _look(self) -> None:
        found: list[bytes] | str
        try:
            found = self._read()
        except ConfigError as error:
            found = str(error)
        before, self._seen = self._seen, found
        if found == self._tried or found != before:
            return
        self._tried = found
        try:
            if isinstance(found, str):
                raise ConfigError(found)
            made, ends, problem = self._made()
            if problem is not None:
                raise ConfigError(problem)
        except ConfigError as error:
            _log.error("the files of [tls] have changed and cannot be used; the old certificate stays: %s", error)
            return
        self._current = made
        self._metrics.certificate_expires_timestamp_seconds = ends
        _log.info("the files of [tls] have changed: new connections get the new certificate")

    def _read(self) -> list[bytes]:
        """Return the contents of the files."""
        one = self._settings
        named = {"tls.certificate": self._certificate, "tls.key": one.key, "tls.client_ca": one.client_ca}
        return [file_of(setting, path) for setting, path in named.items() if path is not None]

    def _made(self) -> tuple[ssl.SSLContext, float, str | None]:
        """Return a context of the files' contents, the time until which its certificate is valid, and what is wrong
        with that."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.sslobject_class = _Connection
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["http/1.1"])
        load_pair(made, *_SETTINGS, self._certificate, self._settings.key)
        if self._settings.client_ca is not None:
            load_authorities(made, "tls.client_ca", self._settings.client_ca)
            made.verify_mode = ssl.CERT_REQUIRED
        begins, ends = validity("tls.certificate", self._certificate)
        now, problem = datetime.now(UTC), None
        if not begins <= now <= ends:
            what = f"expired at {ends:%Y-%m-%d %H:%M}" if now > ends else f"is not valid before {begins:%Y-%m-%d %H:%M}"
            problem = f"tls.certificate {str(self._certificate)!r} {what} UTC"
        return made, ends.timestamp(), problem


def _plain() -> bytes:
    body = (
        ErrorAnswer(error=Problem(message=_PLAIN, type="invalid_request")).model_dump_json(exclude_none=True).encode()
    )
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def server_tls(settings: TlsSettings, metrics: Metrics) -> ServerTls | None:
    """Return the TLS of the port; None where it speaks plain HTTP. Raises `ConfigError`."""
    return None if settings.certificate is None else ServerTls(settings, settings.certificate, metrics)
