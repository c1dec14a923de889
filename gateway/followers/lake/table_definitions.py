"""The tables of a lake: their columns, the meanings of these, and the conversion of the index's rows. Pure.

They are the views of `penstock sql`, as far as a table that is only appended to can be one, so that a query of one
works on the other. Every row begins with a cursor, by which it is written exactly once, and the id of its rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from penstock.gateway.followers.index.rows import COLUMNS, Row
from penstock.gateway.followers.index.sql.views import VIEWS
from penstock.gateway.model.turn import Passage

SCHEMA: Final = 1
"""The version of all tables. It stands in each table and in the metadata of each file; a newer one is refused."""
BODIES: Final = "bodies"
"""The one table that exists only on request."""
DAY_NS: Final = 86_400 * 10**9


class LakeColumn(NamedTuple):
    """A column of a table."""

    type: str
    """A type of `penstock sql`, `date` or `blob`. Timestamps are in UTC, to the microsecond."""
    help: str


class TableDefinition(NamedTuple):
    help: str
    columns: Mapping[str, LakeColumn]

    @property
    def key(self) -> str:
        """The column of the row's cursor, which is the first."""
        return next(iter(self.columns))


_DAY: Final = {"day": LakeColumn("date", "the day on which it began; the table is partitioned by it")}
_VERSION: Final = {"cursor": LakeColumn("bigint", "names this version of it: the last change of it that is in the row")}


def _of(view: str) -> dict[str, LakeColumn]:
    return {name: LakeColumn(column.type, column.help) for name, column in VIEWS[view].columns.items()}


_SPANS: Final = _of("spans")
_SPAN: Final = {name: _SPANS[name] for name in ("span", "rollout", "attempt", "sequence")}
TABLE_DEFINITIONS: Final[dict[str, TableDefinition]] = {
    "spans": TableDefinition(
        "A model call, a run of a tool, a reward or an event that has ended.",
        {
            **_SPANS,
            "status": LakeColumn("varchar", "ok, error, cancelled or interrupted"),
            "request_hash": LakeColumn(
                "varchar", "SHA-256, in hex, of the exact bytes that the tape has of the request"
            ),
            "response_hash": LakeColumn("varchar", "the same of the answer"),
            **_DAY,
        },
    ),
    "messages": TableDefinition(VIEWS["messages"].help, {**_of("messages"), **_DAY}),
    "tool_calls": TableDefinition(VIEWS["tool_calls"].help, {**_of("tool_calls"), **_DAY}),
    "rewards": TableDefinition(VIEWS["rewards"].help, {**_of("rewards"), **_DAY}),
    "rollouts": TableDefinition(
        "One task given to one agent: a row each time that it was found changed.",
        {**_VERSION, **_of("rollouts"), **_DAY},
    ),
    "attempts": TableDefinition(
        "One try at a rollout: a row each time that its rollout was found changed.",
        {**_VERSION, **_of("attempts"), **_DAY},
    ),
    BODIES: TableDefinition(
        "The bytes of a call, as the tape has them. Only with `--bodies`.",
        {
            **_SPAN,
            "request": LakeColumn("blob", "the body of the request"),
            "response": LakeColumn("blob", "the body of the answer"),
            **_DAY,
        },
    ),
}

Values = tuple[Any, ...]
"""A row of a table, without its day."""
_Get = Callable[[Row], Any]


def _getters(view: str) -> list[_Get]:
    """Functions that make a view's columns from a row of the index."""
    table = VIEWS[view].table
    at = {name: place for place, name in enumerate(COLUMNS[table])}
    return [_getter(column.source, at) for column in VIEWS[view].columns.values()]


def _getter(source: str, at: Mapping[str, int]) -> _Get:
    name = source.removeprefix("make_timestamp(").partition(" ")[0].strip('"')
    place = at[name]
    if source.startswith("make_timestamp("):
        return lambda row: None if row[place] is None else row[place] // 1000
    if source.endswith(" / 1e6"):
        return lambda row: None if row[place] is None else row[place] / 1e6
    return lambda row: row[place]


_GETTERS: Final = {view: _getters(view) for view in ("spans", "rewards", "rollouts", "attempts")}


def view_row(view: str, row: Row) -> Values:
    """The view's row for a row of the index."""
    return tuple([get(row) for get in _GETTERS[view]])


def message_row(span: Values, position: int, passage: Passage) -> Values:
    """A row of `messages`; `span`: the columns that identify the span."""
    answer, role, kind, name, id, text = passage
    return (*span, position, answer, role, kind, name, id, text)


def tool_call_row(span: Values, position: int, passage: Passage) -> Values | None:
    """A row of `tool_calls`; None for a passage that is no tool call."""
    answer, role, kind, name, id, text = passage
    if kind != "tool_call" or not (answer or role == "client"):
        return None
    arguments = text[len(name or "") + 1 : len(text) - text.endswith(")")]
    return (*span, position, not answer, name, id, arguments)
