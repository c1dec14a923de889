"""Measures our own source: its size, and the dependencies between its parts.

`measure` returns the figures, `faults` names parts that are too large, `rings` files that import each other in a ring.
`make measure` prints them, with those of `bench.paths`; `tests/test_measures.py` holds each below a ceiling.
"""

from __future__ import annotations

import ast
import gc
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "console", "sidecar", "adapters", "trainer", "tui")
LINES, FUNCTION_LINES, PARAMETERS = 700, 60, 8
SHORT_LINES, SHORT_WORDS = 60, 4
VAGUE = ("What", "How", "Whether", "Whose", "Where", "Who", "Which", "Of", "As", "Those")
"""A docstring that begins so has no subject, and is read twice."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


class Source(NamedTuple):
    """A file, and all nodes of its tree, the outermost first."""

    path: str
    text: str
    nodes: list[ast.AST]

    @property
    def module(self) -> str:
        return "penstock." + self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        """The package below `gateway`, a file that lies there itself, or another package at the top."""
        parts = self.module.split(".")[1:]
        return ".".join(parts[:2]) if parts[0] == "gateway" else parts[0]


def parsed(text: str) -> ast.Module:
    """The tree of a source text. No garbage is collected meanwhile: a finalizer that logs a traceback parses its lines,
    and within another call of `ast.parse` that makes CPython 3.11 raise `SystemError`."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@cache
def sources(*folders: str) -> list[Source]:
    """Return the files of folders, by their paths from the root; by default of our packages."""
    return [source for folder in folders or PACKAGES for source in _parsed(folder)]


@cache
def _parsed(folder: str) -> list[Source]:
    # A million nodes that all stay: garbage collection takes longer than parsing.
    gc.collect()
    gc.disable()
    try:
        paths = sorted((ROOT / folder).rglob("*.py"))
        # Packages that a bench has installed are in a folder with a dot.
        shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
        texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in shown}
        return [Source(path, text, list(ast.walk(ast.parse(text)))) for path, text in texts.items()]
    finally:
        gc.freeze()
        gc.enable()


def faults(source: Source) -> Iterator[str]:
    """Yield the parts of a file that are too large."""
    if (lines := len(source.text.splitlines())) > LINES:
        yield f"{source.path}: it has {lines} lines, not {LINES} or less: split it where two ideas meet"
    for node in source.nodes:
        if not isinstance(node, Function):
            continue
        place, lines, number = f"{source.path}:{node.lineno}: {node.name}", _lines(node), _parameters(node)
        if lines > FUNCTION_LINES:
            yield f"{place} has {lines} lines, not {FUNCTION_LINES} or less: split it"
        if number > PARAMETERS:
            yield f"{place} has {number} parameters, not {PARAMETERS} or less: make a noun"


def _lines(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def _parameters(function: Function) -> int:
    every = function.args
    plain = [*every.posonlyargs, *every.args]
    own = bool(plain) and plain[0].arg in ("self", "cls")
    return len(plain) - own + len(every.kwonlyargs) + (every.vararg is not None) + (every.kwarg is not None)


def graph(found: Sequence[Source]) -> dict[str, set[str]]:
    """Return module -> modules that it imports, including imports for types and inside of functions."""
    modules = {source.module for source in found}
    return {one.module: imports(one.module, one.path.endswith("__init__.py"), one.nodes, modules) for one in found}


def imports(own: str, is_package: bool, nodes: Iterable[ast.AST], modules: Set[str]) -> set[str]:
    """Return those of `modules` that a file imports. A package counts if a name that is no module is imported from
    it."""
    package = own if is_package else own.rpartition(".")[0]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            whole = ".".join(part for part in (above, node.module) if part)
            names = {f"{whole}.{alias.name}" for alias in node.names}
            found |= names & modules
            found |= {whole} if names - modules else set()
    return (found & modules) - {own}


def rings(modules: Mapping[str, Set[str]]) -> Iterator[list[str]]:
    """Yield modules of which each imports the next, the first one again at the end; each import is reported once."""
    left = {module: set(others) for module, others in modules.items()}
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as problem:
            found: list[str] = list(reversed(problem.args[1]))
            yield found
            left[found[0]].remove(found[1])
        else:
            return


def layers() -> list[list[str]]:
    """Return the rooms of the gateway by layer, the highest first, as in the import contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (one["layers"] for one in contracts if one.get("containers") == ["penstock.gateway"])
    return [[f"gateway.{name.strip()}" for name in re.split("[|:]", line)] for line in found]


def settings() -> dict[str, int]:
    """Return the number of keys of penstock.toml, a release's policy, train.toml and apo.toml (tables do not count,
    their keys do), and of options of `penstock run`."""
    from penstock.gateway.config import GatewayConfig as Gateway
    from penstock.gateway.model.release_policy import ReleasePolicy
    from penstock.sidecar.run.commands import RunOptions
    from penstock.trainer.apo.config import ApoConfig as Apo
    from penstock.trainer.config import TrainConfig as Trainer

    files = {"penstock.toml": Gateway, "policy": ReleasePolicy, "train.toml": Trainer, "apo.toml": Apo}
    options = {"gateway", *(one.name for one in fields(RunOptions))}
    return {name: len(list(_keys(model))) for name, model in files.items()} | {"penstock run": len(options)}


def _keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _table(field.annotation)
        if inner is None:
            yield path + name
        else:
            yield from _keys(inner, f"{path}{name}.")


def _table(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a table, of a list of tables, or of an optional one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _table(one)) is not None), None)


def measure() -> dict[str, int]:
    """Return every figure, by its name for people."""
    found = sources()
    rooms = {source.module: source.room for source in found}
    lines = layers()
    layer = {room: number for number, names in enumerate(lines) for room in names}
    arrows = {
        (rooms[module], rooms[other])
        for module, others in graph(found).items() for other in others if rooms[module] != rooms[other]
    }  # fmt: skip
    classes = Counter(name for source in found for name in _classes(source))
    near: dict[str, Counter[str]] = defaultdict(Counter)
    for source in found:
        near[str(layer.get(source.room, source.room))].update(_classes(source))
    docstrings = [words for source in found for words in _docstrings(source)]
    long = [len(source.text.splitlines()) for source in found]
    return {
        "files": len(found),
        "lines": sum(long),
        f"files below {SHORT_LINES} lines": sum(0 < one < SHORT_LINES for one in long),
        "rooms of the gateway": sum(
            "." in room and (ROOT / room.replace(".", "/")).is_dir() for room in {*rooms.values()}
        ),
        "layers of the gateway": len(lines),
        "arrows between rooms": len(arrows),
        "arrows back": sum(layer.get(one, -1) > layer.get(other, len(lines)) for one, other in arrows),
        "classes": classes.total(),
        "class names used twice": sum(number > 1 for number in classes.values()),
        "class names used twice in a layer": sum(number > 1 for names in near.values() for number in names.values()),
        f"docstrings of {SHORT_WORDS} words or fewer": sum(len(words) <= SHORT_WORDS for words in docstrings),
        "docstrings that begin with What, Of and the like": sum(words[0] in VAGUE for words in docstrings),
        "settings": sum(settings().values()),
    }


def _classes(source: Source) -> Iterator[str]:
    return (node.name for node in source.nodes if isinstance(node, ast.ClassDef))


def _docstrings(source: Source) -> Iterator[list[str]]:
    texts = (ast.get_docstring(node) for node in source.nodes if isinstance(node, Documented))
    return (text.split() for text in texts if text)


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{figure:>8,}  {name}")
