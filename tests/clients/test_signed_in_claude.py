"""Claude Code signs in at the gateway as its users do, in a terminal, and works with its saved sign-in."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from clients.profiles import NOWHERE, PROFILES
from fakes.budgets import budget, spans_of, world
from fakes.process import PATIENCE
from fakes.pty_program import PtyProgram, pty_program

from penstock.gateway.traffic.calls.admission import LOGIN_PREFIX, key_hash, make_key

PROFILE: Final = next(one for one in PROFILES if one.client == "Claude Code")
KEY: Final = make_key()
KEPT: Final = f'require_token = true\n[[key]]\nname = "ann"\nrole = "call"\nsha256 = "{key_hash(KEY)}"\n'

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.xdist_group("clients"), pytest.mark.timeout(300)]


async def choose(program: PtyProgram, question: str, answer: str) -> None:
    """Chooses the answer above the one that is chosen already, which is to cancel."""
    await program.until(lambda text: question in text)
    program.write("\x1b[A")
    await program.until(lambda text: f"❯ {answer}" in text)
    program.write("\r")


async def test_claude_code_signs_in_with_a_key_and_its_calls_are_counted_for_it(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    if not PROFILE.installed():
        pytest.skip(NOWHERE)
    home = tmp_path / "home"
    (home / ".claude").mkdir(parents=True)
    usd = budget(name="ann", per="key", unit="usd", limit=50, window="1d")
    async with world(tmp_path / "gateway", usd, more=KEPT) as (gateway, provider):
        settings = {"forceLoginMethod": "gateway", "forceLoginGatewayUrl": gateway.url}
        _ = (home / ".claude" / "settings.json").write_text(json.dumps(settings))
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "xterm-256color", "BROWSER": "true"}
        async with pty_program(["sh", "-c", f"cd {home} && exec {PROFILE.command[0]}"], env, (130, 45)) as program:
            await program.until(lambda text: "Choose the text style" in text)
            program.write("\r")
            await program.until(lambda text: "Enter to connect" in text)
            program.write("\r")
            await choose(program, "Trust gateway", "Yes, trust this gateway")
            found = re.search(r"Code: +([A-Z]{4}-[A-Z]{4})", await program.until(lambda text: "Code:" in text))
            assert found is not None
            form = {"user_code": found[1], "key": KEY, "decision": "allow"}
            async with http.post(f"{gateway.url}/device", data=form) as answer:
                assert answer.status == 200
            await choose(program, "Signed in to Cloud gateway as ann", "Yes, continue")
            await program.until(lambda text: "Connected to Cloud gateway" in text)
        env |= {"CLAUDE_CODE_ENABLE_TELEMETRY": "1", "OTEL_LOGS_EXPORTER": "otlp"}
        env |= {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        claude = await asyncio.create_subprocess_exec(
            PROFILE.command[0],
            "-p",
            "say hi",
            env=env,
            cwd=home,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(claude.communicate(), PATIENCE)
        assert claude.returncode == 0, out
        calls = [
            span for span in await spans_of(http, gateway, "kind:llm", len(provider.log)) if span["status"] == "ok"
        ]
        assert calls
        (prompt,) = await spans_of(http, gateway, "name:claude_code.user_prompt", 1)
        assert prompt["rollout"].startswith("claude-")
        assert {call["rollout"] for call in calls} == {prompt["rollout"]}
        assert LOGIN_PREFIX not in str([seen.headers for seen in provider.log])
        async with http.get(f"{gateway.url}/api/budgets") as answer:
            (use,) = (await answer.json())["budgets"]
        assert (use["of"], use["used"] > 0) == ("ann", True)
