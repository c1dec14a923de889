"""Where sockets lie that are made for a while."""

from __future__ import annotations

import os
import tempfile
from typing import Final

_ROOM: Final = 100
"""Bytes of the address of a socket; Linux has room for some more, others for few more."""
_BY_CHANCE: Final = 8
"""Letters that make the name of a directory its own."""
_SHORT: Final = "/tmp"


def socket_folder(prefix: str, longest: str) -> tempfile.TemporaryDirectory[str]:
    """A directory that only this user can enter, for sockets of names that are no longer than that one. It is where
    temporary files are, unless that lies too deep for an address."""
    made = len(os.fsencode(os.path.join(tempfile.gettempdir(), prefix))) + _BY_CHANCE + len(f"/{longest}")
    return tempfile.TemporaryDirectory(prefix=prefix, dir=None if made <= _ROOM else _SHORT)
