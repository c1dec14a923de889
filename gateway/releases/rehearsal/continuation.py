"""Continues a conversation without its agent: puts an answer and the results of its tools behind the request. Pure.

An agent that has called its tools sends the conversation again with the model's answer and a result for each call. This
module does that for the agent, in the wire form of each API: the answer's own objects as they came, as the official
SDKs send them back, and the recorded results under the ids of the new calls. Read again, such a request is the old
conversation, the answer and the results.

The agent never saw these messages, so its later requests lack them. `restored` puts them back in their place: without
them the model would not know what its own tools have said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.gateway.dialects.json_post import Post
from penstock.gateway.dialects.loose_json import Json, arr, count, loads, obj, objs, text
from penstock.gateway.model.turn import Part

FIELDS: Final[Mapping[str, str]] = {
    "chat": "messages",
    "messages": "messages",
    "responses": "input",
    "gemini": "contents",
}
"""Where the conversation stands in a request, by dialect."""
_OUTPUTS: Final = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
_ASKING: Final = ("user", "system", "developer", "tool", "function")
"""Roles of messages that are not the model's."""


class CannotContinue(Exception):
    """The answer's calls have no results that could be written; the message says why."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Calls and results that an agent has not seen."""

    before: Sequence[Any]
    """The messages that they stand behind, as the agent sent them."""
    messages: Sequence[Any]
    """Themselves."""


def conversation(dialect: str, asked: Json) -> list[Any]:
    """The messages of a request, as they stand in it."""
    found = asked.get(FIELDS[dialect])
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return list(arr(found)) if isinstance(found, list) else [] if found is None else [found]


def with_conversation(dialect: str, asked: Json, messages: Sequence[Any]) -> bytes:
    """The request with these messages."""
    return orjson.dumps(asked | {FIELDS[dialect]: list(messages)})


def exchange(dialect: Post, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json]:
    """An answer and the results of its calls, in their order, as messages of a request. Raises `CannotContinue`."""
    made = _FORMS[dialect.name](dialect.answer(response, stream, []), results)
    if made is None:
        raise CannotContinue("a call of it has no result that could be written")
    return made


def restored(messages: Sequence[Any], told: Sequence[Hidden]) -> list[Any]:
    """A conversation with the messages that its agent has not seen. Of several for one place the last counts."""
    whole, at = list(messages), {len(one.before): one for one in told if _goes_on(messages, one)}
    for place in sorted(at, reverse=True):
        whole[place:place] = at[place].messages
    return whole


def _goes_on(messages: Sequence[Any], hidden: Hidden) -> bool:
    """Whether the messages are those before, and then the model's answer."""
    end = len(hidden.before)
    if end >= len(messages) or obj(messages[end]).get("role") in _ASKING:
        return False
    return _plain(list(messages[:end])) == _plain(list(hidden.before))


def _plain(value: Any) -> Any:
    """Without the markers of caches: agents move them from message to message."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in obj(value).items() if key != "cache_control"}
    return [_plain(inner) for inner in arr(value)] if isinstance(value, list) else value


# -- the wire forms --------------------------------------------------------------------------------------------------


def _chat(answer: Json, results: Sequence[Part]) -> list[Json] | None:
    choice = min(objs(answer.get("choices")), key=lambda one: count(one.get("index")) or 0, default=Json())
    message = {key: value for key, value in obj(choice.get("message")).items() if value not in (None, [])}
    if audio := obj(message.get("audio")):
        message["audio"] = {"id": audio.get("id")}
    calls = objs(message.get("tool_calls"))
    said: Json = {"role": "assistant", "content": None} | message
    if calls:
        said["tool_calls"] = [{"type": "custom" if "custom" in call else "function"} | call for call in calls]
    answered = [_tool(call, result) for call, result in zip(calls, results, strict=False)]
    if (function := obj(message.get("function_call"))) and len(results) > len(calls):
        answered.append({"role": "function", "name": function.get("name"), "content": results[len(calls)].text or ""})
    return [said, *answered] if len(answered) == len(results) else None


def _tool(call: Json, result: Part) -> Json:
    named = {} if result.name is None else {"name": result.name}
    return {"role": "tool", "tool_call_id": call.get("id"), "content": _content(result)} | named


def _content(result: Part) -> Any:
    return (result.text or "") if result.data is None else result.data


def _messages(answer: Json, results: Sequence[Part]) -> list[Json] | None:
    blocks = arr(answer.get("content"))
    calls = [block for block in objs(blocks) if block.get("type") == "tool_use"]
    answered = [_result(call, result) for call, result in zip(calls, results, strict=False)]
    turns: list[Json] = [{"role": "assistant", "content": blocks}, {"role": "user", "content": answered}]
    return turns if len(calls) == len(results) else None


def _result(call: Json, result: Part) -> Json:
    named = {"type": "tool_result", "tool_use_id": call.get("id")}
    if obj(result.data).get("type") == "tool_result":
        # A failed one is kept as a whole.
        return {key: value for key, value in obj(result.data).items() if key != "cache_control"} | named
    return named | {"content": _content(result)}


def _responses(answer: Json, results: Sequence[Part]) -> list[Json] | None:
    items = objs(answer.get("output"))
    calls = [item for item in items if text(item.get("type")) in _OUTPUTS]
    answered = [
        {"type": _OUTPUTS[call["type"]], "call_id": call.get("call_id"), "output": _content(result)}
        for call, result in zip(calls, results, strict=False)
    ]
    return [*items, *answered] if len(calls) == len(results) else None


def _gemini(answer: Json, results: Sequence[Part]) -> list[Json] | None:
    content = obj(next(iter(objs(answer.get("candidates"))), Json()).get("content"))
    calls = [obj(part.get("functionCall") or part.get("function_call")) for part in objs(content.get("parts"))]
    calls = [call for call in calls if call]
    parts = [{"functionResponse": _response(call, it)} for call, it in zip(calls, results, strict=False)]
    turns: list[Json] = [{"role": "model"} | content, {"role": "user", "parts": parts}]
    return turns if len(calls) == len(results) else None


def _response(call: Json, result: Part) -> Json:
    said = {"name": call.get("name"), "response": obj(loads(result.text or ""))}
    return said if call.get("id") is None else said | {"id": call["id"]}


_FORMS: Final[Mapping[str, Callable[[Json, Sequence[Part]], list[Json] | None]]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "gemini": _gemini,
}
