"""Everything else: recorded byte for byte and not interpreted, except for what any JSON body would say.

The model is looked for because many of these calls name one (rerank, speech, fine-tuning), and upstreams are chosen
by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.gateway.dialects.base import EVENT_STREAM, Facts, Otel
from penstock.gateway.dialects.family import OPENAI, Family
from penstock.gateway.dialects.items import Items
from penstock.gateway.dialects.loose_json import Json, Peek, error_message, label, loads, obj, peek
from penstock.gateway.dialects.text_spans import Place, Texts
from penstock.gateway.dialects.token_estimate import SAID
from penstock.gateway.model.turn import Part, Turn


class Opaque:
    """Any call at all."""

    name = "opaque"
    family: Family = OPENAI
    any_family = True
    answers = generates = uses_tokens = stateful = False
    conversation_field = ""
    instructions: tuple[str, ...] = ()
    token_fields: Mapping[str, bytes] = MappingProxyType({})
    streaming_content_type = EVENT_STREAM
    otel: Otel | None = None

    def matches(self, method: str, path: str) -> bool:
        """Always."""
        return True

    def peek(self, request: bytes) -> Peek | None:
        """The few fields that a head needs, if the request is a JSON object."""
        return peek(request)

    def model(self, request: bytes, path: str = "", asked: Peek | None = None) -> str | None:
        """The model, if the request is a JSON object that names one."""
        return label((asked or peek(request)).model)

    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        """The model asked for."""
        return Facts(model=self.model(request, asked=asked))

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The model asked for, and the error if the answer is one."""
        error = None if stream else error_message(obj(loads(response)))
        return Turn(dialect=self.name, model=self.model(request), stream=stream, error=error)

    def system_texts(self, request: bytes) -> Texts:
        """None that is understood."""
        return Texts([])

    def tool_texts(self, request: bytes) -> list[Place]:
        """None that is understood."""
        return []

    def over(self, response: bytes) -> bool:
        """Nobody knows."""
        return False

    def conversation(self, request: bytes) -> list[bytes]:
        """None that is understood."""
        return []

    def reply(self, response: bytes, stream: bool) -> bytes:
        """None that is understood."""
        return b""

    def items(self, request: bytes) -> Items:
        """None that are understood."""
        return Items(None, [])

    def source(self, item: bytes) -> bytes:
        """None that is understood."""
        return b""

    def replies(self, response: bytes, stream: bool) -> list[bytes]:
        """None that are understood."""
        return []

    def response_id(self, response: bytes, stream: bool) -> str | None:
        """None that is understood."""
        return None

    def server_tools(self, asked: Json) -> list[str]:
        """None that are understood."""
        return []

    def continued(self, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json] | None:
        """None that is understood."""
        return None

    def texts_said(self, stream: bool) -> re.Pattern[bytes]:
        """By the names that most formats have for them."""
        return SAID
