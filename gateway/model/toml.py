"""Strict TOML trees: an unknown key is an error that names its path and the nearest right key.

Pure but for reading the file, and free of the gateway's own settings: the trainer's configuration is made of it too.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.gateway.model.wording import sentence

Tree = TypeVar("Tree", bound=BaseModel)


class ConfigError(Exception):
    """The configuration cannot be used; the message names the key, the value and the way out."""


class Section(BaseModel):
    """Base of every table."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def names_differ(names: Collection[str], what: str) -> None:
    """Raises `ValueError` where two have one name. `what` they are, in the plural."""
    if twice := next((name for name in names if list(names).count(name) > 1), None):
        raise ValueError(f"{twice!r} is the name of two {what}: choose one for each")


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `ConfigError` when there is none or it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None


def validated(root: type[Tree], tree: dict[str, Any], where: str, options: Collection[str] = ()) -> Tree:
    """The tree as a `root`. Raises `ConfigError` naming every wrong key and `where` it came from: the command line
    where it is one of `options`."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        options_said, keys_said = list[str](), list[str]()
        for one in error.errors():
            if one["loc"] and one["loc"][0] in options:
                options_said.append(f"--{one['loc'][0]}: {sentence(one)}")
            else:
                keys_said.append(_explain(root, one))
        raise ConfigError(
            "; ".join(options_said + ([f"{where}: {'; '.join(keys_said)}"] if keys_said else []))
        ) from None


def _explain(root: type[BaseModel], error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] != "extra_forbidden":
        return f"{where}: {sentence(error)}"
    return unknown_key(root, error["loc"])


def unknown_key(root: type[BaseModel], location: tuple[Any, ...]) -> str:
    """What is wrong with a key that a tree of this model does not have, and the nearest right one."""
    where, known = ".".join(map(str, location)), list(_section(root, location[:-1]).model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"{where}: unknown key; {hint}"


def _section(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    """The model that a location in a tree of `model` belongs to."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            annotation = cast(Any, model.model_fields[part].annotation)
            # A table, a list of them, or one by each name.
            inner = getattr(annotation, "__args__", ()) or (annotation,)
            model = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), model)
    return model
