"""Sessions of real coding agents with sub-agents: what the gateway tells of them is what their own transcripts say.

The model is a script; Claude Code and Codex are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import aiohttp
import pytest
from clients.profiles import PROFILES
from conftest import StartGateway
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.tape import Tape

from examples.demo.model import DemoAnswer, DemoToolCall, Json

CLAUDE = next(profile for profile in PROFILES if profile.client == "Claude Code")
CODEX = next(profile for profile in PROFILES if profile.client == "Codex")
pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.xdist_group("clients"), pytest.mark.timeout(300)]


def model(asked: Json) -> DemoAnswer:
    names = [tool["name"] for tool in asked.get("tools") or []]
    text = json.dumps(asked["messages"])
    done = re.findall(r'"tool_use_id": ?"(\w+)"', text)
    if not names:
        return DemoAnswer("A title")
    if "PART" in text and "START" not in text:
        if done:
            return DemoAnswer("The part is done.")
        return DemoAnswer(
            calls=(
                DemoToolCall(
                    "toolu_" + os.urandom(4).hex(),
                    "Bash",
                    json.dumps({"command": "sleep 0.2; echo hi", "description": "x"}),
                ),
            )
        )
    if len(done) == 0:
        spawn = "Agent" if "Agent" in names else "Task"
        kinds = ["general-purpose", "Explore", "reviewer"]
        return DemoAnswer(
            calls=tuple(
                DemoToolCall(
                    f"toolu_spawn{n}",
                    spawn,
                    json.dumps(
                        {
                            "description": f"part {n}",
                            "prompt": f"Do PART {n}",
                            "subagent_type": kind,
                            "run_in_background": False,
                        }
                    ),
                )
                for n, kind in enumerate(kinds)
            )
        )
    return DemoAnswer("All is done.")


async def run(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, (out, err)
    return out.decode()


async def test_claude(
    tmp_path: Path, start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway(upstreams(openai=provider.openai_url, anthropic=provider.url))
    provider.script = model
    home = tmp_path / "home"
    work = tmp_path / "work"
    (work / ".claude/agents").mkdir(parents=True)
    home.mkdir()
    (work / ".claude/agents/reviewer.md").write_text("---\nname: reviewer\ndescription: Reviews.\n---\nYou review.\n")
    env = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": gateway.url + os.environ.get("ADDR", ""),
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": os.environ.get("HINTS", "1"),
    }
    print(await run([CLAUDE.command[0], "-p", "START now", "--allowedTools", "Bash,Agent,Task"], work, env))
    tape = Tape(gateway.url, http)
    await tape.written()
    found = await tape.get("/api/rollouts")
    for one in found["rollouts"]:
        print(one["id"])
        for s in (await tape.get(f"/api/rollouts/{one['id']}/attempts/a1/spans"))["spans"]:
            print(
                s["sequence"],
                s["dialect"],
                s["status"],
                s["agent"],
                s["tool_calls"],
                (s["start_ns"] - found["rollouts"][0]["created_ns"]) // 10**6,
                (s["end_ns"] - found["rollouts"][0]["created_ns"]) // 10**6,
                s["attributes"],
            )
    for seen in provider.log:
        if seen.body:
            print(
                seen.path if hasattr(seen, "path") else "",
                {n: v for n, v in seen.headers if n.lower().startswith(("x-claude", "x-app", "x-stainless-retry"))},
            )
            b = json.loads(seen.plain)
            print(
                "   SYS",
                [t["text"][:120] for t in b.get("system", [])][:2],
                len(b["messages"]),
                [
                    p.get("content") if isinstance(p.get("content"), str) else [q.get("type") for q in p["content"]]
                    for p in b["messages"]
                ][-2:],
            )
    os.system(f"find {home} {work} -name '*.jsonl' | xargs ls -la; cp -r {home} /tmp/h/trees/claude-home")
