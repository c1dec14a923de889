"""Results of a search for a text."""

from __future__ import annotations

from penstock.gateway.model.answers import Page
from penstock.gateway.model.base import Noun
from penstock.gateway.model.span import Span


class Hit(Noun):
    """A passage that has the text, around the first place where it stands."""

    answer: bool
    """True in the answer, false in the request."""
    role: str
    """Who says it: system, developer, user, assistant, tool ...; empty where nobody is known to."""
    part: str
    """What it is: text, reasoning, tool_call, tool_call_response, refusal, error, unknown, body or attribute."""
    name: str | None = None
    """Of a tool call the tool, of an attribute its name."""
    before: str
    """What stands before it, up to the length of context that was asked for."""
    match: str
    """The text as it stands there."""
    after: str
    """What stands behind it, up to the same length."""
    times: int = 1
    """How often it stands in the passage."""


class SearchRow(Noun):
    """A span that says it."""

    span: Span
    """Its head."""
    hits: list[Hit]
    """A hit for each passage that has the text, in the order in which they are said; the first ten."""
    more: int = 0
    """How many more passages have it."""


class SearchPage(Page):
    """Spans that say a text, newest first."""

    rows: list[SearchRow]
    """Each with the passages that have it."""
