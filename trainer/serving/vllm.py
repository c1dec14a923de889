"""Starts the vLLM that serves agents' calls, from vLLM's own environment.

`trainer.serving.server_supervisor` restarts one that has died; `trainer.serving.replicas` restarts one with other
weights.
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

from penstock.gateway.client.child_process import STOP_S, ChildProcess, spawn

START_S: Final = 900.0
"""Time limit for a start: a large model takes minutes to load."""
POLL_S: Final = 0.2
"""Seconds between two polls of vLLM's health, because it does not report that it is ready."""
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM has kernels for."""
ON_CPU: Final[Mapping[str, str]] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without it the first answer waits for a compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


class InferenceError(Exception):
    """There is no server; the message says why and what to do."""


def server_arguments(model: Path, name: str, url: str, more: Sequence[str]) -> list[str]:
    """Return vLLM's arguments to serve a model under a name."""
    parts = urlsplit(url)
    return [
        f"--model={model}",
        f"--served-model-name={name}",
        f"--host={parts.hostname}",
        f"--port={parts.port}",
        # Log-probabilities of the distribution that was sampled from: after temperature and nucleus.
        "--logprobs-mode=processed_logprobs",
        # Agents' sampling parameters count, not defaults in a file of the model.
        "--generation-config=vllm",
        *more,
    ]


def adapter_arguments(rank: int, slots: int) -> list[str]:
    """Return further arguments to serve adapters of the model. `slots`: adapters in use at a time."""
    most = next((known for known in RANKS if known >= rank), rank)
    return ["--enable-lora", f"--max-lora-rank={most}", f"--max-loras={slots}"]


class VllmServer:
    """A vLLM process that is ours, with its arguments."""

    def __init__(self, python: Path, arguments: Sequence[str], url: str, log: Path, cpu: bool) -> None:
        """`python`: the Python of vLLM's environment; `url`: with `/v1`; `log`: the file of its output."""
        self.url = url
        self.arguments = arguments
        """Arguments of the next start."""
        self._python = python
        self._log, self._cpu = log, cpu
        self._child: ChildProcess | None = None
        self._turn = asyncio.Lock()
        """Held during a start, and during a restart with other arguments."""

    @property
    def runs(self) -> bool:
        """True if it was started and has not ended."""
        return self._child is not None and self._child.code is None

    async def wait_exit(self) -> int:
        """Wait until it dies by itself; return its exit code. Raises RuntimeError if it was never started."""
        while True:
            child = self._child
            if child is None:
                raise RuntimeError("`start` it first")
            code = await child.wait()
            async with self._turn:
                if self._child is child:
                    return code

    def tail(self) -> str:
        """Return the end of its log."""
        return "" if self._child is None else self._child.tail()

    async def start(self) -> None:
        """Start it if it does not run; return when it is ready. Raises `InferenceError`."""
        async with self._turn:
            if not self.runs:
                await self._start()

    async def restart_with(self, arguments: Sequence[str]) -> None:
        """Restart it with other arguments. Raises `InferenceError`."""
        async with self._turn:
            await self.stop()
            self.arguments = arguments
            await self._start()

    async def _start(self) -> None:
        if self._child is not None:
            self._child.kill()
        async with aiohttp.ClientSession() as http:
            await self._refuse_another(http)
            command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *self.arguments]
            try:
                self._child = await spawn(command, self._environment(), self._log)
            except OSError as error:
                raise InferenceError(f"{self._python} cannot be started (inference.python): {error}") from None
            await self._ready(http, self._child)

    async def _refuse_another(self, http: aiohttp.ClientSession) -> None:
        """Wait until a killed earlier process's server of this run is gone; raise `InferenceError` if it stays."""
        try:
            async with asyncio.timeout(STOP_S):
                while await _healthy(http, self.url):  # noqa: ASYNC110 - it does not report its end
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{self.url} answers already: stop what serves there, or name it in inference.urls"
            raise InferenceError(message) from None

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return {**ours, **(ON_CPU if self._cpu else {}), **inherited}

    async def _ready(self, http: aiohttp.ClientSession, child: ChildProcess) -> None:
        try:
            async with asyncio.timeout(START_S):
                while not await _healthy(http, self.url):
                    with suppress(TimeoutError):
                        code = await asyncio.wait_for(child.wait(), POLL_S)
                        raise InferenceError(f"vLLM ended with {code}; {child.tail()}")
        except TimeoutError:
            await child.stop()
            message = f"vLLM was not ready after {START_S:g} s; {child.tail()}"
            raise InferenceError(message) from None

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()


async def _healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url.removesuffix("/v1") + "/health", timeout=aiohttp.ClientTimeout(5)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
