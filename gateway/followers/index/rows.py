"""Rows of spans, rollouts and attempts, in the order of the index's columns.

A span that has ended never changes, so its row is made once, without making the noun: a few microseconds. Rows of a
rollout and its attempts are those of now.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from penstock.gateway.model.attributes import AMBIGUOUS, REPLAY_OF, SHADOW_OF, TOOL, UNREAD
from penstock.gateway.model.lifecycle import is_claimed
from penstock.gateway.model.passage import Passage
from penstock.gateway.model.prices import Prices, TokenCounts
from penstock.gateway.model.release_calls import is_rehearsal
from penstock.gateway.model.rollout import REWARD_PREFIX, Attempt, Rollout
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.model.summaries import last_seen_ns, reward
from penstock.gateway.reading.filters.fields import version_labels
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.records import OWN, STYLE, USAGE
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.traffic.calls.passages import tools_called
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.token_estimate import lacks_token_counts

COLUMNS: Final = {
    "spans": {
        "cursor": "bigint", "number": "bigint", "rollout": "varchar", "attempt": "varchar", "sequence": "bigint",
        "kind": "varchar", "name": "varchar", "status": "varchar", "start_ns": "bigint", "duration_ns": "bigint",
        "first_byte_ns": "bigint", "dialect": "varchar", "path": "varchar", "upstream": "varchar",
        "http_status": "integer", "error": "varchar", "model": "varchar", "model_served": "varchar",
        "stream": "boolean", "finish": "varchar", "input_tokens": "bigint", "output_tokens": "bigint",
        "cached_tokens": "bigint", "cache_write_tokens": "bigint", "reasoning_tokens": "bigint",
        "cost": "double", "cost_reported": "boolean", "tool_calls": "integer", "choices": "integer",
        "agent": "varchar", "request_bytes": "bigint",
        "response_bytes": "bigint", "truncated": "boolean", "retry_of": "bigint", "versions": "varchar[]",
        "arm": "varchar", "tools": "varchar[]", "ambiguous": "boolean", "unread": "varchar[]",
        "of_release": "boolean", "uncounted": "boolean",
        "reward": "double", "reward_source": "varchar", "reward_trusted": "boolean",
    },
    "rollouts": {
        "number": "bigint", "rollout": "varchar", "origin": "varchar", "mode": "varchar", "status": "varchar",
        "claimed": "boolean", "group": "varchar", "priority": "integer", "tries": "integer", "created_ns": "bigint",
        "last_seen_ns": "bigint", "ended_ns": "bigint", "ambiguous": "boolean", "reward": "double",
        "metadata": "map(varchar, varchar)",
    },
    "attempts": {
        "number": "bigint", "rollout": "varchar", "attempt": "varchar", "sequence": "integer", "status": "varchar",
        "worker": "varchar", "created_ns": "bigint", "last_seen_ns": "bigint", "ended_ns": "bigint",
        "reward": "double", "calls": "bigint", "errors": "bigint", "cancelled": "bigint", "input_tokens": "bigint",
        "output_tokens": "bigint", "tool_calls": "bigint", "uncounted": "bigint",
    },
    "inputs": {"number": "bigint", "folded": "varchar"},
}  # fmt: skip
"""The columns of each table, with their types."""
Row = tuple[Any, ...]

_KIND, _STATUS, _DIALECT, _UPSTREAM, _HTTP, _ERROR = map(
    STYLE.index, ("kind", "status", "dialect", "upstream", "http_status", "error")
)
_SHOWN: Final = {name: STYLE.index(name) for name in COLUMNS["spans"] if name in STYLE}
_COUNTS: Final = USAGE.index("billed")
_OWN_USUAL: Final[list[Any]] = [Span.model_fields[name].default for name in OWN]
_AT: Final = {name: at for at, name in enumerate(OWN)}


class RolloutNumbers:
    """The numbers of rollouts by id, as many as are active at once."""

    MOST: Final = 100_000

    def __init__(self) -> None:
        self._numbers = dict[str, int]()

    def forget(self, rollout: str) -> None:
        """Called when a rollout was forgotten: another of this id may follow."""
        self._numbers.pop(rollout, None)

    def number(self, view: TapeView, rollout: str) -> int:
        """The number of a rollout; -1 if it is gone."""
        found = self._numbers.get(rollout)
        if found is None:
            if len(self._numbers) >= self.MOST:
                self._numbers.clear()
            origins = view.origins(rollout)
            if origins is None:
                return -1
            found = self._numbers[rollout] = origins.number
        return found


class SpanRecord:
    """The record of a span, decoded only as far as needed."""

    __slots__ = ("attempt", "attributes", "own", "rollout", "sequence", "style")

    def __init__(self, view: TapeView, key: bytes, summary: bytes) -> None:
        self.rollout, self.attempt, self.sequence = keys.split_summary_key(key)
        style, *own = codec.decode(summary)
        self.style = view.style(style) if isinstance(style, int) else style
        self.own: list[Any] = own + _OWN_USUAL[len(own) :]
        self.attributes: dict[str, Any] = self.own[_AT["attributes"]] or {}

    @property
    def kind(self) -> str:
        return self.style[_KIND]

    @property
    def dialect(self) -> str:
        return self.style[_DIALECT]

    @property
    def stream(self) -> bool:
        return self.style[_SHOWN["stream"]]

    @property
    def http_status(self) -> int | None:
        return self.style[_HTTP]

    @property
    def body(self) -> int | None:
        """The number of the span's body on the tape; None without one."""
        return self.own[_AT["body"]]

    def tools(self, passages: Iterable[Passage]) -> list[str]:
        """The tool that the span ran, or those that its answer asked for."""
        if self.kind == "tool":
            return [str(self.attributes.get(TOOL, ""))]
        return tools_called(passages) if self.own[_AT["tool_calls"]] else []


def span_row(head: SpanRecord, cursor: int, number: int, tools: list[str], prices: Prices) -> Row:
    """The row of a span. `number`: its rollout's."""
    style, own, attributes = head.style, head.own, head.attributes
    told: list[Any] = own[_AT["usage"]] or []
    tokens = TokenCounts(*told, *[None] * (len(USAGE) - len(told)))
    usage = list(tokens[:_COUNTS])
    kind, start = style[_KIND], own[_AT["start_ns"]]
    is_reward = kind == "reward"
    versions = own[_AT["versions"]]
    shown = {name: style[at] for name, at in _SHOWN.items()}
    cost = prices.cost(shown["model_served"], shown["model"], start, tokens) if kind == "llm" else None
    return (
        cursor, number, head.rollout, head.attempt, head.sequence, kind, shown["name"], style[_STATUS], start,
        own[_AT["end_ns"]], own[_AT["first_byte_ns"]], style[_DIALECT], shown["path"], style[_UPSTREAM], style[_HTTP],
        style[_ERROR], shown["model"], shown["model_served"], shown["stream"], shown["finish"], *usage,
        cost, tokens.own_cost is not None, own[_AT["tool_calls"]], shown["choices"], shown["agent"],
        own[_AT["request_bytes"]], own[_AT["response_bytes"]], shown["truncated"], own[_AT["retry_of"]],
        None if versions is None else version_labels(versions), own[_AT["arm"]], tools, AMBIGUOUS in attributes,
        list(attributes.get(UNREAD, ())) or None,
        REPLAY_OF in attributes or SHADOW_OF in attributes or is_rehearsal(head.rollout),
        _uncounted(style, usage), attributes.get(f"{REWARD_PREFIX}value") if is_reward else None,
        attributes.get(f"{REWARD_PREFIX}source", "user") if is_reward else None,
        attributes.get(f"{REWARD_PREFIX}trusted", True) if is_reward else None,
    )  # fmt: skip


class _Call:
    """The fields of a call that tell whether its tokens were counted (`lacks_token_counts`)."""

    __slots__ = ("error", "http_status", "kind", "status", "upstream", "usage")

    def __init__(self, style: Any, usage: list[Any]) -> None:
        self.kind, self.status, self.upstream = style[_KIND], style[_STATUS], style[_UPSTREAM]
        self.http_status, self.error = style[_HTTP], style[_ERROR]
        self.usage = Usage.model_construct(input_tokens=usage[0], output_tokens=usage[1])


def _uncounted(style: Any, usage: list[Any]) -> bool:
    if style[_KIND] != "llm" or (usage[0] is not None and usage[1] is not None):
        return False
    return lacks_token_counts(_Call(style, usage), by_name(style[_DIALECT]))


def rollout_row(number: int, rollout: Rollout, attempts: list[Attempt]) -> Row:
    """The row of a rollout as of now."""
    return (
        number, rollout.id, rollout.origin, rollout.mode, str(rollout.status),
        is_claimed(rollout.origin, rollout.status), rollout.group, rollout.priority, rollout.tries, rollout.created_ns,
        last_seen_ns(rollout, attempts), rollout.ended_ns,
        any(attempt.totals.ambiguous for attempt in attempts),
        reward(attempts),
        [(name, text) for name, text in dict(flatten_metadata(rollout.metadata or {})).items() if text is not None],
    )  # fmt: skip


def attempt_row(number: int, attempt: Attempt) -> Row:
    """The row of an attempt as of now."""
    totals = attempt.totals
    return (
        number, attempt.rollout, attempt.id, attempt.sequence, str(attempt.status), attempt.worker,
        attempt.created_ns, attempt.last_seen_ns, attempt.ended_ns, attempt.reward, totals.calls, totals.errors,
        totals.cancelled, totals.input_tokens, totals.output_tokens, totals.tool_calls, totals.uncounted,
    )  # fmt: skip


def input_row(number: int, rollout: Rollout) -> Row:
    """The input of a rollout as filters compare it."""
    return number, json.dumps(rollout.input, ensure_ascii=False).casefold()


def flatten_metadata(metadata: dict[str, Any], before: str = "") -> Iterator[tuple[str, str | None]]:
    """Every name that `metadata.NAME` of a filter may have, with its text: a key, or a path of keys with dots between.
    A key comes after the paths, because a key with dots takes precedence over a path of the same name, even if its
    value is null."""
    for key, value in metadata.items():
        if isinstance(value, dict) and "." not in key:
            yield from flatten_metadata(cast("dict[str, Any]", value), f"{before}{key}.")
    for key, value in metadata.items():
        if not key and before:
            continue  # no filter can name it
        yield before + key, value if value is None or isinstance(value, str) else json.dumps(value)
