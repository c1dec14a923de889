"""The views of a query: each with its columns, their meanings, and their sources. Pure.

In all of them `span` identifies a span: the number of the change that recorded it. Times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple


class Column(NamedTuple):
    """A column of a view."""

    type: str
    """DuckDB's type."""
    source: str
    """An expression over the table below."""
    help: str


class View(NamedTuple):
    """A view over a table of the index or over given rows."""

    help: str
    table: str
    """`spans`, `rollouts`, `attempts` or `passages` of the index; else the given rows of this name."""
    where: str
    columns: Mapping[str, Column]


def _time(source: str, help: str) -> Column:
    return Column("timestamp", f"make_timestamp({source} // 1000)", help)


def _text(name: str, help: str) -> dict[str, Column]:
    return {name: Column("varchar", name, help)}


def _count(name: str, help: str) -> dict[str, Column]:
    return {name: Column("bigint", name, help)}


_OF: Final = {
    "rollout": Column("varchar", "rollout", "its rollout"),
    "attempt": Column("varchar", "attempt", "its attempt"),
    "sequence": Column("bigint", "sequence", "its place in the attempt, from 1 on"),
}
_SPAN: Final = {"span": Column("bigint", "cursor", "names the span in all views"), **_OF}
_TOKENS: Final = {
    "input_tokens": Column("bigint", "input_tokens", "prompt tokens, cached ones included"),
    "output_tokens": Column("bigint", "output_tokens", "generated tokens"),
}
VIEWS: Final[dict[str, View]] = {
    "rollouts": View(
        "One task given to one agent, as it stands now.", "rollouts", "true",
        {
            "rollout": Column("varchar", "rollout", "its name"),
            "origin": Column("varchar", "origin", "how it came to be: header, url, implicit, queued ..."),
            "mode": Column("varchar", "mode", "train, val, test or online"),
            "status": Column("varchar", "status", "where it stands"),
            "task": Column("varchar", '"group"', "the task that it repeats: `group` in filters"),
            "priority": Column("integer", "priority", "its priority in the queue"),
            "tries": Column("integer", "tries", "attempts that the queue has handed out"),
            "created": _time("created_ns", "when it was made"),
            "last_seen": _time("last_seen_ns", "when something happened to it last"),
            "ended": _time("ended_ns", "when it ended"),
            "ambiguous": Column("boolean", "ambiguous", "a call of it could be another rollout's"),
            "reward": Column("double", "reward", "that of its last attempt that has one"),
            "metadata": Column("map(varchar, varchar)", "metadata", "keys with dots for nested ones: metadata['a.b']"),
        },
    ),
    "attempts": View(
        "One try at a rollout, as it stands now.", "attempts", "true",
        {
            "rollout": _OF["rollout"],
            "attempt": Column("varchar", "attempt", "its name"),
            "number": Column("integer", "sequence", "1 for the first"),
            "status": Column("varchar", "status", "where it stands"),
            "worker": Column("varchar", "worker", "who runs it"),
            "created": _time("created_ns", "when it was made"),
            "last_seen": _time("last_seen_ns", "when something happened to it last"),
            "ended": _time("ended_ns", "when it ended"),
            "reward": Column("double", "reward", "value of its newest trusted reward"),
            "calls": Column("bigint", "calls", "model calls"),
            "errors": Column("bigint", "errors", "those that failed"),
            "cancelled": Column("bigint", "cancelled", "those that the agent left"),
            **_TOKENS,
            "tool_calls": Column("bigint", "tool_calls", "tool calls that answers asked for"),
        },
    ),
    "spans": View(
        "A model call, a run of a tool, a reward or an event.", "spans", "true",
        {
            **_SPAN,
            "kind": Column("varchar", "kind", "llm, tool, mcp, reward, event or otel"),
            "name": Column("varchar", "name", "of what is no call: reward, stdout ..."),
            "status": Column("varchar", "status", "ok, error, cancelled, interrupted, or open while it runs"),
            "started": _time("start_ns", "when it began"),
            "duration_ms": Column("double", "duration_ns / 1e6", "how long it took; ms"),
            "first_byte_ms": Column("double", "first_byte_ns / 1e6", "until the answer began; ms"),
            "dialect": Column("varchar", "dialect", "wire format"),
            "path": Column("varchar", "path", "of the URL"),
            "upstream": Column("varchar", "upstream", "who answered; of tools the server"),
            "http_status": Column("integer", "http_status", "how it was answered"),
            "error": Column("varchar", "error", "reason of a failure, such as http_429"),
            "model": Column("varchar", "model", "model asked for"),
            "model_served": Column("varchar", "model_served", "model that answered"),
            "stream": Column("boolean", "stream", "the answer came as events"),
            "finish": Column("varchar", "finish", "why the model stopped"),
            **_TOKENS,
            "cached_tokens": Column("bigint", "cached_tokens", "prompt tokens read from a cache"),
            "cache_write_tokens": Column("bigint", "cache_write_tokens", "prompt tokens written to a cache"),
            "reasoning_tokens": Column("bigint", "reasoning_tokens", "generated tokens of reasoning"),
            "cost": Column("double", "cost", "by the list of prices; NULL where there is no price or no count"),
            "tool_calls": Column("integer", "tool_calls", "tool calls that the answer asked for"),
            "tools": Column("varchar[]", "tools", "their names; of a run of a tool its own"),
            "choices": Column("integer", "choices", "answers to the one request"),
            "agent": Column("varchar", "agent", "name of the agent"),
            "request_bytes": Column("bigint", "request_bytes", "size of the request"),
            "response_bytes": Column("bigint", "response_bytes", "size of the answer"),
            "truncated": Column("boolean", "truncated", "too large to be kept whole"),
            "retry_of": Column("bigint", "retry_of", "sequence of the call that it repeats"),
            "versions": Column("varchar[]", "versions", "NAME@VERSION of resources that served it"),
            "arm": Column("varchar", "arm", "RELEASE:ARM where it takes part in a release"),
            "ambiguous": Column("boolean", "ambiguous", "it could be another rollout's"),
            "for_release": Column("boolean", "of_release", "it was made to try a release, by no agent"),
        },
    ),
    "messages": View(
        "A part of a message that a call adds to its conversation: what is new in its request, and its answer.",
        "passages", "true",
        {
            **_SPAN,
            "position": Column("integer", "position", "its place among those of the call, from 0 on"),
            "answer": Column("boolean", "answer", "true in the answer, false in the request"),
            "role": Column("varchar", "role", "system, developer, user, assistant, tool ..."),
            "part": Column("varchar", "kind", "text, reasoning, tool_call, tool_call_response, refusal, error ..."),
            "name": Column("varchar", "name", "of a tool call the tool; of an attribute its name"),
            "id": Column("varchar", "id", "of a tool call, and of its result"),
            "text": Column("varchar", "text", "what it says; of a tool call NAME(ARGUMENTS)"),
        },
    ),
    "tool_calls": View(
        "A tool call: that an answer asks for, or that a server of tools was asked to run.",
        "passages", "kind = 'tool_call' and (answer or role = 'client')",
        {
            **_SPAN,
            "position": Column("integer", "position", "its place among the parts of the call"),
            "run": Column("boolean", "not answer", "a server was asked to run it; else a model asks for it"),
            "tool": Column("varchar", "name", "name of the tool"),
            "id": Column("varchar", "id", "its id, which its result has too (messages.id)"),
            "arguments": Column(
                "varchar",
                "text[length(coalesce(name, '')) + 2 : length(text) - ends_with(text, ')')::int]",
                "as they were generated: JSON, if it is whole",
            ),
        },
    ),
    "rewards": View(
        "How well an attempt, or one call of it, went.", "spans", "kind = 'reward'",
        {
            **_SPAN,
            "given": _time("start_ns", "when"),
            "value": Column("double", "reward", "the reward"),
            "source": Column("varchar", "reward_source", "who gave it"),
            "trusted": Column("boolean", "reward_trusted", "false: it counts for nothing"),
        },
    ),
    "releases": View(
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
            "split": Column("double", "split", "the share of new rollouts that get the candidate"),
            **_count("assigned", "rollouts that take part"),
            **_count("counted", "those whose outcome is counted"),
            "created": _time("created_ns", "when it was started"),
            "changed": _time("changed_ns", "when it changed last"),
        },
    ),
    "runs": View(
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


def _select(view: View, files: Mapping[str, Sequence[str]]) -> str:
    if view.table in GIVEN:
        return f"select {_columns(view)} from _{view.table}"
    paths = ", ".join("'" + path.replace("'", "''") + "'" for path in files.get(view.table, ()))
    if not paths:
        empty = ", ".join(f'cast(null as {column.type}) as "{name}"' for name, column in view.columns.items())
        return f"select {empty} where false"
    return f"select {_columns(view)} from read_parquet([{paths}], hive_partitioning = false) where {view.where}"


def _columns(view: View) -> str:
    return ", ".join(f'{column.source} as "{name}"' for name, column in view.columns.items())


def given(table: str) -> dict[str, str]:
    """The columns of a table whose rows are given, with their types."""
    return {
        f"{name}_ns" if column.type == "timestamp" else name: "bigint" if column.type == "timestamp" else column.type
        for name, column in VIEWS[table].columns.items()
    }
