"""The names by which clients may call a gateway that requires no key, and the sites whose pages may call it.

Any web page can send requests to this machine from a visitor's browser, and read the answers too, if its own name
resolves to this machine (DNS rebinding). But it cannot hide its name: the called name is in `Host`, the page's site in
`Origin`. So only names are accepted that nobody else can own: one of this machine, an address, a name without a dot or
of a domain that is reserved for private use, and the names in the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

LOOPBACK: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Hosts by which a browser reaches this machine only. A page of any other name may be an attacker's (DNS rebinding)."""
_PRIVATE: Final = re.compile(
    r"([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]|[a-z0-9_-]+|[a-z0-9_.-]+\.(localhost|internal|test))", re.IGNORECASE
)
"""Hosts that nobody can have registered. Docker calls the machine around a container host.docker.internal."""
_PORT: Final = re.compile(r":\d{1,5}\Z")
_WEB: Final = re.compile(r"https?://", re.IGNORECASE)
_NOWHERE: Final = ("null", "file://")
"""Origins of pages that hide their site."""


class LocalNames:
    """The accepted names of one gateway."""

    def __init__(self, names: Iterable[str] = (), asked: Iterable[str] = ()) -> None:
        """`names`: the gateway's own, as configured. `asked`: hosts of other servers that calls may name, because their
        traffic is led through this gateway."""
        self._names = frozenset(name.lower() for name in names)
        self._asked = frozenset(name.lower() for name in asked)

    def is_own(self, host: str) -> bool:
        """True if a host, with or without a port, is this machine for certain."""
        return LOOPBACK.fullmatch(host) is not None or _PORT.sub("", host).lower() in self._names

    def accepts_host(self, host: str) -> bool:
        """True if a call may name this host."""
        name = _PORT.sub("", host).lower()
        return _PRIVATE.fullmatch(name) is not None or name in self._names or name in self._asked

    def accepts_origin(self, origin: str, host: str) -> bool:
        """True if a page of this origin may send calls: it is this machine's, it is of the same `host`, which was
        accepted, or it belongs to a local program, such as an editor."""
        web = _WEB.match(origin)
        if web is None:
            return origin.lower() not in _NOWHERE
        site = origin[web.end() :]
        return self.is_own(site) or (site.lower() == host.lower() and bool(host))
