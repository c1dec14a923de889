"""Lets a list query the index, if there is one."""

from __future__ import annotations

from penstock.gateway.api.context import Control
from penstock.gateway.api.pages import Find, scan
from penstock.gateway.filters.fields import Target
from penstock.gateway.filters.query import Query
from penstock.gateway.index import questions


def finder(control: Control, target: Target, query: Query, now_ns: int) -> Find:
    """A function that queries the index, or `scan` if the index cannot help with this filter."""
    index = control.index
    if index is None or not any(one.field.about != "bodies" for one in query.conditions):
        return scan
    text, silent, last = str(query), False, None

    def find(before: int | None, limit: int) -> questions.Found | None:
        """Query the index. After one query without an answer the rest of the page is scanned. Rows that were found are
        not queried again."""
        nonlocal silent, last
        found = last.below(before) if last is not None and before is not None else None
        if found is None and not silent:
            last = found = index.find(questions.Find(target, text, now_ns, before, limit))
            silent = found is None
        return found

    return find
