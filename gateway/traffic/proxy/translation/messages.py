"""Translates messages: makes the request of chat completions that asks the same, and the answer in the agent's format.

litellm makes it. Where litellm would alter, lose or guess something, this module corrects it, each with a test. A
tool's name stays whole however long it is. A tool whose loading is deferred is shown when it is loaded
(`visible_tools`). `disable_parallel_tool_use` is passed on, and so is a tool's failure, for which chat has no flag.
Reasoning goes where vLLM reads it. A schema for the answer stays unchanged. litellm is never told the model's name,
from which it would guess a provider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.gateway.traffic.proxy.translation.framing import (
    AnswerPiece,
    ChatAnswer,
    IteratorDriver,
    PieceKind,
    items,
    joined_text,
    non_empty_text,
    object_field,
    one_of,
    only,
    refuse,
    tool_calls,
)
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.wire.dialects.loose_json import Json, arr, count, dumps, loads, obj, objs, text
from penstock.gateway.wire.http.request import Headers

# Writes an answer of chat completions as one of messages.
#
# litellm makes the events and the plain answer. It gets the answer piece by piece, because it takes a chunk that says
# nothing for the beginning of a text and mixes the arguments of two calls in one chunk. Ids are the engine's, to the
# letter, also where Anthropic's would look different: the agent's next request brings them back. The stop sequence is
# named.
#
# Arguments that are no JSON object come below the key `INVALID_JSON`, as Anthropic advises; litellm would repair
# them, and hide what the model wrote. In a stream, arguments that begin like an object are passed on as they come.
# Arguments that begin otherwise, even with blanks, cannot be read by Anthropic's own SDK, and are held until they are
# complete.

INVALID: Final = "INVALID_JSON"
_UNCACHED: Final = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
"""Fields that Anthropic's answers always have, and litellm's plain ones only if something was cached."""
_DELTAS: Final[dict[PieceKind, str]] = {"reasoning": "reasoning_content", "text": "content", "refusal": "refusal"}


class MessagesConverter:
    """Writes one answer of messages."""

    def __init__(self, library: LiteLlmApi, asked: Json) -> None:
        self._library = library
        self._steps = IteratorDriver(lambda feed: library.events(feed, asked["model"]))
        self._about: Json = {}
        self._arguments = _ArgumentBuffer()
        self._empty = True

    def whole(self, answer: ChatAnswer, pieces: list[AnswerPiece]) -> Json:
        calls = tool_calls(pieces)
        choice = {"index": 0, "message": _message(pieces), "finish_reason": _finish(answer)}
        chat = self._library.answer(**_about(answer), choices=[choice], usage=_usage(answer))
        told: Json = dict(self._library.messages.translate_openai_response_to_anthropic(chat))
        ids = iter([call.text for call, _ in calls])
        told["content"] = [_answer_mended(block, ids) for block in told["content"] if block.get("text") != ""]
        told["usage"] = _UNCACHED | told["usage"]
        return told | _stopped(answer)

    def begin(self, answer: ChatAnswer) -> list[Json]:
        """Return the begin of a message, under the engine's id."""
        self._about = _about(answer)
        events = self._put({})
        events[0]["message"] |= {"id": answer.id, "model": answer.model}
        return events

    def feed(self, piece: AnswerPiece) -> list[Json]:
        """Return a delta, and the begin of its block."""
        self._empty = False
        if piece.kind == "arguments":
            return self._argued(self._arguments.feed(piece.text))
        events = self._argued(self._arguments.flush())
        if piece.kind == "call":
            begun = self._put({"tool_calls": [_function(piece, "")]})
            return [*events, *(_answer_named(event, piece) for event in begun)]
        return [*events, *self._put({_DELTAS[piece.kind]: piece.text})]

    def end(self, answer: ChatAnswer) -> list[Json]:
        """Return the ends of the last block and of the message."""
        events = self._argued(self._arguments.flush())
        events += [*self._put({}, _finish(answer)), *self._feed(choices=[], usage=_usage(answer)), *self._steps.close()]
        # litellm makes an empty text of an answer without content, which no agent may send back.
        kept = [event for event in events if not (self._empty and event["type"].startswith("content_block"))]
        return [_ended(event, answer) for event in kept]

    def broken(self, message: str) -> list[Json]:
        """Return the error event that ends a stream which the engine broke off."""
        return [{"type": "error", "error": {"type": "api_error", "message": message}}]

    def _argued(self, arguments: str) -> list[Json]:
        return self._put({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}) if arguments else []

    def _put(self, delta: Json, finish: str | None = None) -> list[Json]:
        return self._feed(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])

    def _feed(self, **said: Any) -> list[Json]:
        return self._steps.put(self._library.chunk(**self._about, **said))


class _ArgumentBuffer:
    """The arguments of one tool call, as they come."""

    def __init__(self) -> None:
        self._held = ""
        self._is_object = False

    def feed(self, text: str) -> str:
        """Take a piece and return the text that can be passed on now."""
        if self._is_object:
            return text
        self._held += text
        self._is_object = self._held.lstrip().startswith("{")
        return self._held if self._is_object else ""

    def flush(self) -> str:
        """Return the held text of a call that is over."""
        held, told = self._held, self._is_object
        self._held, self._is_object = "", False
        return "" if told or not held.strip() else _object(held)


def _about(answer: ChatAnswer) -> Json:
    return {"id": answer.id, "created": answer.created, "model": answer.model}


def _message(pieces: list[AnswerPiece]) -> Json:
    """The message of a plain answer. Arguments that are no object come below `INVALID_JSON`."""
    said = {name: joined_text(pieces, kind) for kind, name in _DELTAS.items()}
    calls = [_function(call, _object(arguments)) for call, arguments in tool_calls(pieces)]
    return {"role": "assistant", **said, "tool_calls": calls or None}


def _function(call: AnswerPiece, arguments: str) -> Json:
    return {"index": 0, "id": call.text, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object(arguments: str) -> str:
    return arguments if isinstance(loads(arguments.strip() or "{}"), dict) else dumps({INVALID: arguments})


def _usage(answer: ChatAnswer) -> Json:
    return answer.usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _finish(answer: ChatAnswer) -> str | None:
    """The finish reason. Engines end a prescribed tool call with `stop`, which becomes `tool_calls`."""
    return "tool_calls" if answer.calls and answer.finish in ("stop", "function_call") else answer.finish


def _stopped(answer: ChatAnswer) -> Json:
    """The stop sequence that ended the answer, and the stop reason for it."""
    if answer.stop is None or answer.calls:
        return {"stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}


def _answer_mended(block: Json, ids: Iterator[str]) -> Json:
    """A block with the engine's id, or with the signature of reasoning left empty: only Anthropic can give one."""
    if block["type"] == "tool_use":
        return block | {"id": next(ids)}
    return block | {"signature": ""} if block["type"] == "thinking" else block


def _answer_named(event: Json, call: AnswerPiece) -> Json:
    """The begin of a call with the engine's id."""
    if event["type"] == "content_block_start":
        event["content_block"] |= {"id": call.text}
    return event


def _ended(event: Json, answer: ChatAnswer) -> Json:
    if event["type"] == "message_delta":
        event["delta"] |= _stopped(answer)
    return event


# Tools of messages that the model does not see yet (`defer_loading`). Pure.
#
# Claude Code offers many tools by their names alone. Its model asks the tool `ToolSearch` for some, and the result
# refers to them (`tool_reference`); Anthropic then shows them to the model where the reference stands. Here they
# become the text that `ToolSearch` promises. The tools of the request stay the same however many are loaded, and so
# do the tokens at the beginning of the conversation.

REFERENCE: Final = "tool_reference"


def results(message: Json, where: str = "") -> Iterator[tuple[Json, str]]:
    """Yield the tool results in a message whose blocks were checked, each with the place of its content."""
    for at, block in enumerate(objs(message.get("content"))):
        if block["type"] == "tool_result":
            yield block, f"{where}[{at}].content"


def check_deferred_tools(asked: Json) -> None:
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
SAMPLING: Final = ("temperature", "top_p", "top_k")
WITHOUT_SAMPLING: Final = "2026-10-21"
"""The version of the API that refuses sampling parameters, even at their defaults, as all later ones do."""
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d")
BLOCKS: Final = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text", "image", REFERENCE),
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


def check_version(asked: Json, headers: Headers) -> None:
    """Refuse sampling parameters where the client names a version of the API that has none: Anthropic would, too."""
    version = next((value for low, _, value in headers if low == b"anthropic-version"), b"").decode("latin-1")
    for name in SAMPLING if _DAY.fullmatch(version) and version >= WITHOUT_SAMPLING else ():
        if asked.get(name) is not None:
            refuse(
                name, f"anthropic-version {version} has no sampling parameters: leave it out, or name an earlier one"
            )


def check(asked: Json) -> None:
    """Raise `ClientFault` for what chat completions cannot express."""
    messages = list(items(asked.get("messages"), "messages"))
    if not messages:
        refuse("messages", "there must be one")
    for message, where in messages:
        role = one_of(message.get("role"), ("user", "assistant", "system"), f"{where}.role")
        _check_content(message.get("content"), role, f"{where}.content")
    check_deferred_tools(asked)
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
        elif name == REFERENCE:
            continue
        elif not isinstance(block.get(name), str):
            refuse(f"{place}.{name}", "it must be a string")


def _prepared(asked: Json) -> Json:
    """A copy for litellm, which writes into its input."""
    prepared: Json = loads(dumps(asked)) | {"model": MODEL}
    tools = by_name(prepared)
    prepared["tools"] = [only(tool, TOOL, TOOL_LEFT_OUT) for tool in visible_tools(prepared)]
    if not prepared["tools"]:
        prepared.pop("tool_choice", None)
    for message in objs(prepared["messages"]):
        for block, _ in results(message):
            content = expand_references(block.get("content") or "", tools)
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
