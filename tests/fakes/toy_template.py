"""A tokenizer, a chat template and a tool parser that one can read: the template writes the past in another way than
the model did. Pure.

Text is tokenised into words; the toy model makes a token of each character, so that no answer of more than a character
comes back as the tokens that it was made of. The template strips white space, writes JSON anew, leaves reasoning out.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.gateway.wire.dialects.loose_json import objs

Json = dict[str, Any]
START, END = "<|im_start|>", "<|im_end|>"
CALL, CALLED = "<tool_call>", "</tool_call>"
_WORDS = re.compile(re.escape(START) + "|" + re.escape(END) + r"|\w+|\s+|[^\w\s]")


@dataclass
class Vocabulary:
    """Pieces of text by their ids; grows as it sees new ones."""

    pieces: list[str] = field(default_factory=lambda: [START, END])
    ids: dict[str, int] = field(default_factory=lambda: {START: 0, END: 1})

    def one(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self.ids[piece]

    def encode(self, text: str) -> list[int]:
        """As the tokenizer has it: the fewest pieces. What looks like a special token is one."""
        return [self.one(piece) for piece in _WORDS.findall(text)]

    def spell(self, text: str, ended: bool = True) -> list[int]:
        """As the model makes it: character by character, and its end."""
        return [*map(self.one, text), *([1] if ended else [])]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[id] for id in ids)


@dataclass(frozen=True)
class Template:
    """How a conversation is written. By default as the model writes it."""

    strips: bool = False
    rewrites: bool = False
    """Whether arguments are parsed and written anew."""
    thinks: bool = False
    """Whether reasoning is left out of turns that are not the last one."""
    moves: bool = False
    """Whether the system text is written before the last user message, wherever that is."""
    one_system: bool = False
    """Whether a system message anywhere but at the beginning is refused, as the template of Qwen3.5 refuses it."""
    ends: bool = True
    """Whether a turn of the model is ended by the token that the model ends it with."""

    def refusal(self, messages: Sequence[Json]) -> str | None:
        """Why it does not write a prompt of these."""
        refused = self.one_system and any(one["role"] in ("system", "developer") for one in messages[1:])
        return "System message must be at the beginning." if refused else None

    def write(self, messages: Sequence[Json], tools: Any = None, opening: bool = True) -> str:
        """The text of a prompt."""
        offered = f"{START}system\n{json.dumps(tools)}{END}\n" if tools else ""
        told = [self._message(one, at == len(messages) - 1) for at, one in enumerate(messages)]
        if self.moves:
            told = self._moved(messages, told)
        return offered + "".join(told) + (f"{START}assistant\n" if opening else "")

    def _moved(self, messages: Sequence[Json], told: list[str]) -> list[str]:
        system = [text for one, text in zip(messages, told, strict=True) if one["role"] == "system"]
        rest = [(one["role"], text) for one, text in zip(messages, told, strict=True) if one["role"] != "system"]
        last = max((at for at, (role, _) in enumerate(rest) if role == "user"), default=0)
        texts = [text for _, text in rest]
        return [*texts[:last], *system, *texts[last:]]

    def _message(self, message: Json, last: bool) -> str:
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        said = f"<think>{thought}</think>" if thought and not (self.thinks and not last) else ""
        content: Any = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text") or f"[{part['type']}]" for part in objs(cast(Any, content)))
        said += (content.strip() if self.strips else content) + "".join(
            f"{CALL}{self._call(call['function'])}{CALLED}" for call in message.get("tool_calls") or ()
        )
        end = END if self.ends or message["role"] != "assistant" else ""
        return f"{START}{message['role']}\n{said}{end}\n"

    def _call(self, function: Json) -> str:
        arguments = function["arguments"]
        if self.rewrites:
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        return f'{{"name": "{function["name"]}", "arguments": {arguments}}}'


def parsed(text: str, ids: Iterable[str] = ()) -> Json:
    """What an answer says, as a message: text up to the first tool call, and the calls."""
    reasoning, text = _thought(text)
    content, *calls = text.split(CALL)
    named = iter(ids)
    found = [_call(call, next(named, f"call-{at}")) for at, call in enumerate(calls) if CALLED in call]
    message: Json = {"role": "assistant", "content": content or None, "reasoning": reasoning}
    return message | ({"tool_calls": found} if found else {})


def _thought(text: str) -> tuple[str | None, str]:
    if text.startswith("<think>") and "</think>" in text:
        thought, _, rest = text.removeprefix("<think>").partition("</think>")
        return thought, rest
    return None, text


def _call(text: str, id: str) -> Json:
    value: Json = json.loads(text.partition(CALLED)[0])
    function = {"name": value["name"], "arguments": json.dumps(value["arguments"])}
    return {"id": id, "type": "function", "function": function}


def packed(ids: Iterable[int]) -> bytes:
    """Ids as the gateway keeps them."""
    return array("i", ids).tobytes()


def listed(ids: bytes) -> list[int]:
    """The other way round."""
    return array("i", ids).tolist()
