"""What is absent, unreachable or damaged when a run begins is one sentence, at once: no traceback and no silence."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.lives import begun
from fakes.ports import steady_ports
from fakes.settings import Sections, merged, toml
from fakes.staging import settings, staged, write_tasks

from penstock.trainer.runs.session import ANSWER_S

pytestmark = pytest.mark.timeout(300)


def one_sentence(text: str, said: str) -> None:
    lines = [line for line in text.splitlines() if line]
    assert lines[-1].startswith(f"penstock: {said}"), text
    assert len([line for line in lines if line.startswith("penstock: ")]) == 1
    assert "Traceback" not in text


def damaged(home: Path, model: Path) -> Path:
    """A copy of a model whose file of weights was cut off."""
    made = home / "damaged"
    shutil.copytree(model, made)
    weights = made / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return made


def empty(home: Path, model: Path) -> Path:
    """A model without weights."""
    made = home / "empty"
    shutil.copytree(model, made)
    (made / "model.safetensors").unlink()
    return made


def of_another(home: Path, model: Path) -> Path:
    """An adapter whose weights are none."""
    made = home / "adapter"
    made.mkdir()
    (made / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (made / "adapter_model.safetensors").write_bytes(b"nothing")
    return made


Change = Callable[[Path, Path], dict[str, Any]]


MISSING: dict[str, tuple[str, Change, str]] = {
    "no-python": (
        "inference",
        lambda home, _: {"python": home / "vllm/bin/python"},
        "inference.python: {home}/vllm/bin/python is not there; name the Python of an environment with vLLM in it",
    ),
    "no-executable": (
        "inference",
        lambda home, _: {"python": home / "tasks.jsonl"},
        "inference.python: {home}/tasks.jsonl cannot be executed; name the Python",
    ),
    "urls": (
        "inference",
        lambda home, _: {"urls": ["http://127.0.0.1:9/v1"]},
        "inference.urls: http://127.0.0.1:9/v1 cannot be reached: Cannot connect to host 127.0.0.1:9",
    ),
    "weights": (
        "model",
        lambda home, model: {"path": damaged(home, model)},
        "model.path: the model in {home}/damaged cannot be loaded (SafetensorError: Error while deserializing header",
    ),
    "no-weights": (
        "model",
        lambda home, model: {"path": empty(home, model)},
        "model.path: the model in {home}/empty cannot be loaded (OSError: Error no file named model.safetensors",
    ),
    "no-model": (
        "model",
        lambda home, _: {"path": home},
        "model.path: {home} holds no config.json; it must be the directory",
    ),
    "a-target": (
        "model",
        lambda home, _: {"targets": ["q_proj", "roj"]},
        "model.targets: this model has no module 'roj'; its linear modules are down_proj, gate_proj, k_proj, lm_head,",
    ),
    "targets": (
        "model",
        lambda home, _: {"targets": ["norm"]},
        "model.targets: ['norm'] do not fit this model: Target module Qwen2RMSNorm",
    ),
    "adapter": (
        "model",
        lambda home, model: {"adapter": of_another(home, model)},
        "model.adapter: the adapter in {home}/adapter cannot be loaded (SafetensorError: ",
    ),
}


@pytest.mark.parametrize(("section", "change", "said"), MISSING.values(), ids=MISSING)
async def test_what_is_missing_is_said_at_once(
    tmp_path: Path, model: Path, section: str, change: Change, said: str
) -> None:
    own: Sections = merged({"model": {"rank": 4}}, {section: change(tmp_path, model)})
    async with staged(tmp_path, model, 1, own) as stage:
        async with stage.life() as life:
            assert await life.ended() == 1
        async with stage.client as client:
            assert [one async for one in client.rollouts()] == []
    one_sentence(life.text, said.replace("{home}", str(tmp_path)))


@asynccontextmanager
async def silent() -> AsyncGenerator[str]:
    """Somebody who takes connections and says nothing."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _ = await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_gateway_that_is_absent_is_said_at_once(tmp_path: Path, model: Path) -> None:
    (port,) = steady_ports(1)
    write_tasks(tmp_path, "q")
    (tmp_path / "train.toml").write_text(toml(settings(tmp_path, model, [port], 1)))
    async with begun(tmp_path / "train.toml", f"http://127.0.0.1:{port}") as life:
        assert await life.ended() == 1
    one_sentence(life.text, f"--gateway: no gateway answers at http://127.0.0.1:{port}: ")
    assert "start it (penstock serve), or name another" in life.text


async def test_a_gateway_that_says_nothing_is_not_waited_for(tmp_path: Path, model: Path) -> None:
    write_tasks(tmp_path, "q")
    (tmp_path / "train.toml").write_text(toml(settings(tmp_path, model, steady_ports(1), 1)))
    async with silent() as url, begun(tmp_path / "train.toml", url) as life:
        assert await life.ended() == 1
    one_sentence(life.text, f"--gateway: no gateway answers at {url}: it has said nothing for {ANSWER_S:g} s; start it")
