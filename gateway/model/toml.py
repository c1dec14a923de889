"""Strict TOML trees: an unknown key is an error that names its path and the nearest right key.

Pure but for reading the file, and free of the gateway's own settings: the trainer's configuration uses it too.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.gateway.model.base import ID_PATTERN

# Errors in values in plain words, made from pydantic's errors. Pure.
#
# Each sentence follows the name of its field: it names the value and what would be right.

LONGEST: Final = 60
"""Most characters of a value that are shown."""
_TYPES: Final = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of a size that is kept",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
}
"""The expected value, by the type of the error."""
_BOUNDS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "greater_than": lambda c: f"more than {c['gt']:g}",
    "greater_than_equal": lambda c: f"{c['ge']:g} or more",
    "less_than": lambda c: f"less than {c['lt']:g}",
    "less_than_equal": lambda c: f"{c['le']:g} or less",
    "literal_error": lambda c: c["expected"],
    "enum": lambda c: c["expected"],
    "string_pattern_mismatch": lambda c: _pattern(c["pattern"]),
    "string_too_short": lambda c: f"text of {pluralized(c['min_length'], 'character')} or more",
    "string_too_long": lambda c: f"text of {pluralized(c['max_length'], 'character')} or less",
}
_PATTERNS: Final = {
    ID_PATTERN: "an id: up to 128 letters, digits and . _ -",
    r"^[A-Za-z0-9._-]{1,64}$": "a name: 1 to 64 letters, digits and . _ -",
    r"^[A-Za-z0-9._-]{1,253}$": "the name of a host: letters, digits and . _ -",
    r"^[0-9a-f]{64}$": "64 hexadecimal digits in lower case",
    r"^/[!-~]*$": "a path that begins with /",
    r"^[Xx]-[A-Za-z0-9-]{1,60}$": "the name of a header that begins with X-",
    r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$": "module:name",
    r"^[^\x00-\x1f\x7f]{1,64}$": "text of 1 to 64 characters that can be seen",
}
"""The expected value, by the pattern of its field; a pattern that is not here is shown itself."""
_USER_INFO: Final = re.compile(r"://[^/?#]*@")
_SIZES: Final = {"too_short": ("min_length", "or more"), "too_long": ("max_length", "or less")}


def sentence(error: Mapping[str, Any]) -> str:
    """The sentence for one of `ValidationError.errors()`, without its field."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "it is missing"
    if kind == "json_invalid":
        return f"it is not JSON: {context['error']}"
    if kind in _SIZES:
        name, most = _SIZES[kind]
        if context["actual_length"] is None:
            # pydantic stops counting the keys of an object that has too many.
            return f"it has more than {pluralized(context[name], 'item')}"
        return f"it has {pluralized(context['actual_length'], 'item')}, not {context[name]:,} {most}"
    wanted = _TYPES.get(kind) or (_BOUNDS[kind](context) if kind in _BOUNDS else None)
    if wanted is not None:
        return f"{_shown(error['input'])} is not {wanted}"
    found = f" (found {_shown(error['input'])})" if isinstance(error["input"], str | int | float) else ""
    return error["msg"].removeprefix("Value error, ") + found


def _pattern(pattern: str) -> str:
    return _PATTERNS.get(pattern, f"as {pattern} says")


def pluralized(number: int, noun: str) -> str:
    """A number with its noun: 1 call, 2 calls."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    # The text before the host of a URL may be a password.
    text = _USER_INFO.sub("://***@", repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


Tree = TypeVar("Tree", bound=BaseModel)
_UNQUOTED: Final = ("int_type", "float_type", "bool_type")
"""pydantic's names for values of the wrong type where TOML wants no quotes."""


class ConfigError(Exception):
    """The configuration cannot be used; the message names the key, the value and the way out."""


class Section(BaseModel):
    """The base of every table of a TOML file: unknown keys are refused, and values are not converted."""

    known_by: ClassVar[str] = "name"  # the key that tells one from others, where there are several

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def names_differ(names: Collection[str], what: str) -> None:
    """Raise `ValueError` where two names are equal. `what` names the objects, in the plural."""
    if twice := next((name for name in names if list(names).count(name) > 1), None):
        raise ValueError(f"{twice!r} is the name of two {what}: choose one for each")


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `ConfigError` when there is none or it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name another file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None


def validated(root: type[Tree], tree: dict[str, Any], where: str, options: Collection[str] = ()) -> Tree:
    """The tree as a `root`. Raises `ConfigError`, which names every wrong key and its origin: `where`, or the command
    line if the key is one of `options`."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        options_said, keys_said = list[str](), list[str]()
        for one in error.errors():
            if one["loc"] and one["loc"][0] in options:
                options_said.append(f"--{one['loc'][0]}: {sentence(one)}")
            else:
                keys_said.append(explained(root, tree, one, "configuration"))
        raise ConfigError(
            "; ".join(options_said + ([f"{where}: {'; '.join(keys_said)}"] if keys_said else []))
        ) from None


def explained(root: type[BaseModel], tree: dict[str, Any], error: Any, whole: str) -> str:
    """The sentence for one error in a tree of this model, with its place, and with the nearest right key where the key
    is unknown. `whole` names the tree; empty if it needs no name."""
    location = error["loc"]
    # pydantic marks errors in a key, and not in its value, so.
    location = location[:-1] if location[-1:] == ("[key]",) else location
    place = _place(root, tree, location) or whole
    if error["type"] == "list_type" and isinstance(error["input"], dict) and _section(root, location) is not root:
        return f"{place}: there may be several, so write [[{location[-1]}]] or a list of tables"
    if error["type"] in _UNQUOTED and re.fullmatch(r"[+-]?[\d.]+|true|false", str(error["input"])):
        return f"{place or whole}: {sentence(error)}: write it without quotes"
    known = list(_section(root, location[:-1]).model_fields) if location else []
    if error["type"] == "model_type" and location:
        others = difflib.get_close_matches(str(location[-1]), [name for name in known if name != location[-1]], 1)
        return f"{place}: {sentence(error)}" + "".join(f"; did you mean {name!r}?" for name in others)
    if error["type"] != "extra_forbidden":
        return f"{place}: {sentence(error)}" if place else sentence(error)
    if 0 < len(tables := _tables(root, str(location[-1]))) <= 3 and len(location) == 1:
        return f"{place}: unknown key; did you mean {' or '.join(tables)}?"
    near = difflib.get_close_matches(str(location[-1]), known, 1)
    return f"{place}: unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}")


def _tables(root: type[BaseModel], key: str) -> list[str]:
    """The tables that have this key, as a file writes them: `[tape] record`."""
    forms = {list: "[[{}]] {}", dict: "[{}.NAME] {}"}
    return [
        forms.get(cast(Any, get_origin(field.annotation)), "[{}] {}").format(name, key)
        for name, field in root.model_fields.items()
        if (inner := _section(root, (name,))) is not root and key in inner.model_fields
    ]


def _place(root: type[BaseModel], tree: Any, location: tuple[Any, ...]) -> str:
    """The place of an error: `upstream 'openai': base_url`. A table without a unique name has its number, from 1."""
    said, at = "", tree
    for depth, part in enumerate(location):
        if isinstance(part, int):
            said += f" {_which(_section(root, location[:depth]), at, part)}"
            # The value may be missing: a pair with one item has no second.
            at = dict(enumerate(cast("list[Any]", at))).get(part) if isinstance(at, list) else None
        elif isinstance(at, str | int | float | list):
            continue  # pydantic's name for one of the types that a value may have
        else:
            between = ": " if depth and isinstance(location[depth - 1], int) else "."
            said += f"{between if said else ''}{part}"
            at = cast("dict[str, Any]", at).get(part) if isinstance(at, dict) else None
    return said


def _which(model: type[BaseModel], several: Any, number: int) -> str:
    known_by = model.known_by if issubclass(model, Section) else ""
    tables = cast("list[Any]", several) if isinstance(several, list) else []
    names = [cast("dict[str, Any]", one).get(known_by) if isinstance(one, dict) else None for one in tables]
    name = names[number] if number < len(names) else None
    return repr(name) if isinstance(name, str) and names.count(name) == 1 else str(number + 1)


def _section(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    """The model that a location in a tree of `model` belongs to."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            annotation = cast(Any, model.model_fields[part].annotation)
            # A table, a list of them, or one by each name.
            inner = getattr(annotation, "__args__", ()) or (annotation,)
            model = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), model)
    return model
