"""The views of a query: each with its columns, their meanings, and their sources. Pure.

In all of them `span` identifies a span: the number of the change that recorded it. Times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.gateway.model.facts import SPAN_FACTS, Fact


class ViewColumn(NamedTuple):
    """A column of a view."""

    type: str
    """DuckDB's type."""
    source: str
    """An expression over the table below."""
    help: str


class ViewDefinition(NamedTuple):
    """A view over a table of the index or over given rows."""

    help: str
    table: str
    """`spans`, `rollouts`, `attempts` or `passages` of the index; else the given rows of this name."""
    where: str
    columns: Mapping[str, ViewColumn]


def _time(source: str, help: str) -> ViewColumn:
    return ViewColumn("timestamp", f"make_timestamp({source} // 1000)", help)


def _text(name: str, help: str) -> dict[str, ViewColumn]:
    return {name: ViewColumn("varchar", name, help)}


def _count(name: str, help: str) -> dict[str, ViewColumn]:
    return {name: ViewColumn("bigint", name, help)}


def _of_fact(fact: Fact) -> ViewColumn:
    """The column of a fact of `model.facts`."""
    if fact.unit == "time":
        return _time(fact.index_column, fact.help)
    if fact.unit == "ns":
        return ViewColumn("double", f"{fact.index_column} / 1e6", fact.help)
    assert fact.type is not None
    return ViewColumn(fact.type, fact.index_column, fact.help)


_SPAN: Final = {
    fact.name: _of_fact(fact) for fact in SPAN_FACTS if fact.name in ("span", "rollout", "attempt", "sequence")
}
_TOKENS: Final = {
    "input_tokens": ViewColumn("bigint", "input_tokens", "prompt tokens, cached ones included"),
    "output_tokens": ViewColumn("bigint", "output_tokens", "generated tokens"),
}
VIEWS: Final[dict[str, ViewDefinition]] = {
    "rollouts": ViewDefinition(
        "One task given to one agent, as it stands now.", "rollouts", "true",
        {
            "rollout": ViewColumn("varchar", "rollout", "its name"),
            "origin": ViewColumn(
                "varchar", "origin", "how it came to be: queued, header (an address in a request) or implicit"
            ),
            "mode": ViewColumn("varchar", "mode", "train, val, test or online"),
            "status": ViewColumn("varchar", "status", "where it stands"),
            "task": ViewColumn("varchar", '"group"', "the task that it repeats: `group` in filters"),
            "priority": ViewColumn("integer", "priority", "its priority in the queue"),
            "tries": ViewColumn("integer", "tries", "attempts that the queue has handed out"),
            "created": _time("created_ns", "when it was made"),
            "last_seen": _time("last_seen_ns", "when something happened to it last"),
            "ended": _time("ended_ns", "when it ended"),
            "ambiguous": ViewColumn("boolean", "ambiguous", "a call of it could be another rollout's"),
            "reward": ViewColumn("double", "reward", "that of its last attempt that has one"),
            "metadata": ViewColumn(
                "map(varchar, varchar)", "metadata", "keys with dots for nested ones: metadata['a.b']"
            ),
        },
    ),
    "attempts": ViewDefinition(
        "One try at a rollout, as it stands now.", "attempts", "true",
        {
            "rollout": _SPAN["rollout"],
            "attempt": ViewColumn("varchar", "attempt", "its name"),
            "number": ViewColumn("integer", "sequence", "1 for the first"),
            "status": ViewColumn("varchar", "status", "where it stands"),
            "worker": ViewColumn("varchar", "worker", "who runs it"),
            "created": _time("created_ns", "when it was made"),
            "last_seen": _time("last_seen_ns", "when something happened to it last"),
            "ended": _time("ended_ns", "when it ended"),
            "reward": ViewColumn("double", "reward", "value of its newest trusted reward"),
            "calls": ViewColumn("bigint", "calls", "model calls"),
            "errors": ViewColumn("bigint", "errors", "those that failed"),
            "cancelled": ViewColumn("bigint", "cancelled", "those that the agent left"),
            **_TOKENS,
            "tool_calls": ViewColumn("bigint", "tool_calls", "tool calls that answers asked for"),
        },
    ),
    "spans": ViewDefinition(
        "A model call, a run of a tool, a reward or an event.", "spans", "true",
        {
            fact.name: _of_fact(fact) for fact in SPAN_FACTS if fact.help
        },
    ),
    "messages": ViewDefinition(
        "A part of a message that a call adds to its conversation: what is new in its request, and its answer.",
        "passages", "true",
        {
            **_SPAN,
            "position": ViewColumn("integer", "position", "its place among those of the call, from 0 on"),
            "answer": ViewColumn("boolean", "answer", "true in the answer, false in the request"),
            "role": ViewColumn("varchar", "role", "system, developer, user, assistant, tool ..."),
            "part": ViewColumn("varchar", "kind", "text, reasoning, tool_call, tool_call_response, refusal, error ..."),
            "name": ViewColumn("varchar", "name", "of a tool call the tool; of an attribute its name"),
            "id": ViewColumn("varchar", "id", "of a tool call, and of its result"),
            "text": ViewColumn("varchar", "text", "what it says; of a tool call NAME(ARGUMENTS)"),
        },
    ),
    "tool_calls": ViewDefinition(
        "A tool call: that an answer asks for, or that a server of tools was asked to run.",
        "passages", "kind = 'tool_call' and (answer or role = 'client')",
        {
            **_SPAN,
            "position": ViewColumn("integer", "position", "its place among the parts of the call"),
            "run": ViewColumn("boolean", "not answer", "a server was asked to run it; else a model asks for it"),
            "tool": ViewColumn("varchar", "name", "name of the tool"),
            "id": ViewColumn("varchar", "id", "its id, which its result has too (messages.id)"),
            "arguments": ViewColumn(
                "varchar",
                "text[length(coalesce(name, '')) + 2 : length(text) - ends_with(text, ')')::int]",
                "as they were generated: JSON, if it is whole",
            ),
        },
    ),
    "rewards": ViewDefinition(
        "How well an attempt, or one call of it, went.", "spans", "kind = 'reward'",
        {
            **_SPAN,
            "given": _time("start_ns", "when"),
            "value": ViewColumn("double", "reward", "the reward"),
            "source": ViewColumn("varchar", "reward_source", "who gave it"),
            "trusted": ViewColumn("boolean", "reward_trusted", "false: it counts for nothing"),
        },
    ),
    "releases": ViewDefinition(
        "A release of a prompt or of weights.", "releases", "true",
        {
            **_text("release", "its name"),
            **_text("resource", "what it changes"),
            **_text("kind", "prompt, model ..."),
            **_text("stable", "the version that it moves rollouts from"),
            **_text("candidate", "the version that it moves them to"),
            **_text("stage", "how far it is, or how it ended"),
            **_text("reason", "why"),
            **_text("author", "who started it"),
            "split": ViewColumn("double", "split", "the share of new rollouts that get the candidate"),
            **_count("assigned", "rollouts that take part"),
            **_count("counted", "those whose outcome is counted"),
            "created": _time("created_ns", "when it was started"),
            "changed": _time("changed_ns", "when it changed last"),
        },
    ),
    "runs": ViewDefinition(
        "A training run.", "runs", "true",
        {
            **_text("run", "its name"),
            **_text("kind", "how it learns"),
            **_text("name", "what it is called, for a person"),
            **_text("status", "where it stands"),
            **_text("message", "how it stands, for a person"),
            **_count("step", "the last step that it has reported"),
            **_count("steps", "how many are planned"),
            **_count("resumed", "how often it was started again"),
            "created": _time("created_ns", "when it was started"),
            "ended": _time("ended_ns", "when it ended"),
        },
    ),
}  # fmt: skip
GIVEN: Final = ("releases", "runs")
"""The views of given rows: they are in no file of an index."""


def statements(files: Mapping[str, Sequence[str]]) -> list[str]:
    """The SQL that makes the views. `files`: those of each table. Given rows are copied from tables of the same name
    with an underscore before it and the columns of `given`."""
    return [
        f"create {'table' if view.table in GIVEN else 'view'} {name} as {_select(view, files)}"
        for name, view in VIEWS.items()
    ]


def _select(view: ViewDefinition, files: Mapping[str, Sequence[str]]) -> str:
    if view.table in GIVEN:
        return f"select {_columns(view)} from _{view.table}"
    paths = ", ".join("'" + path.replace("'", "''") + "'" for path in files.get(view.table, ()))
    if not paths:
        empty = ", ".join(f'cast(null as {column.type}) as "{name}"' for name, column in view.columns.items())
        return f"select {empty} where false"
    return f"select {_columns(view)} from read_parquet([{paths}], hive_partitioning = false) where {view.where}"


def _columns(view: ViewDefinition) -> str:
    return ", ".join(f'{column.source} as "{name}"' for name, column in view.columns.items())


def given(table: str) -> dict[str, str]:
    """The columns of a table whose rows are given, with their types."""
    return {
        f"{name}_ns" if column.type == "timestamp" else name: "bigint" if column.type == "timestamp" else column.type
        for name, column in VIEWS[table].columns.items()
    }


# The input and output of a query's process: MessagePack in both directions.

READY: Final = b"ready"
"""The first bytes that the process writes, just before it runs the query."""
Format = Literal["rows", "csv", "parquet"]


class SqlJob(msgspec.Struct, frozen=True):
    """One query with its data and limits."""

    query: str
    directory: str
    """Holds all files; nothing else can be read."""
    files: dict[str, list[str]]
    """The files of each table of the index."""
    given: dict[str, list[dict[str, Any]]]
    """The rows of tables that are in no file."""
    format: Format
    rows: int
    """Most rows of the answer."""
    bytes: int
    """Most bytes of the answer."""
    seconds: float
    """Longest run time."""
    enclosed: bool
    """True if the process must give up its rights; False only by an operator's setting."""


class SqlResult(msgspec.Struct, tag=True, frozen=True):
    """The answer to a query."""

    json: bytes
    """As `model.state.SqlAnswer` writes it: large answers are not parsed and written again."""


class SqlFailure(msgspec.Struct, tag=True, frozen=True):
    """The reason why a query has no answer."""

    kind: Literal["query", "memory", "too_large", "no_sandbox"]
    reason: str


SqlOutcome: TypeAlias = SqlResult | SqlFailure
