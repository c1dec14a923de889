"""Sessions of real coding agents with sub-agents: what the gateway tells of them is what their transcripts on disk say.

The model is a script; Claude Code and Codex are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.profiles import NOWHERE, PROFILES
from conftest import StartGateway
from fakes.process import upstreams
from fakes.provider import Events, Provider
from rich.console import Console

from examples.demo.model import DemoAnswer, DemoToolCall, Json
from penstock.console.views.rollout_tree import RequestedToolRuns, rollout_tree
from penstock.gateway.client.client import Client
from penstock.gateway.model.facts import COMPACTION
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import ToolList
from penstock.sidecar.intercept.rules import HINTS

CLAUDE, CODEX = (next(one for one in PROFILES if one.client == name) for name in ("Claude Code", "Codex"))
KINDS = ("general-purpose", "Explore", "reviewer")
"""Of Claude Code's sub-agents; the last one is the user's own, whose name it keeps to itself."""
SHELL = {"command": "sleep 0.2; echo hi", "description": "Say hi"}
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.xdist_group("clients"), pytest.mark.timeout(300)]


def claude(asked: Json) -> DemoAnswer:
    """Starts three sub-agents, which use the shell once and then answer."""
    said = json.dumps(asked["messages"])
    tools: list[Json] = asked.get("tools") or []
    done = said.count('"tool_result"')
    if not tools or "CRITICAL: Respond with TEXT ONLY" in said or "<summary>" in said[-4000:]:
        return DemoAnswer("<summary>The parts are done.</summary>")
    if done:
        return DemoAnswer("All is done.")
    if "Do part" in said:
        return DemoAnswer(calls=(DemoToolCall(f"toolu_{os.urandom(6).hex()}", "Bash", json.dumps(SHELL)),))
    parts = [
        {"description": f"part {kind}", "prompt": f"Do part {kind}", "subagent_type": kind, "run_in_background": False}
        for kind in KINDS
    ]
    calls = (DemoToolCall(f"toolu_{at}", "Agent", json.dumps(part)) for at, part in enumerate(parts))
    return DemoAnswer(calls=tuple(calls))


def codex(asked: Json) -> DemoAnswer:
    """Starts two sub-agents, waits for both, and answers."""
    said = json.dumps(asked["input"])
    done = sum(str(item.get("type")).endswith("_output") for item in asked["input"])
    if "Do part" in said and "Start the parts" not in said:
        shell = DemoToolCall(f"call_{os.urandom(6).hex()}", "exec_command", json.dumps({"cmd": "echo hi"}))
        return DemoAnswer("The part is done.") if done else DemoAnswer(calls=(shell,))
    if done == 0:
        parts = [{"message": f"Do part {at}", "agent_type": kind} for at, kind in enumerate(("explorer", "worker"))]
        calls = (DemoToolCall(f"call_{at}", f"{SPACE}spawn_agent", json.dumps(one)) for at, one in enumerate(parts))
        return DemoAnswer(calls=tuple(calls))
    waiting = [
        one for one in re.findall(r'agent_id\\+":\\+"([0-9a-f-]+)', said) if f'{one}\\":{{\\"completed' not in said
    ]
    if not waiting:
        return DemoAnswer("All is done.")
    wait = DemoToolCall(f"call_{os.urandom(6).hex()}", f"{SPACE}wait_agent", json.dumps({"targets": waiting}))
    return DemoAnswer(calls=(wait,))


SPACE = "multi_agent_v1."


def in_namespaces(events: Events) -> Events:
    """The events, with the namespace of a tool apart from its name, as Codex has them."""

    def made(asked: Json, answer: DemoAnswer) -> Iterator[bytes]:
        for event in events(asked, answer):
            yield event.replace(b'"name": "' + SPACE.encode(), f'"namespace": "{SPACE[:-1]}", "name": "'.encode())

    return made


@dataclass
class Place:
    """Where an agent runs, and the gateway that it calls."""

    home: Path
    client: Client
    url: str

    async def run(self, command: tuple[str, ...], env: dict[str, str]) -> str:
        work = self.home / "work"
        work.mkdir(exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"], **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, (out[-3000:], err[-3000:])
        return out.decode()

    async def rollout(self) -> tuple[str, list[Span], ToolList]:
        """The one rollout: its id, its calls that were answered, its tools and sub-agents."""
        (one,) = [rollout async for rollout in self.client.rollouts()]
        spans = [span async for span in self.client.spans(one.id, filter="kind:llm")]
        return one.id, spans, await self.client.tool_list(one.id, "a1")

    async def shown(self, rollout: str, spans: list[Span], tools: ToolList) -> str:
        """The rollout as `penstock show` prints it."""
        details = [await self.client.span(rollout, "a1", span.sequence) for span in spans]
        asked = {"a1": RequestedToolRuns(agents=tools.agents)}
        console = Console(width=400, color_system=None)
        with console.capture() as captured:
            console.print(rollout_tree(await self.client.rollout(rollout), details, asked))
        return captured.get()


@pytest.fixture
async def place(tmp_path: Path, start_gateway: StartGateway, provider: Provider) -> AsyncGenerator[Place]:
    gateway = await start_gateway(upstreams(openai=provider.openai_url, anthropic=provider.url))
    home = tmp_path / "home"
    for folder in (home / "work" / ".claude" / "agents", home / ".codex"):
        folder.mkdir(parents=True)
    async with Client(gateway.url, "") as client:
        yield Place(home, client, gateway.url)


def lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def agents(folder: Path) -> dict[str, Json]:
    """What Claude Code keeps of each of its sub-agents, by id."""
    return {file.name[6 : -len(".meta.json")]: json.loads(file.read_text()) for file in folder.glob("*.meta.json")}


async def test_claude_code(place: Place, provider: Provider) -> None:
    if not CLAUDE.installed():
        pytest.skip(NOWHERE)
    provider.script = claude
    agent = "---\nname: reviewer\ndescription: Reviews.\n---\nYou review.\n"
    (place.home / "work" / ".claude" / "agents" / "reviewer.md").write_text(agent)
    env = {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_API_KEY": "none", **HINTS}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    program, ask = CLAUDE.command[0], ("--allowedTools", "Bash,Agent")
    _ = await place.run((program, "-p", "Start the parts", *ask), env)
    rollout, spans, tools = await place.rollout()
    (main,) = (place.home / ".claude" / "projects").glob("*/*.jsonl")
    folder = main.with_suffix("") / "subagents"

    kept = agents(folder)
    assert {one.agent_id: one.call_id for one in tools.agents} == {id: one["toolUseId"] for id, one in kept.items()}
    kinds = {id: one["agentType"] if one["isBuiltIn"] else "custom" for id, one in kept.items()}
    assert {one.agent_id: one.agent for one in tools.agents} == kinds
    assert sorted(kinds.values()) == ["Explore", "custom", "general-purpose"]
    said: dict[str, dict[str, Json]] = {}
    for id, file in {"": main, **{id: folder / f"agent-{id}.jsonl" for id in kept}}.items():
        answers = (line["message"] for line in lines(file) if line["type"] == "assistant")
        said[id] = {one["id"]: one["usage"] for one in answers}
    response = {span.sequence: span.response_id for span in spans}
    by_agent = {one.agent_id or "": [response.pop(call) for call in one.calls] for one in tools.agents}
    assert by_agent | {"": [*response.values()]} == {id: [*answers] for id, answers in said.items()}

    took = {
        line["message"]["content"][0]["tool_use_id"]: line["toolUseResult"]["totalDurationMs"]
        for line in lines(main)
        if isinstance(line.get("toolUseResult"), dict)
    }
    measured = {use.call_id or "": (use.measured_ns or 0) / 1e6 for use in tools.tools}
    assert (len(took), len(measured)) == (3, 6)
    assert {id: measured[id] for id in took} == pytest.approx(took, abs=100), "the whole tool, and the agent in it"
    assert all(200 <= ms < 10_000 for ms in measured.values())

    usage = [one for answers in said.values() for one in answers.values()]
    spent = sum(one["input_tokens"] * 4 + one["output_tokens"] * 20 for one in usage) / 1e6
    assert (await place.client.rollout(rollout)).totals.cost == pytest.approx(spent, rel=0.01)

    _ = await place.run((program, "-p", "/compact", "--resume", main.stem), env)
    _ = await place.run((program, "-p", "Go on", "--resume", main.stem), env)
    _, spans, tools = await place.rollout()
    assert [(span.attributes or {}).get(COMPACTION) for span in spans][8:10] == ["manual", None]
    assert len(tools.agents) == 6 == len(agents(folder))
    page = await place.shown(rollout, spans, tools)
    assert re.search(r"\n    ├── #9 .* compaction \(manual\) .*\n", page)
    assert len(re.findall(r"\n    │   [├└]── #\d+  messages  Explore …\w{6} ", page)) == 4, (
        "below the calls that began them"
    )
    assert len(re.findall(r"user  \d+ ms by the agent  hi\n", page)) == 6


async def test_codex(place: Place, provider: Provider) -> None:
    if not CODEX.installed():
        pytest.skip(NOWHERE)
    plain, events = provider.formats["/v1/responses"]
    assert events is not None
    provider.formats = {**provider.formats, "/v1/responses": (plain, in_namespaces(events))}
    provider.script = codex
    for name, text in CODEX.files.items():
        (place.home / name).write_text(text)
    provider_ = f'model_providers.gateway={{name="OpenAI", base_url="{place.url}/v1", requires_openai_auth=true}}'
    words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5.4")
    options = ("-c", provider_, "-c", 'model_provider="gateway"')
    _ = await place.run((CODEX.command[0], *words, *options, "Start the parts"), {})
    rollout, spans, tools = await place.rollout()

    parents: dict[str, str | None] = {}
    tokens: dict[str | None, Json] = {}
    started: dict[str, str] = {}
    for file in (place.home / ".codex" / "sessions").rglob("*.jsonl"):
        payloads = [line["payload"] for line in lines(file)]
        thread, parent = payloads[0]["id"], payloads[0].get("parent_thread_id")
        parents |= {thread: parent} if parent else {}
        counts = [one["info"]["total_token_usage"] for one in payloads if one.get("type") == "token_count"]
        tokens[thread if parent else None] = counts[-1]
        outputs = [one for one in payloads if one.get("type") == "function_call_output" and "agent_id" in one["output"]]
        started |= {json.loads(one["output"])["agent_id"]: one["call_id"] for one in outputs}
    assert {one.agent_id: one.parent_agent for one in tools.agents} == parents
    assert {one.agent_id: one.call_id for one in tools.agents} == started
    assert len(started) == 2
    assert {one.agent for one in tools.agents} == {"collab_spawn"}
    of = {call: one.agent_id for one in tools.agents for call in one.calls}
    for agent, total in tokens.items():
        usage = [span.usage for span in spans if of.get(span.sequence) == agent and span.usage]
        assert sum(one.input_tokens or 0 for one in usage) == total["input_tokens"]
        assert sum(one.output_tokens or 0 for one in usage) == total["output_tokens"]
    assert (await place.client.rollout(rollout)).totals.cost == pytest.approx(sum(span.cost or 0 for span in spans))
    page = await place.shown(rollout, spans, tools)
    assert len(re.findall(r"\n    │   [├└]── #\d+  responses  collab_spawn …\w{6} ", page)) == 4
