"""docs/troubleshooting.md quotes messages that the code has, and has a row for every reason that the code can give.

A message in the code is a string constant; what an f-string puts in is `…`, as on the page. A reason is what the
gateway names a refusal by, or notes as the error of a call: it is found where refusals are made and calls are ended.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import get_args

import pytest
from fakes.process import ROOT

from penstock.gateway.dialects.batches import NoResult
from penstock.gateway.dialects.ending import Failed
from penstock.gateway.metrics import METRICS

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("gateway", "sidecar", "adapters", "trainer", "tui")
REFUSALS = ("ClientFault", "GatewayFault", "UpstreamFault")
ENDS = ("on_unreachable", "on_broken", "call_soon", "_break", "_broken", "_give_up_on", "_end", "_cut_off")
"""What ends a call; one of its arguments is the reason."""
STATUSES = {"ok", "error", "cancelled", "interrupted", "open"}
KINDS = {"otel"}
"""Errors of spans that are no calls."""
REASON = re.compile(r"[a-z]+(_[a-z]+)*")


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """All that is ours, parsed."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        (".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)), ast.parse(path.read_text()))
        for path in paths
    ]


@cache
def messages() -> list[str]:
    """Every string of the code, with `…` for what is put in."""
    return [text for _, tree in modules() for node in ast.walk(tree) if (text := rendered(node))]


def rendered(node: ast.AST) -> str:
    """A string constant or f-string; empty for everything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(rendered(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def rows(section: str) -> list[list[str]]:
    """Cells of the table below a heading, its head left out."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return found[1:]


def quoted(cell: str) -> list[str]:
    """Messages in a cell; they stand in one or two backticks."""
    return [double or single for double, single in re.findall(r"``(.+?)``|`([^`]+)`", cell)]


def sections() -> Iterator[tuple[str, str]]:
    """(heading, what its table is a table of)."""
    yield from re.findall(r"^## (.+)\n(?:(?!^## ).*\n)*?\| ([a-z ]+) \|", PAGE, re.MULTILINE)


MESSAGES = [
    quote
    for title, head in sections()
    if head == "message"
    for row in rows(title)
    for quote in quoted(row[0])
    if " " in quote
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    assert len(message.replace("…", "").strip()) >= 8, "too short to be looked for"
    assert any(message in known for known in messages()), message


def reasons() -> set[str]:
    """Reasons of refusals, and errors of calls, by which the code names them."""
    found = {
        value
        for name, tree in modules()
        if name.startswith("penstock.gateway.")
        for node in ast.walk(tree)
        for given in places(node)
        for value in values(name, given)
    }
    return ({value for value in found if REASON.fullmatch(value)} - STATUSES - KINDS) | {
        *get_args(Failed),
        *get_args(NoResult),
    }


def places(node: ast.AST) -> Iterator[ast.expr]:
    """Where a reason may stand."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in REFUSALS:
            yield node.args[1]
        elif name in ENDS:
            yield from node.args
        yield from (word.value for word in node.keywords if word.arg == "error")
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from assigned(target, node.value)
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        yield from (part for part in node.value.elts[:1] if rendered(part).endswith(("_error", "_answer")))


def assigned(target: ast.expr, value: ast.expr) -> Iterator[ast.expr]:
    """What an error is set to: `entry.error`, or the place of it in the heads of calls (`STYLE.index("error")`)."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from assigned(one, other)
    elif getattr(target, "attr", "") == "error" or (
        isinstance(target, ast.Subscript) and "'error'" in ast.dump(target)
    ):
        yield value


def values(module: str, node: ast.AST) -> Iterator[str]:
    """A constant, also one that has a name, or that is one of two."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for part in (node.body, node.orelse) if isinstance(node, ast.IfExp) else ():
        yield from values(module, part)
    for part in node.values if isinstance(node, ast.BoolOp) else ():
        yield from values(module, part)
    if isinstance(node, ast.Name) and node.id.isupper():
        found = getattr(importlib.import_module(module), node.id, None)
        if isinstance(found, str):
            yield found


def documented() -> set[str]:
    """Reasons that have a row."""
    tables = ("What an agent was answered", "How a call ended otherwise")
    return {name for table in tables for row in rows(table) for name in quoted(row[0])}


def test_every_reason_has_a_row() -> None:
    assert sorted(reasons() - documented()) == []


def test_every_row_is_of_a_reason() -> None:
    own = {name for name in documented() if not name.startswith("http_")}
    assert sorted(own - reasons()) == []


def test_statuses_of_refusals_are_those_of_the_code() -> None:
    """`| `paused` | 504 |`, and `UpstreamFault(504, "paused", ...)`."""
    given: dict[str, set[str]] = {}
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFUSALS:
                status, reason = node.args[0], next(values(name, node.args[1]), None)
                if isinstance(status, ast.Constant) and reason is not None:
                    given.setdefault(reason, set()).add(str(status.value))
    shown = {quoted(row[0])[0]: set(row[1].split(", ")) for row in rows("What an agent was answered")}
    assert given
    assert {reason: sorted(found - shown[reason]) for reason, found in given.items() if found - shown[reason]} == {}


def test_named_metrics_exist() -> None:
    for row in rows("Figures that mean trouble"):
        assert quoted(row[0])[0].partition("{")[0] in METRICS


def test_the_tables_are_found() -> None:
    assert len(MESSAGES) > 25
    assert {"paused", "gateway_died", "http_429"} <= documented()
