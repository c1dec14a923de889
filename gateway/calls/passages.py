"""What a span adds to a conversation (`model.passage`): of a call what its bodies say, of what is no call its texts.

Agents send the whole conversation with every call, so a call adds what its request says after the model's last answer,
and the answer. The first call of a conversation in an attempt adds all that it begins with: examples, or what was said
elsewhere. Whether a call is the first is asked only where there is an answer in its request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from penstock.gateway.calls.turns import decode_body, encoding
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.passages import of_body
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.passage import MOST, Passage
from penstock.gateway.model.span import Span

_REASON: Final = "penstock.reward.reason"


class Called(Protocol):
    """What of a span tells how to read its bodies."""

    @property
    def kind(self) -> str: ...
    @property
    def dialect(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def http_status(self) -> int | None: ...


def passages(span: Span, exchange: Exchange | None, whole: Callable[[], bool]) -> list[Passage]:
    """Those of a span. `whole`: is it the first call of a conversation in its attempt?"""
    if exchange is None:
        return of_attributes(span.attributes)
    request = decode_body(exchange.request_body, encoding(exchange.request_headers))[0]
    response = decode_body(exchange.response_body, encoding(exchange.response_headers))[0]
    return of_call(span, request, response, whole)


def of_call(call: Called, request: bytes, response: bytes, whole: Callable[[], bool]) -> list[Passage]:
    """Those of a call, by its decoded bodies."""
    found = list(by_name(call.dialect).passages(request, response, call.stream, whole))
    if (call.http_status or 0) >= 400 and not any(passage.answer for passage in found):
        # An error in no shape that is known, such as a page of a proxy.
        found += of_body(response, True)
    return _bounded(found)


def converses(call: Called) -> bool:
    """Whether it is a call of a conversation: embeddings and counts of tokens are none."""
    dialect = by_name(call.dialect)
    return call.kind == "llm" and dialect.answers and bool(dialect.conversation_field)


def of_attributes(attributes: Mapping[str, Any] | None) -> list[Passage]:
    """Those of what is no call: every attribute that is text; of the gateway's own only why a reward was given."""
    return _bounded(list(_texts(attributes or {})))


def _texts(attributes: Mapping[str, Any]) -> Iterator[Passage]:
    for name, text in attributes.items():
        if isinstance(text, str) and text and (not name.startswith("penstock.") or name == _REASON):
            yield Passage(False, "", "attribute", name, None, text)


def _bounded(passages: list[Passage]) -> list[Passage]:
    """The passages up to so many characters together; the last one is cut there."""
    left = MOST
    for at, passage in enumerate(passages):
        left -= len(passage.text)
        if left < 0:
            return [*passages[:at], passage._replace(text=passage.text[:left])]
    return passages


def tools_called(passages: Iterable[Passage]) -> list[str]:
    """The names of the tools that an answer asks for."""
    return [passage.name or "" for passage in passages if passage.answer and passage.kind == "tool_call"]
