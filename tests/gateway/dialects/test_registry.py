"""A new format is a file and a line: what depends on the format is asked of the dialect, and no other package knows one
by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.dialects import DIALECTS, FAMILIES

ROOT = Path(__file__).parents[3]
NAMES = {dialect.name for dialect in DIALECTS} | set(FAMILIES)
OTHERS = {
    "gateway/calls/batches.py": "whose APIs have batches",
    "gateway/calls/capture/request.py": "which of chat's events are there for token ids alone",
    "gateway/demo/demo.py": "the two agents of the demo",
    "gateway/model/price_lists.py": "providers, as LiteLLM's list of prices names them",
    "gateway/proxy/exact/exact_call.py": "engines render chat completions only",
    "gateway/proxy/system_messages.py": "templates that take one system message get chat completions",
    "gateway/proxy/translation/translator.py": "the formats that are translated to chat completions",
}
"""Where names are known, and why: what converts between two formats names them."""


def known_names(source: str) -> Iterator[int]:
    """Lines on which a name of a dialect or a family decides something: a table of several of them, or a comparison of
    something that is called dialect or family with one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_names, sides)) and any(map(_is_format, sides)):
                yield node.lineno
        elif isinstance(node, ast.Match) and _is_format(node.subject):
            yield from (case.pattern.lineno for case in node.cases if _names(case.pattern))
        elif isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple) and len(_names(*_entries(node))) > 1:
            yield node.lineno


def _entries(table: ast.Dict | ast.Set | ast.List | ast.Tuple) -> list[ast.expr]:
    """The keys, or the items."""
    return [key for key in table.keys if key is not None] if isinstance(table, ast.Dict) else table.elts


def _is_format(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return "dialect" in text or "family" in text


def _names(*nodes: ast.AST) -> set[str]:
    inner = (one for node in nodes for one in ast.walk(node))
    return {one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)} & NAMES


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ('TABLE = {"chat": 1, "messages": 2}', True),
        ('TABLE = frozenset({"chat", "gemini"})', True),
        ('Family = Literal["openai", "anthropic"]', True),
        ('if call.dialect.name == "responses": ...', True),
        ('if upstream.dialect != "openai": ...', True),
        ('if span.dialect not in ("opaque", "chat"): ...', True),
        ('match dialect:\n    case "chat": ...', True),
        ('body = {"model": "m", "messages": []}', False),
        ('if form == "chat": ...', False),
        ("if dialect.generates: ...", False),
    ],
)
def test_what_is_found(source: str, known: bool) -> None:
    assert bool(list(known_names(source))) == known


def test_no_other_package_knows_a_dialect_by_its_name() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for package in ("gateway", "adapters", "sidecar", "trainer")
        for path in sorted((ROOT / package).rglob("*.py"))
        if ROOT / "gateway" / "dialects" not in path.parents
        and any(f'"{name}"' in (source := path.read_text()) for name in NAMES)
        and (lines := list(known_names(source)))
    }
    assert set(found) == set(OTHERS), {path: lines for path, lines in found.items() if path not in OTHERS}
