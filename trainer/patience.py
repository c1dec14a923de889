"""A client that waits for a gateway that is away: it restarts in a moment, and a run must outlive that."""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.client import Client, ClientError
from gateway.connection import Params

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
PATIENCE_S: Final = 600.0
"""How long a gateway may be away before the run stops; it can be resumed."""


class Patient(Client):
    """The typed client; everything it is asked may be asked again."""

    async def read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        """The bytes of a good answer, as soon as the gateway gives one. Raises ClientError when it refuses, or is away
        for too long."""
        clock = asyncio.get_running_loop().time
        pause, end = FIRST_PAUSE_S, clock() + PATIENCE_S
        while True:
            try:
                return await super().read(method, path, params, body)
            except ClientError as error:
                if not error.passing or clock() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
