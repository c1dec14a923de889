"""The check of who calls servers without agent tokens: local programs may, pages of foreign sites may not (DNS
rebinding).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from penstock.gateway.http.errors import ClientFault
from penstock.gateway.model.local_names import LocalNames

_SCHEME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")


def check_origin(headers: Mapping[bytes, bytes], names: LocalNames) -> None:
    """Raises `ClientFault` for a request of a foreign site's page: the gateway may hold the keys of servers. (The
    protocol wants servers to check `Origin`, but a server would see the gateway's host.)"""
    for name in (b"host", b"origin"):
        value = headers.get(name, b"").decode("latin-1")
        host = value if name == b"host" else _SCHEME.sub("", value)
        if value and not names.is_own(host):
            message = f"{value[:100]!r} is no name of this machine: without agent tokens only local pages are served"
            raise ClientFault(403, "origin", message, name.decode())
