"""The examples run as they are, through a gateway, with nothing but the base URL changed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.process import Gateway
from fakes.provider import Provider
from fakes.tape import Tape

from penstock.gateway.config import load

EXAMPLES = Path(__file__).parents[1] / "examples"
SPOKEN = "The answer is 437.\nYou said: Thank you, that is all.\n"


async def run(script: str, openai_url: str, anthropic_url: str) -> str:
    """Run an example; anything on stderr or a status but 0 fails the test."""
    addresses = {"OPENAI_BASE_URL": openai_url, "ANTHROPIC_BASE_URL": anthropic_url}
    keys = {"OPENAI_API_KEY": "sk-openai", "ANTHROPIC_API_KEY": "sk-ant-anthropic"}
    interpreter = sys.executable if script.endswith(".py") else "sh"
    process = await asyncio.create_subprocess_exec(
        interpreter,
        str(EXAMPLES / script),
        env=dict(os.environ) | addresses | keys,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaints = await process.communicate()
    assert (process.returncode, complaints.decode()) == (0, "")
    return output.decode()


@pytest.mark.parametrize(
    ("script", "dialect", "models"),
    [
        ("openai_agent.py", "chat", ["gpt-5-mini"] * 3),
        ("anthropic_agent.py", "messages", ["claude-haiku-4-5"] * 3),
        ("langchain_agent.py", "chat", ["gpt-5-mini"] * 3),
        ("agents_sdk.py", "responses", ["gpt-5-mini"] * 3),
        ("curl.sh", "chat", ["gpt-5-mini"] * 2),
    ],
)
async def test_an_example_runs_and_is_recorded(
    script: str, dialect: str, models: list[str], gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    directly, through = await asyncio.gather(
        run(script, provider.openai_url, provider.url),
        run(script, gateway.openai("example"), gateway.address("example")),
    )
    assert through == directly
    assert through == SPOKEN or script == "curl.sh"
    spans = await tape.spans("example", len(models))
    assert [(span.dialect, span.model) for span in spans] == [(dialect, model) for model in models]
    assert [span.stream for span in spans] == [False] * (len(models) - 1) + [True]


def test_the_example_configuration_is_valid() -> None:
    assert [upstream.name for upstream in load(EXAMPLES / "penstock.toml").upstreams()] == [
        "openai",
        "anthropic",
        "chatgpt",
        "gemini",
    ]


@pytest.mark.smoke
def test_the_quickstarts_model_says_what_to_do_where_its_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # Without packages: it must run where Penstock is installed from a checkout that is not on the path.
        command = [sys.executable, "-I", "-S", str(EXAMPLES / "quickstart/model.py"), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"port {port} of 127.0.0.1 cannot be opened (Address already in use):\nchoose another"
    )
