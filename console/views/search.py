"""The results of a search, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group
from rich.text import Text

from penstock.console.views.text import ago, clean
from penstock.gateway.model.search import Hit, SearchRow

BEFORE = 32
"""Maximum number of characters before a hit that are shown: the hit must be visible on a narrow terminal."""
MATCH = "bold reverse"


def findings(found: Iterable[SearchRow], now_ns: int) -> Group:
    """A line for each span, and one for each passage of it."""
    return Group(*(line for finding in found for line in _finding(finding, now_ns)))


def _finding(finding: SearchRow, now_ns: int) -> Iterator[Text]:
    span = finding.span
    about = [it for it in (span.kind, span.name, span.agent, span.model) if it]
    line = Text(f"{span.rollout}/{span.attempt}#{span.sequence}", style="bold", no_wrap=True, overflow="ellipsis")
    yield line.append(f"  {ago(span.start_ns, now_ns)}  {clean(' '.join(about))}", style="not bold dim")
    for hit in finding.hits:
        yield _passage(hit)
    if finding.more:
        yield Text(f"  {finding.more:,} more in this call", style="dim")


def _passage(hit: Hit) -> Text:
    line = Text("  ", no_wrap=True, overflow="ellipsis")
    who = " ".join(filter(None, (hit.role, _KINDS.get(hit.part, hit.part))))
    line.append(f"{' '.join(clean(who).split())}: ", style="dim")
    before, match, after = (" ".join(clean(it).split()) for it in (hit.before, hit.match, hit.after))
    if hit.before[-1:].isspace():
        before += " "
    if len(before) > BEFORE:
        before = f"…{before[-BEFORE:]}"
    line.append(before).append(match, style=MATCH)
    line.append(f" {after}" if hit.after[:1].isspace() else after)
    return line.append(f"  ({hit.times} times)", style="dim") if hit.times > 1 else line


_KINDS = {"text": "", "tool_call": "calls", "tool_call_response": "result"}
"""Words for the types of parts; other types are shown as they are."""
