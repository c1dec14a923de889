"""Tools of messages that the model does not see yet (`defer_loading`). Pure.

Claude Code offers many tools by their names alone. Its model asks the tool `ToolSearch` for some, and the result refers
to them (`tool_reference`); Anthropic then shows them to the model where the reference stands. Here they become the text
that `ToolSearch` promises. The tools of the request stay the same however many are loaded, and so do the tokens at the
beginning of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.gateway.traffic.proxy.translation.checks import non_empty_text, refuse
from penstock.gateway.wire.dialects.loose_json import Json, arr, dumps, obj, objs

REFERENCE: Final = "tool_reference"


def results(message: Json, where: str = "") -> Iterator[tuple[Json, str]]:
    """Yield the tool results in a message whose blocks were checked, each with the place of its content."""
    for at, block in enumerate(objs(message.get("content"))):
        if block["type"] == "tool_result":
            yield block, f"{where}[{at}].content"


def check(asked: Json) -> None:
    """Refuse a reference to a tool that the request does not have."""
    known = {tool.get("name") for tool in objs(asked.get("tools"))}
    for at, message in enumerate(objs(asked["messages"])):
        for block, place in results(message, f"messages[{at}].content"):
            parts = arr(block.get("content")) if isinstance(block.get("content"), list) else []
            for number, part in enumerate(parts):
                where = f"{place}[{number}].tool_name"
                if part["type"] == REFERENCE and non_empty_text(part.get("tool_name"), where) not in known:
                    refuse(where, f"none of the tools is called {part['tool_name']!r}")


def visible_tools(asked: Json) -> list[Json]:
    """The tools that the model sees from the beginning, including one that it has to call."""
    wanted = obj(asked.get("tool_choice")).get("name")
    return [one for one in objs(asked.get("tools")) if not one.get("defer_loading") or one["name"] == wanted]


def by_name(asked: Json) -> dict[str, Json]:
    """All tools of the request, deferred ones too, by name."""
    return {one["name"]: one for one in objs(asked.get("tools"))}


def expand_references(content: Any, tools: Mapping[str, Json]) -> Any:
    """A tool's result with the definitions of the tools that it refers to, in the words of Claude Code's own search."""
    found = [tools[part["tool_name"]] for part in objs(content) if part["type"] == REFERENCE]
    if not found:
        return content
    lines = [f"<function>{dumps(_told(tool))}</function>" for tool in found]
    text = "\n".join(["<functions>", *lines, "</functions>"])
    return [*(part for part in objs(content) if part["type"] != REFERENCE), {"type": "text", "text": text}]


def _told(tool: Json) -> Json:
    return {"description": tool.get("description"), "name": tool["name"], "parameters": tool["input_schema"]}
