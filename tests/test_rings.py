"""No files import each other in a ring, whatever the import is for: who reads one of them would have to read all.

The import contracts hold packages apart; this holds the files in them apart. Imports for types count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set
from graphlib import CycleError, TopologicalSorter

from fakes.source import GROUP, sources

pytestmark = GROUP


def test_no_files_import_in_a_ring() -> None:
    modules = {source.module for source in sources()}
    graph = {one.module: imports(one.module, one.path.endswith("__init__.py"), one.nodes, modules) for one in sources()}
    found = list(rings(graph))
    assert not found, "\n".join(" imports ".join(ring) for ring in found)


def imports(own: str, is_package: bool, nodes: Iterable[ast.AST], modules: Set[str]) -> set[str]:
    """Modules of ours that a file names in an import, those for types and those inside of functions too. A package
    counts where something is taken from it that is no module."""
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


def rings(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Modules of which each imports the next, the first one again at the end; each import is told once."""
    left = {module: set(others) for module, others in graph.items()}
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as problem:
            found: list[str] = list(reversed(problem.args[1]))
            yield found
            left[found[0]].remove(found[1])
        else:
            return


def test_what_a_ring_is() -> None:
    straight = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert list(rings(straight)) == []
    found = list(rings({**straight, "c": {"d"}, "d": {"b", "e"}, "e": {"f"}, "f": {"e"}}))
    assert sorted(sorted(ring[1:]) for ring in found) == [["b", "c", "d"], ["e", "f"]]
    assert all(ring[0] == ring[-1] for ring in found)


def test_what_counts_as_an_import() -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.gateway.store.writer import Writer\n"
    text += "def f():\n    import penstock.gateway.config\n    from penstock.gateway.store import keys, Store\n"
    text += "from ..http import redact"
    wanted = {f"penstock.gateway.{name}" for name in ("store.writer", "store.keys", "store", "config", "http.redact")}
    own = "penstock.gateway.store.transaction"
    assert imports(own, False, ast.walk(ast.parse(text)), wanted | {own}) == wanted
