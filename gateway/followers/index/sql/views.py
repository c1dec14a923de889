"""The views of a query: each with its columns, their meanings, and their sources. Pure.

In all of them `span` identifies a span: the number of the change that recorded it. Times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple


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


_OF: Final = {
    "rollout": ViewColumn("varchar", "rollout", "its rollout"),
    "attempt": ViewColumn("varchar", "attempt", "its attempt"),
    "sequence": ViewColumn("bigint", "sequence", "its place in the attempt, from 1 on"),
}
_SPAN: Final = {"span": ViewColumn("bigint", "cursor", "names the span in all views"), **_OF}
_TOKENS: Final = {
    "input_tokens": ViewColumn("bigint", "input_tokens", "prompt tokens, cached ones included"),
    "output_tokens": ViewColumn("bigint", "output_tokens", "generated tokens"),
}
VIEWS: Final[dict[str, ViewDefinition]] = {
    "rollouts": ViewDefinition(
        "One task given to one agent, as it stands now.", "rollouts", "true",
        {
            "rollout": ViewColumn("varchar", "rollout", "its name"),
            "origin": ViewColumn("varchar", "origin", "how it came to be: header, url, implicit, queued ..."),
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
            "rollout": _OF["rollout"],
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
            **_SPAN,
            "kind": ViewColumn("varchar", "kind", "llm, tool, mcp, reward, event or otel"),
            "name": ViewColumn("varchar", "name", "of what is no call: reward, stdout ..."),
            "status": ViewColumn("varchar", "status", "ok, error, cancelled, interrupted, or open while it runs"),
            "started": _time("start_ns", "when it began"),
            "duration_ms": ViewColumn("double", "duration_ns / 1e6", "how long it took; ms"),
            "first_byte_ms": ViewColumn("double", "first_byte_ns / 1e6", "until the answer began; ms"),
            "dialect": ViewColumn("varchar", "dialect", "wire format"),
            "path": ViewColumn("varchar", "path", "of the URL"),
            "upstream": ViewColumn("varchar", "upstream", "who answered; of tools the server"),
            "http_status": ViewColumn("integer", "http_status", "how it was answered"),
            "error": ViewColumn("varchar", "error", "reason of a failure, such as http_429"),
            "model": ViewColumn("varchar", "model", "model asked for"),
            "model_served": ViewColumn("varchar", "model_served", "model that answered"),
            "stream": ViewColumn("boolean", "stream", "the answer came as events"),
            "finish": ViewColumn("varchar", "finish", "why the model stopped"),
            **_TOKENS,
            "cached_tokens": ViewColumn("bigint", "cached_tokens", "prompt tokens read from a cache"),
            "cache_write_tokens": ViewColumn("bigint", "cache_write_tokens", "prompt tokens written to a cache"),
            "reasoning_tokens": ViewColumn("bigint", "reasoning_tokens", "generated tokens of reasoning"),
            "cost": ViewColumn("double", "cost", "by the list of prices; NULL where there is no price or no count"),
            "tool_calls": ViewColumn("integer", "tool_calls", "tool calls that the answer asked for"),
            "tools": ViewColumn("varchar[]", "tools", "their names; of a run of a tool its own"),
            "choices": ViewColumn("integer", "choices", "answers to the one request"),
            "agent": ViewColumn("varchar", "agent", "name of the agent"),
            "request_bytes": ViewColumn("bigint", "request_bytes", "size of the request"),
            "response_bytes": ViewColumn("bigint", "response_bytes", "size of the answer"),
            "truncated": ViewColumn("boolean", "truncated", "too large to be kept whole"),
            "retry_of": ViewColumn("bigint", "retry_of", "sequence of the call that it repeats"),
            "versions": ViewColumn("varchar[]", "versions", "NAME@VERSION of resources that served it"),
            "arm": ViewColumn("varchar", "arm", "RELEASE:ARM where it takes part in a release"),
            "ambiguous": ViewColumn("boolean", "ambiguous", "it could be another rollout's"),
            "for_release": ViewColumn("boolean", "of_release", "it was made to try a release, by no agent"),
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
