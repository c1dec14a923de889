"""Everything else: recorded byte for byte and not interpreted, except for what any JSON body would say.

The model is looked for because many of these calls name one (rerank, speech, fine-tuning), and upstreams are chosen
by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.gateway.dialects.base import Dialect, Facts
from penstock.gateway.dialects.family import OPENAI
from penstock.gateway.dialects.loose_json import Peek, error_message, loads, obj
from penstock.gateway.dialects.passages import of_body
from penstock.gateway.model.passage import Passage
from penstock.gateway.model.turn import Turn


class Opaque(Dialect):
    """Any call at all."""

    name = "opaque"
    family = OPENAI
    unknown = True

    def matches(self, method: str, path: str) -> bool:
        """Always."""
        return True

    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        """The model asked for."""
        return Facts(model=self.model(request, asked=asked))

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The model asked for, and the error if the answer is one."""
        error = None if stream else error_message(obj(loads(response)))
        return Turn(dialect=self.name, model=self.model(request), stream=stream, error=error)

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """Both bodies, as far as they are text."""
        return [*of_body(request, False), *of_body(response, True)]
