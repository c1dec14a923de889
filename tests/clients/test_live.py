"""Google's own SDK in a live session through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from clients.profiles import ROOT
from fakes.certificates import Authority
from fakes.rig import inside
from fakes.sessions import session_rig
from fakes.tape import Tape

PYTHON = ROOT / ".venv-clients" / "python" / "bin" / "python"
SCRIPT = Path(__file__).parent / "scripts" / "live_google_genai.py"

pytestmark = [pytest.mark.clients, pytest.mark.slow]


async def test_googles_sdk_talks_through_the_gateway(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """It always opens `wss://`, so the gateway has a certificate."""
    authority = Authority(tmp_path)
    certificate = {"tls": {"certificate": str(authority.issue("gateway"))}}
    trusting = aiohttp.TCPConnector(ssl=authority.client())
    async with (
        session_rig(partial(inside, tmp_path, http), "gemini", certificate) as rig,
        aiohttp.ClientSession(connector=trusting) as session,
    ):
        rig.url = rig.url.replace("http", "https")
        rig.tape = Tape(rig.url, session)
        trust = {"SSL_CERT_FILE": str(authority.file), "BASE_URL": rig.base}
        env = {"PATH": os.environ["PATH"], "GEMINI_API_KEY": "AIza-not-real", **trust}
        agent = await asyncio.create_subprocess_exec(str(PYTHON), str(SCRIPT), env=env, stdout=PIPE)
        host = await rig.accepted.get()
        assert (await host.hear())["setup"]["model"] == "models/gemini-live"
        await host.say({"setupComplete": {}}, binary=True)
        _ = [await host.hear() for _ in range(2)]
        call = {"id": "f1", "name": "weather"}
        await host.say({"toolCall": {"functionCalls": [call]}}, binary=True)
        assert '"response": {"sky": "rain"}' in json.dumps(await host.hear())
        usage = {"promptTokenCount": 20, "responseTokenCount": 5, "totalTokenCount": 25}
        said = {"serverContent": {"modelTurn": {"parts": [{"text": "It rains."}]}}}
        await host.say(said, {"serverContent": {"turnComplete": True}, "usageMetadata": usage}, binary=True)
        out, _ = await agent.communicate()
        assert (out.decode().strip(), agent.returncode) == ("It rains.", 0)
        one = (await rig.spans(2))[0]
    assert (one.dialect, one.model, one.status, one.tool_calls) == ("gemini_live", "gemini-live", "ok", 1)
    assert one.usage is not None
    assert (one.usage.input_tokens, one.usage.output_tokens) == (20, 5)
