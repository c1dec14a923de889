"""The passages that a span adds to a conversation (`model.turn`): of a call from its bodies, of any other span its
texts.

Agents send the whole conversation with every call, so a call adds the part of its request after the model's last
answer, and its answer. The first call of a conversation in an attempt adds everything that it begins with: examples, or
messages of an earlier attempt or client. Whether a call is the first is only looked up if its request holds an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import MOST, Exchange, Passage
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.parts import body_passages

_REASON: Final = "penstock.reward.reason"


class CallFacts(Protocol):
    """The facts of a span that its bodies are read by."""

    @property
    def kind(self) -> str: ...
    @property
    def dialect(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def http_status(self) -> int | None: ...


def passages(span: Span, exchange: Exchange | None, whole: Callable[[], bool]) -> list[Passage]:
    """The passages of a span. `whole`: True if it is the first call of a conversation in its attempt."""
    if exchange is None:
        return attribute_passages(span.attributes)
    request = decode_body(exchange.request_body, encoding(exchange.request_headers))[0]
    response = decode_body(exchange.response_body, encoding(exchange.response_headers))[0]
    return call_passages(span, request, response, whole)


def call_passages(call: CallFacts, request: bytes, response: bytes, whole: Callable[[], bool]) -> list[Passage]:
    """The passages of a call, from its decoded bodies."""
    found = list(by_name(call.dialect).passages(request, response, call.stream, whole))
    if (call.http_status or 0) >= 400 and not any(passage.answer for passage in found):
        # An error in an unknown shape, such as a page of a proxy.
        found += body_passages(response, True)
    return _bounded(found)


def is_conversation(call: CallFacts) -> bool:
    """True if it is a call of a conversation; embeddings and counts of tokens are none."""
    dialect = by_name(call.dialect)
    return call.kind == "llm" and dialect.answers and bool(dialect.conversation_field)


def attribute_passages(attributes: Mapping[str, Any] | None) -> list[Passage]:
    """The passages of a span that is no call: each attribute that is text; of the gateway's own only a reward's
    reason."""
    return _bounded(list(_texts(attributes or {})))


def _texts(attributes: Mapping[str, Any]) -> Iterator[Passage]:
    for name, text in attributes.items():
        if isinstance(text, str) and text and (not name.startswith("penstock.") or name == _REASON):
            yield Passage(False, "", "attribute", name, None, text)


def _bounded(passages: list[Passage]) -> list[Passage]:
    """The passages up to `MOST` characters together; the last one is cut there."""
    left = MOST
    for at, passage in enumerate(passages):
        left -= len(passage.text)
        if left < 0:
            return [*passages[:at], passage._replace(text=passage.text[:left])]
    return passages


def tools_called(passages: Iterable[Passage]) -> list[str]:
    """The names of the tools that an answer calls."""
    return [passage.name or "" for passage in passages if passage.answer and passage.kind == "tool_call"]
