"""Makes a chat answer of token ids, as vLLM writes one when asked for ids. Pure: it makes the requests to the engine
and the answer; `gateway.traffic.proxy.exact.connection` sends them.

Text, reasoning and tool calls come from derender, the server's own parsers; ids and log-probabilities come from
generate, unchanged. Two things are done here because derender does not do them. The token that ends a turn is no text,
and is not given to derender, which would write it out. And text is cut where generate ended because of a text that the
agent had named (`stop`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from penstock.gateway.model.turn import Message
from penstock.gateway.wire.dialects.chat import ChatDialect
from penstock.gateway.wire.dialects.loose_json import Json, arr, obj, objs
from penstock.gateway.wire.dialects.parts import fingerprint, flat
from penstock.gateway.wire.dialects.tokens import read_tokens

# Reads chat completions for sessions: the messages of a request, one by one, and the answer. Pure.
#
# Malformed bytes never raise: a call that cannot be read continues no session, and none continues it.

_CHAT: Final = ChatDialect()
_ITSELF: Final = ("stop", "tool_calls")
"""Finish reasons of an answer that the model may have ended by itself."""
_BY_TEXT: Final = (b'"stop_reason":"', b'"stop_reason": "')
"""Bytes in an answer that a stop text of the agent has ended. Their quotes cannot stand in a JSON string."""


class MessageFingerprint(NamedTuple):
    """The fingerprint of a request's message that has content."""

    at: int
    """Its index in the request."""
    role: str
    print: bytes
    """Its fingerprint."""
    edges: tuple[str, str]
    """White space around its text, which the fingerprint leaves out."""
    thought: str
    """Its reasoning, if the agent sends that back; without its edges."""


class AnswerChoice(NamedTuple):
    """One choice of an answer."""

    print: bytes
    edges: tuple[str, str]
    thought: str
    prompt: bytes
    """Token ids of the prompt."""
    ids: bytes
    """Token ids of the answer."""
    ended: bool
    """True if the model may have ended it by itself."""


def messages(asked: Json) -> list[Message]:
    return _CHAT.messages(asked, [])


def message_fingerprints(conversation: list[Message]) -> list[MessageFingerprint]:
    """Messages with their fingerprints, without those that have none."""
    found = [
        MessageFingerprint(at, one.role, fingerprint(one), _edges(one), _thought(one))
        for at, one in enumerate(conversation)
    ]
    return [one for one in found if one.print]


def only_text(conversation: list[Message]) -> bool:
    """True if tokens represent all of the content: no pictures, and nothing unknown."""
    return all(
        part.type not in ("media", "unknown") and part.data is None
        for message in conversation
        for part in message.parts
    )


def answer_choices(response: bytes, stream: bool) -> list[AnswerChoice]:
    """The choices of a decoded answer that came with all token ids."""
    tokens = read_tokens(response, stream)
    if not tokens.complete:
        return []
    by_text = any(mark in response for mark in _BY_TEXT)
    found: list[AnswerChoice] = []
    for choice in _CHAT.choices(_CHAT.answer(response, stream, [])):
        if (output := tokens.outputs.get(choice.index)) is not None:
            ended = choice.finish in _ITSELF and not by_text
            told = fingerprint(choice.message), _edges(choice.message), _thought(choice.message)
            found.append(AnswerChoice(*told, tokens.prompt, output.ids, ended))
    return found


def _edges(message: Message) -> tuple[str, str]:
    text = flat(message.parts)
    begun = text.lstrip()
    return text[: len(text) - len(begun)], begun[len(begun.rstrip()) :]


def _thought(message: Message) -> str:
    return "".join(part.text or "" for part in message.parts if part.type == "reasoning").strip()


# The answers of generate, plain or event by event. Pure.


class ChoiceDelta(msgspec.Struct):
    """One choice: complete in a plain answer, or a part of it in a streamed one."""

    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None


class GenerateEvent(msgspec.Struct):
    """An answer of generate, or an event of its stream."""

    choices: list[ChoiceDelta] = []
    usage: Any = None
    created: int | None = None
    error: Json | None = None


decode_event = msgspec.json.Decoder(GenerateEvent).decode
"""Reads an answer or an event; raises `ValueError` if it is neither."""


@dataclass(slots=True)
class PendingTokens:
    """The tokens of one choice that were not passed on yet."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[Any] | None = None
    finish: str | None = None
    stop: int | str | None = None
    usage: Any = None

    def add(self, delta: ChoiceDelta, usage: Any) -> None:
        """Add the choice of one event."""
        self.ids += delta.token_ids or ()
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *arr(obj(delta.logprobs).get("content"))]
        self.finish = delta.finish_reason or self.finish
        self.stop = delta.stop_reason if delta.stop_reason is not None else self.stop
        self.usage = usage or self.usage


END: Final = b"data: [DONE]\n\n"
_NOT_NEEDED: Final = ("messages", "stream_options", "return_token_ids", "logprobs", "top_logprobs", "logprob_token_ids")
"""Fields of a request that derender does not use; `messages` must be there, but may be empty."""


class _DerenderedAnswer(msgspec.Struct):
    choices: list[Json]


_whole = msgspec.json.Decoder(_DerenderedAnswer).decode


class ChatCompletionWriter:
    """Makes the chat answer to one request."""

    def __init__(self, asked: Json, rendered: Json, prompt: list[int]) -> None:
        """`asked`: the chat request; `rendered`: the answer of render; `prompt`: the ids that are sent."""
        self._asked, self._prompt = asked, prompt
        self._id, self._created = str(rendered.get("request_id")), int(time.time())
        self._stops = _stops(asked.get("stop"))
        self._shown = asked.get("top_logprobs") or 0
        choice = asked.get("tool_choice")
        self._named, self._required = isinstance(choice, dict), choice == "required"
        about: Json = {name: value for name, value in asked.items() if name not in _NOT_NEEDED}
        about["messages"] = []
        self._about: Json = {"model": asked.get("model"), "prompt_token_ids": prompt, "chat_request": about}
        self._opened = orjson.dumps(self._about)[:-1]

    @property
    def longest_stop(self) -> int:
        """Number of characters at the end of a text that may be the beginning of a stop text."""
        return max(map(len, self._stops), default=1) - 1

    # -- requests to derender ----------------------------------------------------------------------------------------

    def stream_request(self, index: int, piece: PendingTokens, state: bytes) -> bytes:
        """The request to derender for the new tokens of a choice."""
        ids = self._heard(piece.ids, piece.finish, piece.stop)
        choice: Json = {"index": index, "token_ids": ids, "finish_reason": piece.finish}
        chunk = orjson.dumps({"request_id": self._id, "choices": [choice]})
        return b'%b,"stream":true,"generate_chunk":%b,"stream_state":%b}' % (self._opened, chunk, state)

    def plain_request(self, choices: Iterable[ChoiceDelta]) -> bytes | None:
        """The request to derender for a plain answer; None if there are no tokens."""
        heard = [(choice, self._heard(choice.token_ids or [], choice.finish_reason, choice.stop_reason))
                 for choice in choices]  # fmt: skip
        told = [
            {"index": choice.index, "token_ids": ids, "finish_reason": choice.finish_reason}
            for choice, ids in heard
            if ids
        ]
        response = orjson.dumps({"request_id": self._id, "choices": told})
        return b'%b,"generate_response":%b}' % (self._opened, response) if told else None

    def _heard(self, ids: list[int], finish: str | None, stop: int | str | None) -> list[int]:
        """Ids without the one that ends the turn."""
        silent = finish == "stop" and not isinstance(stop, str) and not self._asked.get("include_stop_str_in_output")
        return ids[:-1] if silent else ids

    # -- the agent's answer ------------------------------------------------------------------------------------------

    def opening(self, index: int) -> bytes:
        """The first event of a choice."""
        choice: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return self._event([choice | {"finish_reason": None}], prompt_token_ids=self._prompt)

    def event(self, index: int, piece: PendingTokens, delta: Json, tools: bool) -> bytes:
        """The event for the new tokens of a choice. `tools`: True if it has called tools so far."""
        choice: Json = {"index": index, "delta": delta, "logprobs": self._logprobs(piece.logprobs)}
        choice["finish_reason"] = piece.finish
        if piece.finish is not None:
            called = tools and piece.finish == "stop" and not self._named
            choice |= {"finish_reason": "tool_calls" if called else piece.finish, "stop_reason": piece.stop}
        usage: Json = {"usage": piece.usage} if piece.usage else {}
        return self._event([choice | {"token_ids": piece.ids}], **usage)

    def usage_event(self, usage: Any) -> bytes:
        """The event with the token counts of the whole answer."""
        return self._event([], usage=usage)

    def error_event(self, error: Json) -> bytes:
        return b"data: %b\n\n" % orjson.dumps({"error": error})

    def plain_answer(self, event: GenerateEvent, said: bytes | None) -> bytes:
        """The body of a plain answer. `said`: derender's answer; None if there were no tokens."""
        told = {choice.get("index"): choice for choice in (_whole(said).choices if said else ())}
        choices = [self._choice(choice, obj(told.get(choice.index))) for choice in event.choices]
        body: Json = {"id": self._id, "object": "chat.completion", "created": event.created or self._created}
        body |= {"model": self._asked.get("model"), "choices": choices, "usage": event.usage}
        return orjson.dumps(body | {"prompt_logprobs": None, "prompt_token_ids": self._prompt})

    def _choice(self, delta: ChoiceDelta, said: Json) -> Json:
        message = obj(said.get("message")) or {"role": "assistant", "content": ""}
        calls, stop = objs(message.get("tool_calls")), delta.stop_reason
        if self._asked.get("parallel_tool_calls") is False and calls:
            message["tool_calls"] = calls[:1]
        if isinstance(stop, str) and isinstance(content := message.get("content"), str):
            message["content"] = self.cut(content, stop)
        called = bool(calls) and not self._named and (delta.finish_reason == "stop" or not self._required)
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(None if delta.logprobs is None else arr(obj(delta.logprobs).get("content"))),
            "finish_reason": "tool_calls" if called else delta.finish_reason,
            "stop_reason": stop,
            "token_ids": delta.token_ids,
        }

    def cut(self, text: str, stop: str) -> str:
        """A text up to the stop text that ended it."""
        # It ends at the first stop text, which is that of the last token; before `min_tokens` none is looked for.
        at = text.rfind(stop) if self._asked.get("min_tokens") else text.find(stop)
        end = at + len(stop) if self._asked.get("include_stop_str_in_output") else at
        return text if at < 0 else text[:end]

    def _logprobs(self, content: list[Any] | None) -> Json | None:
        """Log-probabilities with as many alternatives as were asked for, as in vLLM's own chat answers; generate adds
        the token itself."""
        if content is None or not self._asked.get("logprobs"):
            return None
        return {"content": [entry | {"top_logprobs": entry["top_logprobs"][: self._shown]} for entry in content]}

    def _event(self, choices: list[Json], **more: Any) -> bytes:
        about = {"id": self._id, "object": "chat.completion.chunk", "created": self._created}
        about |= {"model": self._asked.get("model"), "choices": choices}
        return b"data: %b\n\n" % orjson.dumps(about | more)


def _stops(stop: Any) -> list[str]:
    """The texts that end an answer."""
    found = [stop] if isinstance(stop, str) else arr(stop)
    return [one for one in found if isinstance(one, str) and one]


# One choice of a streamed answer: makes events of derender's answers. Pure.
#
# If the agent has named texts that end an answer (`stop`), the end of the text is held back as long as it may belong
# to one.


class _DerenderedChunk(msgspec.Struct):
    choices: list[Json] = []


class _DerenderStep(msgspec.Struct):
    chunk: _DerenderedChunk
    stream_state: msgspec.Raw


_step = msgspec.json.Decoder(_DerenderStep).decode


class ChoiceStream:
    """One choice of a streamed answer: the state of derender, and the text that is held back."""

    def __init__(self, words: ChatCompletionWriter, index: int) -> None:
        self._words, self._index = words, index
        self._state = b"null"
        self._held = ""
        self._tools = False

    def derender_request(self, piece: PendingTokens) -> bytes:
        """The request to derender for the new tokens."""
        return self._words.stream_request(self._index, piece, self._state)

    def event(self, piece: PendingTokens, answer: bytes) -> bytes:
        """The event for derender's answer; raises `ValueError` if that cannot be read."""
        step = _step(answer)
        self._state = bytes(step.stream_state)
        delta = _told(obj(step.chunk.choices[0].get("delta")) if step.chunk.choices else {})
        self._tools = self._tools or "tool_calls" in delta
        text = self._let_go(delta.pop("content", ""), piece)
        return self._words.event(self._index, piece, ({"content": text} if text else {}) | delta, self._tools)

    def _let_go(self, text: str, piece: PendingTokens) -> str:
        """The text that can be sent now; the rest is held."""
        text, keep = self._held + text, self._words.longest_stop
        if piece.finish is not None:
            self._held = ""
            return self._words.cut(text, piece.stop) if isinstance(piece.stop, str) else text
        at = len(text) - keep if keep else len(text)
        self._held = text[max(at, 0) :]
        return text[: max(at, 0)]


def _told(delta: Mapping[str, Any]) -> Json:
    """A delta without empty fields."""
    kept: Json = {name: value for name, value in delta.items() if value not in (None, []) and name != "role"}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call) for call in objs(kept["tool_calls"])]
    return kept


def _call(call: Json) -> Json:
    found = {name: value for name, value in call.items() if value is not None}
    function = {name: value for name, value in obj(call.get("function")).items() if value is not None}
    return found | ({"function": function} if function else {})
