"""Rollouts as text for the reflecting model: the messages that each call added, and tools that failed. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

from penstock.console.views.rollout_tree import ConversationPrefixes
from penstock.gateway.model.transcript import Transcript
from penstock.gateway.model.turn import Message, Part

SYSTEM = ("system", "developer")
"""Roles whose texts are left out: they are the optimised texts, and are shown once, in the candidate's version."""


def render_transcript(transcript: Transcript) -> str:
    """Return the task and the conversation of an attempt; with several agents their messages in the order of the
    calls."""
    lines = [f"Task: {json.dumps(transcript.rollout.input, ensure_ascii=False)}"]
    conversations = ConversationPrefixes()
    for call in transcript.calls:
        if call.turn is None:
            continue
        agent = f"{call.span.agent}, " if call.span.agent else ""
        skip = conversations.known_length(call.turn.messages)
        for message in call.turn.messages[skip:]:
            if message.role not in SYSTEM:
                lines += (f"[{agent}{message.role}] {text}" for text in _texts(message))
        for choice in call.turn.choices[:1]:
            lines += (f"[{agent}assistant] {text}" for text in _texts(choice.message))
        if call.turn.error:
            lines.append(f"[{agent}error] {call.turn.error}")
        conversations.add(call.turn)
    lines += (f"[refused by a rule] {span.name or span.model or 'a tool call'}" for span in transcript.violations)
    if transcript.outcome.reason:
        lines.append(f"[ended] {transcript.outcome.reason}")
    return "\n".join(lines)


def _texts(message: Message) -> Iterator[str]:
    for part in message.parts:
        if text := _text(part):
            yield text


def _text(part: Part) -> str:
    match part.type:
        case "tool_call":
            return f"calls {part.name}({part.arguments or ''})"
        case "tool_call_response":
            failed = isinstance(part.data, dict) and cast(dict[str, object], part.data).get("is_error")
            return f"{'failed' if failed else 'result'}: {_result(part)}"
        case "text" | "refusal":
            return part.text or ""
        case _:
            return ""


def _result(part: Part) -> str:
    return part.text or ("" if part.data is None else json.dumps(part.data, ensure_ascii=False))
