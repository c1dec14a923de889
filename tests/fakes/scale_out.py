"""A vLLM that runs with `--enable-scale-out`, as 0.32 was seen to answer, around a toy template that drifts.

    async with scale_out() as vllm:
        vllm.template = Template(strips=True)
        vllm.says = [" Let me look. ", ...]   # what the model makes next, in turn; then "ok"

It answers chat completions, render, generate and derender, plain and streamed. `hold` stops the model after so many
tokens until `go` is set. What derender is shown it says: special tokens too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from fakes.toy_template import CALL, Json, Template, Vocabulary, parsed
from fakes.waiting import News
from fakes.web_site import event_stream, everywhere, site

from examples.demo.model import sse
from penstock.gateway.wire.dialects.loose_json import arr, obj, objs

CHAT, RENDER, DERENDER = "/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/derender"
GENERATE = "/inference/v1/generate"
LONGEST = 4096
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class ScaleOut:
    """The server, what its model says and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.template = Template()
        self.words = Vocabulary()
        self.says: list[str] = []
        self.speaks: Callable[[str], str] | None = None
        """What the model says to a prompt, where `says` is empty."""
        self.longest = LONGEST
        self.render_fails = 0
        """How many of the next renderings fail."""
        self.derender_fails: list[int] = []
        """Status of the next answers of derender, in turn; 0: the connection is closed."""
        self.refuses: list[str] = []
        """Why it refuses the next chat requests, in turn."""
        self.models = {"policy"}
        self.enabled = True
        self.unknown = False
        """Whether it is too old to know of the endpoints."""
        self.hold: int | None = None
        self.go = asyncio.Event()
        self.breaks: int | None = None
        """Tokens after which a stream of generate breaks off."""
        self.fails: int | None = None
        """Tokens after which it says that it failed."""
        self.asked: list[tuple[str, Json]] = []
        self.cancelled, self.generated = asyncio.Event(), asyncio.Event()
        """Set when a request was given up, and when a stream of generate is over."""
        self._calls = 0
        self._news = News()

    @property
    def openai_url(self) -> str:
        return self.url + "/v1"

    def of(self, path: str) -> list[Json]:
        """The requests to a path."""
        return [body for one, body in self.asked if one == path]

    async def until(self, path: str, requests: int = 1) -> None:
        """Waits until so many requests to a path came."""
        await self._news.until(lambda: len(self.of(path)) >= requests)

    def _refusal(self, path: str, body: Json) -> str | None:
        if path == CHAT and self.refuses:
            return self.refuses.pop(0)
        if (body.get("temperature") or 0) > 2:
            return "temperature must be in [0, 2]."
        return self.template.refusal(body["messages"])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body: Json = json.loads(await request.read())
        if request.path != CHAT:
            if self.unknown:
                return web.json_response({"detail": "Not Found"}, status=404)
            if not self.enabled:
                return failure(403, DISABLED, "PermissionDeniedError")
        self.asked.append((request.path, body))
        self._news.tell()
        if request.path == DERENDER and self.derender_fails:
            status = self.derender_fails.pop(0)
            if not status:
                assert request.transport is not None
                request.transport.abort()
            return failure(status or 500, "The parser is not well.", "InternalServerError")
        if body.get("model") not in self.models:
            return failure(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        if request.path in (CHAT, RENDER) and (refused := self._refusal(request.path, body)):
            return failure(400, refused, "BadRequestError")
        try:
            made = await {CHAT: self._chat, RENDER: self._render, DERENDER: self._derender, GENERATE: self._generate}[
                request.path
            ](request, body)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return made

    # -- render ------------------------------------------------------------------------------------------------------

    def rendered(self, body: Json) -> list[int]:
        opening = body.get("add_generation_prompt", True)
        return self.words.encode(self.template.write(body["messages"], body.get("tools"), opening))

    async def _render(self, request: web.Request, body: Json) -> web.StreamResponse:
        ids = self.rendered(body)
        if self.render_fails:
            self.render_fails -= 1
            return failure(500, "The renderer is not well.", "InternalServerError")
        if len(ids) > self.longest:
            return failure(400, f"The prompt has {len(ids)} tokens.", "BadRequestError")
        room = self.longest - len(ids)
        sampling: Json = {"n": body.get("n") or 1, "max_tokens": min(body.get("max_tokens") or room, room)}
        sampling |= {"stop": stops(body), "logprobs": body.get("top_logprobs") or 0 if body.get("logprobs") else None}
        answer: Json = {"request_id": f"chatcmpl-{len(self.asked)}", "token_ids": ids, "features": None}
        answer |= {"sampling_params": sampling, "model": body["model"], "stream": bool(body.get("stream"))}
        return web.json_response(answer | {"stream_options": body.get("stream_options")})

    # -- the model ---------------------------------------------------------------------------------------------------

    def _made(self, sampling: Json, prompt: list[int]) -> tuple[list[int], str, int | str | None, str]:
        """(ids, why it ended, by which text, the text before that)."""
        if self.says or self.speaks is None:
            text = self.says.pop(0) if self.says else "ok"
        else:
            text = self.speaks(self.words.decode(prompt))
        for stop in stops(sampling):
            if stop in text:
                cut = text.index(stop)
                return self.words.spell(text[: cut + len(stop)], False), "stop", stop, text[:cut]
        ids, most = self.words.spell(text), sampling.get("max_tokens") or self.longest
        return (ids, "stop", None, text) if len(ids) <= most else (ids[:most], "length", None, text[:most])

    def logprobs(self, ids: list[int], most: int | None) -> Json | None:
        if most is None:
            return None
        return {"content": [self._logprob(id) | {"top_logprobs": [self._logprob(id)] * most} for id in ids]}

    def _logprob(self, id: int) -> Json:
        piece = self.words.pieces[id]
        return {"token": piece, "logprob": -(id % 7) / 8, "bytes": list(piece.encode())}

    # -- chat --------------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request, body: Json) -> web.StreamResponse:
        prompt, many = self.rendered(body), body.get("n") or 1
        most = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        about: Json = {"id": f"chatcmpl-{len(self.asked)}", "created": 1, "model": body["model"]}
        shown: Json = {"prompt_token_ids": prompt if body.get("return_token_ids") else None}
        made = [self._made(body, prompt) for _ in range(many)]
        if not body.get("stream"):
            choices = [
                self._choice(at, *one, body) | {"logprobs": self.logprobs(one[0], most)} for at, one in enumerate(made)
            ]
            counted = usage(prompt, made)
            return web.json_response(
                about | {"object": "chat.completion", "choices": choices, "usage": counted} | shown
            )
        return await self._send(request, self._events(body, about | {"object": "chat.completion.chunk"}, shown, made))

    def _choice(
        self, at: int, ids: list[int], finish: str, stop: int | str | None, text: str, body: Json
    ) -> Json:  # fmt: skip
        message = parsed(text, self._ids())
        finish = "tool_calls" if message.get("tool_calls") else finish
        choice: Json = {"index": at, "message": message, "finish_reason": finish, "stop_reason": stop}
        return choice | {"token_ids": ids if body.get("return_token_ids") else None}

    def _ids(self) -> Iterator[str]:
        while True:
            self._calls += 1
            yield f"chatcmpl-tool-{self._calls}"

    def _events(self, body: Json, about: Json, shown: Json, made: list[Any]) -> Iterator[Json]:
        most = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        for at, (ids, finish, stop, text) in enumerate(made):
            first: Json = {"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield about | {"choices": [first]} | shown
            said = parsed(text, self._ids())
            calls = [{"index": number} | call for number, call in enumerate(objs(said.get("tool_calls")))]
            delta = {name: said[name] for name in ("content", "reasoning") if said.get(name)}
            delta |= {"tool_calls": calls} if calls else {}
            whole: Json = {"index": at, "delta": delta, "finish_reason": "tool_calls" if calls else finish}
            whole |= {"stop_reason": stop, "logprobs": self.logprobs(ids, most)}
            yield about | {"choices": [whole | {"token_ids": ids if body.get("return_token_ids") else None}]}
        if obj(body.get("stream_options")).get("include_usage"):
            yield about | {"choices": [], "usage": usage(shown["prompt_token_ids"] or [], made)}

    # -- generate ----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request, body: Json) -> web.StreamResponse:
        assert body["output_mode"] == "text"
        sampling: Json = body["sampling_params"]
        made = [self._made(sampling, body["token_ids"]) for _ in range(sampling["n"])]
        about: Json = {"request_id": "generate-tokens-" + body["request_id"], "output_mode": "text"}
        if body["stream"]:
            response = await self._send(request, self._tokens(body, about, made), self.breaks)
            self.generated.set()
            return response
        choices = [
            {"index": at, "finish_reason": finish, "stop_reason": stop, "token_ids": ids, "text": text}
            | {"logprobs": self.generated_logprobs(ids, sampling["logprobs"])}
            for at, (ids, finish, stop, text) in enumerate(made)
        ]
        counted = usage(body["token_ids"], made)
        return web.json_response(about | {"model": body["model"], "created": 1, "choices": choices, "usage": counted})

    def generated_logprobs(self, ids: list[int], most: int | None) -> Json | None:
        """With the token itself among the alternatives, also where none were asked for."""
        return self.logprobs(ids, None if most is None else most or 1)

    def _tokens(self, body: Json, about: Json, made: list[Any]) -> Iterator[Json]:
        most = body["sampling_params"]["logprobs"]
        for step in range(max(len(one[0]) for one in made)):
            for at, (ids, finish, stop, _) in enumerate(made):
                if step < len(ids):
                    last = step == len(ids) - 1
                    choice: Json = {"index": at, "finish_reason": finish if last else None, "text": ""}
                    choice |= {"stop_reason": stop if last else None, "token_ids": [ids[step]]}
                    yield about | {"choices": [choice | {"logprobs": self.generated_logprobs([ids[step]], most)}]}
        if obj(body.get("stream_options")).get("include_usage"):
            yield about | {"choices": [], "usage": usage(body["token_ids"], made)}

    async def _send(
        self, request: web.Request, events: Iterator[Json], breaks: int | None = None
    ) -> web.StreamResponse:
        response = await event_stream(request)
        for number, event in enumerate(events):
            if number == breaks:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == self.fails:
                await response.write(b'data: {"error":{"message":"out of memory","code":500}}\n\n')
                break
            if number == self.hold:
                await self.go.wait()
            await response.write(sse(event))
        await response.write(b"data: [DONE]\n\n")
        return response

    # -- derender ----------------------------------------------------------------------------------------------------

    async def _derender(self, request: web.Request, body: Json) -> web.StreamResponse:
        assert body["prompt_token_ids"]
        assert body["chat_request"]["messages"] == []
        if not body.get("stream"):
            choices: list[Json] = []
            for choice in body["generate_response"]["choices"]:
                assert choice["token_ids"], "empty or null token_ids"
                message = parsed(self.words.decode(choice["token_ids"]), self._ids())
                choices.append({"index": choice["index"], "message": message, "finish_reason": choice["finish_reason"]})
            return web.json_response({"id": "x", "choices": choices})
        return web.json_response(self._step(body))

    def _step(self, body: Json) -> Json:
        (choice,) = body["generate_chunk"]["choices"]
        state: Json = body["stream_state"] or {"ids": [], "content": 0, "calls": [], "thought": False}
        ids = [*state["ids"], *choice["token_ids"]]
        over = choice["finish_reason"] is not None
        said = parsed(self.words.decode(ids), iter(state["calls"]))
        content = _certain(self.words.decode(ids), over)
        calls = objs(said.get("tool_calls"))
        named: list[str] = [*state["calls"], *[next(self._ids()) for _ in calls[len(state["calls"]) :]]]
        new: list[Json] = [
            {"index": at, "id": named[at], "type": "function", "function": calls[at]["function"]}
            for at in range(len(state["calls"]), len(calls))
        ]
        delta: Json = {"role": None if state["ids"] else "assistant", "content": content[state["content"] :] or None}
        delta |= {"reasoning": None if state["thought"] else said["reasoning"], "tool_calls": new}
        finish = "tool_calls" if over and named else choice["finish_reason"]
        chunk: Json = {"id": "x", "choices": [{"index": choice["index"], "delta": delta, "finish_reason": finish}]}
        after: Json = {"ids": ids, "content": len(content), "calls": named, "thought": said["reasoning"] is not None}
        return {"chunk": chunk, "stream_state": after}


def _certain(text: str, over: bool) -> str:
    """The text that cannot become anything else any more."""
    if text.startswith("<think>"):
        text = text.partition("</think>")[2]
    elif not over and "<think>".startswith(text):
        return ""
    if CALL in text:
        return text.partition(CALL)[0]
    held = 0 if over else next((size for size in range(len(CALL) - 1, 0, -1) if text.endswith(CALL[:size])), 0)
    return text[: len(text) - held]


def stops(body: Json) -> list[str]:
    stop = body.get("stop")
    return [stop] if isinstance(stop, str) else arr(stop)


def usage(prompt: list[int], made: list[Any]) -> Json:
    count = sum(len(one[0]) for one in made)
    return {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}


def failure(status: int, message: str, kind: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@asynccontextmanager
async def scale_out() -> AsyncGenerator[ScaleOut]:
    """A running engine."""
    engine = ScaleOut()
    async with site(everywhere(engine.handle)) as engine.url:
        yield engine
