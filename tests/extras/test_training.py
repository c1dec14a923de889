"""The extra that trains, alone in a clean environment: a step of fine-tuning by the command, on a model made here.

The extra of several machines is imported alone by `make install-verl`, before its tests' tools come. Its tests
train with it.
"""

from __future__ import annotations

import json
from pathlib import Path

from fakes.clean import Install
from fakes.process import ROOT, upstreams

from penstock.gateway.client.client import Client

MODEL = f"""
import sys
sys.path += {[str(ROOT), str(ROOT / "tests")]!r}
from fakes.tiny_model import make_model, make_tokenizer
path = make_model(sys.argv[1])
make_tokenizer(sys.argv[2]).save_pretrained(path)
"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
CHAT = [{"role": "user", "content": "the water"}, {"role": "assistant", "content": "and the wheel"}]
TRAIN = """
[run]
name = "run"
directory = "run"

[model]
path = "model"
rank = 4

[data]
file = "chats.jsonl"
batch = 4

[engine]
batch_tokens = 64
"""


async def test_a_step_is_trained(install: Install, tmp_path: Path) -> None:
    clean = install("train")
    clean.run("-c", MODEL, tmp_path / "model", TEMPLATE)
    (tmp_path / "train.toml").write_text(TRAIN)
    lines = (json.dumps({"messages": CHAT, "reward": 1.0, "rollout": f"r{n}"}) for n in range(4))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    async with clean.gateway(tmp_path / "home", upstreams(openai="http://127.0.0.1:9/v1")) as gateway:
        shell = clean.shell(gateway.url, tmp_path)
        shell.patience = 900.0
        done = await shell.run("train", "sft", "train.toml")
        assert done.code == 0, done.err
        async with Client(gateway.url) as client:
            run = await client.run("run")
            points = [point async for point in client.points("run")]
    assert (run.kind, run.status, run.steps) == ("sft", "succeeded", 1)
    loss = points[-1].values["loss"]
    assert loss is not None
    assert 0 < loss < 20
    assert list((tmp_path / "run").rglob("adapter_model.safetensors"))
