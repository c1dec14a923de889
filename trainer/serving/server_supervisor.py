"""Keeps a vLLM of ours running: after its death it is started again at once, and agents wait meanwhile.

    it does not run      the gateway pauses its upstream: new calls wait at the socket, calls under way fail
    it is started        which may take minutes; the pause is a lease, and is renewed
    it is ready          the gateway lets the calls go, and loads the adapters that they ask for

A vLLM that dies again and again within a step ends the run, which would otherwise never end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.serving.publisher import NOT_FOUND
from penstock.trainer.serving.vllm import InferenceError, VllmServer

MOST_DEATHS: Final = 3
"""Deaths within one step that are repaired; one more ends the run."""
PAUSE_S: Final = 60.0
"""Lease of the pause in seconds: how long calls wait after the trainer has died."""
OPEN_S: Final = 10.0
TRAINER: Final = "trainer"
"""Name in the gateway's audit log of who pauses and opens an upstream."""


class ServerSupervisor:
    """Keeps one server running. `run` must run beside the loop."""

    def __init__(
        self, client: Client, server: VllmServer, upstream: str, say: Callable[[str], Awaitable[None]]
    ) -> None:
        """`upstream`: the gateway's name of the server; `say`: called with messages for a person."""
        self._client, self._server, self._say = client, server, say
        self._upstream = upstream
        self._turn = asyncio.Lock()
        self._deaths = 0

    async def ready(self) -> None:
        """Start the server if it does not run, and wait for it; called before each step. Raises `InferenceError`,
        `ConfigError` and `ClientError`."""
        self._deaths = 0
        await self._up()

    async def ensure_running(self) -> None:
        """Like `ready`, in the middle of a step: deaths are not counted anew."""
        await self._up()

    async def run(self) -> None:
        """Restart the server whenever it dies, for ever. Raises `InferenceError` when there can be no server."""
        await self._up()
        while True:
            code = await self._server.wait_exit()
            self._deaths += 1
            if self._deaths > MOST_DEATHS:
                raise InferenceError(f"vLLM has died {self._deaths} times in one step; {self._server.tail()}")
            await self._up(f"vLLM ended with {code} and is started again; calls to it wait")

    async def _up(self, why: str | None = None) -> None:
        async with self._turn:
            if self._server.runs:
                return
            async with self._paused():
                if why is not None:
                    await self._say(why)
                await self._server.start()

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the upstream: calls wait within the context."""
        await self._pause()
        renewing = asyncio.ensure_future(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            # A gateway that is away needs no opening: it forgets its pauses when it restarts.
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(OPEN_S):
                    await self._client.open_upstream(
                        self._upstream, ActionRequest(who=TRAINER, why="vLLM serves again")
                    )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S / 4)
            await self._pause()

    async def _pause(self) -> None:
        try:
            await self._client.pause_upstream(
                self._upstream, PAUSE_S, ActionRequest(who=TRAINER, why="vLLM is started")
            )
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
            raise ConfigError(
                f"inference.upstream: {error}; it is the name of an [[upstream]] of the gateway"
            ) from None
