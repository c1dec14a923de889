"""The vLLM that agents' calls go to, when it is ours: started from vLLM's own environment.

One that has died is started again with the next step. The gateway sees that its adapters are gone and loads them again;
calls that were under way fail, as they do with any upstream.
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

from trainer.children import Child, spawn

START_S: Final = 900.0
"""A large model takes minutes to load."""
POLL_S: Final = 0.2
"""vLLM says nothing when it is ready: it is asked."""
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has kernels for."""
ON_CPU: Final[Mapping[str, str]] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without it the first answer waits for a compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


class InferenceError(Exception):
    """There is no server; the message says why and what to do."""


def arguments(model: Path, base: str, url: str, rank: int, slots: int, more: Sequence[str]) -> list[str]:
    """What vLLM is started with to serve adapters of a model. `slots`: adapters that are in use at a time."""
    parts = urlsplit(url)
    return [
        f"--model={model}",
        f"--served-model-name={base}",
        f"--host={parts.hostname}",
        f"--port={parts.port}",
        "--enable-lora",
        f"--max-lora-rank={next((known for known in RANKS if known >= rank), rank)}",
        f"--max-loras={slots}",
        # Log-probabilities of what was really sampled from: after temperature and nucleus.
        "--logprobs-mode=processed_logprobs",
        # Sampling is what agents ask for, and not what a file of the model says.
        "--generation-config=vllm",
        *more,
    ]


class Server:
    """A vLLM of ours."""

    def __init__(self, python: Path, arguments: Sequence[str], url: str, log: Path, cpu: bool) -> None:
        """`python`: of vLLM's environment; `url`: with `/v1`; `log`: the file that it writes to."""
        self._command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._url, self._log, self._cpu = url, log, cpu
        self._child: Child | None = None

    async def start(self) -> None:
        """Comes back when it is ready; starts it if it does not run. Raises `InferenceError`."""
        if self._child is not None and self._child.code is None:
            return
        async with aiohttp.ClientSession() as http:
            if await _healthy(http, self._url):
                message = f"{self._url} answers already: stop what serves there, or name it in inference.urls"
                raise InferenceError(message)
            try:
                self._child = await spawn(self._command, self._environment(), self._log)
            except OSError as error:
                raise InferenceError(f"{self._command[0]} cannot be started (inference.python): {error}") from None
            await self._ready(http, self._child)

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return {**ours, **(ON_CPU if self._cpu else {}), **inherited}

    async def _ready(self, http: aiohttp.ClientSession, child: Child) -> None:
        try:
            async with asyncio.timeout(START_S):
                while not await _healthy(http, self._url):
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
