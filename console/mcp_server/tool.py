"""The definition of a tool: a name, a description for models, its arguments, and the function that answers.

An answer is given twice, as fields and as text, because clients differ in which of them they show a model. Both are
limited, and both tell how to get the rest. A tool that cannot answer raises `ToolError` in plain words, with the way
out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict, Field

from penstock.gateway.model.base import Noun

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

A = TypeVar("A", bound=Noun)

MOST_TEXT = 20_000
"""Most characters of an answer's text."""

Characters = Annotated[int, Field(ge=500, le=MOST_TEXT)]
Cursor = Annotated[str | None, Field(max_length=1000)]


class ToolError(Exception):
    """A tool cannot answer; the message says why, and what to do."""


class ToolArguments(Noun):
    """Arguments of a tool; docstrings of the fields are what a model is told of them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ToolAnswer(Noun):
    """Fields of an answer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ToolResult(NamedTuple):
    """An answer, as fields and as text."""

    answer: ToolAnswer
    text: str


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The client of the gateway, and the caller."""

    client: Client
    who: str
    """The calling program, for entries that are kept under a name."""


@dataclass(frozen=True, slots=True)
class ToolDefinition(Generic[A]):
    name: str
    title: str
    description: str
    arguments: type[A]
    answer: type[ToolAnswer]
    act: Callable[[ToolContext, A], Awaitable[ToolResult]]
    writes: bool = False
    """True if it changes anything: it is then offered only by a server that was started with `--write`."""
    idempotent: bool = True
    """True if two equal calls leave the same as one."""


AnyTool = ToolDefinition[Any]
