"""Makes the request of chat completions that asks the same as a request of messages.

litellm makes it. Where litellm would alter, lose or guess something, this module corrects it, each with a test. A
tool's name stays whole however long it is. A tool whose loading is deferred is shown when it is loaded
(`deferred_tools`). `disable_parallel_tool_use` is passed on, and so is a tool's failure, for which chat has no flag.
Reasoning goes where vLLM reads it. A schema for the answer stays unchanged. litellm is never told the model's name,
from which it would guess a provider.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.gateway.traffic.proxy.translation import deferred_tools
from penstock.gateway.traffic.proxy.translation.checks import items, non_empty_text, object_field, one_of, only, refuse
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.wire.dialects.loose_json import Json, arr, count, dumps, loads, obj, objs, text

MODEL: Final = "engine"
"""The model's name that litellm sees."""
FIELDS: Final = frozenset(
    {
        "model", "messages", "max_tokens", "system", "temperature", "top_p", "top_k", "stop_sequences", "stream",
        "tools", "tool_choice", "thinking", "metadata", "output_config", "output_format",
    }
)  # fmt: skip
LEFT_OUT: Final = frozenset({"cache_control", "context_management", "service_tier", "inference_geo"})
TOOL: Final = frozenset({"type", "name", "description", "input_schema", "strict"})
TOOL_LEFT_OUT: Final = frozenset({"cache_control", "eager_input_streaming", "defer_loading"})
BLOCKS: Final = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text", "image", deferred_tools.REFERENCE),
}
"""Allowed types of blocks, by role or containing block."""
CONTINUED: Final = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields that ask vLLM and SGLang to continue the last message, which is the beginning of their answer."""
_SEARCH: Final = (
    "a search that the provider runs, and this model's engine has none: let the agent do without "
    "(Claude Code: --disallowedTools WebSearch)"
)
FAILED: Final = "Error: "
"""Prefix of a tool's result that is marked as an error."""


def chat_request(library: LiteLlmApi, asked: Json) -> Json:
    """The request of chat completions; raises `ClientFault` for a request that cannot be expressed in it."""
    _check_management(asked)
    known = only(asked, FIELDS, LEFT_OUT)
    check(known)
    chat, _ = library.messages.translate_anthropic_to_openai(_prepared(known), preserve_midturn_system=True)
    return _mended(chat, library.names(_named(known)), known)


def check(asked: Json) -> None:
    """Raise `ClientFault` for what chat completions cannot express."""
    messages = list(items(asked.get("messages"), "messages"))
    if not messages:
        refuse("messages", "there must be one")
    for message, where in messages:
        role = one_of(message.get("role"), ("user", "assistant", "system"), f"{where}.role")
        _check_content(message.get("content"), role, f"{where}.content")
    deferred_tools.check(asked)
    if messages[-1][0]["role"] == "assistant":
        _check_begun(*messages[-1])
    _check_content(asked.get("system", ""), "system", "system")
    for tool, where in items(asked.get("tools", []), "tools"):
        if str(tool.get("type")).startswith("web_search"):
            refuse(f"{where}.type", f"{tool['type']!r} is {_SEARCH}")
        one_of(tool.get("type"), (None, "custom"), f"{where}.type")
        only(tool, TOOL, TOOL_LEFT_OUT, f"{where}.")
        non_empty_text(tool.get("name"), f"{where}.name")
        if not isinstance(tool.get("input_schema"), dict):
            refuse(f"{where}.input_schema", "it must be an object")
    object_field(asked, "metadata")
    if choice := object_field(asked, "tool_choice"):
        one_of(choice.get("type"), ("auto", "any", "tool", "none"), "tool_choice.type")
    if choice.get("type") == "tool":
        non_empty_text(choice.get("name"), "tool_choice.name")
    _check_thinking(asked)


def _check_begun(message: Json, where: str) -> None:
    """Check a last message of the assistant: the beginning of the answer, which the engine is asked to continue."""
    blocks = objs(message["content"])
    if any(block["type"] == "tool_use" for block in blocks):
        refuse(f"{where}.content", "an answer that has called tools cannot be continued: send their results after it")
    if not "".join(block.get("text", "") for block in blocks) and not text(message["content"]):
        refuse(f"{where}.content", "there is no text in it that could be continued: leave the message out")


def _check_management(asked: Json) -> None:
    """Let context management pass that clears nothing, because coding agents send it with every request."""
    for edit, where in items(object_field(asked, "context_management").get("edits") or [], "context_management.edits"):
        if not (str(edit.get("type")).startswith("clear_thinking_") and edit.get("keep") == "all"):
            refuse(where, "the gateway edits no conversations")


def _check_thinking(asked: Json) -> None:
    if thinking := object_field(asked, "thinking"):
        kind = one_of(thinking.get("type"), ("enabled", "disabled", "adaptive"), "thinking.type")
        if kind == "enabled" and count(thinking.get("budget_tokens")) is None:
            refuse("thinking.budget_tokens", "it must be a number")
    only(object_field(asked, "output_config"), ("effort", "format"), (), "output_config.")
    object_field(asked, "output_format")
    object_field(obj(asked.get("output_config")), "format", "output_config.")
    if form := _format(asked):
        one_of(form.get("type"), ("json_schema",), "output_config.format.type")
        if not object_field(form, "schema", "output_config.format."):
            refuse("output_config.format.schema", "it must be an object that is not empty")


def _check_content(content: Any, kind: str, where: str) -> None:
    if isinstance(content, str):
        return
    for block, place in items(content, where):
        name = one_of(block.get("type"), BLOCKS[kind], f"{place}.type")
        if name == "tool_result":
            non_empty_text(block.get("tool_use_id"), f"{place}.tool_use_id")
            _check_content(block.get("content") or "", "tool_result", f"{place}.content")
        elif name == "tool_use":
            non_empty_text(block.get("id"), f"{place}.id")
            non_empty_text(block.get("name"), f"{place}.name")
        elif name == "image":
            one_of(obj(block.get("source")).get("type"), ("base64", "url"), f"{place}.source.type")
        elif name == deferred_tools.REFERENCE:
            continue
        elif not isinstance(block.get(name), str):
            refuse(f"{place}.{name}", "it must be a string")


def _prepared(asked: Json) -> Json:
    """A copy for litellm, which writes into its input."""
    prepared: Json = loads(dumps(asked)) | {"model": MODEL}
    tools = deferred_tools.by_name(prepared)
    prepared["tools"] = [only(tool, TOOL, TOOL_LEFT_OUT) for tool in deferred_tools.visible_tools(prepared)]
    if not prepared["tools"]:
        prepared.pop("tool_choice", None)
    for message in objs(prepared["messages"]):
        for block, _ in deferred_tools.results(message):
            content = deferred_tools.expand_references(block.get("content") or "", tools)
            block["content"] = _failed(content) if block.get("is_error") else content
    return prepared


def _failed(content: Any) -> Any:
    """The result of a tool that has failed, marked as an error."""
    if not isinstance(content, str):
        return [{"type": "text", "text": FAILED}, *arr(content)]
    return content if content.startswith(FAILED) else FAILED + content


def _named(asked: Json) -> list[Json]:
    """Everything in the request that names a tool: tools, past calls, the choice."""
    blocks = [block for message in objs(asked["messages"]) for block in objs(message.get("content"))]
    return [*objs(asked.get("tools")), *(block for block in blocks if block["type"] == "tool_use"), _choice(asked)]


def _choice(asked: Json) -> Json:
    return obj(asked.get("tool_choice"))


def _mended(chat: Json, names: dict[str, str], asked: Json) -> Json:
    """litellm's translation, corrected where it differs from the agent's request."""
    chat["model"] = asked["model"]
    for message in objs(chat["messages"]):
        _mend_message(message, names)
    for tool in objs(chat.get("tools")):
        _whole(tool["function"], names)
    if isinstance(chat.get("tool_choice"), dict):
        _whole(chat["tool_choice"]["function"], names)
    if _choice(asked).get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if form := _format(asked):
        chat["response_format"]["json_schema"]["schema"] = form["schema"]
    effort = text(obj(asked.get("output_config")).get("effort"))
    if effort and obj(asked.get("thinking")).get("type") != "disabled":
        chat["reasoning_effort"] = effort
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat | (CONTINUED if asked["messages"][-1]["role"] == "assistant" else {})


def _mend_message(message: Json, names: dict[str, str]) -> None:
    message.pop("thinking_blocks", None)
    if (thought := message.pop("reasoning_content", None)) is not None:
        message["reasoning"] = thought
    for call in objs(message.get("tool_calls")):
        _whole(call["function"], names)


def _whole(function: Json, names: dict[str, str]) -> None:
    """Restore a tool's name that litellm has cut."""
    function["name"] = names.get(function["name"], function["name"])


def _format(asked: Json) -> Json:
    """The required format of the answer, under its old field name or its new one."""
    return obj(asked.get("output_format")) or obj(obj(asked.get("output_config")).get("format"))
