"""A scripted vLLM: what of its API the gateway uses to serve versions of weights, answering as 0.32 was seen to.

    async with engine() as vllm:
        vllm.files = {"/adapters/v1"}                           # paths that exist on the server; by default all do
        vllm.plan("/v1/load_lora_adapter", Planned(status=500)) # what goes wrong next, in turn
        ...
        vllm.restart()                                          # its adapters are gone

A model answers `I am NAME.`, plain or streamed, so that a test can see which version served a call. Names in `damaged`
answer as weights that are not numbers do.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from fakes.formats import completion, completion_events
from fakes.waiting import News
from fakes.web_site import event_stream, everywhere, site

from examples.demo.model import DemoAnswer, Json, chat, chat_events

LOAD, UNLOAD, MODELS, CHAT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models", "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FORMATS = {CHAT: (chat, chat_events), COMPLETIONS: (completion, completion_events)}


@dataclass(slots=True)
class Planned:
    """What happens to one request."""

    status: int = 200
    text: str | None = None
    """What is answered; None with status 200: as ever."""
    hang_up: bool = False
    """Closes the connection instead."""
    before: asyncio.Event | None = None
    """Waited for first."""


class FakeEngine:
    """The server, its adapters and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.base = "base"
        self.adapters: dict[str, str] = {}
        self.files: set[str] | None = None
        self.damaged: set[str] = set()
        self.slots = 4
        self.key: str | None = None
        """What was given as `--api-key`."""
        self.updates = True
        """Whether it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""
        self.asked: list[tuple[str, Json]] = []
        """Path and body of every request."""
        self._plans: dict[str, deque[Planned]] = defaultdict(deque)
        self.news = News()

    @property
    def openai_url(self) -> str:
        """What an upstream has as its base URL."""
        return self.url + "/v1"

    def plan(self, path: str, *planned: Planned) -> None:
        """What happens to the next requests of this path."""
        self._plans[path].extend(planned)

    def restart(self) -> None:
        """It comes back without its adapters."""
        self.adapters.clear()

    async def until(self, path: str, requests: int = 1) -> None:
        """Waits until so many requests of this path came."""
        await self.news.until(lambda: sum(one == path for one, _ in self.asked) >= requests)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one request."""
        body: Json = json.loads(await request.read() or b"{}")
        self.asked.append((request.path, body))
        self.news.tell()
        planned = self._plans[request.path].popleft() if self._plans[request.path] else Planned()
        if planned.before is not None:
            await planned.before.wait()
        if planned.hang_up:
            assert request.transport is not None
            request.transport.abort()
        if planned.status != 200 or planned.text is not None:
            return web.Response(status=planned.status, text=planned.text)
        if self.key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await self._serve(request, body)

    async def _serve(self, request: web.Request, body: Json) -> web.StreamResponse:
        match request.path:
            case "/health":
                return web.Response()
            case "/metrics":
                return web.Response(text=f'vllm:lora_requests_info{{max_lora="{self.slots}",running=""}} 1.0\n')
            case "/v1/models":
                return web.json_response({"object": "list", "data": self._cards()})
            case "/v1/load_lora_adapter" if self.updates:
                return self._load(body["lora_name"], body["lora_path"])
            case "/v1/unload_lora_adapter" if self.updates:
                return self._unload(body["lora_name"])
            case path if path in FORMATS:
                return await self._generate(request, body)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)

    def _cards(self) -> list[Json]:
        base: Json = {"id": self.base, "object": "model", "root": f"/models/{self.base}", "parent": None}
        loaded = self.adapters.items()
        return [base, *({"id": n, "object": "model", "root": path, "parent": self.base} for n, path in loaded)]

    def answer(self, body: Json) -> DemoAnswer:
        """What is answered by a model that is there."""
        return DemoAnswer(f"I am {body['model']}.")

    def _load(self, name: str, path: str) -> web.Response:
        if name in self.adapters:
            return fault(400, f"The lora adapter '{name}' has already been loaded.")
        if self.files is not None and path not in self.files:
            return fault(404, f"Loading lora {name} failed: No adapter found for <path>")
        self.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, name: str) -> web.Response:
        if name not in self.adapters:
            return fault(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _generate(self, request: web.Request, body: Json) -> web.StreamResponse:
        name: str = body["model"]
        if name != self.base and name not in self.adapters:
            return fault(404, f"The model `{name}` does not exist. Valid aliases: {self.base}.")
        if name in self.damaged and body.get("logprobs"):
            return fault(400, "Out of range float values are not JSON compliant")
        plain, events = FORMATS[request.path]
        answer = self.answer(body)
        if not body.get("stream"):
            return web.json_response(plain(body, answer))
        made = await event_stream(request)
        for event in events(body, answer):
            await made.write(event)
        return made


def fault(status: int, message: str) -> web.Response:
    """An error as vLLM words it."""
    error: dict[str, Any] = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


E = TypeVar("E", bound=FakeEngine)


@asynccontextmanager
async def engine(port: int = 0) -> AsyncGenerator[FakeEngine]:
    """A scripted vLLM on a free port, or on this one."""
    async with serving(FakeEngine(), port) as made:
        yield made


@asynccontextmanager
async def serving(made: E, port: int = 0) -> AsyncGenerator[E]:
    """The same for a variant of it."""
    async with site(everywhere(made.handle), port) as made.url:
        yield made
