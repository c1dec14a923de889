"""What tests of the trainer share: one thread of a CPU for each; a tiny model, a client, where a real vLLM is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes import environments
from fakes.engine import FakeEngine
from fakes.process import Gateway, vllms
from fakes.production import Shop, tokens_of
from fakes.threads import no_gpu, one_thread
from fakes.vllm_process import VOCABULARY

from penstock.gateway.client.client import Client

__all__ = ["no_gpu", "one_thread"]


def pytest_configure(config: pytest.Config) -> None:
    # peft 0.21 asks transformers 5.23 for an attribute by its former name.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's directory, which nobody changes."""
    from fakes.tiny_model import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def client(served: Gateway) -> AsyncGenerator[Client]:
    """A client of the gateway in front of the model server."""
    async with Client(served.url) as made:
        yield made


@pytest.fixture
def small_tokens() -> Iterator[None]:
    """The scripted vLLM answers with token ids that the tiny model knows."""
    with tokens_of(VOCABULARY):
        yield


@pytest.fixture
async def shop(start_gateway: StartGateway, vllm: FakeEngine, http: aiohttp.ClientSession) -> AsyncGenerator[Shop]:
    """Agents in production, whose calls to the model `policy` are trained on."""
    gateway = await start_gateway(vllms(vllm.openai_url))
    async with Client(gateway.url) as client:
        yield Shop(gateway, http, client)


@pytest.fixture
def vllm_python() -> Path:
    """The Python of a real vLLM; without one the test is skipped."""
    if not environments.installed("vllm"):
        pytest.skip("there is no vLLM here: `make install-vllm` installs it (3.4 GB)")
    return environments.python("vllm")
