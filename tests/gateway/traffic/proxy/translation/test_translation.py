"""Translation where there is no litellm: what starts, what does not, and what an agent is told.

With litellm: tests/providers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes.raw import body_of, reply
from fakes.rig import MESSAGES, Inside, Within

from penstock.gateway.app import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.traffic.proxy.translation import litellm, messages
from penstock.gateway.traffic.proxy.translation.framing import IteratorDriver, PushIterator
from penstock.gateway.wire.dialects.loose_json import loads
from penstock.gateway.wire.http.request import ClientFault

ROOT = Path(__file__).parents[5]
ASK = b'{"model":"policy","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
RESPONSES = "/v1/responses"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No litellm, also where there is one."""
    monkeypatch.setattr(litellm, "missing", lambda: "litellm is not installed: pip install '.[providers]'")


def configured(home: Path, **route: Any) -> GatewayConfig:
    up = {"name": "up", "base_url": "http://127.0.0.1:1/v1"}
    route = {"model": "policy", "upstream": ["up"]} | route
    return GatewayConfig.model_validate({"upstream": [up], "route": [route], "data": home / "data", "port": 0})


@pytest.fixture
async def rig(nowhere: None, within: Within) -> AsyncGenerator[Inside]:
    routes: list[dict[str, Any]] = [
        {"model": "policy", "upstream": ["up"], "train": True},
        {"model": "plain", "upstream": ["up"], "train": True, "translate": False},
    ]
    async with within(route=routes) as made:
        yield made


def test_a_gateway_that_must_translate_and_cannot_does_not_start(nowhere: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install '\.\[providers\]'"):
        Gateway(configured(tmp_path, translate=True))


def test_another_release_than_the_one_that_was_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_: str) -> str:
        return "1.82.8"

    monkeypatch.setattr(litellm, "version", found)
    with pytest.raises(ConfigError, match=r"litellm 1\.82\.8 is installed and 1\.106\.2 is needed"):
        litellm.load()


@pytest.mark.parametrize("below", [MESSAGES, RESPONSES])
async def test_a_call_that_would_be_translated_is_refused_in_its_own_shape(rig: Inside, below: str) -> None:
    async with rig.upstream(), rig.client() as client:
        client.send(rig.call(ASK, below=below))
        told = loads(body_of(await client.message()))
    assert told["error"]["type"] == "invalid_request_error"
    assert "pip install '.[providers]'" in told["error"]["message"]
    span = await rig.span()
    assert (span.dialect, span.error, span.http_status) == (below.rpartition("/")[2], "translation", 400)


async def test_a_route_that_does_not_translate_lets_calls_pass(rig: Inside) -> None:
    body, answer = ASK.replace(b"policy", b"plain"), reply(200, b'{"type":"message"}')
    got, seen = await rig.passes(rig.call(body, below=MESSAGES), answer)
    assert (got, body_of(seen)) == (answer, body)
    span = await rig.span()
    assert (span.dialect, span.path, span.attributes) == ("messages", MESSAGES, None)


def test_a_provider_that_speaks_no_chat_is_not_translated_to() -> None:
    up = {"name": "up", "base_url": "http://127.0.0.1:1", "dialect": "anthropic"}
    route = {"model": "policy", "upstream": ["up"], "translate": True}
    with pytest.raises(
        ValueError, match=r"route 'policy' has translate = true and upstream 'up' \(dialect 'anthropic'\)"
    ):
        GatewayConfig.model_validate({"upstream": [up], "route": [route]})


@pytest.mark.slow
def test_a_gateway_without_such_a_route_does_not_import_the_library(tmp_path: Path) -> None:
    """Nothing imports it on the way either: looking whether it is there does not."""
    route = {"model": "policy", "upstream": ["up"], "train": True, "translate": False}
    settings = {"upstream": [{"name": "up", "base_url": "http://127.0.0.1:1/v1"}], "route": [route]}
    program = f"""
import asyncio, json, sys
from penstock.gateway.app import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.traffic.proxy.translation import litellm as library
settings = json.loads({json.dumps(settings)!r}) | {{"data": {str(tmp_path)!r}}}
async def start():
    Gateway(GatewayConfig.model_validate(settings))
asyncio.run(start())
library.missing()
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("litellm", "openai", "tokenizers")))
"""
    made = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (made.stdout, made.returncode) == ("[]\n", 0), made.stderr


def test_the_release_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    hashed = (ROOT / ".ci" / "litellm.txt").read_text()
    assert f'"litellm=={litellm.VERSION}"' in project
    assert f"litellm=={litellm.VERSION} \\" in hashed
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", hashed)) == 5
    assert litellm.VERSION in (ROOT / "docs" / "translation.md").read_text()


class Wrapper:
    """A stream wrapper as litellm has them: it pulls, holds one back, and has something to say at the end."""

    def __init__(self, feed: PushIterator) -> None:
        self._feed = feed
        self._held: list[int] = []

    def __aiter__(self) -> Wrapper:
        return self

    async def __anext__(self) -> int:
        async for item in self._feed:
            self._held.append(item)
            if len(self._held) == 2:
                return self._held.pop(0)
        if not self._held:
            raise StopAsyncIteration
        return self._held.pop()


def test_an_iterator_goes_on_with_what_arrives_and_no_further() -> None:
    steps = IteratorDriver(Wrapper)
    assert [steps.put(item) for item in (1, 2, 3)] == [[], [1], [2]]
    assert steps.close() == [3]


def test_an_iterator_that_waits_for_something_else_is_found_out() -> None:
    class Other(Wrapper):
        async def __anext__(self) -> int:
            await Somewhere()
            return 0

    class Somewhere:
        def __await__(self) -> Any:
            yield self

    with pytest.raises(RuntimeError, match="which never comes"):
        IteratorDriver(Other).put(1)


@pytest.mark.parametrize(
    ("version", "refused"),
    [("2023-06-01", []), ("2026-10-21", ["temperature", "top_k"]), ("2027-01-02", ["temperature", "top_k"]),
     ("bedrock-2023-05-31", []), ("", [])],
)  # fmt: skip
def test_a_version_without_sampling_parameters_has_them_refused(version: str, refused: list[str]) -> None:
    headers = [(b"anthropic-version", b"Anthropic-Version", version.encode())] if version else []
    found: list[str | None] = []
    for asked in ({"temperature": 1.0}, {"top_k": 5}, {"top_p": None}, {}):
        try:
            messages.check_version(asked, headers)
        except ClientFault as fault:
            found.append(fault.field if version in fault.message else None)
    assert found == refused
