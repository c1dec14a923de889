"""The common base of all nouns: ids, modes, kinds of spans, and the base class."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

ID_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"


def _no_dots(value: str) -> str:
    if value in (".", ".."):
        raise ValueError("it may not be . or ..: no path could name it")
    return value


Id = Annotated[str, StringConstraints(pattern=ID_PATTERN), AfterValidator(_no_dots)]


LONGEST_S = 10 * 365 * 86400
"""Ten years, in seconds: longer than anything waits."""


Mode = Literal["train", "val", "test", "online"]


Origin = Literal["queued", "header", "implicit"]


SpanKind = Literal["llm", "tool", "mcp", "reward", "event", "otel"]


CALLS: tuple[SpanKind, ...] = ("llm", "tool", "mcp")
"""Kinds of spans that are calls: of a model, of a tool, and other requests to a server of tools."""
TOOLS: tuple[SpanKind, ...] = ("tool", "mcp")
"""Kinds of calls to a server of tools."""


class Noun(BaseModel):
    """Base of every noun: unknown fields are refused, so that a misspelt one is an error and not a silence.

    pydantic builds what checks it at first use: to build it for all of them takes a third of a command's start.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)


N = TypeVar("N", bound=BaseModel)


def parse_record(noun: type[N], record: bytes | None) -> N | None:
    """A noun from its record; None where there is none, or it is damaged: a damaged record must not stop others."""
    try:
        return None if record is None else noun.model_validate_json(record)
    except ValueError:
        return None
