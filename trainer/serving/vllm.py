"""The vLLM that agents' calls go to, when it is ours: started from vLLM's own environment.

`trainer.serving.restart` starts one again that has died; `trainer.serving.replicas` restarts one with other weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from penstock.trainer.serving.child_process import STOP_S, Child, spawn

START_S: Final = 900.0
"""A large model takes minutes to load."""
POLL_S: Final = 0.2
"""Between two questions whether vLLM is ready, because it does not say so; s."""
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has kernels for."""
ON_CPU: Final[Mapping[str, str]] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without it the first answer waits for a compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


class InferenceError(Exception):
    """There is no server; the message says why and what to do."""


def arguments(model: Path, name: str, url: str, more: Sequence[str]) -> list[str]:
    """What vLLM is started with to serve a model under a name."""
    parts = urlsplit(url)
    return [
        f"--model={model}",
        f"--served-model-name={name}",
        f"--host={parts.hostname}",
        f"--port={parts.port}",
        # Log-probabilities of what was really sampled from: after temperature and nucleus.
        "--logprobs-mode=processed_logprobs",
        # Sampling is what agents ask for, and not what a file of the model says.
        "--generation-config=vllm",
        *more,
    ]


def adapters(rank: int, slots: int) -> list[str]:
    """What it needs beside to serve adapters of the model. `slots`: those that are in use at a time."""
    most = next((known for known in RANKS if known >= rank), rank)
    return ["--enable-lora", f"--max-lora-rank={most}", f"--max-loras={slots}"]


class Server:
    """A vLLM of ours."""

    def __init__(self, python: Path, arguments: Sequence[str], url: str, log: Path, cpu: bool) -> None:
        """`python`: of vLLM's environment; `url`: with `/v1`; `log`: the file that it writes to."""
        self.url = url
        self.arguments = arguments
        """What it is started with the next time."""
        self._python = python
        self._log, self._cpu = log, cpu
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        """Held while it is started, and while it is another one that is started."""

    @property
    def runs(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._child is not None and self._child.code is None

    async def died(self) -> int:
        """What it ended with, as soon as it has, by itself; it was started."""
        while True:
            child = self._child
            if child is None:
                raise RuntimeError("`start` it first")
            code = await child.ended()
            async with self._turn:
                if self._child is child:
                    return code

    def tail(self) -> str:
        """The end of its log."""
        return "" if self._child is None else self._child.tail()

    async def start(self) -> None:
        """Comes back when it is ready; starts it if it does not run. Raises `InferenceError`."""
        async with self._turn:
            if not self.runs:
                await self._start()

    async def become(self, arguments: Sequence[str]) -> None:
        """Ends it and starts it with other arguments. Raises `InferenceError`."""
        async with self._turn:
            await self.stop()
            self.arguments = arguments
            await self._start()

    async def _start(self) -> None:
        if self._child is not None:
            self._child.sweep()
        async with aiohttp.ClientSession() as http:
            await self._refuse_another(http)
            command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *self.arguments]
            try:
                self._child = await spawn(command, self._environment(), self._log)
            except OSError as error:
                raise InferenceError(f"{self._python} cannot be started (inference.python): {error}") from None
            await self._ready(http, self._child)

    async def _refuse_another(self, http: aiohttp.ClientSession) -> None:
        """Refuses to start while a server of an earlier process of this run, which was killed, is not gone yet."""
        try:
            async with asyncio.timeout(STOP_S):
                while await _healthy(http, self.url):  # noqa: ASYNC110 - it does not tell when it goes
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{self.url} answers already: stop what serves there, or name it in inference.urls"
            raise InferenceError(message) from None

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return {**ours, **(ON_CPU if self._cpu else {}), **inherited}

    async def _ready(self, http: aiohttp.ClientSession, child: Child) -> None:
        try:
            async with asyncio.timeout(START_S):
                while not await _healthy(http, self.url):
                    with suppress(TimeoutError):
                        code = await asyncio.wait_for(child.ended(), POLL_S)
                        raise InferenceError(f"vLLM ended with {code}; {child.tail()}")
        except TimeoutError:
            await child.stop()
            message = f"vLLM was not ready after {START_S:g} s; {child.tail()}"
            raise InferenceError(message) from None

    async def stop(self) -> None:
        """Ends it, if it runs."""
        if self._child is not None:
            await self._child.stop()


async def _healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url.removesuffix("/v1") + "/health", timeout=aiohttp.ClientTimeout(5)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
