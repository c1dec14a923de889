"""A model made of rules: deterministic answers in the wire formats of OpenAI chat completions and Anthropic
messages, plain and streamed.

It behaves as agents expect. When it is offered tools, it calls the first one with arguments from the question; when it
is given a tool's result, or no tools, it answers in words. Everything follows from the request, ids
and token counts too, so two equal requests get equal bytes. The formats are pure functions of a request and an
`DemoAnswer`: `demo.demo` puts a small server around them, the tests' scripted provider a larger one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

Json = dict[str, Any]
CREATED = 1_760_000_000


@dataclass(frozen=True, slots=True)
class DemoToolCall:
    """A tool call in an answer."""

    id: str
    name: str
    arguments: str
    """JSON text, sent unchanged."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """The content of the model's next answer."""

    text: str = ""
    calls: tuple[DemoToolCall, ...] = ()
    thinking: str = ""
    extra: Json = field(default_factory=Json)
    """Fields that are added at the top of the response, as vendors do."""


def decide(request: Json) -> DemoAnswer:
    """The answer to a chat, messages or responses request."""
    conversation = as_messages(request)
    question, result = last_text(conversation, "user"), tool_result(conversation[-1])
    tools: list[Json] = request.get("tools") or []
    if result is not None:
        return DemoAnswer(f"The answer is {result}.")
    if tools and request.get("tool_choice") != "none":
        return DemoAnswer(calls=(call_for(tools[0], question),))
    return DemoAnswer(f"You said: {question}")


def as_messages(request: Json) -> list[Json]:
    """The conversation of a request, from `messages`, `input` or `prompt`."""
    found: Any = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if not isinstance(found, list):
        return [{"role": "user", "content": str(found)}]
    return [as_message(item) for item in cast("list[Json | str]", found)]


def as_message(item: Json | str) -> Json:
    """An item of the conversation as a message; a bare string is the user's."""
    return {"role": "user", "content": item} if isinstance(item, str) else item


def last_text(conversation: list[Json], role: str) -> str:
    """The last text of a role; empty without one."""
    texts = [text_of(message.get("content")) for message in conversation if message.get("role") == role]
    return next((text for text in reversed(texts) if text), "")


def text_of(content: Any) -> str:
    """The text of a message's content: a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts: list[Json] = content or []
    return " ".join(part["text"] for part in parts if "text" in part)


def tool_result(message: Json) -> str | None:
    """The text of the tool result in this message; None without one."""
    if message.get("role") == "tool":
        return text_of(message["content"])
    if message.get("type") == "function_call_output":
        return text_of(message["output"])
    if isinstance(message.get("content"), str):
        return None
    parts: list[Json] = message.get("content") or []
    results = [text_of(part["content"]) for part in parts if part.get("type") == "tool_result"]
    return results[-1] if results else None


def call_for(tool: Json, question: str) -> DemoToolCall:
    """A call of this tool: the numbers in the question become its numbers, the last word its strings."""
    function: Json = tool.get("function") or tool
    schema: Json = function.get("parameters") or function.get("input_schema") or {}
    numbers = iter(re.findall(r"\d+", question))
    word = (re.findall(r"\w+", question) or ["something"])[-1]
    properties: dict[str, Json] = schema.get("properties") or {}
    arguments = {
        name: int(next(numbers, "1")) if kind.get("type") in ("integer", "number") else word
        for name, kind in properties.items()
    }
    return DemoToolCall("call_" + digest([function["name"], question])[:20], function["name"], json.dumps(arguments))


def digest(value: Any) -> str:
    """SHA-256 of a JSON value; hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def pieces(text: str) -> list[str]:
    """The pieces in which a text is streamed, one 'token' each."""
    return re.findall(r"\s*\S+", text)


def counts(request: Json, answer: DemoAnswer) -> tuple[int, int]:
    """The numbers of (input, output) tokens, counted as pieces."""
    generated = answer.thinking + " " + answer.text + " " + " ".join(call.arguments for call in answer.calls)
    return len(pieces(json.dumps(request))), max(1, len(pieces(generated)))


def sse(value: Json, name: str | None = None) -> bytes:
    """An event of a stream of server-sent events."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


# OpenAI chat completions


def chat(request: Json, answer: DemoAnswer) -> Json:
    """The chat completion with this answer."""
    choices = [
        {"index": index, "message": chat_message(answer), "logprobs": logprobs(request, answer.text)}
        | {"finish_reason": chat_finish(answer)}
        for index in range(request.get("n") or 1)
    ]
    return (
        chat_head(request, "chat.completion")
        | {"choices": choices, "usage": chat_usage(request, answer)}
        | answer.extra
    )


def chat_head(request: Json, kind: str) -> Json:
    return {"id": "chatcmpl-" + digest(request)[:24], "object": kind, "created": CREATED} | {
        "model": request["model"],
        "service_tier": "default",
        "system_fingerprint": "fp_demo",
    }


def chat_message(answer: DemoAnswer) -> Json:
    message: Json = {"role": "assistant", "content": answer.text or None, "refusal": None, "annotations": []}
    return message | ({"tool_calls": [chat_call(call) for call in answer.calls]} if answer.calls else {})


def chat_call(call: DemoToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_finish(answer: DemoAnswer) -> str:
    return "tool_calls" if answer.calls else "stop"


def chat_usage(request: Json, answer: DemoAnswer) -> Json:
    asked, generated = counts(request, answer)
    return {"prompt_tokens": asked, "completion_tokens": generated * (request.get("n") or 1)} | {
        "total_tokens": asked + generated * (request.get("n") or 1),
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def logprobs(request: Json, text: str) -> Json | None:
    """Log-probabilities, one entry for each piece; None unless the request asks for them."""
    if not request.get("logprobs"):
        return None
    entries = [
        {"token": piece, "bytes": list(piece.encode()), "logprob": -0.125 * index, "top_logprobs": []}
        for index, piece in enumerate(pieces(text))
    ]
    return {"content": entries, "refusal": None}


def chat_events(request: Json, answer: DemoAnswer) -> Iterator[bytes]:
    """The chat completion as events; the usage event only for a client that asked for it."""
    options: Json = request.get("stream_options") or {}
    wants_usage = bool(options.get("include_usage"))
    head = chat_head(request, "chat.completion.chunk") | ({"usage": None} if wants_usage else {}) | answer.extra
    for index in range(request.get("n") or 1):
        for delta in chat_deltas(answer):
            choice = {"index": index, "delta": delta, "logprobs": logprobs(request, delta.get("content") or "")}
            yield sse(head | {"choices": [choice | {"finish_reason": None}]})
        last: Json = {"index": index, "delta": {}, "logprobs": None, "finish_reason": chat_finish(answer)}
        yield sse(head | {"choices": [last]})
    if wants_usage:
        yield sse(head | {"choices": [], "usage": chat_usage(request, answer)})
    yield b"data: [DONE]\n\n"


def chat_deltas(answer: DemoAnswer) -> Iterator[Json]:
    yield {"role": "assistant", "content": "" if answer.text else None, "refusal": None}
    for piece in pieces(answer.text):
        yield {"content": piece}
    for index, call in enumerate(answer.calls):
        yield {"tool_calls": [{"index": index} | chat_call(DemoToolCall(call.id, call.name, ""))]}
        for piece in pieces(call.arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


# Anthropic messages


def message(request: Json, answer: DemoAnswer) -> Json:
    """The Anthropic message with this answer."""
    return message_head(request, answer) | {
        "content": [block for block, _ in blocks(answer)],
        "stop_reason": "tool_use" if answer.calls else "end_turn",
        "usage": message_usage(request, answer),
    }


def message_head(request: Json, answer: DemoAnswer) -> Json:
    head: Json = {"id": "msg_" + digest(request)[:24], "type": "message", "role": "assistant"}
    empty: Json = {"model": request["model"], "content": [], "stop_reason": None, "stop_sequence": None}
    return head | empty | answer.extra


def message_usage(request: Json, answer: DemoAnswer) -> Json:
    asked, generated = counts(request, answer)
    usage: Json = {"input_tokens": asked, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return usage | {"output_tokens": generated, "service_tier": "standard"}


def blocks(answer: DemoAnswer) -> Iterator[tuple[Json, list[Json]]]:
    """The content blocks of a message, each with the deltas that stream it."""
    if answer.thinking:
        signature = digest(answer.thinking)
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(answer.thinking)]
        block = {"type": "thinking", "thinking": answer.thinking, "signature": signature}
        yield block, [*deltas, {"type": "signature_delta", "signature": signature}]
    if answer.text:
        text = [{"type": "text_delta", "text": piece} for piece in pieces(answer.text)]
        yield {"type": "text", "text": answer.text}, text
    for call in answer.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        yield block, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(call.arguments)]


def message_events(request: Json, answer: DemoAnswer) -> Iterator[bytes]:
    """The Anthropic message as events."""
    usage = message_usage(request, answer)
    start = message_head(request, answer) | {"usage": usage | {"output_tokens": 1}}
    yield named_event({"type": "message_start", "message": start})
    for index, (block, deltas) in enumerate(blocks(answer)):
        yield named_event({"type": "content_block_start", "index": index, "content_block": empty_block(block)})
        yield named_event({"type": "ping"})
        for delta in deltas:
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    yield named_event({"type": "message_delta", "delta": stop, "usage": {"output_tokens": usage["output_tokens"]}})
    yield named_event({"type": "message_stop"})


def named_event(event: Json) -> bytes:
    return sse(event, event["type"])


def empty_block(block: Json) -> Json:
    """A content block as its start event contains it: the fields that deltas fill are empty."""
    empty: Json = {"thinking": "", "signature": "", "text": "", "input": {}}
    return {key: empty.get(key, value) for key, value in block.items()}
