"""The wire form of vLLM 0.32, as it was seen: where nothing was asked for its fields are there and null, and asked for
token ids or log-probabilities it streams events that bring nothing else. Pure, like `fakes.formats`.

A token is a piece of text with an id that follows from it. The same request answers the same with and without the flags
of `CAPTURE`, so that two clients can be compared byte for byte.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

from examples.demo.model import CREATED, DemoAnswer, Json, chat_call, chat_finish, digest, pieces

CAPTURE = ("return_token_ids", "logprobs", "top_logprobs")
FRAME = ("<tool_call>", "</tool_call>")
"""Tokens of a tool call that have no text of their own."""


def token_id(text: str) -> int:
    return zlib.crc32(text.encode()) % 150_000


def prompt_ids(request: Json) -> list[int]:
    said = json.dumps([request.get("messages"), request.get("tools"), request.get("prompt")])
    return [token_id(piece) for piece in pieces(said)]


def generated(answer: DemoAnswer) -> list[tuple[str, Json | None]]:
    """Every token with its delta; None for those that bring no text."""
    story: list[tuple[str, Json | None]] = [(piece, {"content": piece}) for piece in pieces(answer.text)]
    for index, call in enumerate(answer.calls):
        head = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name}}
        story += [(FRAME[0], None), (call.name, {"content": None, "tool_calls": [head]})]
        for piece in pieces(call.arguments):
            part = {"index": index, "function": {"arguments": piece}}
            story.append((piece, {"content": None, "tool_calls": [part]}))
        story.append((FRAME[1], None))
    return story


def ids_of(request: Json, tokens: list[str]) -> list[int] | None:
    return [token_id(token) for token in tokens] if request.get("return_token_ids") else None


def logprob(token: str) -> float:
    return -(token_id(token) % 1000) / 256


def chat_logprobs(request: Json, tokens: list[str]) -> Json | None:
    if not request.get("logprobs"):
        return None
    tops = [{"token": "?", "logprob": -9.5, "bytes": [63]}] * (request.get("top_logprobs") or 0)
    content = [
        {"token": token, "logprob": logprob(token), "bytes": list(token.encode()), "top_logprobs": tops}
        for token in tokens
    ]
    return {"content": content}


def completion_logprobs(request: Json, tokens: list[str]) -> Json | None:
    if request.get("logprobs") is None:
        return None
    found = [logprob(token) for token in tokens]
    tops = [{token: one} for token, one in zip(tokens, found, strict=True)]
    return {"text_offset": [0] * len(tokens), "token_logprobs": found, "tokens": tokens, "top_logprobs": tops}


def head(request: Json, prefix: str, kind: str) -> Json:
    bare = {key: value for key, value in request.items() if key not in CAPTURE}
    return {"id": prefix + digest(bare)[:24], "object": kind, "created": CREATED, "model": request["model"]}


def usage(request: Json, answer: DemoAnswer, ends: int = 0) -> Json:
    """`ends`: tokens of each choice that end it."""
    asked, made = len(prompt_ids(request)), (len(generated(answer)) + ends) * (request.get("n") or 1)
    return {"prompt_tokens": asked, "total_tokens": asked + made, "completion_tokens": made}


def chat(request: Json, answer: DemoAnswer) -> Json:
    """The whole response."""
    tokens = [token for token, _ in generated(answer)]
    message: Json = {"role": "assistant", "content": answer.text or None, "refusal": None, "reasoning": None}
    message |= {"tool_calls": [chat_call(call) for call in answer.calls]} if answer.calls else {}
    choices = [
        {"index": index, "message": message, "logprobs": chat_logprobs(request, tokens)}
        | {"finish_reason": chat_finish(answer), "stop_reason": None, "token_ids": ids_of(request, tokens)}
        for index in range(request.get("n") or 1)
    ]
    tail: Json = {"system_fingerprint": "vllm-0.32.0", "usage": usage(request, answer), "prompt_logprobs": None}
    ids = prompt_ids(request) if request.get("return_token_ids") else None
    return head(request, "chatcmpl-", "chat.completion") | {"choices": choices} | tail | {"prompt_token_ids": ids}


def chat_events(request: Json, answer: DemoAnswer) -> Iterator[bytes]:
    """The response as events, those of several choices in turn."""
    about, count = head(request, "chatcmpl-", "chat.completion.chunk"), request.get("n") or 1
    loud = request.get("return_token_ids") or request.get("logprobs")
    for index in range(count):
        first: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        ids = prompt_ids(request) if request.get("return_token_ids") else None
        yield sse(about | {"choices": [first | {"finish_reason": None}], "prompt_token_ids": ids})
    for token, delta in generated(answer):
        for index in range(count if delta is not None or loud else 0):
            choice: Json = {"index": index, "delta": delta or {}, "logprobs": chat_logprobs(request, [token])}
            yield sse(about | {"choices": [choice | {"finish_reason": None, "token_ids": ids_of(request, [token])}]})
    for index in range(count):
        last: Json = {"index": index, "delta": {}, "logprobs": chat_logprobs(request, ["<|im_end|>"])}
        last |= {"finish_reason": chat_finish(answer), "stop_reason": None}
        yield sse(about | {"choices": [last | {"token_ids": ids_of(request, ["<|im_end|>"])}]})
    options: Json = request.get("stream_options") or {}
    if options.get("include_usage"):
        yield sse(about | {"choices": [], "usage": usage(request, answer, ends=1)})
    yield b"data: [DONE]\n\n"


def completion(request: Json, answer: DemoAnswer) -> Json:
    """The whole response."""
    tokens = pieces(answer.text)
    ids = prompt_ids(request) if request.get("return_token_ids") else None
    choices = [
        {"index": index, "text": answer.text, "logprobs": completion_logprobs(request, tokens)}
        | {"finish_reason": "stop", "stop_reason": None, "token_ids": ids_of(request, tokens)}
        | {"prompt_logprobs": None, "prompt_token_ids": ids}
        for index in range(request.get("n") or 1)
    ]
    return head(request, "cmpl-", "text_completion") | {"choices": choices, "usage": usage(request, answer)}


def completion_events(request: Json, answer: DemoAnswer) -> Iterator[bytes]:
    """The response as events."""
    about, tokens = head(request, "cmpl-", "text_completion"), pieces(answer.text)
    for at, token in enumerate(tokens):
        for index in range(request.get("n") or 1):
            ids = prompt_ids(request) if at == 0 and request.get("return_token_ids") else None
            choice: Json = {"index": index, "text": token, "logprobs": completion_logprobs(request, [token])}
            choice |= {"finish_reason": "stop" if at == len(tokens) - 1 else None, "stop_reason": None}
            yield sse(about | {"choices": [choice | {"prompt_token_ids": ids, "token_ids": ids_of(request, [token])}]})
    yield b"data: [DONE]\n\n"


def sse(value: Json) -> bytes:
    """One event in compact JSON, as pydantic writes it."""
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


FORMATS = {"/v1/chat/completions": (chat, chat_events), "/v1/completions": (completion, completion_events)}
