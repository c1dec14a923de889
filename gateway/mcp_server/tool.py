"""What a tool is: a name, what a model is told of it, its arguments, and the function that answers.

An answer is said twice, as clients differ in what they show a model: as fields, and as text. Both are bounded, and both
say how to get the rest. A tool that cannot answer raises `Refused` in plain words, with the way out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict, Field

from penstock.gateway.model.base import Noun

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

A = TypeVar("A", bound="Arguments")

MOST_TEXT = 20_000
"""Characters of an answer's text."""

Characters = Annotated[int, Field(ge=500, le=MOST_TEXT)]
Cursor = Annotated[str | None, Field(max_length=1000)]


class Refused(Exception):
    """A tool cannot answer; the message says why, and what to do."""


class Arguments(Noun):
    """Arguments of a tool; docstrings of the fields are what a model is told of them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Answer(Noun):
    """Fields of an answer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Said(NamedTuple):
    """An answer, twice."""

    answer: Answer
    text: str


@dataclass(frozen=True, slots=True)
class Context:
    """What a tool works with."""

    client: Client
    who: str
    """The program that calls, for what is kept under a name."""


@dataclass(frozen=True, slots=True)
class Tool(Generic[A]):
    """A tool of the server."""

    name: str
    title: str
    description: str
    arguments: type[A]
    answer: type[Answer]
    act: Callable[[Context, A], Awaitable[Said]]
    writes: bool = False
    """Whether it changes anything: then it is there only when the server was started with `--write`."""
    idempotent: bool = True
    """Whether the same call twice leaves what one leaves."""


AnyTool = Tool[Any]
