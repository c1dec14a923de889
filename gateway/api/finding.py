"""What a list asks the index, where there is one."""

from __future__ import annotations

from penstock.gateway.api.context import Control
from penstock.gateway.api.pages import Find, scan
from penstock.gateway.filters.fields import Target
from penstock.gateway.filters.query import Query
from penstock.gateway.index import questions


def finder(control: Control, target: Target, query: Query, now_ns: int) -> Find:
    """Asks the index, where it knows something that the filter is about."""
    index = control.index
    if index is None or not any(one.field.about != "bodies" for one in query.conditions):
        return scan
    text, silent, last = str(query), False, None

    def find(before: int | None, limit: int) -> questions.Found | None:
        """Once it has not answered, the rest of the page is scanned. What it has found is not asked for again."""
        nonlocal silent, last
        found = last.below(before) if last is not None and before is not None else None
        if found is None and not silent:
            last = found = index.find(questions.Find(target, text, now_ns, before, limit))
            silent = found is None
        return found

    return find
