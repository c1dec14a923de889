"""Reads pages of the API's lists: up to the requested number of rows, and the cursor for the rest.

A selective filter may match nothing on many pages. After `PAGES` pages the answer is returned, with the cursor to
continue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Page

P = TypeVar("P", bound=Page)
R = TypeVar("R")

PAGES = 20
"""Most pages that are read for one answer."""


class ListArguments(Protocol):
    """Arguments that all tools that list have."""

    @property
    def filter(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def cursor(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class RowPage(Generic[R]):
    """Rows, and the cursor of the next ones."""

    rows: list[R]
    next: str | None
    scanned: int


async def read_rows(
    client: Client, path: str, model: type[P], rows_of: Callable[[P], list[R]], asked: ListArguments
) -> RowPage[R]:
    """Reads rows of the list at `path`, whose pages are of type `model`."""
    rows, cursor, scanned = list[R](), asked.cursor, 0
    for _ in range(PAGES):
        params = {"filter": asked.filter or None, "limit": asked.limit - len(rows), "cursor": cursor}
        page = await client.get(path, model, params)
        rows, cursor, scanned = rows + rows_of(page), page.next, scanned + page.scanned
        if cursor is None or len(rows) >= asked.limit:
            break
    return RowPage(rows, cursor, scanned)
