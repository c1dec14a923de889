"""Asks a sidecar for its description of itself, as a client of its agent would: `https://192.0.2.1/`, through the proxy
of an environment or a redirection by the kernel, and with the certificates that the client would trust. An answer
proves that connections reach the sidecar.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from penstock.sidecar.intercept.egress import failure_reason
from penstock.sidecar.intercept.policy import CHECK

_SECONDS: Final = 5.0
_ALL: Final = 30.0
"""The longest time of a request that tries every host; s."""


class SidecarUnreachable(Exception):
    """Raised when connections do not reach a sidecar; the text is the reason."""


async def query_sidecar(proxy: str | None, trusted: Path | str | None, hosts: bool = False) -> Mapping[str, Any]:
    """The sidecar's description of itself; with `hosts`, also which hosts' calls reach the gateway. `proxy`: the
    sidecar's URL as a proxy; None where the kernel redirects. `trusted`: a file of certificates, or the certificates,
    or None to trust any server. Raises `SidecarUnreachable`.
    """
    try:
        if trusted is None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif isinstance(trusted, Path):
            context = ssl.create_default_context(cafile=trusted)
        else:
            context = ssl.create_default_context(cadata=trusted)
    except ssl.SSLError:
        raise SidecarUnreachable(f"{trusted} holds no certificates") from None
    except OSError as error:
        raise SidecarUnreachable(f"{trusted}: {error.strerror}") from None
    try:
        async with asyncio.timeout(_ALL if hosts else _SECONDS):
            return await _asked(proxy, context, "/hosts" if hosts else "/")
    except TimeoutError:
        raise SidecarUnreachable(f"no answer from {_place(proxy)}") from None
    except ssl.SSLCertVerificationError as error:
        file = trusted if isinstance(trusted, Path) else "what is trusted"
        why = f"does not hold the certificate of this sidecar ({error.verify_message})"
        raise SidecarUnreachable(f"{file} {why}") from None
    except OSError as error:
        raise SidecarUnreachable(f"{_place(proxy)}: {failure_reason(error)}") from None
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise SidecarUnreachable(f"{_place(proxy)}: {error}") from None


async def _asked(proxy: str | None, context: ssl.SSLContext, target: str) -> Mapping[str, Any]:
    host, port = CHECK
    if proxy is not None:
        try:
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            host, port = parts.hostname or "", parts.port or 80
        except ValueError:  # Python's message may hold a part of a password
            raise ValueError("it is no HOST with a port up to 65535") from None
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if proxy is not None:
            await _tunnel(reader, writer)
        await writer.start_tls(context, server_hostname=CHECK[0])
        writer.write(f"GET {target} HTTP/1.1\r\nHost: {CHECK[0]}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        said = json.loads(await reader.read()) if head.startswith(b"HTTP/1.1 200 ") else None
    except asyncio.IncompleteReadError:
        raise ValueError("it closed the connection") from None
    finally:
        writer.close()
    if not isinstance(said, dict) or cast(dict[str, Any], said).get("penstock") != "sidecar":
        raise ValueError("something else than a sidecar has answered")
    return cast(dict[str, Any], said)


async def _tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    where = f"{CHECK[0]}:{CHECK[1]}"
    writer.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
    line = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
    if b" 200 " not in line:
        raise ValueError(f"it answered {line.decode('latin-1')[:80]!r}: it is no sidecar")


def _place(proxy: str | None) -> str:
    return f"{CHECK[0]}:{CHECK[1]}" if proxy is None else f"the proxy {proxy.rpartition('@')[2]}"
