"""Nothing grows past what can be read at one go: modules, functions, lists of parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES, FUNCTION_LINES, PARAMETERS = 700, 60, 8
FOLDERS = ("penstock", "gateway", "sidecar", "adapters", "trainer", "tui", "bench")
Function = ast.FunctionDef | ast.AsyncFunctionDef

TOO_LARGE: frozenset[str] = frozenset()
"""What is too large today. What is no longer has to go from here."""


def test_nothing_is_too_large() -> None:
    # What a bench has installed lies in a folder with a dot.
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    paths = [path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    flaws = {place: flaw for path in paths for place, flaw in too_large(path.relative_to(ROOT), path.read_text())}
    grown = {place: flaw for place, flaw in flaws.items() if place not in TOO_LARGE}
    assert not grown
    assert not TOO_LARGE - set(flaws), "these are small enough now: take them from TOO_LARGE"


def too_large(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """(module or function, what is wrong with it)."""
    lines = len(text.splitlines())
    if lines > LINES:
        yield f"{path.as_posix()}", f"{lines} lines"
    for name, function in functions(ast.parse(text)):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{path.as_posix()}: {name}", f"{lines} lines"
        if (number := parameters(function)) > PARAMETERS:
            yield f"{path.as_posix()}: {name}", f"{number} parameters"


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its name in the module, those inside of classes and of functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield outer + node.name, node
        named = isinstance(node, Function | ast.ClassDef)
        yield from functions(node, f"{outer}{node.name}." if named else outer)


def parameters(function: Function) -> int:
    every = function.args
    plain = [*every.posonlyargs, *every.args]
    own = bool(plain) and plain[0].arg in ("self", "cls")
    return len(plain) - own + len(every.kwonlyargs) + (every.vararg is not None) + (every.kwarg is not None)


@pytest.mark.parametrize(
    ("text", "flaws"),
    [
        ("x = 1\n" * 701, [("here.py", "701 lines")]),
        ("x = 1\n" * 700, []),
        ("class A:\n    async def f(self):\n" + "        x\n" * 60, [("here.py: A.f", "61 lines")]),
        ("def f():\n" + "    x\n" * 59, []),
        ("def f(a, /, b, c, *d, e, f, g, h, **i): ...", [("here.py: f", "9 parameters")]),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", []),
        ("if x:\n    def f(a, b, c, d, e, f, g, h, i): ...", [("here.py: f", "9 parameters")]),
        ("def f():\n    def g(a, b, c, d, e, f, g, h, i): ...", [("here.py: f.g", "9 parameters")]),
    ],
)
def test_what_is_too_large(text: str, flaws: list[tuple[str, str]]) -> None:
    assert list(too_large(Path("here.py"), text)) == flaws
