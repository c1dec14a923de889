"""Agents of other formats in front of an engine that speaks chat completions only, as vLLM does.

Translation needs litellm, which cannot be installed next to the newest OpenAI SDK: it has an environment of its own
(`make install-providers`). What calls litellm itself runs there and is skipped elsewhere. What speaks to a gateway
runs anywhere, with the gateway's process in that environment, so that the newest SDKs are tried too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fakes import environments, process, vllm_wire
from fakes.process import Gateway, running, upstream
from fakes.provider import Provider, serving
from fakes.tape import Tape

from examples.demo.model import Json, pieces
from penstock.gateway.traffic.proxy.translation import litellm as library
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.traffic.proxy.translation.translator import Translator

ROOT = Path(__file__).parents[2]
HERE = library.missing() is None
PYTHON = Path(sys.executable) if HERE else environments.python("providers")
NOWHERE = "there is no litellm here: `make install-providers` installs it, `make test-providers` runs this"
ROUTE = '[[route]]\nmodel = "policy*"\nupstream = "vllm"\ntrain = true\n\n'
START_S = 600.0
"""litellm takes seconds to be imported, and a busy machine several times as long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(900))


def templated(request: Json) -> list[int]:
    """Token ids of a prompt as a chat template writes it: what was generated stands in it as it was generated."""
    story: list[str] = [*pieces(json.dumps(request.get("tools")))]
    for message in request["messages"]:
        story += ["<|im_start|>", message["role"], *pieces(_text(message.get("content")))]
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
            story += [vllm_wire.FRAME[0], call["function"]["name"], *pieces(arguments), vllm_wire.FRAME[1]]
        story.append("<|im_end|>")
    return [vllm_wire.token_id(piece) for piece in [*story, "<|im_start|>", "assistant"]]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


@pytest.fixture(scope="session")
def litellm() -> LiteLlmApi:
    """The library, in this process."""
    if not HERE:
        pytest.skip(NOWHERE)
    found = library.load()
    Translator(found).warm()
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncGenerator[Provider]:
    """An engine that speaks chat completions only."""
    async with serving() as made:
        made.formats = vllm_wire.FORMATS
        yield made


@pytest.fixture(scope="session")
def patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "PATIENCE", START_S)
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(tmp_path_factory: pytest.TempPathFactory, engine: Provider, patient: None) -> AsyncGenerator[Gateway]:
    """A gateway process that translates: one for all modules, importing litellm takes it seconds."""
    if not (HERE or environments.installed("providers")):
        pytest.skip(NOWHERE)
    config = ROUTE + upstream("vllm", engine.openai_url, "openai")
    async with running(tmp_path_factory.mktemp("translating"), config, python=PYTHON) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def tape(gateway: Gateway) -> AsyncGenerator[Tape]:
    async with aiohttp.ClientSession() as session:
        yield Tape(gateway.url, session)


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_wire, "prompt_ids", templated)
