"""Deferred answers: one call asks for an answer in the background, others fetch it, or cancel it, by its id.

Whoever fetches an answer, and however often, it belongs to the call that asked for it (`tape.background_answers`), so
it is read in that call's format. The call that fetches it uses no tokens.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects.base import Dialect, Facts
from penstock.gateway.wire.dialects.loose_json import RequestFields, lenient
from penstock.gateway.wire.dialects.opaque import OpaqueDialect

ID: Final = "[A-Za-z0-9_-]{1,256}"
"""Matches the id of an answer: it is a segment of a path, and a key on the tape."""


class _BackgroundField(msgspec.Struct):
    background: Any = None


_asked = lenient(_BackgroundField)
_id = re.compile(ID)


class RetrievalDialect(OpaqueDialect):
    """Calls that fetch answers of one format."""

    retrieves = True

    def __init__(self, name: str, of: Dialect, path: str) -> None:
        """`of`: the format of the calls that ask; `path`: a pattern of the path of an answer."""
        self.name, self._of = name, of
        self._calls = re.compile(f"GET {path}|POST {path}/cancel")

    def matches(self, method: str, path: str) -> bool:
        """True for calls whose response is the state of an earlier call."""
        return self._calls.fullmatch(f"{method} {path}") is not None

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The id and the state of the answer, and the answer's facts once it is there."""
        found = self._of.facts(b"", response, stream)
        name = None if found.finish is None else answer_name(self._of, found.response_id)
        return Facts(
            model_served=found.model_served,
            response_id=found.response_id,
            finish=found.finish,
            # An answer that is an error is no failure of the call that fetches it.
            failed=found.failed if name is None else None,
            answers=None if name is None else (name, found),
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The id and the model of the fetched answer. Its content is in the turn of the call that asked for it."""
        found = self._of.read(b"", response, stream)
        seen = {"model_served": found.model_served, "response_id": found.response_id, "stream": stream}
        return super().read(request, response, stream).model_copy(update=seen)


def deferred_answer_name(dialect: Dialect, request: bytes, facts: Facts) -> str | None:
    """The name under which an answer will be fetched (`answer_name`); None where the answer is complete. `facts`:
    those of the call that asked for it, as far as its response came."""
    ended = facts.finish is not None or facts.usage is not None
    if not dialect.stateful or ended or _asked(request).background is not True:
        return None
    return answer_name(dialect, facts.response_id)


def answer_name(dialect: Dialect, response: str | None) -> str | None:
    """The name of an answer of this format; None where its id is not valid."""
    return None if response is None or not _id.fullmatch(response) else f"{dialect.name}/{response}"
