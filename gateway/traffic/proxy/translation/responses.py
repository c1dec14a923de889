"""Translates responses: makes the request of chat completions that asks the same, and the answer in the agent's format.

litellm makes it. Where litellm would alter, lose or guess something, this module corrects it, each with a test.
Consecutive items of the model become one message again. Reasoning is given back to the letter, where vLLM reads it. A
function has no description and no `strict` that the agent did not give. A result whose call is missing is refused:
litellm would take the call from a memory that all rollouts share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from penstock.gateway.traffic.proxy.translation.framing import (
    AnswerPiece,
    ChatAnswer,
    PieceKind,
    items,
    non_empty_text,
    object_field,
    one_of,
    only,
    refuse,
)
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.wire.dialects.loose_json import Json, arr, dumps, loads, obj, objs, text

# Tools of responses that chat completions cannot express. Pure.
#
# A `namespace` holds functions: Codex offers the functions of sub-agents and of MCP servers so. They become functions
# called `namespace__name`, in the tools, in past calls and in the choice of a tool; `namespaced_tools` maps these
# names back to the agent's. A namespace's own description is dropped.
#
# A search that the provider runs (`web_search`) is left out if other tools are on offer: its model cannot search, and
# nothing else changes. Alone, or chosen, it is refused, because then it is the question.

TOOL: Final = frozenset({"type", "name", "description", "parameters", "strict"})
NAMESPACE: Final = frozenset({"type", "name", "description", "tools"})
SEARCHES: Final = ("web_search", "web_search_preview")
"""Prefixes of the types of a provider's search."""
_ALONE: Final = (
    "a search that the provider runs, and this model's engine has none: offer other tools, or none "
    '(Codex: web_search = "disabled" in its config.toml, or -c \'web_search="disabled"\')'
)


class NamespacedTool(NamedTuple):
    """An agent's name of a function in a namespace."""

    namespace: str
    name: str


def is_search(tool: Json) -> bool:
    """True for a search that the provider runs."""
    return (text(tool.get("type")) or "").startswith(SEARCHES)


def left_out(asked: Json) -> list[str]:
    """The types of the tools that are not passed on."""
    return [text(tool.get("type")) or "" for tool in objs(asked.get("tools")) if is_search(tool)]


def check_tools(asked: Json) -> None:
    """Raise `ClientFault` for tools that cannot be functions."""
    names = set[str]()
    for tool, where in items(asked.get("tools") or [], "tools"):
        if is_search(tool):
            if len(objs(asked["tools"])) == len(left_out(asked)):
                refuse(f"{where}.type", f"{tool['type']!r} is {_ALONE}")
            continue
        one_of(tool.get("type"), ("function", "namespace"), f"{where}.type")
        for function, place, name in _functions(tool, where):
            _check_function(function, place)
            if name in names:
                refuse(f"{place}.name", f"there are two tools that would be called {name!r}")
            names.add(name)
    choice = obj(asked.get("tool_choice"))
    if is_search(choice):
        refuse("tool_choice.type", f"{choice['type']!r} is {_ALONE}")


def _functions(tool: Json, where: str) -> Iterator[tuple[Json, str, str]]:
    """Yield functions, each with its place and its name in chat completions."""
    if tool.get("type") != "namespace":
        yield tool, where, text(tool.get("name")) or ""
        return
    only(tool, NAMESPACE, (), f"{where}.")
    space = non_empty_text(tool.get("name"), f"{where}.name")
    for function, place in items(tool.get("tools"), f"{where}.tools"):
        yield function, place, qualified_name(space, text(function.get("name")) or "")


def _check_function(tool: Json, where: str) -> None:
    one_of(tool.get("type"), ("function",), f"{where}.type")
    only(tool, TOOL, (), f"{where}.")
    non_empty_text(tool.get("name"), f"{where}.name")
    object_field(tool, "parameters", f"{where}.")


def qualified_name(space: str, name: str) -> str:
    """The name of a namespace's function in chat completions."""
    return f"{space}{'' if space.endswith('__') else '__'}{name}"


def namespaced_tools(asked: Json) -> Mapping[str, NamespacedTool]:
    """Functions of namespaces, by their names in chat completions. Past calls may name functions that are not on offer
    now."""
    tools = [(tool, one) for tool in objs(asked.get("tools")) for one in objs(tool.get("tools"))]
    return {
        qualified_name(space["name"], one["name"]): NamespacedTool(space["name"], one["name"]) for space, one in tools
    }


def flatten_namespaces(asked: Json) -> Json:
    """A copy of the request with functions only."""
    made = dict(asked)
    if objs(asked.get("tools")):
        made["tools"] = [
            one | {"name": name}
            for tool in objs(asked["tools"])
            if not is_search(tool)
            for one, _, name in _functions(tool, "")
        ]
    if isinstance(asked.get("input"), list):
        made["input"] = [_named(item) for item in asked["input"]]
    if isinstance(asked.get("tool_choice"), dict):
        made["tool_choice"] = _named(asked["tool_choice"])
    return made


def _named(item: Json) -> Json:
    """A call, or a choice, with its function's name in chat completions."""
    space, name = text(obj(item).get("namespace")), text(obj(item).get("name"))
    if not space or not name:
        return item
    return {key: value for key, value in item.items() if key != "namespace"} | {"name": qualified_name(space, name)}


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
    known = flatten_namespaces(only(asked, FIELDS, LEFT_OUT))
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
    check_tools(asked)
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


# Writes an answer of chat completions as one of responses.
#
# litellm makes the response around the items: the fields echoed from the request, status, usage. The items and the
# events are made here, because of what litellm's iterator (1.106.2) does to a stream. It ends every item only when
# the answer is over, in another order than they began, and agents such as Codex keep them in the order of their ends.
# It cuts arguments into pieces of ten characters, skips sequence numbers, and gives the response another id. For the
# last event it calls a function that writes to stdout and counts tokens anew.
#
# A plain answer and a streamed one have the same items with the same ids, which are derived from the engine's.

_FINISHES: Final = {"function_call": "tool_calls"}
_OPENS: Final[dict[PieceKind, str]] = {"reasoning": "reasoning", "text": "message", "refusal": "message"}
"""Type of item that a piece belongs to, by its kind; arguments belong to the call before them."""
_PARTS: Final[dict[PieceKind, tuple[str, str, str]]] = {
    "reasoning": ("reasoning_text", "text", "response.reasoning_text"),
    "text": ("output_text", "text", "response.output_text"),
    "refusal": ("refusal", "refusal", "response.refusal"),
}
"""(type, field, prefix of events) of a part, by the kind of its pieces."""
_ENDS: Final = {"completed": "response.completed", "incomplete": "response.incomplete"}
_CUT: Final = ("length", "content_filter")


class ResponsesConverter:
    """Writes one answer of responses."""

    def __init__(self, library: LiteLlmApi, asked: Json) -> None:
        self._library = library
        self._asked = asked
        self._known = namespaced_tools(asked)
        self._answer = ChatAnswer()
        self._sequence = 0
        self._items: list[Json] = []
        self._open: PieceKind | None = None
        """Kind of pieces that the newest item, or its newest part, still takes; None if it is closed."""

    def whole(self, answer: ChatAnswer, pieces: list[AnswerPiece]) -> Json:
        self._answer = answer
        for piece in pieces:
            self.feed(piece)
        self._close(_status(answer))
        return self._response(answer)

    def begin(self, answer: ChatAnswer) -> list[Json]:
        """Return the begin of a response, under the engine's id."""
        self._answer = answer
        response = self._unfinished("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def feed(self, piece: AnswerPiece) -> list[Json]:
        """Return a delta, with the ends of items that are over and the begins of new ones."""
        if piece.kind == "call":
            return [*self._close(), *self._begin_item(_call(piece, self._known.get(piece.name)), "arguments")]
        if piece.kind == "arguments":
            self._items[-1]["arguments"] += piece.text
            return [self._event("response.function_call_arguments.delta", **self._place(), delta=piece.text)]
        events = [] if self._open == piece.kind else self._begin_part(piece.kind)
        _, key, name = _PARTS[piece.kind]
        self._items[-1]["content"][-1][key] += piece.text
        return [*events, self._event(f"{name}.delta", **self._part_place(), delta=piece.text)]

    def end(self, answer: ChatAnswer) -> list[Json]:
        """Return the ends of the last item and of the response."""
        events = self._close(_status(answer))
        response = self._response(answer)
        return [*events, self._event(_ENDS[response["status"]], response=response)]

    def broken(self, message: str) -> list[Json]:
        """Return a failed response, or an error if it has not begun."""
        if not self._sequence:
            return [self._event("error", code="server_error", message=message, param=None)]
        response = self._unfinished("failed") | {"error": {"code": "server_error", "message": message}}
        return [self._event("response.failed", response=response)]

    # -- items and parts ---------------------------------------------------------------------------------------------

    def _begin_item(self, item: Json, takes: PieceKind | None) -> list[Json]:
        self._items.append(item)
        self._open = takes
        return [self._event("response.output_item.added", output_index=self._index, item=_copied(item))]

    def _begin_part(self, kind: PieceKind) -> list[Json]:
        """Begin a part of this kind, in the open item if it belongs there."""
        fits = self._open is not None and _OPENS.get(self._open) == _OPENS[kind]
        events = self._end_part() if fits else [*self._close(), *self._begin_item(self._item(_OPENS[kind]), kind)]
        self._open = kind
        self._items[-1]["content"].append(_part(kind))
        return [*events, self._event("response.content_part.added", **self._part_place(), part=_part(kind))]

    def _end_part(self) -> list[Json]:
        if self._open is None or self._open not in _PARTS:
            return []
        _, key, name = _PARTS[self._open]
        part = self._items[-1]["content"][-1]
        said: Json = {key: part[key]} | ({"logprobs": []} if self._open == "text" else {})
        return [
            self._event(f"{name}.done", **self._part_place(), **said),
            self._event("response.content_part.done", **self._part_place(), part=dict(part)),
        ]

    def _close(self, status: str = "completed") -> list[Json]:
        """End the newest item if it is open."""
        if self._open is None:
            return []
        item, events = self._items[-1], self._end_part()
        if self._open == "arguments":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **self._place(), **told)]
        self._open = None
        item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=self._index, item=_copied(item))]

    def _item(self, kind: str) -> Json:
        prefix = {"reasoning": "rs", "message": "msg"}[kind]
        before = sum(item["type"] == kind for item in self._items)
        about = {"type": kind, "id": f"{prefix}_{self._answer.id}" + (f"_{before + 1}" if before else "")}
        rest: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return about | rest | {"status": "in_progress", "content": []}

    # -- events ------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": self._index}

    def _part_place(self) -> Json:
        parts = len(self._items[-1]["content"])
        return self._place() | {"content_index": parts - 1}

    def _event(self, kind: str, **told: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **told}
        if kind == "response.output_text.delta":
            event["logprobs"] = []
        self._sequence += 1
        return event

    def _unfinished(self, status: str) -> Json:
        """The response so far, without an end."""
        about = ChatAnswer(self._answer.id, self._answer.model, self._answer.created)
        return self._response(about) | {"status": status, "incomplete_details": None, "usage": None}

    def _response(self, answer: ChatAnswer) -> Json:
        """The response with all items."""
        finish = _FINISHES.get(answer.finish or "", answer.finish)
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": finish}
        chat = self._library.answer(
            id=answer.id, created=answer.created, model=answer.model, choices=[choice], usage=answer.usage
        )
        made = self._library.responses.transform_chat_completion_response_to_responses_api_response(
            request_input="", responses_api_request=self._asked, chat_completion_response=chat
        ).model_dump(mode="json")
        made["output"] = [_copied(item) for item in self._items]
        made["parallel_tool_calls"] = self._asked.get("parallel_tool_calls") is not False
        made["usage"] = _usage(obj(made.get("usage")))
        return made


def _status(answer: ChatAnswer) -> str:
    """The status of the answer's last item."""
    return "incomplete" if answer.finish in _CUT else "completed"


def _call(piece: AnswerPiece, known: NamespacedTool | None) -> Json:
    """A tool call. `namespaced_tools`: the agent's name of its function if that is in a namespace."""
    made = {
        "type": "function_call",
        "id": f"fc_{piece.text}",
        "call_id": piece.text,
        "name": piece.name,
        "arguments": "",
        "status": "in_progress",
    }
    return made if known is None else made | {"name": known.name, "namespace": known.namespace}


def _part(kind: PieceKind) -> Json:
    name, key, _ = _PARTS[kind]
    return {"type": name, key: ""} | ({"annotations": [], "logprobs": []} if kind == "text" else {})


def _copied(item: Json) -> Json:
    """A copy of an item in its current state."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})


def _usage(usage: Json) -> Json:
    """Usage with the details that clients read without checking that they exist."""
    read, made = obj(usage.get("input_tokens_details")), obj(usage.get("output_tokens_details"))
    details = {
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0},
        "output_tokens_details": {"reasoning_tokens": made.get("reasoning_tokens") or 0},
    }
    return usage | details
