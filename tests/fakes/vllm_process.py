"""A scripted vLLM in a process of its own, for a trainer that starts it as it starts the real one.

    python = install(home)       # a path for `inference.python`
    flags = [f"--hold={home}/hold"]

What a version answers follows from its name and the messages: ids of the tiny model's vocabulary and log-probabilities
that are near those of a model that knows nothing. Calls to the model whose name stands in the file `--hold` are not
answered while it is there; a word after the name limits that to questions with this word in them. `GET /held/N` answers
as soon as N calls wait. `GET /asked` lists what was asked for token ids, by model: what agents asked for, and not the
gateway's checks. It takes `--slow` seconds to start.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from aiohttp import web
from fakes.engine import FakeEngine, serving
from fakes.process import PATHS

from examples.demo.model import Json

VOCABULARY, TOKENS, PROMPT = 300, 6, 5
"""Of `fakes.tiny_model`; tokens of every answer and of every prompt."""


def install(home: Path) -> Path:
    """An executable that takes the arguments of vLLM's Python and is this."""
    path = home / "vllm-python"
    # Its first two words are `-m vllm.entrypoints.openai.api_server`.
    path.write_text(f'#!/bin/sh\nshift 2\nPYTHONPATH="{PATHS}" exec "{sys.executable}" -m fakes.vllm_process "$@"\n')
    path.chmod(0o755)
    return path


class Process(FakeEngine):
    """The server."""

    def __init__(self, base: str, hold: Path) -> None:
        super().__init__()
        self.base, self.hold = base, hold
        self.models: Counter[str] = Counter()
        self.held = 0

    async def _serve(self, request: web.Request, body: Json) -> web.StreamResponse:
        match request.path.split("/"):
            case ["", "held", count]:
                await self.news.until(lambda: self.held >= int(count), patience_s=None)
                return web.Response()
            case ["", "asked"]:
                return web.json_response(self.models)
            case _:
                return await super()._serve(request, body)

    async def _generate(self, request: web.Request, body: Json) -> web.StreamResponse:
        name: str = body["model"]
        if not body.get("return_token_ids") or (name != self.base and name not in self.adapters):
            return await super()._generate(request, body)
        self.models[name] += 1
        await self._wait(name, str(body["messages"][-1]["content"]))
        return web.json_response(answered(name, body["messages"], body.get("max_tokens", TOKENS)))

    async def _wait(self, name: str, question: str) -> None:
        while self._holds(name, question):
            self.held += 1
            self.news.tell()
            try:
                while self.hold.exists():  # noqa: ASYNC110 - files do not tell when they go
                    await asyncio.sleep(0.02)
            finally:
                self.held -= 1

    def _holds(self, name: str, question: str) -> bool:
        if not self.hold.exists():
            return False
        model, _, word = self.hold.read_text().partition(" ")
        return model == name and word in question


def answered(name: str, messages: list[Json], most: int = TOKENS) -> Json:
    """What a version says to these messages, in at most so many tokens."""
    seed = json.dumps([name, messages], sort_keys=True)
    ids = numbers(seed, min(most, TOKENS))
    text = " ".join(map(str, ids))
    content: list[Json] = [
        {"token": str(one), "logprob": -5.0 - one / 1000, "bytes": None, "top_logprobs": []} for one in ids
    ]
    choice: Json = {"index": 0, "message": {"role": "assistant", "content": text}}
    choice["finish_reason"] = "stop" if len(ids) == TOKENS else "length"
    choice |= {"logprobs": {"content": content}, "token_ids": ids}
    about: Json = {"id": "c", "object": "chat.completion", "created": 0, "model": name, "choices": [choice]}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": len(ids), "total_tokens": PROMPT + len(ids)}
    return about | {"usage": usage, "prompt_token_ids": numbers(json.dumps(messages), PROMPT)}


def numbers(seed: str, count: int) -> list[int]:
    """Token ids that follow from a text."""
    digest = hashlib.sha256(seed.encode()).digest()
    return [1 + int.from_bytes(digest[2 * at : 2 * at + 2]) % (VOCABULARY - 1) for at in range(count)]


async def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--slow", type=float, default=0.0)
    asked, _ = parser.parse_known_args()
    made = Process(asked.served_model_name, asked.hold)
    await asyncio.sleep(asked.slow)
    async with serving(made, asked.port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
