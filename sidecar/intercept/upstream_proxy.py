"""The proxy that this machine itself needs for other hosts, from its own environment. It is used for hosts, never for
the gateway.
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
class UpstreamProxy:
    """A proxy that accepts CONNECT."""

    host: str
    port: int
    tls: bool
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The header with its user and password; empty without them."""


def proxy_for(host: str, plain: bool) -> UpstreamProxy | None:
    """The proxy for a host; None when the host is reached without one."""
    proxies = getproxies_environment()
    url = proxies.get("http" if plain else "https") or proxies.get("all")
    if not url or _is_here(host) or proxy_bypass(host):
        return None
    return parse_proxy_url(url)


def check_environment() -> None:
    """Raise `ValueError` when a proxy variable of this environment does not name a proxy."""
    for kind, url in getproxies_environment().items():
        if kind in ("http", "https", "all"):
            try:
                _ = parse_proxy_url(url)
            except ValueError as error:
                raise ValueError(f"{kind.upper()}_PROXY: {error}") from None


def parse_proxy_url(url: str) -> UpstreamProxy | None:
    """The proxy that the value of a variable names; None for an unsupported kind. Raises `ValueError` when the value is
    invalid.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port
    except ValueError:
        # Without user and password, of which Python's own message may hold a part.
        raise ValueError(f"{url.rpartition('@')[2]!r} is no proxy: HOST, and a port up to 65535 behind it") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    headers = ()
    if parts.username is not None:
        known = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = (("Proxy-Authorization", f"Basic {b64encode(known.encode()).decode('ascii')}"),)
    return UpstreamProxy(parts.hostname, parts.port or _PORTS[parts.scheme], parts.scheme == "https", headers)


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
