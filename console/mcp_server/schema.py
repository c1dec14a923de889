"""JSON schemas of arguments and answers, as short as possible for models; errors of arguments in plain words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from penstock.gateway.model.validation_messages import sentence

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
