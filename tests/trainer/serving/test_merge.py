"""An adapter that is merged says what it said beside its model, from a directory that others can load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.mistakes import tells
from fakes.tiny_model import config, make_model, make_tokenizer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.console.main import main
from penstock.trainer.engines.local import TrainingEngine


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """One whose weights are not zero, of a model with a tokenizer."""
    model = make_model(tmp_path / "model")
    make_tokenizer().save_pretrained(model)
    engine = TrainingEngine(config(model))
    with torch.no_grad():
        for one in engine.model.trained.values():
            one.add_(0.05)
    engine.save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def said(*words: object) -> int:
    """The exit code of `penstock train merge`."""
    try:
        main(["train", "merge", *(str(word) for word in words)])
    except SystemExit as ended:
        return int(str(ended.code or 0))
    return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_model_says_the_same(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    model, out = tmp_path / "model", tmp_path / "merged"
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(model)
    assert said(adapter, "-o", out) == 0
    assert capsys.readouterr().out == f"{out} is {model} with {adapter} merged into its weights\n"
    ids = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = base(ids).logits.detach()
    expected = PeftModel.from_pretrained(base, str(adapter))(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == dtype
    rounding = 1e-4 if dtype == torch.float32 else 0.1 * float((expected - before).abs().max())
    torch.testing.assert_close(merged.float()(ids).logits, expected, atol=rounding, rtol=0)
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert not (out / "adapter_config.json").exists()


def test_what_cannot_be_merged_is_told_in_a_sentence(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: object) -> str:
        assert said(*words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    out = tmp_path / "merged"
    assert f"{tmp_path} is no directory of an adapter: adapter_config.json" in told(tmp_path, "-o", out)
    assert tells(told(adapter, "-o", out, "--model", tmp_path), "no config.json", "correct --model")
    assert "exists" in told(adapter, "-o", tmp_path / "model")
    make_model(tmp_path / "other", hidden_size=64)
    assert "does not fit" in told(adapter, "-o", out, "--model", tmp_path / "other")
    (adapter / "adapter_model.safetensors").write_bytes(b"gone")
    assert "does not fit" in told(adapter, "-o", out)
    moved = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "hub/name"}
    (adapter / "adapter_config.json").write_text(json.dumps(moved))
    assert "give the model's directory with --model" in told(adapter, "-o", out)
    shutil.rmtree(adapter)
    assert "adapter_config.json" in told(adapter, "-o", out)
    assert not out.exists()
