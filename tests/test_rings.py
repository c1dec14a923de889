"""No files import each other in a ring, whatever the import is for: who reads one of them would have to read all.

The import contracts hold packages apart; this holds the files in them apart. Imports for types count too.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("gateway", "sidecar", "adapters", "trainer", "tui")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def test_no_files_import_in_a_ring() -> None:
    assert rings({module(path): imports(module(path), path, text) for path, text in FILES.items()}) == []


def module(path: str) -> str:
    return "penstock." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = set(map(module, FILES))


def imports(own: str, path: str, text: str) -> set[str]:
    """Modules of ours that a file names in an import, those for types and those inside of functions too. A package
    counts where something is taken from it that is no module."""
    package = own if path.endswith("__init__.py") else own.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            whole = ".".join(part for part in (above, node.module) if part)
            names = {f"{whole}.{alias.name}" for alias in node.names}
            found |= names & MODULES
            found |= {whole} if names - MODULES else set()
    return (found & MODULES) - {own}


def rings(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other, by Tarjan's algorithm; a ring of one is none."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return sorted(found)


def test_what_a_ring_is() -> None:
    straight = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert rings(straight) == []
    assert rings({**straight, "c": {"d"}, "d": {"b", "e"}, "e": {"f"}, "f": {"e"}}) == [["b", "c", "d"], ["e", "f"]]


def test_what_counts_as_an_import() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.gateway.store.writer import Writer\n"
    text += "def f():\n    import penstock.gateway.config\n    from penstock.gateway.store import keys, Store\n"
    own = "penstock.gateway.store.transaction"
    store = {f"penstock.gateway.{name}" for name in ("store", "store.writer", "store.keys", "config")}
    assert imports(own, "gateway/store/transaction.py", text) == store
    assert imports(own, "gateway/store/transaction.py", "from . import keys\nfrom ..http import redact") == {
        "penstock.gateway.store.keys",
        "penstock.gateway.http.redact",
    }
