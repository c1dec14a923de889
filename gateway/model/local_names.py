"""By which names clients may ask a gateway that asks them for no key, and pages of which sites.

Any page can send requests to this machine from the browser of whoever looks at it, and read the answers too, if its own
name leads there (DNS rebinding). What it cannot do is to leave out its name: it is in `Host`, where the page has come
from in `Origin`. So a name counts that nobody else can own: one of this machine, an address, a name without a dot or of
a domain that is kept for private use, and what the configuration names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

LOOPBACK: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Hosts by which a browser reaches this machine only. A page of any other name may be anybody's (DNS rebinding)."""
_PRIVATE: Final = re.compile(
    r"([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]|[a-z0-9_-]+|[a-z0-9_.-]+\.(localhost|internal|test))", re.IGNORECASE
)
"""Hosts that nobody can have registered. Docker calls the machine around a container host.docker.internal."""
_PORT: Final = re.compile(r":\d{1,5}\Z")
_WEB: Final = re.compile(r"https?://", re.IGNORECASE)
_NOWHERE: Final = ("null", "file://")
"""Origins of pages that hide where they come from."""


class LocalNames:
    """The names of one gateway."""

    def __init__(self, names: Iterable[str] = (), asked: Iterable[str] = ()) -> None:
        """`names`: of its own, as configured. `asked`: hosts that calls may name because they are led here on their way
        there."""
        self._names = frozenset(name.lower() for name in names)
        self._asked = frozenset(name.lower() for name in asked)

    def is_own(self, host: str) -> bool:
        """Whether a host, with its port or without, is this machine for certain."""
        return LOOPBACK.fullmatch(host) is not None or _PORT.sub("", host).lower() in self._names

    def may_be_asked(self, host: str) -> bool:
        """Whether a call may name this host."""
        name = _PORT.sub("", host).lower()
        return _PRIVATE.fullmatch(name) is not None or name in self._names or name in self._asked

    def may_ask(self, origin: str, host: str) -> bool:
        """Whether a page from there may send calls: one of this machine, one that came from this `host`, which is good,
        or one of a program of its own, such as an editor."""
        web = _WEB.match(origin)
        if web is None:
            return origin.lower() not in _NOWHERE
        site = origin[web.end() :]
        return self.is_own(site) or (site.lower() == host.lower() and bool(host))
