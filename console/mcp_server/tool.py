"""The definition of a tool: a name, a description for models, its arguments, and the function that answers.

An answer is given twice, as fields and as text, because clients differ in which of them they show a model. Both are
limited, and both tell how to get the rest. A tool that cannot answer raises `ToolError` in plain words, with the way
out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.gateway.model.base import Noun
from penstock.gateway.model.toml import sentence

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
    """The base of a tool's answer as fields; models are told the docstrings of the fields."""

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


# JSON schemas of arguments and answers, as short as possible for models; errors of arguments in plain words. Pure.

SEVERAL = 5
"""Most errors that are reported at once."""
NULL = {"type": "null"}

Schema = dict[str, Any]


def schema(model: type[BaseModel]) -> Schema:
    """The schema without titles and the docstrings of classes. A nullable member is not required, and has only its
    other type."""
    made = _object(model.model_json_schema())
    return {name: value for name, value in made.items() if name != "description"}


def _object(given: Schema) -> Schema:
    fields: dict[str, Schema] = given.get("properties", {})
    needed = [name for name in given.get("required", []) if NULL not in fields[name].get("anyOf", [])]
    made = {name: value for name, value in given.items() if name not in ("title", "required", "properties", "$defs")}
    made |= {"properties": {name: _field(field) for name, field in fields.items()}}
    made |= {"required": needed} if needed else {}
    parts = cast("dict[str, Schema]", given.get("$defs", {}))
    return made | ({"$defs": {name: _part(part) for name, part in parts.items()}} if parts else {})


def _part(given: Schema) -> Schema:
    made = _object(given) if given.get("type") == "object" else _field(given)
    return {name: value for name, value in made.items() if name != "description"}


def _field(given: Schema) -> Schema:
    made = {name: value for name, value in given.items() if name != "title"}
    kinds = [kind for kind in made.get("anyOf", []) if kind != NULL]
    if len(kinds) == 1:
        del made["anyOf"]
        made = kinds[0] | made
    if made.get("default", made) is None:
        del made["default"]
    return made


def problems(error: ValidationError, model: type[BaseModel]) -> str:
    """The errors of arguments, a sentence each."""
    found = [_problem(one, model) for one in cast("list[Mapping[str, Any]]", error.errors(include_url=False))]
    return "; ".join(found[:SEVERAL])


def _problem(one: Mapping[str, Any], model: type[BaseModel]) -> str:
    place = ".".join(map(str, one["loc"]))
    if one["type"] == "extra_forbidden":
        names = ", ".join(model.model_fields)
        return f"{place}: there is no such argument; {f'there are: {names}' if names else 'it takes none'}"
    return f"{place or 'arguments'}: {sentence(one)}"
