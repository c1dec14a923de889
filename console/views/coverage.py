"""The coverage of prompts in words: how many calls they match. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.console.views.table import ago
from penstock.gateway.model.resource import Coverage, LastMiss

SHOWN = 40
"""Maximum number of characters of a text, and of a version's text, that are shown."""
WORDS = {
    "miss": "no registered text",
    "ambiguous": "two ways to read it",
    "slots": "other slots",
    "unknown": "no version",
    "encoding": "content encoding",
    "utf8": "no UTF-8",
    "nan": "NaN or Infinity",
    "depth": "too deep, or endless numbers",
    "shape": "not this API",
    "json": "no JSON",
}
"""The reasons why a call passed unchanged, in words."""


def brief(coverage: Coverage | None) -> str:
    """The coverage for a cell: `98.0% of 1,234`, and `fell` if it fell; empty for None."""
    if coverage is None:
        return ""
    share = f"{coverage.matched / _calls(coverage):.1%} of {_calls(coverage):,}"
    return share if coverage.fell_ns is None else f"{share}, fell"


def _calls(coverage: Coverage) -> int:
    return coverage.matched + sum(coverage.missed.values())


def lines(name: str, coverage: Coverage, now_ns: int) -> Iterator[str]:
    """A resource's coverage: how many matched, how many missed and why, the last miss, and a fall."""
    calls = _calls(coverage)
    missed = f"; {reasons(coverage.missed)}" if coverage.missed else ""
    yield f"{name}: {coverage.matched:,} of {calls:,} calls matched{missed}"
    if coverage.last is not None:
        yield _miss(coverage.last, now_ns)
    if coverage.fell_ns is not None:
        yield f"fell {ago(coverage.fell_ns, now_ns)}: {coverage.fell}"


def reasons(counts: Mapping[str, int]) -> str:
    """The counts by reason, the largest first: `30 no registered text, 4 two ways to read it`."""
    return ", ".join(f"{count:,} {WORDS[why]}" for why, count in sorted(counts.items(), key=lambda it: -it[1]))


def _miss(last: LastMiss, now_ns: int) -> str:
    where = last.difference
    said = f"last miss: rollout {last.rollout}, {ago(last.at_ns, now_ns)}, {WORDS[last.why]}"
    if where is None:
        return said
    there = f"{where.found[:SHOWN]!r} stands" if where.found else "the text ends"
    asked = f"{where.wanted[:SHOWN]!r}" if where.wanted else "its end"
    return f"{said}: at character {where.at:,} {there} where {where.version} has {asked}"
