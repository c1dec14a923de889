"""OpenAI chat completions: `POST /v1/chat/completions`, as OpenAI, vLLM, SGLang and most others speak it.

Streams come as deltas per choice; a choice's text and its tool calls' arguments are put together piece by piece.
Reasoning is read from `reasoning_content` and from `reasoning`: servers disagree on the name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import orjson

from penstock.gateway.dialects.base import Facts, Otel
from penstock.gateway.dialects.ending import Said, body_failed, is_done, stream_failed
from penstock.gateway.dialects.family import OPENAI
from penstock.gateway.dialects.items import cutter
from penstock.gateway.dialects.json_post import Post, choices_of, marked, routes
from penstock.gateway.dialects.loose_json import (
    PROMPT,
    Json,
    Peek,
    chunks,
    count,
    earliest,
    entries,
    joined,
    label,
    lenient,
    loads,
    obj,
    objs,
    peek,
    text,
    tokens,
)
from penstock.gateway.dialects.parts import (
    compared,
    content_parts,
    flat_text,
    result_content,
    result_part,
    same_arguments,
)
from penstock.gateway.dialects.passages import of_message, of_part
from penstock.gateway.dialects.sse import last
from penstock.gateway.dialects.text_spans import Described, Item, Pointed, Quoted, quoted_items, quoted_tool
from penstock.gateway.dialects.token_ids import IDS, LOGPROBS
from penstock.gateway.model.passage import Passage
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool

CALL = b'"function":{"name":"'
"""Only the first delta of a tool call has the name; CUSTOM is its like for custom tools."""
_COMMON = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""What there is to a message of no unusual kind."""
CUSTOM = b'"custom":{"name":"'
FAILED = "error"
"""The finish reason by which routers of models say that the model failed in the middle of its answer."""
TAIL = 5
"""[DONE], the usage, the finish reason, and room for two more: content filters, comments of the server."""


class _Said(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    finish_reason: Any = None
    message: _Said | None = None


class _Answer(Said):
    """Of a plain body or a chunk only what a head wants: text, log-probabilities and token ids are skipped."""

    id: Any = None
    model: Any = None
    usage: Any = None
    choices: list[_Choice] | None = None


class _Asked(Peek):
    messages: list[Item] | None = None


class _Told(Peek):
    messages: list[msgspec.Raw] | None = None


class _Offer(msgspec.Struct):
    function: Described | None = None
    custom: Described | None = None


class _Offers(msgspec.Struct):
    tools: list[_Offer] | None = None


_decode = lenient(_Answer)
_asked = msgspec.json.Decoder(_Asked).decode
_offers = msgspec.json.Decoder(_Offers).decode


_READ = 2 << 20
"""Bytes at the end of a stream in which the ends of its choices are looked for: that takes a second, in which nothing
else is recorded."""


class Framed(Post):
    """What chat and text completions share: the frame around their choices."""

    family = OPENAI
    last_mark = b"[DONE]"

    def over(self, response: bytes) -> bool:
        """True after `[DONE]`."""
        return last(response, 1) == [b"[DONE]"]

    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        """A stream of one choice is read from its end; of several (rare) whole, since each ends where it likes."""
        asked = asked or peek(request)
        facts = Facts(model=label(asked.model))
        wanted = count(asked.n) or 1
        if not stream:
            answer = _decode(response)
            _note(facts, answer)
            facts.failed = "error_body" if facts.finish == FAILED else body_failed(answer)
            return facts
        tail = [_decode(data) for data in reversed(last(response, TAIL))]
        if wanted > 1:
            _note(facts, _decode(orjson.dumps(self.assemble(response, []))))
        else:
            for answer in tail:
                _note(facts, answer)
            facts.tool_calls += marked(response, CALL) if asked.tools else 0
            # Rare enough not to be searched for in every answer.
            facts.tool_calls += marked(response, CUSTOM) if facts.finish == "tool_calls" else 0
            facts.tool_calls += facts.finish == "function_call"
        facts.failed = stream_failed(response, tail, lambda: is_done(response) or self._finished(response, wanted))
        facts.failed = "stream_error" if facts.finish == FAILED else facts.failed
        return facts

    def _finished(self, response: bytes, wanted: int) -> bool:
        """Whether all choices of a stream have ended; some servers send nothing after that."""
        end = response if len(response) <= _READ else response[response.find(b"\n\n", len(response) - _READ) + 2 :]
        choices = self.assemble(end, [])["choices"]
        return len(choices) >= wanted and _complete(choices)

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Chunks carry the answer's own fields again and again, and pieces of its choices."""
        answer: Json = {}
        pieces: dict[int, list[Json]] = {}
        for chunk in chunks(body, problems):
            answer |= {key: chunk[key] for key in ("id", "model", "usage", "error") if chunk.get(key) is not None}
            for piece in objs(chunk.get("choices")):
                pieces.setdefault(count(piece.get("index")) or 0, []).append(piece)
        answer["choices"] = [self.fold(index, pieces[index]) for index in sorted(pieces)]
        if not (_complete(answer["choices"]) or "error" in answer or body.rstrip().endswith(b"[DONE]")):
            problems.append("response: the stream ended early")
        return answer

    @abstractmethod
    def fold(self, index: int, pieces: list[Json]) -> Json:
        """The pieces of one choice as a choice of a plain answer."""

    @abstractmethod
    def message(self, choice: Json) -> Message:
        """What a choice says."""

    def choices(self, answer: Json) -> list[Choice]:
        """As many as there are, by index."""
        return choices_of(answer.get("choices"), self.message, "finish_reason")

    def usage(self, answer: Json) -> Usage | None:
        """As reported."""
        return tokens(answer.get("usage"), PROMPT)


class Chat(Framed):
    """Chat completions."""

    name = "chat"
    routes: ClassVar[frozenset[str]] = routes("/chat/completions")
    apart: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "functions", "model", "stream"})
    client_tools: ClassVar[tuple[str, ...]] = ("function", "custom")
    conversation_field = "messages"
    token_fields: Mapping[str, bytes] = MappingProxyType({IDS: b"true", LOGPROBS: b"true"})
    otel: Otel | None = Otel("chat", "openai", "chat_completions")
    cut = staticmethod(cutter(_Told))

    def quoted_system(self, request: bytes) -> Pointed:
        """Messages of the roles system and developer."""
        asked = _asked(request)
        return quoted_items(asked.messages, "messages"), asked

    def quoted_descriptions(self, request: bytes) -> Iterator[Quoted]:
        """Of functions and custom tools."""
        for at, offer in enumerate(_offers(request).tools or ()):
            yield from quoted_tool(offer.function, ("tools", at, "function"))
            yield from quoted_tool(offer.custom, ("tools", at, "custom"))

    def fold(self, index: int, pieces: list[Json]) -> Json:
        """The pieces of one choice as a choice of a plain answer."""
        deltas = [obj(piece.get("delta")) for piece in pieces]
        message = {key: joined(deltas, key) for key in ("content", "refusal", "reasoning_content", "reasoning")}
        return {
            "index": index,
            "finish_reason": earliest(pieces, "finish_reason"),
            "message": message
            | {"role": earliest(deltas, "role"), "audio": _audio(deltas)}
            | {"tool_calls": _calls(deltas), "function_call": _function(deltas)},
        }

    def message(self, choice: Json) -> Message:
        """The message in a choice."""
        return _message(obj(choice.get("message")), "assistant")

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One for one."""
        return [_message(item, "user") for item in entries(asked, "messages", problems)]

    def asked_passages(self, asked: Json) -> Iterator[Passage]:
        """The same as of the messages, without making any: an index reads every call."""
        return (passage for item in objs(asked.get("messages")) for passage in _passages(item, "user", False))

    def answer_passages(self, answer: Json) -> Iterator[Passage]:
        """The same as of the choices."""
        choices = objs(answer.get("choices"))
        return (passage for it in choices for passage in _passages(obj(it.get("message")), "assistant", True))

    def source(self, item: bytes) -> bytes:
        """The fingerprint of the message, without making one of it: every call brings new ones."""
        wire = loads(item)
        return _source(obj(wire)) if isinstance(wire, dict) else b""

    def tools(self, asked: Json) -> list[Tool]:
        """Functions, custom tools, and the functions of before there were tools."""
        tools = [_tool(item) for item in objs(asked.get("tools"))]
        return tools + [_named(item, "function") for item in objs(asked.get("functions"))]

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The first choice's message, and a message for each result."""
        choice = min(objs(answer.get("choices")), key=lambda one: count(one.get("index")) or 0, default=Json())
        message = {key: value for key, value in obj(choice.get("message")).items() if value not in (None, [])}
        if audio := obj(message.get("audio")):
            message["audio"] = {"id": audio.get("id")}
        calls = objs(message.get("tool_calls"))
        said: Json = {"role": "assistant", "content": None} | message
        if calls:
            said["tool_calls"] = [{"type": "custom" if "custom" in call else "function"} | call for call in calls]
        answered = [_result(call, result) for call, result in zip(calls, results, strict=False)]
        function = obj(message.get("function_call"))
        if function and len(results) > len(calls):
            content = results[len(calls)].text or ""
            answered.append({"role": "function", "name": function.get("name"), "content": content})
        return [said, *answered] if len(answered) == len(results) else None


def _note(facts: Facts, answer: _Answer) -> None:
    """Adds what is not known yet: the end of a stream is noted newest first."""
    facts.model_served = facts.model_served or label(answer.model)
    facts.response_id = facts.response_id or label(answer.id)
    facts.usage = facts.usage or tokens(answer.usage, PROMPT)
    if answer.choices:
        facts.finish = facts.finish or label(answer.choices[0].finish_reason)
        facts.choices = max(facts.choices, len(answer.choices))
        for choice in answer.choices:
            if (said := choice.message) is not None:
                facts.tool_calls += len(said.tool_calls or ()) + bool(obj(said.function_call))


def _complete(choices: list[Json]) -> bool:
    return bool(choices) and all(choice["finish_reason"] for choice in choices)


def _audio(deltas: list[Json]) -> Json | None:
    pieces = [audio for delta in deltas if (audio := obj(delta.get("audio")))]
    whole = {key: joined(pieces, key) for key in ("data", "transcript")}
    return {"id": earliest(pieces, "id"), **whole} if pieces else None


def _calls(deltas: list[Json]) -> list[Json]:
    """Tool calls of a stream, in order. A delta without an index belongs to the newest call unless it brings an id."""
    slots: dict[int, list[Json]] = {}
    for piece in (piece for delta in deltas for piece in objs(delta.get("tool_calls"))):
        index = count(piece.get("index"))
        newest = max(slots, default=-1)
        slot = newest + bool(piece.get("id") or newest < 0) if index is None else index
        slots.setdefault(slot, []).append(piece)
    return [_call(slots[slot]) for slot in sorted(slots)]


def _call(pieces: list[Json]) -> Json:
    custom = [obj(piece.get("custom")) for piece in pieces if "custom" in piece]
    function = [obj(piece.get("function")) for piece in pieces]
    body: Json = (
        {"custom": _named_text(custom, "input")} if custom else {"function": _named_text(function, "arguments")}
    )
    return {"id": earliest(pieces, "id"), **body}


def _function(deltas: list[Json]) -> Json | None:
    pieces = [call for delta in deltas if (call := obj(delta.get("function_call")))]
    return _named_text(pieces, "arguments") if pieces else None


def _named_text(pieces: list[Json], key: str) -> Json:
    return {"name": earliest(pieces, "name"), key: joined(pieces, key)}


def _result(call: Json, result: Part) -> Json:
    named = {} if result.name is None else {"name": result.name}
    return {"role": "tool", "tool_call_id": call.get("id"), "content": result_content(result)} | named


def _message(wire: Json, role: str) -> Message:
    role = text(wire.get("role")) or role
    return Message(role=role, parts=_parts(wire, role), name=text(wire.get("name")))


def _parts(wire: Json, role: str) -> list[Part]:
    if role in ("tool", "function"):
        return [result_part(wire.get("tool_call_id"), wire.get("content"), name=wire.get("name"))]
    thought = text(wire.get("reasoning_content")) or text(wire.get("reasoning"))
    refusal, audio, function = text(wire.get("refusal")), obj(wire.get("audio")), obj(wire.get("function_call"))
    return [
        *([Part(type="reasoning", text=thought)] if thought else []),
        *content_parts(wire.get("content")),
        *([Part(type="refusal", text=refusal)] if refusal else []),
        *([Part(type="media", data=audio)] if audio else []),
        *[_call_part(call) for call in objs(wire.get("tool_calls"))],
        *([_call_part({"function": function})] if function else []),
    ]


def _passages(wire: Json, role: str, answer: bool) -> Iterator[Passage]:
    """Those of the commonest messages: texts, calls and results. Of others those of the message that it is."""
    said, calls = wire.get("content"), wire.get("tool_calls")
    role = text(wire.get("role")) or role
    if wire.keys() - _COMMON or not (said is None or isinstance(said, str)):
        yield from of_message(_message(wire, role), answer)
    elif role in ("tool", "function"):
        if said:
            yield Passage(
                answer, role, "tool_call_response", text(wire.get("name")), text(wire.get("tool_call_id")), said
            )
    else:
        if said:
            yield Passage(answer, role, "text", None, None, said)
        for call in objs(calls) if calls else ():
            yield from of_part(_call_part(call), role, answer)


def _call_part(call: Json) -> Part:
    body = obj(call.get("function")) or obj(call.get("custom"))
    arguments = text(body.get("arguments") if "arguments" in body else body.get("input"))
    return Part(type="tool_call", id=text(call.get("id")), name=text(body.get("name")), arguments=arguments or "")


def _source(wire: Json) -> bytes:
    role = text(wire.get("role")) or "user"
    said = flat_text(wire.get("content"))
    if role in ("tool", "function"):
        return orjson.dumps([role, "", [], [[text(wire.get("tool_call_id")), said]]])
    calls = [_call_source(call) for call in objs(wire.get("tool_calls"))]
    if function := obj(wire.get("function_call")):
        calls.append(_call_source({"function": function}))
    return compared(role, said, calls, [])


def _call_source(call: Json) -> list[str | None]:
    body = obj(call.get("function")) or obj(call.get("custom"))
    arguments = text(body.get("arguments") if "arguments" in body else body.get("input"))
    return [text(call.get("id")), text(body.get("name")), same_arguments(arguments or "")]


def _tool(item: Json) -> Tool:
    kind = text(item.get("type")) or "function"
    return _named(obj(item.get(kind)) or item, kind)


def _named(item: Json, kind: str) -> Tool:
    return Tool(
        name=text(item.get("name")) or kind,
        description=text(item.get("description")),
        parameters=item.get("parameters"),
    )
