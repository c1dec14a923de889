"""The names in the SDKs that the tests use are read, or stand in `.ci/wire.toml` with a reason."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

CI: Final = Path(__file__).parents[1] / ".ci"
SITE: Final = Path(sysconfig.get_path("purelib"))


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wire", CI / "wire.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["wire"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wire: Final[Any] = loaded()


def test_every_name_of_the_sdks_here_is_known() -> None:
    found = wire.names_of([SITE])
    assert {"/v1/messages", "/chat/completions", "/responses/{response_id}"} <= found["path"].keys()
    assert {"message_start", "input_json_delta", "response.output_text.delta"} <= found["event"].keys()
    assert {"cache_creation_input_tokens", "ttl_12h_tokens", "prompt_tokens"} <= found["usage"].keys()
    assert wire.unknown(found, tomllib.loads((CI / "wire.toml").read_text(encoding="utf-8"))) == []


def write(site: Path, name: str, text: str) -> None:
    file = site / name
    file.parent.mkdir(parents=True, exist_ok=True)
    _ = file.write_text(text, encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """SDKs with a name of each kind that nobody knows."""
    post = 'class A:\n    def a(self):\n        return self._post(\n            "/{}",\n'
    write(tmp_path, "openai/resources/a.py", post.format("warps"))
    write(
        tmp_path, "openai/types/responses/response_a_event.py", 'class A:\n    type: Literal["response.warp.delta"]\n'
    )
    write(tmp_path, "openai/types/completion_usage.py", "class A:\n    warp_tokens: int\n    prompt_tokens: int\n")
    write(tmp_path, "anthropic/types/warp_delta.py", 'class A:\n    type: Literal["warp_delta"]\n')
    write(tmp_path, "google/genai/models.py", "path = '{model}:warpContent'\n")
    write(
        tmp_path,
        "google/genai/types.py",
        "class GenerateContentResponseUsageMetadata:\n    warp_token_count: int\n    _x: int\n",
    )
    folder = tmp_path / "botocore" / "data" / "bedrock-runtime" / "2023"
    folder.mkdir(parents=True)
    shapes = {"ConverseStreamOutput": ["warpStart", "warpException"], "ContentBlockDelta": [], "TokenUsage": ["warps"]}
    service = {
        "operations": {"Warp": {"http": {"requestUri": "/warp/{modelId}"}}},
        "shapes": {name: {"members": dict.fromkeys(members)} for name, members in shapes.items()},
    }
    _ = (folder / "service-2.json.gz").write_bytes(gzip.compress(json.dumps(service).encode()))
    return tmp_path


def test_a_name_that_nobody_knows_is_told_with_its_file(site: Path) -> None:
    lines = wire.unknown(wire.names_of([site]), {"path": {"/warp/...": "why"}})
    assert [line.partition(":")[0] for line in lines] == [
        "path '/warps' (openai/resources/a.py) is in no table",
        "event 'response.warp.delta' (openai/types/responses/response_a_event.py) is in no table",
        "event 'warpStart' (botocore/data/bedrock-runtime/2023/service-2.json.gz) is in no table",
        "event 'warp_delta' (anthropic/types/warp_delta.py) is in no table",
        "usage 'warpTokenCount' (google/genai/types.py) is in no table",
        "usage 'warp_tokens' (openai/types/completion_usage.py) is in no table",
        "usage 'warps' (botocore/data/bedrock-runtime/2023/service-2.json.gz) is in no table",
    ]


def test_a_row_that_nobody_needs_is_told(site: Path) -> None:
    allowed = {"event": {"warp_delta": "why", "message_start": "why"}, "path": {"/warps": "why"}}
    (line,) = wire.superfluous(wire.names_of([site]), allowed)
    assert "'message_start' can go" in line
    assert wire.main([site]) == 1
    assert wire.main([site / "nothing"]) == 2
