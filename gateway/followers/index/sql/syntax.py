"""Checks that a query is one statement that reads only the views, in the tree that DuckDB has parsed. Pure.

The sandbox is the protection; this check gives early errors in words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Final, cast

Tree = dict[str, Any]
TABLE_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest", "generate_subscripts"})
"""Table functions that read no file."""
FORBIDDEN: Final = frozenset({"current_setting", "getenv", "getvariable", "nextval", "currval", "write_log"})
"""Functions that reveal the process, or change it."""
_NAME: Final = re.compile(r"[^\W\d]\w*")
_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})


class ForbiddenQueryError(ValueError):
    """A query that is not run; the text says why."""


def check(parsed: Tree, views: Collection[str]) -> None:
    """Raises `ForbiddenQueryError`. `parsed`: the query's tree from `json_serialize_sql`."""
    if parsed.get("error"):
        message = str(parsed.get("error_message"))
        if message.startswith("Only SELECT"):
            message = "only SELECT, DESCRIBE and SUMMARIZE are answered: nothing can be changed here"
        raise ForbiddenQueryError(message)
    if len(parsed["statements"]) != 1:
        raise ForbiddenQueryError("one statement at a time")
    named = {name.lower() for tree in _trees(parsed) for name in _ctes(tree)}
    if odd := next((name for name in named if not _NAME.fullmatch(name)), None):
        # Outside its WITH such a name could be that of a file.
        raise ForbiddenQueryError(f"{odd!r} is no name for a WITH: letters, digits and _ are")
    for tree in _trees(parsed):
        _check(tree, {*views, *named})


def _check(tree: Tree, tables: Collection[str]) -> None:
    kind = str(tree.get("type"))
    if kind.endswith("_NODE") and kind not in _NODES:
        raise ForbiddenQueryError(f"only SELECT: nothing can be changed here ({kind.removesuffix('_QUERY_NODE')})")
    if kind == "TABLE_FUNCTION":
        name = str(tree["function"].get("function_name")).lower()
        if name not in TABLE_FUNCTIONS:
            raise ForbiddenQueryError(
                f"the function {name!r} cannot be read from here: the views are {_listed(tables)}"
            )
    if kind == "FUNCTION" and str(tree.get("function_name")).lower() in FORBIDDEN:
        raise ForbiddenQueryError(f"the function {tree['function_name']!r} is not answered here")
    if kind == "BASE_TABLE" or (kind == "SHOW_REF" and tree.get("table_name")):
        _check_table(tree, tables)


def _check_table(tree: Tree, tables: Collection[str]) -> None:
    path = [part for part in (tree.get("catalog_name"), tree.get("schema_name"), tree.get("table_name")) if part]
    name = ".".join(map(str, path))
    if name.strip('"').lower() not in ({*tables, "tables"} if tree["type"] == "SHOW_REF" else tables):
        raise ForbiddenQueryError(f"there is no view {name!r}: the views are {_listed(tables)}")


def _listed(tables: Collection[str]) -> str:
    return " ".join(sorted(tables))


def _ctes(tree: Tree) -> Iterator[str]:
    """The names that a WITH defines."""
    listed = cast("Tree", tree.get("cte_map") or {}).get("map")
    for one in cast("list[Tree]", listed if isinstance(listed, list) else []):
        yield str(one.get("key"))
    if tree.get("type") == "RECURSIVE_CTE_NODE":
        yield str(tree.get("cte_name"))


def _trees(value: Any) -> Iterator[Tree]:
    """Every object of a tree. Uses an explicit stack: a query may be nested deeper than Python recurses."""
    rest: list[Any] = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            tree = cast("Tree", one)
            yield tree
            rest += tree.values()
        elif isinstance(one, list):
            rest += cast("list[Any]", one)
