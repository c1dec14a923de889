"""What agents say of themselves: `penstock.reward`, `event` and `span`, by agents that a runner has started."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from fakes.ports import steady_ports
from fakes.process import PATIENCE, ROOT, Gateway, running, upstreams
from fakes.provider import serving
from fakes.runs import AGENTS, PYTHON, events, only_attempt, runs, said
from fakes.shell import Shell

import penstock
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import Reward, RolloutConfig
from penstock.gateway.model.span import Span, span_tree
from penstock.sidecar.run.agent import helper

SPEAKS = (PYTHON, str(AGENTS / "speaks.py"))
TASKS = ("nested", "async", "threads", "child", "end", "abrupt", "odd")
SHARED = pytest.mark.asyncio(loop_scope="module")
LIGHT = """
import sys
before = set(sys.modules)
import penstock
assert set(sys.modules) - before <= {"__future__", "penstock"}, set(sys.modules) - before
penstock.reward(1, style=2)
penstock.event("cart", {"items": 3})
with penstock.span("search", query="x") as search:
    search.set_attributes(hits=1)
    assert search.headers == {}
assert penstock.flush()
import threading
assert threading.active_count() == 1
heavy = {"asyncio", "json", "typing", "urllib.request", "inspect", "http.client", "aiohttp", "pydantic"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


@dataclass(frozen=True)
class Told:
    """Agents of all tasks have run, and said what they do."""

    gateway: Gateway
    client: Client

    async def spans(self, rollout: str) -> list[Span]:
        """All of the attempt, but its output and its end."""
        return [one async for one in self.client.spans(rollout) if one.name not in ("stdout", "stderr", "exit")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Told]:
    home = tmp_path_factory.mktemp("told")
    async with (
        serving() as provider,
        running(home / "gateway", upstreams(openai=provider.openai_url)) as gateway,
        Client(gateway.url) as client,
        runs(gateway.url, home) as start_run,
    ):
        one_attempt = RolloutConfig(max_attempts=1)
        forked = RolloutSpec(id="forked", input="nested", config=one_attempt)
        for specs, words in (
            ([RolloutSpec(id=task, input=task, config=one_attempt) for task in TASKS], ()),
            ([forked], ("--preload", "--callable", "speaks:work")),
        ):
            _ = await client.enqueue(specs)
            run = await start_run(*words, agent=() if words else SPEAKS)
            assert await run.ended() == 0, run.stderr
        yield Told(gateway, client)


def label(span: Span) -> str:
    return span.name or span.kind


def inside(found: list[Span]) -> dict[str, str | None]:
    """By name: the name of the span that it stands in."""
    by_sequence = {span.sequence: label(span) for span in found}
    return {
        label(span): None if above is None else by_sequence[above]
        for above, below in span_tree(found).items()
        for span in below
    }


@SHARED
@pytest.mark.parametrize("rollout", ["nested", "forked"])
async def test_spans_stand_in_each_other(told: Told, rollout: str) -> None:
    found = await told.spans(rollout)
    assert inside(found) == {
        "plan": None,
        "llm": "plan",
        "search": "plan",
        "cart": "search",
        "book": "plan",
        "look up": "plan",
        "reward": None,
    }
    named = {label(span): span for span in found}
    plan, search, book = named["plan"], named["search"], named["book"]
    assert {span.kind for span in (plan, search, book)} == {"otel"}
    assert (plan.attributes or {}).items() >= {"goal": "Rome", "steps": "[1, 2]", "tries": 2, "booked": False}.items()
    assert (search.attributes or {}).items() >= {"hits": 12, "best": 0.5}.items()
    assert (named["look up"].attributes or {})["kind"] == "tool"
    assert named["cart"].attributes == {"items": 3, "full": False}
    assert plan.start_ns <= search.start_ns <= (search.end_ns or 0) <= book.start_ns <= (plan.end_ns or 0)
    assert {span.trace_id for span in found} == {plan.trace_id}, "they are in the trace of the attempt"
    assert (plan.status, book.status, book.error) == ("ok", "error", "ValueError")
    (thrown,) = (book.attributes or {})["otel.events"]
    assert thrown["name"] == "exception"
    assert thrown["attributes"]["exception.message"] == "no seat"
    assert thrown["attributes"]["exception.stacktrace"].endswith("ValueError: no seat\n")
    reward = Reward.of(named["reward"])
    assert (reward.value, reward.dimensions, reward.source, reward.reason) == (
        0.7,
        {"style": 1.0},
        "agent",
        "felt good",
    )
    assert not reward.trusted
    attempt = await only_attempt(told.client, rollout)
    assert (attempt.status, attempt.reward) == ("succeeded", None)
    assert said(await events(told.client, rollout), "stderr") == ""


@pytest.mark.slow
@SHARED
async def test_show_shows_them_in_each_other(told: Told, tmp_path: Path) -> None:
    shown = (await Shell(told.gateway.url, tmp_path).run("show", "nested")).text
    depth = {
        name: line.index("#")
        for line in shown.splitlines()
        for name in ("plan", "search", "book", "cart", "chat  fake")
        if f"  {name}" in line and "#" in line
    }
    step = depth["search"] - depth["plan"]
    assert step > 0
    assert depth == {
        "plan": depth["plan"],
        "search": depth["plan"] + step,
        "chat  fake": depth["plan"] + step,
        "book": depth["plan"] + step,
        "cart": depth["plan"] + 2 * step,
    }
    assert "otel  book  error  ValueError: no seat" in shown


@SHARED
async def test_async_spans_beside_each_other_are_told_apart(told: Told) -> None:
    found = await told.spans("async")
    names = {span.span_id: label(span) for span in found}
    above = sorted((label(span), names.get(span.parent_id or "", "")) for span in found)
    assert above == [
        ("left", "together"),
        ("llm", "left"),
        ("llm", "right"),
        ("look up later", "left"),
        ("look up later", "right"),
        ("right", "together"),
        ("together", ""),
    ]


@SHARED
async def test_threads_and_children_lose_nothing(told: Told) -> None:
    found = await told.spans("threads")
    names = {span.span_id: label(span) for span in found}
    above = {label(span): names.get(span.parent_id or "") for span in found if span.kind == "otel"}
    assert above == {"outer": None, "alone": None, "inside": "outer"}
    worked = {str((span.attributes or {})["in"]): names[span.parent_id] for span in found if span.name == "worked"}
    assert worked == {"alone": "alone", "inside": "inside"}


@SHARED
async def test_a_child_process_speaks_too(told: Told) -> None:
    assert inside(await told.spans("child")) == {"parent": None, "child": "parent", "born": "child"}


@SHARED
async def test_nothing_is_lost_at_the_end(told: Told) -> None:
    assert {label(span) for span in await told.spans("end")} == {"from a thread", "at exit", "reward"}


@SHARED
async def test_whoever_leaves_at_once_can_wait_before(told: Told) -> None:
    assert [span.name for span in await told.spans("abrupt")] == ["last words"]


@SHARED
async def test_odd_values_are_kept_and_odd_rewards_are_not(told: Told) -> None:
    attempt = await only_attempt(told.client, "odd")
    assert attempt.outcome is not None
    assert attempt.outcome.exit_code == 1
    found = await told.spans("odd")
    assert [(span.kind, span.name, span.status) for span in found] == [
        ("event", "unnamed", "ok"),
        ("otel", "unnamed", "error"),
    ]
    kept = {
        "big": str(2**70),
        "nan": "nan",
        "circle": "list (no text of it can be made: ValueError)",
        "silent": "Silent (no text of it can be made: RuntimeError)",
        "surrogate": "?",
        "unnamed": None,
    }
    for span in found:
        assert (span.attributes or {}).items() >= kept.items()
    assert found[1].error == "SystemExit"
    complaint = "penstock: a reward must be a finite number, not 'nan': it is not sent"
    printed = said(await events(told.client, "odd"), "stderr").splitlines()
    assert printed == [complaint, "lost the way"], "a process complains once"


@pytest.mark.slow
def test_outside_a_rollout_nothing_is_sent_and_nothing_is_loaded() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
    done = subprocess.run([sys.executable, "-S", "-c", LIGHT], env=env, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# In this process, before a server that is no gateway ------------------------------------------------------------------


class Listener:
    """Takes what is said; answers by its `answers`, and then well."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, object]] = []
        self.answers: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        body = await request.json()
        await self.may_answer.wait()
        status = self.answers.pop(0) if self.answers else 200
        if status == 200:
            self.taken.append((request.path, body))
        return web.Response(status=status, text="{}" if status == 200 else "not that")


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Listener]:
    """Where this process speaks to, as if it were an agent."""
    made = Listener()
    server = await asyncio.get_running_loop().create_server(web.Server(made), "127.0.0.1", 0)
    monkeypatch.setenv("PENSTOCK_URL", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/rollout/r")
    monkeypatch.setenv("PENSTOCK_TOKEN", "t")
    monkeypatch.setattr(helper, "_said", set[str]())
    monkeypatch.setattr(helper, "FIRST_PAUSE_S", 0.01)
    async with server:
        yield made
        assert await asyncio.to_thread(penstock.flush, PATIENCE)


async def test_nobody_waits_for_the_gateway(listener: Listener) -> None:
    listener.may_answer.clear()

    async def speak() -> None:
        for number in range(300):
            async with penstock.span("step", number=number):
                penstock.event("tick")
        penstock.reward(1)

    # The loop goes on: nobody else could let the listener answer.
    async with asyncio.timeout(PATIENCE):
        await speak()
        assert not penstock.flush(0)
        listener.may_answer.set()
        assert await asyncio.to_thread(penstock.flush, PATIENCE)
    paths = [path.removeprefix("/rollout/r") for path, _ in listener.taken]
    assert (paths.count("/v1/traces"), paths.count("/events"), paths.count("/rewards")) == (300, 300, 1)


async def test_what_waits_goes_in_few_requests(listener: Listener) -> None:
    listener.may_answer.clear()
    for _ in range(250):
        penstock.event("tick")
    listener.may_answer.set()
    assert await asyncio.to_thread(penstock.flush, PATIENCE)
    sizes = [len(body["events"]) for _, body in listener.taken if isinstance(body, dict)]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    assert sum(sizes) == 250
    assert len(sizes) <= 4


async def test_a_gateway_that_is_busy_is_asked_again(listener: Listener, capfd: pytest.CaptureFixture[str]) -> None:
    listener.answers = [503, 429]
    penstock.reward(0.5, key="mine")
    assert await asyncio.to_thread(penstock.flush, PATIENCE)
    assert listener.taken == [("/rollout/r/rewards", {"value": 0.5, "dimensions": {}, "key": "mine"})]
    assert capfd.readouterr().err == ""


async def test_a_refusal_is_said_once_and_costs_nothing_else(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    listener.may_answer.clear()
    penstock.reward(1)  # what follows waits for it, and goes in one request
    for name in ("one", "two", "three"):
        penstock.event(name)
    listener.answers = [200, 400, 200, 400, 200]
    listener.may_answer.set()
    assert await asyncio.to_thread(penstock.flush, PATIENCE)
    names = [body["events"][0]["name"] for path, body in listener.taken if path.endswith("/events")]  # pyright: ignore
    assert names == ["one", "three"]
    assert re.fullmatch("penstock: the gateway refused .*: 400: not that\n", capfd.readouterr().err)


async def test_a_gateway_that_is_away_never_breaks_the_agent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", f"http://127.0.0.1:{steady_ports(1)[0]}")
    monkeypatch.setattr(helper, "PATIENCE_S", 0.05)
    for _ in range(2):
        with penstock.span("search"):
            penstock.event("cart")
        assert await asyncio.to_thread(penstock.flush, PATIENCE)
    assert re.fullmatch(r"penstock: the gateway did not answer for 0\.05 s \(.*\n", capfd.readouterr().err)


def test_there_is_a_bound_to_what_waits(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(helper, "MOST_WAITING", 2)
    monkeypatch.setattr(helper, "_said", set[str]())
    sender = helper.ReportSender()
    monkeypatch.setattr(sender, "_start", lambda: True)
    for _ in range(4):
        sender.put(("http://127.0.0.1:9", "t"), helper.EVENTS, {})
    assert re.fullmatch("penstock: more than 2 statements wait .* lost\n", capfd.readouterr().err)


def test_a_generator_is_no_span() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"is a generator: use `with penstock.span\(...\)` in it"):
        _ = penstock.span("numbers")(numbers)


def test_the_names_are_those_of_the_helper() -> None:
    names = ("Address", "Span", "address", "event", "flush", "reward", "span")
    assert all(getattr(penstock, name) is getattr(helper, name) for name in names)
    assert {*names} < {*penstock.__all__} == {name for name in penstock.__all__ if getattr(penstock, name)}
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'rewrd'"):
        _ = penstock.rewrd  # pyright: ignore[reportAttributeAccessIssue]
