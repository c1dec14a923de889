# type: ignore # torch and transformers are in .venv-vllm only
"""Makes a model that vLLM serves in seconds: two Qwen2 layers with random weights, a tokenizer trained on the spot, a
chat template, and LoRA adapters. Run by the environment that has torch; everything follows from fixed seeds.

    .venv-vllm/bin/python tests/vllm/make_model.py DIRECTORY

writes `base` and the adapters `v0` (zero: it answers as the base model does), `v1` and `v2` (visibly different), `nan`
(what a diverged training leaves), `wide` (a rank that the server does not take), `alien` (for a model of another size).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HIDDEN, LAYERS, HEADS, RANK = 64, 2, 2, 4
"""Two heads of 32: the smallest that vLLM's attention takes on a CPU."""
END = "<|im_end|>"
TEXT = ["the gate holds the water and the wheel turns the mill by the river in the valley below"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content | trim }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It writes the past anew, as templates do: white space is stripped, and arguments are written as JSON again."""


def make_tokenizer(
    directory: Path, texts: list[str], size: int, template: str, *special: str
) -> PreTrainedTokenizerFast:
    """Writes a byte-level BPE tokenizer of so many tokens; `special`: besides those that begin and end a message."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|im_start|>", END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return fast


def make_base(directory: Path) -> None:
    """Writes the model, with weights large enough that its answers depend on every token."""
    torch.manual_seed(1)
    tokenizer = make_tokenizer(directory, TEXT, 320, TEMPLATE)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(directory)


def make_adapter(directory: Path, seed: int, scale: float, rank: int = RANK, hidden: int = HIDDEN) -> None:
    """Writes an adapter of the query and value projections as PEFT would; `scale` 0 leaves the model as it is."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for target in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            tensors[f"{name}.lora_B.weight"] = scale * torch.randn(hidden, rank, generator=generator)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "bias": "none"}
    config |= {"r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")


def main(home: Path) -> None:
    """Makes everything below `home`."""
    make_base(home / "base")
    make_adapter(home / "v0", 0, 0.0)
    make_adapter(home / "v1", 1, 0.3)
    make_adapter(home / "v2", 2, 0.3)
    make_adapter(home / "nan", 3, float("nan"))
    make_adapter(home / "wide", 4, 0.3, rank=64)
    make_adapter(home / "alien", 5, 0.3, hidden=2 * HIDDEN)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
