"""The proxy that this machine itself needs for the world outside, from its own environment. It leads to hosts, never
to the gateway.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    """Takes CONNECT."""

    host: str
    port: int
    tls: bool
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Its user and password."""


def proxy_for(host: str, plain: bool) -> Proxy | None:
    """The proxy that leads to a host; None where it is reached without one."""
    proxies = getproxies_environment()
    url = proxies.get("http" if plain else "https") or proxies.get("all")
    if not url or _is_here(host) or proxy_bypass(host):
        return None
    return parsed(url)


def check() -> None:
    """Raises `ValueError` where a variable of this environment names what can be no proxy."""
    for kind, url in getproxies_environment().items():
        if kind in ("http", "https", "all"):
            try:
                _ = parsed(url)
            except ValueError as error:
                raise ValueError(f"{kind.upper()}_PROXY: {error}") from None


def parsed(url: str) -> Proxy | None:
    """A proxy as variables name it; None for a kind that we do not speak. Raises `ValueError` for what is none."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port
    except ValueError:
        # Without user and password; what Python says may hold a piece of them.
        raise ValueError(f"{url.rpartition('@')[2]!r} is no proxy: HOST, and a port up to 65535 behind it") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    headers = ()
    if parts.username is not None:
        known = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = (("Proxy-Authorization", f"Basic {b64encode(known.encode()).decode('ascii')}"),)
    return Proxy(parts.hostname, parts.port or _PORTS[parts.scheme], parts.scheme == "https", headers)


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
