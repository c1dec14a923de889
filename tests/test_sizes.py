"""Nothing grows past what can be read at one go: modules, functions, lists of parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from fakes.source import GROUP, PACKAGES, sources

pytestmark = GROUP
LINES, FUNCTION_LINES, PARAMETERS = 700, 60, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_nothing_is_too_large() -> None:
    found = sources("penstock", *PACKAGES, "bench")
    faults = [fault for source in found for fault in too_large(source.path, source.text, source.nodes)]
    assert not faults, "\n".join(faults)


def too_large(path: str, text: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What is wrong with a file."""
    if (lines := len(text.splitlines())) > LINES:
        yield f"{path}: it has {lines} lines, not {LINES} or less: split it where two ideas meet"
    for node in nodes:
        if not isinstance(node, Function):
            continue
        lines, number = (node.end_lineno or 0) - node.lineno + 1, parameters(node)
        if lines > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {lines} lines, not {FUNCTION_LINES} or less: split it"
        if number > PARAMETERS:
            yield f"{path}:{node.lineno}: {node.name} has {number} parameters, not {PARAMETERS} or less: make a noun"


def parameters(function: Function) -> int:
    every = function.args
    plain = [*every.posonlyargs, *every.args]
    own = bool(plain) and plain[0].arg in ("self", "cls")
    return len(plain) - own + len(every.kwonlyargs) + (every.vararg is not None) + (every.kwarg is not None)


def test_what_is_too_large() -> None:
    table: list[tuple[str, list[str]]] = [
        ("x = 1\n" * 701, ["here.py: it has 701 lines"]),
        ("x = 1\n" * 700, []),
        ("class A:\n    async def f(self):\n" + "        x\n" * 60, ["here.py:2: f has 61 lines"]),
        ("def f():\n" + "    x\n" * 59, []),
        ("def f(a, /, b, c, *d, e, f, g, h, **i): ...", ["here.py:1: f has 9 parameters"]),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", []),
        ("if x:\n    def f(a, b, c, d, e, f, g, h, i): ...", ["here.py:2: f has 9 parameters"]),
        ("def f():\n    def g(a, b, c, d, e, f, g, h, i): ...", ["here.py:2: g has 9 parameters"]),
    ]
    for text, faults in table:
        found = too_large("here.py", text, ast.walk(ast.parse(text)))
        assert [fault.partition(", ")[0] for fault in found] == faults
