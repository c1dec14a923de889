"""Lets a list query the index, if there is one."""

from __future__ import annotations

from penstock.gateway.api.context import Control
from penstock.gateway.api.pagination import IndexLookup, scan
from penstock.gateway.followers.index import link
from penstock.gateway.reading.filters.fields import Target
from penstock.gateway.reading.filters.query import Query


def index_lookup(control: Control, target: Target, query: Query, now_ns: int) -> IndexLookup:
    """A function that queries the index, or `scan` if the index cannot help with this filter."""
    index = control.index
    if index is None or not any(one.field.about != "bodies" for one in query.conditions):
        return scan
    text, silent, last = str(query), False, None

    def find(before: int | None, limit: int) -> link.FindResult | None:
        """Query the index. After one query without an answer the rest of the page is scanned. Rows that were found are
        not queried again."""
        nonlocal silent, last
        found = last.below(before) if last is not None and before is not None else None
        if found is None and not silent:
            last = found = index.find(link.FindRequest(target, text, now_ns, before, limit))
            silent = found is None
        return found

    return find
