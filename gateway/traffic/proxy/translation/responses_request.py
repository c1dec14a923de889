"""Makes the request of chat completions that asks the same as a request of responses.

litellm makes it. Where litellm would alter, lose or guess something, this module corrects it, each with a test.
Consecutive items of the model become one message again. Reasoning is given back to the letter, where vLLM reads it. A
function has no description and no `strict` that the agent did not give. A result whose call is missing is refused:
litellm would take the call from a memory that all rollouts share.
"""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.gateway.traffic.proxy.translation import responses_tools
from penstock.gateway.traffic.proxy.translation.checks import items, non_empty_text, object_field, one_of, only, refuse
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.wire.dialects.loose_json import Json, arr, dumps, loads, obj, objs, text

MODEL: Final = "engine"
"""The model's name that litellm sees."""
FIELDS: Final = frozenset(
    {
        "model", "input", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning", "stream",
        "temperature", "text", "tool_choice", "tools", "top_p", "user",
    }
)  # fmt: skip
LEFT_OUT: Final = frozenset(
    {
        "store", "include", "metadata", "client_metadata", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "stream_options", "truncation", "max_tool_calls",
    }
)  # fmt: skip
FORGOTTEN: Final = ("previous_response_id", "conversation", "prompt")
"""Fields that only a provider which keeps responses, conversations and prompts can serve."""
INCLUDED: Final = frozenset({"reasoning.encrypted_content"})
PARTS: Final = ("input_text", "output_text", "text", "input_image")
_PLACE: Final = "<reasoning {}>"
_PLACES: Final = re.compile(r"<reasoning (\d+)>")
_ROLES: Final = {"developer": "system"}


def chat_request(library: LiteLlmApi, asked: Json) -> Json:
    """The request of chat completions; raises `ClientFault` for a request that cannot be expressed in it."""
    check(asked)
    known = responses_tools.flatten_namespaces(only(asked, FIELDS, LEFT_OUT))
    thoughts: list[str] = []
    prepared = _prepared(known, thoughts)
    chat = library.responses.transform_responses_api_request_to_chat_completion_request(
        model=MODEL, input=prepared.pop("input"), responses_api_request=prepared, stream=bool(asked.get("stream"))
    )
    return _mended(chat, known, thoughts)


def check(asked: Json) -> None:
    """Raise `ClientFault` for what chat completions cannot express."""
    for name in FORGOTTEN:
        if asked.get(name) is not None:
            refuse(name, "the gateway keeps no responses: send the whole conversation as `input`")
    for at, name in enumerate(arr(asked.get("include"))):
        one_of(name, INCLUDED, f"include[{at}]")
    only(asked, FIELDS, LEFT_OUT)
    responses_tools.check(asked)
    _check_choice(asked.get("tool_choice"))
    if asked.get("instructions") is not None and not isinstance(asked["instructions"], str):
        refuse("instructions", "it must be a string")
    object_field(asked, "reasoning")
    if form := object_field(object_field(asked, "text"), "format", "text."):
        one_of(form.get("type"), ("text", "json_schema", "json_object"), "text.format.type")
    if not isinstance(asked.get("input"), str):
        _check_items(asked.get("input"))


def _check_choice(choice: Any) -> None:
    if found := obj(choice):
        one_of(found.get("type"), ("function",), "tool_choice.type")
        non_empty_text(found.get("name"), "tool_choice.name")
    else:
        one_of(choice, (None, "auto", "none", "required"), "tool_choice")


def _check_items(given: Any) -> None:
    calls: set[str] = set()
    found = list(items(given, "input"))
    if not found:
        refuse("input", "there must be something in it")
    for item, where in found:
        kinds = (None, "message", "function_call", "function_call_output", "reasoning")
        match one_of(item.get("type"), kinds, f"{where}.type"):
            case "function_call":
                calls.add(non_empty_text(item.get("call_id"), f"{where}.call_id"))
                non_empty_text(item.get("name"), f"{where}.name")
            case "function_call_output":
                _check_output(item, where, calls)
            case "reasoning":
                if item.get("encrypted_content") and not _thought(item):
                    refuse(where, "reasoning that only its own provider can read is of no use to another one")
            case _:
                one_of(item.get("role"), ("user", "assistant", "system", "developer"), f"{where}.role")
                _check_parts(item.get("content"), f"{where}.content")


def _check_output(item: Json, where: str, calls: set[str]) -> None:
    if non_empty_text(item.get("call_id"), f"{where}.call_id") not in calls:
        refuse(f"{where}.call_id", "the call that it answers must stand before it: the gateway keeps no responses")
    _check_parts(item.get("output"), f"{where}.output")


def _check_parts(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    for part, place in items(content, where):
        if one_of(part.get("type"), PARTS, f"{place}.type") == "input_image":
            non_empty_text(part.get("image_url"), f"{place}.image_url")
        elif not isinstance(part.get("text"), str):
            refuse(f"{place}.text", "it must be a string")


def _thought(item: Json) -> str:
    """The text of a reasoning item."""
    parts = objs(item.get("content")) or objs(item.get("summary"))
    return "".join(text(part.get("text")) or "" for part in parts)


def _prepared(asked: Json, thoughts: list[str]) -> Json:
    """A copy for litellm, which writes into its input and strips reasoning; placeholders stand in for the reasoning."""
    prepared: Json = loads(dumps(asked))
    if isinstance(prepared["input"], list):
        prepared["input"] = [
            item for item in objs(prepared["input"]) if item.get("type") != "reasoning" or _thought(item)
        ]
    for item in objs(prepared["input"]):
        if item.get("type") == "reasoning":
            thoughts.append(_thought(item))
            item.pop("content", None)
            item["summary"] = [{"type": "summary_text", "text": _PLACE.format(len(thoughts) - 1)}]
    return prepared


def _mended(chat: Json, asked: Json, thoughts: list[str]) -> Json:
    """litellm's translation, corrected where it differs from the agent's request."""
    chat["model"] = asked["model"]
    chat.pop("custom_llm_provider", None)
    chat["messages"] = _joined([_mended_message(message, thoughts) for message in chat["messages"]])
    for tool, own in zip(objs(chat.get("tools")), objs(asked.get("tools")), strict=True):
        for name in ("description", "strict"):
            if own.get(name) is None:
                tool["function"].pop(name, None)
    return {name: value for name, value in chat.items() if name != "stream" or value}


def _mended_message(message: Any, thoughts: list[str]) -> Json:
    made: Json = dict(message)
    made["role"] = _ROLES.get(made["role"], made["role"])
    parts = objs(made.get("content"))
    if made["role"] == "assistant" and all(part.get("type") == "text" for part in parts) and parts:
        made["content"] = "".join(part["text"] for part in parts)
    elif len(parts) == 1 and parts[0].get("type") == "text":
        made["content"] = parts[0]["text"]
    made.pop("thinking_blocks", None)
    if (thought := made.pop("reasoning_content", None)) is not None:
        made["reasoning"] = _PLACES.sub(lambda found: thoughts[int(found[1])], thought)
    made["tool_calls"] = [
        {name: call[name] for name in call if name != "index"} for call in arr(made.get("tool_calls"))
    ]
    return {name: value for name, value in made.items() if name != "tool_calls" or value}


def _joined(messages: list[Json]) -> list[Json]:
    """Merge consecutive messages of the assistant, because the model has made them in one go."""
    made: list[Json] = []
    for message in messages:
        last = made[-1] if made else {}
        if message["role"] == "assistant" == last.get("role"):
            made[-1] = _one(last, message)
        else:
            made.append(message)
    return made


def _one(first: Json, then: Json) -> Json:
    whole = first | then
    for name in ("content", "reasoning"):
        whole[name] = "".join(text(message.get(name)) or "" for message in (first, then)) or None
    whole["tool_calls"] = [*arr(first.get("tool_calls")), *arr(then.get("tool_calls"))]
    return {name: value for name, value in whole.items() if name == "content" or value}
