# type: ignore # torch and transformers are in .venv-vllm only
"""Makes a model that works in a shell, for coding agents: it thinks, runs `echo 1`, `echo 2`, `echo 3`, and answers.

    .venv-vllm/bin/python tests/vllm/make_shell_model.py DIRECTORY

Two Qwen2 layers that learnt nothing else, in five minutes of CPU. Its chat template keeps of each message only the end,
so that a prompt of 20,000 words is a short one. Otherwise it does what templates of such models do: it takes one system
message, leaves reasoning out of the past, strips white space and writes JSON anew. It names the tool that runs a
command in the header of each message, for the model to see it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from make_model import END, make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SHELLS = {"Bash": "command", "exec_command": "cmd"}
SAID = "All is done."
TEMPLATE = (
    "{%- set ns = namespace(shell='none') -%}"
    "{%- for t in tools or [] -%}{%- if t.function.name in ['Bash', 'exec_command'] -%}"
    "{%- set ns.shell = t.function.name -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' and not loop.first -%}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}"
    "{%- set said = (m.content or '') | trim -%}"
    "{{- '<|im_start|>' + m.role + ' ' + ns.shell + '\n' -}}"
    "{{- said if m.role == 'assistant' else said[-1:] if m.role == 'tool' else said[-16:] -}}"
    "{%- for c in m.tool_calls or [] -%}"
    "{{- '\n<tool_call>\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) -}}"
    "{{- '\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' + ns.shell + '\n' -}}{%- endif -%}"
)
STEPS, BATCH, RATE = 500, 12, 4e-3


def answer(shell: str, turn: int) -> str:
    """What it says in a turn, as it makes it: not as the template writes it."""
    if turn > 3:
        return f"<think>\nAll three.\n</think>\n\n{SAID}"
    call = f'{{"name":  "{shell}", "arguments": {{"{SHELLS[shell]}":"echo {turn}"}}}}'
    return f"<think>\nNow {turn}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def story(rng: random.Random) -> list[tuple[str, bool]]:
    """A conversation in pieces, each with whether the model makes it."""
    shell = rng.choice(list(SHELLS))

    def told(role: str, said: str) -> tuple[str, bool]:
        return f"<|im_start|>{role} {shell}\n{said}{END}\n", False

    pieces = [told(role, noise(rng)) for role in ["system", *["user"] * rng.randint(1, 4)]]
    for turn in range(1, 5):
        pieces += [(f"<|im_start|>assistant {shell}\n", False), (answer(shell, turn) + END, True), ("\n", False)]
        pieces.append(told("tool", (noise(rng) + str(turn))[-rng.randint(1, 16) :]))
    return pieces[:-2]


def noise(rng: random.Random) -> str:
    return "".join(rng.choice("abc xyz.\n:/<>123") for _ in range(rng.randint(1, 16))).strip() or "a"


def encoded(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids, and the same where the model makes them."""
    ids, labels = [], []
    for text, makes in pieces:
        own = tokenizer.encode(text, add_special_tokens=False)
        ids += own
        labels += own if makes else [-100] * len(own)
    return ids, labels


def learn(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Learns conversations by heart; the last loss."""
    rng, loss = random.Random(1), torch.tensor(0.0)
    steps = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(steps, RATE, total_steps=STEPS)
    for _ in range(STEPS):
        rows = [encoded(tokenizer, story(rng)) for _ in range(BATCH)]
        size = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [1] * (size - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (size - len(labels)) for _, labels in rows])
        loss = model(input_ids=ids, labels=labels).loss
        steps.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        rate.step()
    return loss.item()


def main(directory: Path) -> None:
    """Makes it, and says how well it has learnt."""
    torch.manual_seed(1)
    directory.mkdir(parents=True, exist_ok=True)
    # Words of what it says are tokens; anything else is bytes.
    said = [answer(shell, turn) for shell in SHELLS for turn in range(1, 5)] * 4
    tokenizer = make_tokenizer(directory, said, 400, TEMPLATE, "<think>", "</think>", "<tool_call>", "</tool_call>")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.float32)
    print(json.dumps({"loss": learn(model, tokenizer)}))
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
