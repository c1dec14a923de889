"""Converse's wire objects as the parts of a Turn, the deltas of a content block as one block, and a tool's result as a
block."""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error
from typing import Any

from penstock.gateway.model.turn import Message, Part, Tool
from penstock.gateway.wire.dialects.loose_json import Json, arr, dumps, joined, loads, obj, objs, text
from penstock.gateway.wire.dialects.parts import tool_of
from penstock.gateway.wire.dialects.tool_calls import folded_arguments

MEDIA = ("image", "document", "video", "audio", "searchResult")
SERVER = "server_tool_use"
"""The type of a call that Bedrock answers itself."""


def message_of(wire: Json) -> Message:
    """A message; its role is `user` where none is given."""
    parts = [part for item in arr(wire.get("content")) for part in _parts(item)]
    return Message(role=text(wire.get("role")) or "user", parts=parts)


def _parts(item: Any) -> list[Part]:
    block = obj(item)
    if (said := text(block.get("text"))) is not None:
        return [Part(type="text", text=said)] if said else []
    if call := obj(block.get("toolUse")):
        return [Part(type="unknown", data=item) if call.get("type") == SERVER else _call(call)]
    if result := obj(block.get("toolResult")):
        return [_result(result)]
    if thought := obj(block.get("reasoningContent")):
        said = text(obj(thought.get("reasoningText")).get("text"))
        return [Part(type="reasoning", text=said) if said is not None else Part(type="reasoning", data=item)]
    if (guarded := text(obj(obj(block.get("guardContent")).get("text")).get("text"))) is not None:
        return [Part(type="text", text=guarded)]
    if cited := obj(block.get("citationsContent")):
        return [Part(type="text", text=it) for one in objs(cited.get("content")) if (it := text(one.get("text")))]
    if "cachePoint" in block:
        return []
    return [Part(type="media" if any(name in block for name in MEDIA) else "unknown", data=item)]


def _call(call: Json) -> Part:
    given = call.get("input")
    arguments = given if isinstance(given, str) else dumps({} if given is None else given)
    return Part(type="tool_call", id=text(call.get("toolUseId")), name=text(call.get("name")), arguments=arguments)


def _result(result: Json) -> Part:
    """A tool's result. JSON becomes text; the wire object is kept where it holds more than that text."""
    content = objs(result.get("content"))
    said = "".join(it["text"] if text(it.get("text")) is not None else _json(it) for it in content)
    whole = all(it.keys() <= {"text"} for it in content)
    data = result if result.get("status") == "error" else None if whole else result.get("content")
    return Part(type="tool_call_response", id=text(result.get("toolUseId")), text=said, data=data)


def _json(item: Json) -> str:
    return dumps(item["json"]) if "json" in item else ""


def result_of(call: Json, result: Part) -> Json:
    """A result as the block that answers a call."""
    kept = result.data
    if isinstance(kept, dict):
        # A failed result is kept whole.
        return {"toolResult": obj(kept) | {"toolUseId": call.get("toolUseId")}}
    content = [{"text": result.text or ""}] if kept is None else kept
    return {"toolResult": {"toolUseId": call.get("toolUseId"), "content": content, "status": "success"}}


def calls_of(message: Json) -> list[Json]:
    """The tool calls of a message that its client has to answer."""
    calls = (obj(block.get("toolUse")) for block in objs(message.get("content")))
    return [call for call in calls if call and call.get("type") != SERVER]


def tools_of(offered: Any) -> list[Tool]:
    """The client's tools by the name of their specification, Bedrock's own by theirs."""
    found: list[Tool] = []
    for tool in objs(offered):
        spec, own = obj(tool.get("toolSpec")), obj(tool.get("systemTool"))
        if spec:
            found.append(tool_of(spec, "tool", obj(spec.get("inputSchema")).get("json")))
        elif own:
            found.append(Tool(name=text(own.get("name")) or "systemTool"))
    return found


def block_of(start: Json, deltas: list[Json]) -> Json:
    """A content block of a stream as a plain answer would have it: its start, and its deltas put together."""
    call, called = obj(start.get("toolUse")), [obj(it["toolUse"]) for it in deltas if it.get("toolUse")]
    if call or (called and not start):
        # The pieces count before the input in the start.
        given = folded_arguments(it.get("input") for it in called)
        value: Any = loads(given) if given else {} if call.get("input") is None else call["input"]
        return {"toolUse": call | {"input": given if value is None else value}}
    if result := obj(start.get("toolResult")):
        return {"toolResult": result | {"content": [one for it in deltas for one in arr(it.get("toolResult"))]}}
    if image := obj(start.get("image")):
        for delta in deltas:
            image = image | obj(delta.get("image"))
        return {"image": image}
    thoughts = [thought for it in deltas if (thought := obj(it.get("reasoningContent")))]
    if thoughts:
        return {"reasoningContent": _reasoning(thoughts)}
    said, citations = joined(deltas, "text"), [it["citation"] for it in deltas if "citation" in it]
    if citations:
        return {"citationsContent": {"content": [{"text": said or ""}], "citations": citations}}
    if said is not None:
        return {"text": said}
    return dict(start) | {key: value for it in deltas for key, value in it.items() if value is not None}


def _reasoning(thoughts: list[Json]) -> Json:
    said, signature = joined(thoughts, "text"), joined(thoughts, "signature")
    if said is None and signature is None:
        return {"redactedContent": _blob([it for it in (text(one.get("redactedContent")) for one in thoughts) if it])}
    return {"reasoningText": {"text": said or ""} | ({} if signature is None else {"signature": signature})}


def _blob(pieces: list[str]) -> str:
    """Join pieces of binary data, each base64 by itself."""
    try:
        return b64encode(b"".join(b64decode(piece, validate=True) for piece in pieces)).decode()
    except (Error, ValueError):
        return "".join(pieces)
