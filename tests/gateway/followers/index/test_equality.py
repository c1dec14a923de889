"""A filter gives the same answer by the index as by a scan, whatever the tape has and whenever the index was killed."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_args

import pytest
from fakes.entries import body
from fakes.forgetting import forget
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from penstock.gateway.api.guard import Control
from penstock.gateway.api.pagination import IndexLookup as Finder
from penstock.gateway.api.pagination import RolloutCosts, page, recent_walk, rollouts_walk, scan
from penstock.gateway.api.pagination import index_lookup as listing_finder
from penstock.gateway.api.stats import gather, scan_breakdown
from penstock.gateway.app import open_store
from penstock.gateway.followers.index.finder import NoAnswerError
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import FindRequest, FindResult, SumRequest
from penstock.gateway.model.answers import BreakdownRow, Stats
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.facts import AMBIGUOUS, SHADOW_OF, TOOL, UNREAD, is_release_call
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import AttemptStatus, Judgement, Outcome, Totals
from penstock.gateway.model.span import Usage
from penstock.gateway.reading.filter_fields import FIELDS, Target
from penstock.gateway.reading.filters import Term, parse
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.work.operations import QueueOperations

T0 = 1_790_000_000_000_000_000
NOW = T0 + 3600 * 10**9
PRICES = Prices()
SEALED = 7
"""Rows that are sealed together, so that a short history has many files."""

ODD = ["ſmall", "SMALL", "straße", "STRASSE", "K", "naïve", "日本", "a*b", "a?b", "x y", 'q"uote', "", "\u0130", "[ab]"]
MODELS = ["gpt-4o", "GPT-4o", "qwen3-8b", *ODD]
METADATA: list[Any] = [
    None,
    {},
    {"tenant": "t1"},
    {"tenant": "T1", "n": 3},
    {"tenant": {"plan": "Free"}, "tenant.plan": None},
    {"tenant": {"plan": "free", "deep": {"er": True}}},
    {"tenant.plan": "dotted", "tenant": {"plan": "nested"}},
    {"größe": "straße", "n": 1.5},
    {"tenant": ["x", 1]},
    {"tenant": "\ud800 half", chr(0xD801): 1, chr(0xD802): 2},
    {"tenant": {"": 5, "plan": {"": {"x": "deep"}}}, "": {"x": "free"}},
]
INPUTS: list[Any] = [None, "Where is my FLIGHT?", {"question": "Straße?"}, {"q": ["é", 1, None]}, 7, ""]
FAILED, DONE = AttemptStatus.FAILED, AttemptStatus.SUCCEEDED

SAID = [
    "I fly to Paris",
    "STRASSE",
    "straße and ſmall",
    "İstanbul K",
    "日本 reiſe",
    'he said "no"',
    "no such",
    "",
    "yes",
]
ATTRIBUTES: list[Any] = [
    None,
    None,
    {AMBIGUOUS: True},
    {TOOL: "search"},
    {UNREAD: {"choices[].novel": "text", "x.usage": "usage"}},
    {SHADOW_OF: "r1/a1/1"},
    {"text": "Printed to Paris", "n": 3},
]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request and its answer, as an API of chat or one like it has them: with a history, tools, errors."""
    words = st.sampled_from(SAID)
    asked: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 2))):
        asked.append({"role": "user", "content": draw(words)})
        if draw(st.booleans()):
            asked.append({"role": "assistant", "content": draw(words)})
    if draw(st.booleans()):
        asked.append({"role": "tool", "tool_call_id": "c1", "content": draw(words)})
    call = {
        "id": "c1",
        "function": {"name": draw(st.sampled_from(["search", "Sell", ""])), "arguments": '{"to": "Rome"}'},
    }
    message = {"role": "assistant", "content": draw(words), "tool_calls": [call] if draw(st.booleans()) else []}
    answers: list[Any] = [
        {"choices": [{"message": message}]},
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": draw(words)}]},
        {"error": {"message": draw(words)}},
    ]
    request = json.dumps({"messages": asked}, ensure_ascii=draw(st.booleans())).encode()
    return request, json.dumps(draw(st.sampled_from(answers))).encode()


says = st.one_of(conversations(), st.sampled_from([(b"{}", b"yes"), (b"no JSON: Paris", b"\xff\x00"), (b"", b"")]))

entries = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["llm", "llm", "tool", "mcp", "event"]),
        "name": st.sampled_from([None, "stdout", "Note"]),
        "status": st.sampled_from(["ok", "ok", "error", "cancelled"]),
        "start_ns": st.integers(T0, NOW),
        "says": says,
        "took": st.sampled_from([0, 10**6, 250 * 10**6, 2 * 10**9]),
        "dialect": st.sampled_from(["chat", "messages", "opaque"]),
        "upstream": st.sampled_from([None, "up-1", "Up-2"]),
        "http_status": st.sampled_from([None, 200, 429]),
        "error": st.sampled_from([None, "http_429", "timeout", "translation"]),
        "model": st.sampled_from([None, *MODELS]),
        "model_served": st.sampled_from([None, *MODELS]),
        "stream": st.booleans(),
        "finish": st.sampled_from([None, "stop", "tool_calls"]),
        "tool_calls": st.integers(0, 2),
        "agent": st.sampled_from([None, "planner", *ODD]),
        "request_bytes": st.integers(0, 3000),
        "response_bytes": st.integers(0, 3000),
        "versions": st.sampled_from([None, {"planner": "v1"}, {"planner": "v2", "qwen": "v10"}]),
        "attributes": st.sampled_from(ATTRIBUTES),
        "arm": st.sampled_from([None, "rel-1:stable", "rel-1:candidate,rel-2:stable"]),
        "usage": st.sampled_from(
            [None, Usage(), Usage(input_tokens=900), Usage(input_tokens=900, output_tokens=100), Usage(output_tokens=7)]
        ),
    }
)
specs = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["train", "val", "test", "online"]),
        "group": st.sampled_from([None, "g1", "G1", *ODD[:6]]),
        "priority": st.integers(-2, 2),
        "metadata": st.sampled_from(METADATA),
        "input": st.sampled_from(INPUTS),
    }
)
numbers = st.integers(0, 5)
actions = st.one_of(
    st.tuples(st.just("call"), numbers, st.sampled_from(["a1", "a2"]), entries),
    st.tuples(st.just("call"), numbers, st.sampled_from(["a1", "a2"]), entries),
    st.tuples(st.just("begin"), numbers, entries),
    st.tuples(st.just("end"), numbers),
    st.tuples(st.just("die"), numbers),
    st.tuples(st.just("queue"), specs),
    st.tuples(st.just("hand"), st.sampled_from(["gpu-1", "GPU-1", "cpu"]), specs),
    st.tuples(
        st.just("finish"), numbers, st.sampled_from([FAILED, DONE]), st.sampled_from([None, -1.5, 0.0, 0.3, 1.0])
    ),
    st.tuples(st.just("follow")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("forget"), st.integers(0, 30)),
    st.tuples(st.just("tidy")),
)


class History:
    """A tape that something happens to, and its index."""

    def __init__(self, path: Path) -> None:
        self.store = open_store(path)
        self._path = path / "index"
        self.index = TapeIndex(self.store, self._path, SEALED)
        self._queued, self._running = list[str](), list[SpanEntry]()
        self._at = T0

    def do(self, action: tuple[Any, ...]) -> None:
        kind, *values = action
        self._at += 10**9
        getattr(self, f"_{kind}")(*values)

    def _call(self, rollout: int, attempt: str, fields: dict[str, Any]) -> None:
        self.store.write([_entry(f"r{rollout}", attempt, fields)])

    def _begin(self, rollout: int, fields: dict[str, Any]) -> None:
        entry = _entry(f"r{rollout}", "a1", fields)
        entry.status, entry.end_ns = "open", None
        self.store.write([entry])
        self._running.append(entry)

    def _end(self, number: int) -> None:
        if self._running:
            entry = self._running.pop(number % len(self._running))
            entry.status, entry.end_ns = "ok", entry.start_ns + 10**9
            self.store.write([entry])

    def _die(self, number: int) -> None:
        """A gateway was killed while a call ran: nobody knows when that was."""
        if self._running:
            entry = self._running.pop(number % len(self._running))
            entry.status, entry.error = "interrupted", "gateway_died"
            self.store.write([entry])

    def _queue(self, spec: dict[str, Any]) -> None:
        name = f"q{self._at}"
        self._operate(lambda tape: tape.enqueue([(name, RolloutSpec(**spec))], self._at))

    def _hand(self, worker: str, spec: dict[str, Any]) -> None:
        name = f"h{self._at}"
        self._operate(lambda tape: tape.hand_out(name, RolloutSpec(**spec), worker, 10**18, self._at))
        self._queued.append(name)

    def _finish(self, number: int, status: AttemptStatus, reward: float | None) -> None:
        if self._queued:
            name = self._queued.pop(number % len(self._queued))
            said = [] if reward is None else [(Judgement(value=reward, source="rule"), True)]
            self._operate(lambda tape: tape.finish((name, "a1"), None, status, Outcome(), said, self._at))

    def _tool(self, rollout: int, tool: str) -> None:
        """A run of a tool in a rollout that has ended."""
        name = [one.id for _, one in self.store.rollouts() if one.id.startswith("h")][rollout]
        self.store.write([_entry(name, "a1", usual(kind="tool", attributes={TOOL: tool}))])

    def _operate(self, do: Callable[[QueueOperations], object]) -> None:
        task: QueuedOperation[Any] = QueuedOperation(lambda transaction: do(QueueOperations(transaction)))
        self.store.write([task])
        assert task.refusal is None, task.refusal

    def _follow(self) -> None:
        assert self.index.follow(time.monotonic() + 60)

    def _forget(self, number: int) -> None:
        busy = {entry.rollout for entry in self._running} | set(self._queued)
        if free := [rollout.id for _, rollout in self.store.rollouts() if rollout.id not in busy]:
            forget(self.store, free[number % len(free)])

    def _tidy(self) -> None:
        self.index.tidy()

    def _kill(self) -> None:
        """The process of the index is killed, and another one begins where the last manifest is."""
        self.index.close()
        self.index = TapeIndex(self.store, self._path, SEALED)

    def close(self) -> None:
        self.index.close()
        self.store.close()


def _entry(rollout: str, attempt: str, fields: dict[str, Any]) -> SpanEntry:
    known = {name: value for name, value in fields.items() if name not in ("took", "says")}
    request, response = fields.get("says", (b"{}", b"yes"))
    said = None if fields["kind"] == "event" else body(request, response)
    return SpanEntry(rollout, attempt, end_ns=fields["start_ns"] + fields["took"], body=said, **known)


@contextmanager
def history() -> Generator[History]:
    with tempfile.TemporaryDirectory() as path:
        found = History(Path(path))
        try:
            yield found
        finally:
            found.close()


VALUES = {
    "status": [
        "ok",
        "failed",
        "waiting",
        "claimed",
        "over",
        "ended",
        "error",
        "open",
        "cancelled",
        "running",
        "succeeded",
    ],
    "mode": ["train", "val"],
    "origin": ["queued", "header"],
    "kind": ["llm", "tool", "reward", "event"],
    "source": ["rule", "user"],
    "attempt_status": ["running", "failed", "succeeded"],
    "ambiguous": ["true", "false"],
    "stream": ["true", "false"],
    "started": ["30m", "2026-09-21T14:30:00Z"],
    "since": ["30m", "2026-09-21"],
    "latency": ["0ms", "250ms", "1s", "1h", "none"],
    "reward": ["0", "0.3", "-1.5", "1", "none", "none"],
    "cost": ["0", "0.001", "0.00325", "none", "none"],
    "priority": ["-1", "0", "2"],
    "rollout": ["r1", "r*", "R?", "q*", "h*", "none"],
    "text": [
        *("yes", "no such", "paris", "strasse", "SMALL", "k", "istanbul", "日本", '"no"', "i̇", "rome", "Sell(", "r"),
        *("*", "P?ris", "stra*small", "i*PARIS", '*"no*"', "s?*e", "日*r", "??", "a*a*a*z"),
    ],
    "input": ["flight", "my*?", "STRA*", "?", "é*1", "[*]"],
    "raw": ["yes", "no such", '"role"', "Paris"],
    "tool": ["search", "s*", "none"],
    "unread": ["*", "choices*", "x.usage", "none"],
}
WORDS = [*ODD, "planner*", "*4o", "gpt", "up-?", "t1", "Free", "nested", "3", "true", "stra", "flight", "g1", "*@v2"]
NUMBERS = ["none", "0", "1", "7", "200", "900", "1000", "3000"]
KEYS = [
    "metadata.tenant",
    "metadata.tenant.",
    "metadata.tenant.plan",
    "metadata.tenant.plan..x",
    "metadata.n",
    "metadata.größe",
    "metadata.tenant.deep.er",
]


@st.composite
def filters(draw: st.DrawFn) -> tuple[Target, str]:
    target = cast(Target, draw(st.sampled_from(["spans", "rollouts"])))
    terms: list[Term] = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*FIELDS[target], *KEYS]))
        field = FIELDS[target].get(name) or FIELDS[target]["group"]
        operator = draw(st.sampled_from(field.operators))
        numeric = ">" in field.operators and name not in VALUES
        given = draw(st.lists(st.sampled_from(VALUES.get(name, NUMBERS if numeric else WORDS)), min_size=1, max_size=2))
        term = Term(name, operator, tuple(given), draw(st.booleans()))
        try:
            parse(str(term), target, NOW)
        except ValueError:
            continue  # a word that the field does not know
        terms.append(term)
    return target, " ".join(map(str, terms))


def listed(store: Store, target: Target, filter: str, find: Finder) -> list[Any]:
    query = parse(filter, target, NOW)
    costs = RolloutCosts(PRICES)
    walk = recent_walk(store, query, PRICES, find) if target == "spans" else rollouts_walk(store, query, costs, find)
    return [row for _, row in walk(None) if row is not None]


def finder(index: TapeIndex, target: Target, filter: str, page: int) -> Finder:
    """Asks for pages of that size, so that there are several."""
    return lambda before, limit: index.find(FindRequest(target, filter, NOW, before, min(limit, page)))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(actions, min_size=5, max_size=60), st.lists(filters(), min_size=8, max_size=30), st.integers(1, 9))
def test_a_filter_answers_by_the_index_as_by_a_scan(
    happens: list[tuple[Any, ...]], asked: list[tuple[Target, str]], page: int
) -> None:
    with history() as found:
        for at, action in enumerate(happens):
            found.do(action)
            if at % 10 and at != len(happens) - 1:
                continue
            for target, filter in asked:
                found.do(("follow",))
                wanted = listed(found.store, target, filter, scan)
                assert listed(found.store, target, filter, finder(found.index, target, filter, page)) == wanted, filter
                event(f"{target} found: {bool(wanted)}")


REFUSED = {"kind": "llm", "status": "error", "error": "translation", "upstream": None, "dialect": "chat"}


def usual(**fields: Any) -> dict[str, Any]:
    known = {"kind": "llm", "status": "ok", "start_ns": T0, "took": 10**6, "dialect": "chat", "upstream": "up-1"}
    return known | fields


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@example(
    [
        ("call", 0, "a1", usual(**REFUSED)),
        ("call", 0, "a1", usual(status="error", error=None, upstream=None)),
        ("call", 0, "a2", usual(**REFUSED)),
        ("call", 0, "a1", usual()),
    ],
    ["agent", "status", "version"],
    ["", "-error:timeout"],
)
@example(
    [
        *(("hand", "cpu", {}) for _ in range(3)),
        ("finish", 0, FAILED, None),
        ("finish", 0, DONE, 0.3),
        ("finish", 0, DONE, -1.5),
        *(("call", at, "a1", usual(kind="tool", attributes={TOOL: f"t{at % 2}"}, took=at)) for at in (0, 0, 1, 1, 2)),
        ("call", 1, "a1", usual(kind="tool", attributes={TOOL: "t1"}, status="error", upstream=None)),
        ("begin", 2, usual(kind="tool", attributes={TOOL: "t1"})),
        ("call", 2, "a1", usual(attributes={SHADOW_OF: "r1/a1/1"})),
        ("tool", 0, "t0"),
        ("tool", 1, "t0"),
    ],
    ["tool"],
    [""],
)
@example(
    [
        *(("begin", 0, usual(kind=kind, **about)) for kind in ("llm", "tool", "llm") for about in ({}, {"model": "m"})),
        *(("die", 0) for _ in range(5)),
        ("call", 1, "a1", usual()),
    ],
    ["error", "status", "model"],
    ["", "error:gateway_died"],
)
@given(
    st.lists(actions, min_size=5, max_size=60),
    st.lists(st.sampled_from(get_args(BreakdownDimension)), min_size=1, max_size=3),
    st.lists(filters().filter(lambda one: one[0] == "spans").map(lambda one: one[1]), min_size=1, max_size=2),
)
def test_figures_are_those_of_a_scan(
    happens: list[tuple[Any, ...]], bys: list[BreakdownDimension], texts: list[str]
) -> None:
    with history() as found:
        for action in happens:
            found.do(action)
        found.do(("follow",))
        for by, filter in product(bys, ["", *texts]):
            query = parse(filter, "spans", NOW)
            if query.on_bodies:
                continue
            wanted = scan_breakdown(found.store, by, query, 10**6)
            rows = summed(found.index, SumRequest(by, filter, NOW, 1000))
            assert [rounded(BreakdownRow.model_validate(row)) for row in rows] == list(map(rounded, wanted.rows))
            assert wanted.complete
        scanned_all, summed_all = (
            asyncio.run(gather(found.store, most, Metrics(), Prices(), found.index.total)) for most in (10**6, None)
        )
        assert without_mean(summed_all) == without_mean(scanned_all)
        assert summed_all.rewards.mean == pytest.approx(scanned_all.rewards.mean)
        event(f"tools were run: {bool(summed_all.by_tool)}, rewards given: {summed_all.rewards.count > 0}")


OTHERS = ["status", "kind", "http", "error", "model", "tool", "agent", "attempt", "rollout", "text"]


@st.composite
def with_texts(draw: st.DrawFn) -> str:
    """A filter of spans: something that they say, and other terms that the same call must satisfy."""
    terms = [Term("text", "~", (draw(st.sampled_from(VALUES["text"])),), draw(st.booleans()))]
    for name in draw(st.lists(st.sampled_from(OTHERS), min_size=1, max_size=2)):
        values = VALUES.get(name, {"http": ["200", "429"]}.get(name, [*WORDS, "http_429", "a1"]))
        operator = "~" if name == "text" else ":"
        terms.append(Term(name, operator, (draw(st.sampled_from(values)),), draw(st.booleans())))
    filter = " ".join(map(str, terms))
    try:
        parse(filter, "spans", NOW)
    except ValueError:
        assume(False)
    return filter


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.lists(actions, min_size=5, max_size=60),
    st.lists(with_texts(), min_size=4, max_size=12),
    st.integers(1, 9),
    st.integers(0, 4),
)
def test_what_is_said_and_another_term_take_as_many_calls_in_pages_and_in_sums(
    happens: list[tuple[Any, ...]], asked: list[str], limit: int, answers: int
) -> None:
    """Each call once: in pages that are followed, where the index ends to answer after some, and in every sum."""
    with history() as found:
        for action in happens:
            found.do(action)
        found.do(("follow",))
        for filter in asked:
            wanted = listed(found.store, "spans", filter, scan)
            assert followed(found, filter, limit, answers) == wanted, filter
            calls = [one for one in wanted if one.kind == "llm" and one.status != "open" and not is_release_call(one)]
            for by in cast("list[BreakdownDimension]", ["model", "status"]):
                rows = summed(found.index, SumRequest(by, filter, NOW, 1000))
                values = Counter("unknown" if getattr(one, by) is None else str(getattr(one, by)) for one in calls)
                assert {row["value"]: row["calls"] for row in rows} == values, (by, filter)
            event(f"found: {bool(wanted)}, of them calls: {bool(calls)}")


def followed(found: History, filter: str, limit: int, answers: int) -> list[Any]:
    """All rows of a filter, page by page. `answers`: how often the index answers on each page."""
    rows, mark, query, left = list[Any](), None, parse(filter, "spans", NOW), 0

    def find(asked: FindRequest) -> FindResult | None:
        nonlocal left
        left -= 1
        return found.index.find(asked) if left >= 0 else None

    control = cast(Control, SimpleNamespace(index=SimpleNamespace(find=find)))
    while True:
        left = answers
        one = asyncio.run(
            page(
                recent_walk(found.store, query, PRICES, listing_finder(control.index, "spans", query, NOW)), mark, limit
            )
        )
        rows += one.rows
        if (mark := one.mark) is None:
            return rows


def without_mean(stats: Stats) -> Stats:
    sums = {"totals": rounded(stats.totals), "by_model": {name: rounded(it) for name, it in stats.by_model.items()}}
    return stats.model_copy(update={"rewards": stats.rewards.model_copy(update={"mean": None})} | sums)


def summed(index: TapeIndex, asked: SumRequest) -> list[dict[str, Any]]:
    while True:
        try:
            return index.sum(asked).rows
        except NoAnswerError:
            continue


T = TypeVar("T", bound=Totals)


def rounded(row: T) -> T:
    """Means depend on the order of a sum."""
    sums = {name: getattr(row, name, None) for name in ("reward", "cost") if name in type(row).model_fields}
    return row.model_copy(update={name: None if value is None else round(value, 9) for name, value in sums.items()})


@pytest.fixture(autouse=True)
def quiet_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives the test: what is synced need not be."""

    def fsync(handle: int) -> None:
        pass

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short history has many, and searches have several parts."""
    monkeypatch.setattr("penstock.gateway.followers.index.texts.BLOCK", 60)
    monkeypatch.setattr("penstock.gateway.followers.index.texts.FIRST", 2)


@pytest.fixture(autouse=True, params=[0.0, 60.0], ids=["no time to search", "time to search"])
def search_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any a search has one block more each time that it is asked."""
    monkeypatch.setattr("penstock.gateway.followers.index.finder.SEARCH_S", request.param)
    monkeypatch.setattr("penstock.gateway.followers.index.follower.READ_S", request.param)
