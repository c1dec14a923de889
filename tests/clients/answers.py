"""What the model hosts answer: two calls of the agent's own shell (or first tool), then words; each in its own format.

Everything follows from the request, so two equal sessions get equal answers. What is no model call is not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import zstandard
from fakes.formats import count_tokens, response, response_head, response_story
from fakes.raw import chunk, events_head, reply

from examples.demo.model import (
    DemoAnswer,
    DemoToolCall,
    Json,
    chat,
    chat_events,
    digest,
    message,
    message_events,
    named_event,
    sse,
)
from penstock.gateway.wire.dialects.loose_json import obj, objs

TURNS = 2
"""Calls of a tool before the model answers in words."""
SAID = "All is done."
SHELLS: dict[str, tuple[str, Json]] = {
    "Bash": ("command", {"description": "Print a number"}),
    "bash": ("command", {"description": "Print a number"}),
    "shell_command": ("command", {}),
    "exec_command": ("cmd", {}),
    "run_shell_command": ("command", {"description": "Print a number"}),
    "exec": ("script", {}),
    "look": ("name", {}),
}
"""Names of tools that run a command: its field, and others that are needed."""
ACCOUNT = {
    "id": "account-1",
    "account_id": "account-1",
    "account_user_id": "user-1",
    "name": None,
    "profile_picture_url": None,
    "plan_type": "plus",
    "structure": "personal",
    "workspace_backend_origin": "https://chatgpt.com",
    "account_routing_override": "NO_CONSTRAINT",
    "is_deactivated": False,
    "is_fedramp_compliant_workspace": False,
    "can_access_with_session": True,
    "sso_connection_name": None,
}
"""Codex asks where its account's workspace is."""
_DONE = re.compile(r"call_done_([0-9])")


def answer(host: str, head: bytes, body: bytes) -> Iterator[bytes]:
    """The bytes of the answer to a request."""
    line, _, headers = head.partition(b"\r\n")
    path = line.split()[1].partition(b"?")[0].decode()
    if b"content-encoding: zstd" in headers.lower():
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    if path == "/v1/messages/count_tokens":
        yield from _whole(count_tokens(json.loads(body), DemoAnswer()))
    elif path == "/v1/messages":
        yield from _either(json.loads(body), message, message_events)
    elif path == "/v1/chat/completions":
        yield from _either(json.loads(body), chat, chat_events)
    elif path.endswith("/responses"):
        yield from _either(json.loads(body), response, _events)
    elif path == "/backend-api/wham/accounts/check":
        yield from _whole({"accounts": [ACCOUNT], "default_account_id": ACCOUNT["id"]})
    elif path.startswith(("/v1beta/models/", "/v1/models/")) and body:
        yield from _gemini(json.loads(body), path.endswith(":streamGenerateContent"))
    else:
        yield b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
        if not line.startswith(b"HEAD"):
            yield b"{}"


def response_messages(asked: Json) -> Iterator[bytes]:
    """The messages of an answer on a WebSocket."""
    if asked.get("generate") is False:
        made = DemoAnswer()
        asked["tools"] = []
    else:
        made = decide(asked)
    for number, event in enumerate(_story(asked, made)):
        yield json.dumps(event | {"sequence_number": number}).encode()


def decide(asked: Json) -> DemoAnswer:
    """What the model says next."""
    whole = json.dumps(asked)
    done = max((int(number) for number in _DONE.findall(whole)), default=whole.count('"functionResponse"'))
    found = next((name for name in _tools(asked) if name in SHELLS), None)
    if found is None or done >= TURNS:
        return DemoAnswer(SAID)
    field, others = SHELLS[found]
    arguments = {field: f"echo {done + 1}", **others}
    return DemoAnswer(calls=(DemoToolCall(f"call_done_{done + 1}", found, json.dumps(arguments)),))


def _story(asked: Json, made: DemoAnswer) -> Iterator[Json]:
    """The events of a response. Codex's newest models have one tool, which takes a script as it stands."""
    script = next((call for call in made.calls if call.name == "exec"), None)
    if script is None:
        yield from response_story(asked, made)
        return
    command = json.loads(script.arguments)["script"]
    text = f"const done = await tools.exec_command({{cmd: {json.dumps(command)}}}); text(done.output);"
    kind = {"type": "custom_tool_call", "id": f"ctc_{script.id}", "status": "completed", "namespace": "functions"}
    item = kind | {"call_id": script.id, "name": "exec", "input": text}
    head = response_head(asked)
    yield {"type": "response.created", "response": head}
    yield {"type": "response.output_item.added", "output_index": 0, "item": item}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    yield {"type": "response.completed", "response": head | {"status": "completed", "output": [item], "usage": usage}}


def _events(asked: Json, made: DemoAnswer) -> Iterator[bytes]:
    for number, event in enumerate(_story(asked, made)):
        yield named_event(event | {"sequence_number": number})


def _tools(asked: Json) -> Iterator[str]:
    lists: list[Any] = [asked.get("tools") or []]
    items: Any = asked.get("input")
    lists += [one.get("tools") or [] for one in objs(items)]
    for tool in (tool for tools in lists for tool in objs(tools)):
        yield (tool.get("function") or tool).get("name") or ""
        inner = tool.get("functionDeclarations") or (tool.get("tools") if tool.get("type") == "namespace" else None)
        yield from (one["name"] for one in objs(inner))


def _either(asked: Json, plain: Any, events: Any) -> Iterator[bytes]:
    made = decide(asked)
    yield from _stream(events(asked, made)) if asked.get("stream") else _whole(plain(asked, made))


def _gemini(asked: Json, stream: bool) -> Iterator[bytes]:
    made = decide(asked)
    calls = [{"functionCall": {"name": call.name, "args": json.loads(call.arguments)}} for call in made.calls]
    if obj(asked.get("generationConfig")).get("responseJsonSchema"):  # which model shall answer?
        made = DemoAnswer(json.dumps({"complexity_reasoning": "It is easy.", "complexity_score": 1}))
    content = {"role": "model", "parts": calls or [{"text": made.text}]}
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 2, "totalTokenCount": 5}
    whole: Json = {
        "candidates": [{"index": 0, "content": content, "finishReason": "STOP"}],
        "usageMetadata": usage,
        "modelVersion": "gemini",
        "responseId": digest(asked)[:16],
    }
    yield from _stream([sse(whole)]) if stream else _whole(whole)


def _whole(made: Json) -> Iterator[bytes]:
    yield reply(200, json.dumps(made).encode())


def _stream(events: Any) -> Iterator[bytes]:
    yield events_head()
    yield from map(chunk, events)
    yield chunk(b"")
