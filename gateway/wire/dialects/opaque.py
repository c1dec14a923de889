"""All other calls: recorded byte for byte and not interpreted, except for fields that any JSON body may have.

The model is looked for because many of these calls name one (rerank, speech, fine-tuning), and upstreams are chosen by
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from penstock.gateway.model.passage import Passage
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects.base import Dialect, Facts
from penstock.gateway.wire.dialects.family import OPENAI
from penstock.gateway.wire.dialects.loose_json import Json, RequestFields, error_message, lenient, loads, obj
from penstock.gateway.wire.dialects.passages import body_passages
from penstock.gateway.wire.dialects.sse import last_data
from penstock.gateway.wire.dialects.usage import openai_usage

_TAIL: Final = 3
"""Number of events at the end of a stream, one of which may hold the usage."""


class _UsageField(msgspec.Struct):
    usage: Any = None


_answer = lenient(_UsageField)


def _used(usage: Any) -> Usage | None:
    found = openai_usage({"usage": usage})
    return None if found == Usage() else found


class OpaqueDialect(Dialect):
    """A call of no known format."""

    name = "opaque"
    family = OPENAI
    unknown = True

    def matches(self, method: str, path: str) -> bool:
        return True

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The requested model, and the answer's usage if it has the fields of chat's or responses'; of a stream, that
        of the last events."""
        said = last_data(response, _TAIL)[::-1] if stream else [response]
        usage = next((it for data in said if (it := _used(_answer(data).usage)) is not None), None)
        return Facts(model=self.model(request, asked=asked), usage=usage)

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The requested model, and the error if the answer is one."""
        answer = Json() if stream else obj(loads(response))
        usage = self.facts(request, response, stream).usage
        error = error_message(answer)
        return Turn(dialect=self.name, model=self.model(request), stream=stream, error=error, usage=usage)

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """Both bodies, as far as they are text."""
        return [*body_passages(request, False), *body_passages(response, True)]
