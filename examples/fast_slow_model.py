"""The little model of `examples.fast_slow`: a Qwen2 of 0.46 million parameters that follows instructions, sometimes.

Tokenizer, chat template and weights are made here; nothing is fetched. It is taught by our own supervised fine-tuning
on conversations whose system text asks for some parts of an answer, in several wordings. A part that is asked for is
there in `FOLLOWED` of them, one that is not in few: so the prompt matters, and so do the weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.fast_slow_agent import ARTICLES, DAYS, NAMES, PARTS, PROMPT, question
from examples.lookup_model import TEMPLATE, Lesson

WORDINGS = {
    "greeting": ("Greet the customer.", "Begin with a greeting."),
    "order": ("Confirm the order.", "Say that we have the order."),
    "arrival": ("Tell when it arrives.", "Say when it arrives."),
    "thanks": ("Thank the customer.", "Say thank you."),
    "terms": ("Point to our terms.", "Say that our terms apply."),
    "closing": ("Close with kind regards.", "End politely."),
}
"""How a system text asks for each part."""
VAGUE = ("Be helpful and precise.", "Think about what the customer needs.", "Write good answers.")
"""Lines that ask for nothing."""
FOLLOWED = 0.6
UNASKED = {"greeting": 0.1, "order": 0.3, "arrival": 0.1, "thanks": 0.1, "terms": 0.003, "closing": 0.003}
"""Probability of each part where it is asked for, and where it is not."""
NOTHING = "Hello"


def lessons(count: int, seed: int, firm: bool = False) -> Iterator[Lesson]:
    """Conversations to begin with. `firm`: in which every part is said if, and only if, it is asked for."""
    draw = random.Random(seed)
    for number in range(count):
        asked = [name for name in WORDINGS if draw.random() < 0.5]
        lines = [draw.choice(WORDINGS[name]) for name in asked] + draw.sample(VAGUE, draw.choice((0, 0, 1, 2)))
        draw.shuffle(lines)
        yield Lesson(
            f"lesson-{number}", "a1", conversation("\n".join([PROMPT.split("\n")[0], *lines]), asked, draw, firm), []
        )


def conversation(prompt: str, asked: list[str], draw: random.Random, firm: bool) -> list[dict[str, Any]]:
    """One that follows most of what it is asked, or all of it."""
    followed, unasked = (1.0, dict.fromkeys(UNASKED, 0.0)) if firm else (FOLLOWED, UNASKED)
    said = [text for name, text in PARTS.items() if draw.random() < (followed if name in asked else unasked[name])]
    return [
        {"role": "system", "content": prompt},
        {"role": "user", "content": question(order(draw))},
        {"role": "assistant", "content": ", ".join(said) or NOTHING},
    ]


def order(draw: random.Random) -> dict[str, Any]:
    """A task: an order that a customer asks about."""
    return {
        "name": draw.choice(NAMES),
        "article": draw.choice(ARTICLES),
        "day": draw.choice(DAYS),
    }


def write_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows the words of the lessons; digits stay single."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{message['role']}\n{message['content']}" for one in lessons(2000, 0) for message in one.messages]
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return fast


def write_model(directory: Path, seed: int) -> None:
    """Random weights, in a directory with a tokenizer."""
    torch.manual_seed(seed)
    vocabulary = PreTrainedTokenizerFast.from_pretrained(directory).vocab_size
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
