"""Our own source, parsed once for all tests that look at it. They belong to one group, so that one worker parses it:
`pytestmark = GROUP`."""

from __future__ import annotations

import ast
import gc
from functools import cache
from typing import NamedTuple

import pytest
from fakes.process import ROOT

GROUP = pytest.mark.xdist_group("source")
PACKAGES = ("gateway", "sidecar", "adapters", "trainer", "tui")


class Source(NamedTuple):
    """A file, and all nodes of its tree, the outermost first."""

    path: str
    text: str
    nodes: list[ast.AST]

    @property
    def module(self) -> str:
        return "penstock." + self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def sources(*folders: str) -> list[Source]:
    """Files of folders, by their paths from the root; of our packages unless given."""
    return [source for folder in folders or PACKAGES for source in _parsed(folder)]


@cache
def _parsed(folder: str) -> list[Source]:
    # A million nodes that all stay: to look through them for garbage takes longer than to parse them.
    gc.collect()
    gc.disable()
    try:
        paths = sorted((ROOT / folder).rglob("*.py"))
        # What a bench has installed lies in a folder with a dot.
        shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
        texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in shown}
        return [Source(path, text, list(ast.walk(ast.parse(text)))) for path, text in texts.items()]
    finally:
        gc.freeze()
        gc.enable()


def rendered(node: ast.AST) -> str:
    """A string constant or f-string, with `…` for what is put in; empty for everything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
