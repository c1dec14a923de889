"""Reads chat completions for sessions: the messages of a request, one by one, and the answer. Pure.

Malformed bytes never raise: a call that cannot be read continues no session, and none continues it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.gateway.model.turn import Message
from penstock.gateway.wire.dialects.chat import ChatDialect
from penstock.gateway.wire.dialects.loose_json import Json
from penstock.gateway.wire.dialects.parts import fingerprint, flat
from penstock.gateway.wire.dialects.token_ids import read_tokens

_CHAT: Final = ChatDialect()
_ITSELF: Final = ("stop", "tool_calls")
"""Finish reasons of an answer that the model may have ended by itself."""
_BY_TEXT: Final = (b'"stop_reason":"', b'"stop_reason": "')
"""Bytes in an answer that a stop text of the agent has ended. Their quotes cannot stand in a JSON string."""


class MessageFingerprint(NamedTuple):
    """A message with content."""

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
