"""Wire formats that only the tests need: completions, responses, embeddings, model lists, token counts and errors.

Pure, like those in `demo.model`: a request and a `DemoAnswer` in, JSON or events out.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from examples.demo.model import CREATED, DemoAnswer, Json, counts, digest, named_event, pieces, sse


@dataclass(frozen=True, slots=True)
class Failure:
    """An error to answer with."""

    status: int
    message: str = "The fake was told to fail."
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])


# OpenAI completions


def completion(request: Json, answer: DemoAnswer) -> Json:
    choices = [
        {"text": answer.text, "index": index, "logprobs": None, "finish_reason": "stop"}
        for index in range(request.get("n") or 1)
    ]
    return completion_head(request) | {"choices": choices, "usage": completion_usage(request, answer)} | answer.extra


def completion_head(request: Json) -> Json:
    identity: Json = {"id": "cmpl-" + digest(request)[:24], "object": "text_completion"}
    return identity | {"created": CREATED, "model": request["model"]}


def completion_usage(request: Json, answer: DemoAnswer) -> Json:
    asked, generated = counts(request, answer)
    return {"prompt_tokens": asked, "completion_tokens": generated, "total_tokens": asked + generated}


def completion_events(request: Json, answer: DemoAnswer) -> Iterator[bytes]:
    head = completion_head(request) | answer.extra
    for piece in pieces(answer.text):
        yield sse(head | {"choices": [{"text": piece, "index": 0, "logprobs": None, "finish_reason": None}]})
    yield sse(head | {"choices": [{"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}]})
    options: Json = request.get("stream_options") or {}
    if options.get("include_usage"):
        yield sse(head | {"choices": list[Json](), "usage": completion_usage(request, answer)})
    yield b"data: [DONE]\n\n"


# OpenAI responses


def response(request: Json, answer: DemoAnswer) -> Json:
    asked, generated = counts(request, answer)
    usage = {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": len(pieces(answer.thinking))},
        "total_tokens": asked + generated,
    }
    done: Json = {"status": "completed", "output": items(request, answer), "usage": usage}
    return response_head(request) | done | answer.extra


def response_head(request: Json) -> Json:
    return {
        "id": "resp_" + digest(request)[:24],
        "object": "response",
        "created_at": CREATED,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "metadata": {},
        "model": request["model"],
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
    }


def items(request: Json, answer: DemoAnswer) -> list[Json]:
    """The output items: reasoning, message, function calls."""
    mark = digest(request)[:20]
    found: list[Json] = []
    if answer.thinking:
        found.append({"id": "rs_" + mark, "type": "reasoning", "summary": [summary(answer.thinking)]})
    if answer.text:
        said = {"id": "msg_" + mark, "type": "message", "status": "completed", "role": "assistant"}
        found.append(said | {"content": [output_text(answer.text)]})
    for index, call in enumerate(answer.calls):
        called = {"id": f"fc_{mark}{index}", "type": "function_call", "status": "completed"}
        found.append(called | {"arguments": call.arguments, "call_id": call.id, "name": call.name})
    return found


def summary(text: str) -> Json:
    return {"type": "summary_text", "text": text}


def output_text(text: str) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def response_events(request: Json, answer: DemoAnswer) -> Iterator[bytes]:
    for number, event in enumerate(response_story(request, answer)):
        yield named_event(event | {"sequence_number": number})


def response_story(request: Json, answer: DemoAnswer) -> Iterator[Json]:
    """The events in order, not yet numbered."""
    yield {"type": "response.created", "response": response_head(request)}
    yield {"type": "response.in_progress", "response": response_head(request)}
    for index, item in enumerate(items(request, answer)):
        bare: Json = {"content": [], "summary": [], "arguments": "", "status": "in_progress"}
        started = {key: bare.get(key, value) for key, value in item.items()}
        yield {"type": "response.output_item.added", "output_index": index, "item": started}
        for event in item_story(item):
            yield event | {"item_id": item["id"], "output_index": index}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": response(request, answer)}


def item_story(item: Json) -> Iterator[Json]:
    """What happens between an item's start and its end."""
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", "delta": piece}
        yield {"type": "response.function_call_arguments.done", "name": item["name"], "arguments": item["arguments"]}
    elif item["type"] == "message":
        yield from part_story("response.content_part", "response.output_text", "content_index", item["content"][0])
    else:
        events = ("response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index")
        yield from part_story(*events, item["summary"][0])


def part_story(part_event: str, text_event: str, counter: str, part: Json) -> Iterator[Json]:
    logprobs: Json = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": f"{part_event}.added", counter: 0, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield {"type": f"{text_event}.delta", counter: 0, "delta": piece} | logprobs
    yield {"type": f"{text_event}.done", counter: 0, "text": part["text"]} | logprobs
    yield {"type": f"{part_event}.done", counter: 0, "part": part}


# Embeddings, token counts, models


def embeddings(request: Json, answer: DemoAnswer) -> Json:
    texts = [request["input"]] if isinstance(request["input"], str) else request["input"]
    data = [
        {"object": "embedding", "index": index, "embedding": vector(request, text)} for index, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": counts(request, answer)[0], "total_tokens": counts(request, answer)[0]}
    return {"object": "list", "data": data, "model": request["model"], "usage": usage}


def vector(request: Json, text: str) -> str | list[float]:
    """Eight numbers that follow from the text, in the encoding that was asked for."""
    numbers = [byte / 256 for byte in bytes.fromhex(digest(text))[:8]]
    packed = base64.b64encode(struct.pack("<8f", *numbers)).decode()
    return packed if request.get("encoding_format") == "base64" else numbers


def count_tokens(request: Json, answer: DemoAnswer) -> Json:
    return {"input_tokens": counts(request, answer)[0]}


def openai_models() -> Json:
    names = ("fake-large", "fake-small")
    data = [{"id": name, "object": "model", "created": CREATED, "owned_by": "fakes"} for name in names]
    return {"object": "list", "data": data}


def anthropic_models() -> Json:
    names = ("fake-opus", "fake-haiku")
    made = {"type": "model", "created_at": "2025-10-09T08:53:20Z"}
    data = [made | {"id": name, "display_name": name.title()} for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


# Errors

OPENAI_TYPES = {401: "invalid_request_error", 403: "permission_error", 404: "invalid_request_error", 429: "requests"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def error_body(family: str, failure: Failure) -> bytes:
    """The error in the shape of the API being spoken."""
    general = "invalid_request_error" if failure.status < 500 else "server_error"
    if family == "openai":
        kind = OPENAI_TYPES.get(failure.status, general)
        error: Json = {"message": failure.message, "type": kind, "param": None, "code": failure.code}
        return json.dumps({"error": error}, indent=2).encode()
    kind = ANTHROPIC_TYPES.get(failure.status, general.replace("server", "api"))
    return json.dumps({"type": "error", "error": {"type": kind, "message": failure.message}}).encode()
