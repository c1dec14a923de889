"""Pages of the API's lists: as many rows as were asked for, and the cursor of the rest.

A selective filter may find nothing on many pages. After a few of them an answer is given, with the cursor to go on.
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
"""Pages that are asked for in one answer."""


class Asked(Protocol):
    """What the tools that list have among their arguments."""

    @property
    def filter(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def cursor(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Found(Generic[R]):
    """Rows, and how to go on."""

    rows: list[R]
    next: str | None
    scanned: int


async def turned(client: Client, path: str, model: type[P], rows_of: Callable[[P], list[R]], asked: Asked) -> Found[R]:
    """Rows of the list at `path`, whose pages are of `model`."""
    rows, cursor, scanned = list[R](), asked.cursor, 0
    for _ in range(PAGES):
        params = {"filter": asked.filter or None, "limit": asked.limit - len(rows), "cursor": cursor}
        page = await client.get(path, model, params)
        rows, cursor, scanned = rows + rows_of(page), page.next, scanned + page.scanned
        if cursor is None or len(rows) >= asked.limit:
            break
    return Found(rows, cursor, scanned)
