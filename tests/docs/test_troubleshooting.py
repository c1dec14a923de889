"""docs/troubleshooting.md quotes messages that the code has, and has a row for every reason that the code can give.

A message in the code is a string constant; what an f-string puts in is `…`, as on the page. A reason is what the
gateway names a refusal by, or notes as the error of a call: it is found where refusals are made and calls are ended.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import get_args

from fakes.process import ROOT
from fakes.source import GROUP, rendered

from bench.structure import sources
from penstock.gateway.model.metrics import METRICS
from penstock.gateway.wire.dialects.batches import BatchError
from penstock.gateway.wire.dialects.family import Failure

pytestmark = GROUP
REFUSALS = ("ClientFault", "GatewayFault", "UpstreamFault")
ENDS = ("on_unreachable", "on_broken", "call_soon", "_break", "_broken", "_give_up_on", "_end", "_cut_off")
"""What ends a call; one of its arguments is the reason."""
NONE = {"ok", "error", "cancelled", "interrupted", "open", "otel"}
"""Statuses, and the error of spans that are no calls."""
REASON = re.compile(r"[a-z]+(_[a-z]+)*")
REFUSED, ENDED, FIGURES = "What an agent was answered", "How a call ended otherwise", "Figures that mean trouble"


def test_the_page_is_right() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = list(quotes(page))
    known = "\0".join(text for source in sources() for node in source.nodes if (text := rendered(node)))
    faults = [f"{it!r} is too short to be looked for: quote more" for it in messages if len(it.replace("…", "")) < 8]
    faults += [f"{it!r} is no message of the code: quote what it says now" for it in messages if it not in known]
    refused = {name: row[1].split(", ") for row in table(page, REFUSED) for name in quoted(row[0])}
    told = refused.keys() | {name for row in table(page, ENDED) for name in quoted(row[0])}
    given, found = statuses(), reasons()
    faults += [f"{it!r} is a reason that has no row: say why, and the way out" for it in found - told]
    own = {it for it in told if not it.startswith("http_")}
    faults += [f"{it!r} is a reason that the code does not give: take its row out" for it in own - found]
    unsaid = [(name, status) for name, ones in given.items() for status in ones - {*refused.get(name, ())}]
    faults += [f"{name!r} comes with {status}: say so in a row of {REFUSED!r}" for name, status in unsaid]
    names = [quoted(row[0])[0].partition("{")[0] for row in table(page, FIGURES)]
    faults += [f"{it!r} is no metric" for it in names if it not in METRICS]
    assert not faults, "\n".join(f"troubleshooting.md: {fault}" for fault in faults)
    assert len(messages) > 25
    assert {"paused", "gateway_died", "http_429"} <= told
    assert given
    assert names


def table(page: str, title: str) -> list[list[str]]:
    """Cells of the table below a heading, its head left out."""
    text = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]


def quoted(cell: str) -> list[str]:
    """Messages in a cell; they stand in one or two backticks."""
    return [double or single for double, single in re.findall(r"``(.+?)``|`([^`]+)`", cell)]


def quotes(page: str) -> Iterator[str]:
    """Messages that the page quotes: those in tables of messages; a single word is a name."""
    for title, head in re.findall(r"^## (.+)\n(?:(?!^## ).*\n)*?\| ([a-z ]+) \|", page, re.MULTILINE):
        if head == "message":
            yield from (quote for row in table(page, title) for quote in quoted(row[0]) if " " in quote)


def statuses() -> dict[str, set[str]]:
    """Statuses that go with each reason of a refusal: `UpstreamFault(504, "paused", ...)`."""
    given: defaultdict[str, set[str]] = defaultdict(set)
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFUSALS:
                status, reason = node.args[0], next(values(source.module, node.args[1]), None)
                if isinstance(status, ast.Constant) and reason is not None:
                    given[reason].add(str(status.value))
    return given


def reasons() -> set[str]:
    """Reasons of refusals, and errors of calls, by which the code names them."""
    found = {
        value
        for source in sources("gateway", "console")
        for node in source.nodes
        for given in places(node)
        for value in values(source.module, given)
    }
    return {value for value in found - NONE if REASON.fullmatch(value)} | {*get_args(Failure), *get_args(BatchError)}


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
