"""Schemathesis asks the control API everything that its OpenAPI document allows, and what it does not.

What is tried and what is not, with the reasons, is in `schemathesis.toml`. `PENSTOCK_PHASES=coverage` tries each bound
of each field as well, which takes some minutes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes import environments
from fakes.process import upstreams
from fakes.provider import Provider

COMMAND = environments.folder("schemathesis") / "bin" / "st"
NOWHERE = "Schemathesis is not here: `make install-schemathesis` installs it, `make test-api` runs this"
PHASES = os.environ.get("PENSTOCK_PHASES", "fuzzing,stateful")
PATIENCE_S = 900.0


@pytest.mark.timeout(PATIENCE_S)
async def test_the_api_is_as_it_says(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    if not environments.installed("schemathesis"):
        pytest.skip(NOWHERE)
    gateway = await start_gateway(upstreams(openai=provider.openai_url))
    async with http.post(gateway.openai("r1") + "/chat/completions", json={"model": "m", "messages": []}) as answer:
        assert answer.status == 200
    words = ["--config-file", Path(__file__).with_name("schemathesis.toml"), "run", "--phases", PHASES]
    words.append(f"{gateway.url}/api/openapi.json")
    process = await asyncio.create_subprocess_exec(
        COMMAND, *words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        told = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, told
    assert "Traceback" not in gateway.log, gateway.log
