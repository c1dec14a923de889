"""Continues a conversation without its agent: appends an answer and the results of its tools to the request. Pure.

An agent that has called its tools sends the conversation again with the model's answer and a result for each call. This
module does that for the agent, in the wire form of its API (`Dialect.continuation`): the answer's own objects
unchanged, as the official SDKs send them back, and the recorded results under the ids of the new calls. Read again,
such a request is the old conversation, the answer and the results.

The agent never saw these messages, so its later requests lack them. `restore` puts them back in their place: without
them the model would not know the results of its own tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.gateway.model.turn import Part
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import Json, arr, obj

_ASKING: Final = ("user", "system", "developer", "tool", "function")
"""Roles of messages that are not the model's."""


class ContinuationError(Exception):
    """A tool call of the answer has no result that could be written; the message says why."""


@dataclass(frozen=True, slots=True)
class HiddenMessages:
    """Tool calls and results that an agent has not seen."""

    before: list[Any]
    """The messages before them, as `plain` returns them."""
    messages: Sequence[Any]
    """The hidden messages."""


def conversation(dialect: Dialect, asked: Json) -> list[Any]:
    """Return the messages of a request, unchanged."""
    found = asked.get(dialect.conversation_field)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return list(arr(found)) if isinstance(found, list) else [] if found is None else [found]


def with_conversation(dialect: Dialect, asked: Json, messages: Sequence[Any]) -> bytes:
    """Return the request with these messages."""
    return orjson.dumps(asked | {dialect.conversation_field: list(messages)})


def exchange(dialect: Dialect, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json]:
    """Return an answer and the results of its calls, in their order, as messages of a request. Raises
    `ContinuationError`."""
    made = dialect.continuation(response, stream, results)
    if made is None:
        raise ContinuationError("a call of it has no result that could be written")
    return made


def restore(messages: Sequence[Any], told: Sequence[HiddenMessages]) -> list[Any]:
    """Return a conversation with its hidden messages. Of several for one place the last counts."""
    whole = list(messages)
    compared: list[Any] = plain(whole)
    at = {len(one.before): one for one in told if _goes_on(compared, one)}
    for place in sorted(at, reverse=True):
        whole[place:place] = at[place].messages
    return whole


def _goes_on(messages: list[Any], hidden: HiddenMessages) -> bool:
    """True if the messages are those in `hidden.before`, followed by an answer of the model."""
    end = len(hidden.before)
    if end >= len(messages) or obj(messages[end]).get("role") in _ASKING:
        return False
    return messages[:end] == hidden.before


def plain(value: Any) -> Any:
    """Return a value without cache markers: agents move them from message to message."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in obj(value).items() if key != "cache_control"}
    return [plain(inner) for inner in arr(value)] if isinstance(value, list) else value
