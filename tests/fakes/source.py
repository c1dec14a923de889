"""Tests that look at our own source (`bench.structure`) belong to one group, so that one worker parses it:
`pytestmark = GROUP`."""

from __future__ import annotations

import ast

import pytest

GROUP = pytest.mark.xdist_group("source")


def rendered(node: ast.AST) -> str:
    """A string constant or f-string, with `…` for what is put in; empty for everything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
