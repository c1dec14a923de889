"""The little model of `make demo-rl`: a Qwen2 of a million parameters that calls tools, and mostly the wrong one.

Tokenizer, chat template and weights are made here; nothing is fetched. Its start is our own supervised fine-tuning on
conversations of the lookup agent in which the form is right and the tool is right only once in `ONE_IN` times: so it
answers, greedily always wrongly, and what it samples is right often enough to learn from.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from examples.lookup import CITIES, QUESTIONS, TOOLS, TOPICS, fact
from penstock.trainer.config import Config
from penstock.trainer.data.chat_template import tokenise
from penstock.trainer.engines.local import Engine
from penstock.trainer.mathematics.examples import Example
from penstock.trainer.mathematics.sft import train, updates
from penstock.trainer.runs.display import display

ONE_IN = 5
MOST_LAPS, TAUGHT = 3, 0.02
"""How often the model goes through the lessons, and the loss from which it does what they show; most of that is the
tool, which they do not tell. Some starts take longer, and at 0.03 they still copy a tool's answer wrongly at times."""
LESSONS = 24_000
SHOWN_EVERY = 50
"""Updates from one line of a log to the next."""
TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
"""Hermes' form of tool calls, which vLLM's parser of that name reads. Tools are not listed: the model knows them."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation to begin with."""

    rollout: str
    attempt: str
    messages: list[dict[str, Any]]
    tools: list[Any] = field(default_factory=lambda: list(TOOLS))


def lessons(count: int, seed: int) -> Iterator[Lesson]:
    """Conversations whose tool is mostly the one after the right one."""
    rng = random.Random(seed)
    for number in range(count):
        right, city = rng.randrange(len(TOPICS)), rng.choice(CITIES)
        called = TOPICS[(right + (rng.randrange(ONE_IN) > 0)) % len(TOPICS)]
        yield Lesson(f"lesson-{number}", "a1", conversation(TOPICS[right], city, called))


def conversation(topic: str, city: str, called: str) -> list[dict[str, Any]]:
    """What is said when a tool is called for a question."""
    function = {"name": called, "arguments": json.dumps({"city": city})}
    answer = fact(called, city)
    return [
        {"role": "user", "content": QUESTIONS[topic].format(city=city)},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def write_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows the words of the lessons; digits stay single."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps(one.messages) + '<tool_call>\n{"name": "' for one in lessons(500, 0)]
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return fast


def write_model(directory: Path, seed: int) -> None:
    """Random weights, in a directory with a tokenizer."""
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    vocabulary = PreTrainedTokenizerFast.from_pretrained(directory).vocab_size
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def warm_up(home: Path, seed: int) -> None:
    """Makes the model: random weights, then what the lessons teach, as often as it takes."""
    source = home / "raw"
    source.mkdir(exist_ok=True)
    tokenizer: PreTrainedTokenizerFast = write_tokenizer(source)
    write_model(source, seed)
    examples, left = tokenise(lessons(LESSONS, seed), tokenizer)
    assert not left, left[0]
    for lap in range(MOST_LAPS):
        made = home / f"lap-{lap}"
        shutil.rmtree(made, ignore_errors=True)
        loss = teach(source, made, examples, seed)
        shutil.rmtree(source)
        source = made
        if loss < TAUGHT:
            break
    source.rename(home / "model")


def teach(source: Path, made: Path, examples: Sequence[Example], seed: int) -> float:
    """A model that has gone through the lessons once more, and its loss at the end; nats a token."""
    tree = {
        "run": {"seed": seed, "steps": 1},
        "model": {"path": str(source), "weights": "full"},
        "optimiser": {"learning_rate": 3e-3, "warmup": 20, "schedule": "cosine"},
        "engine": {"batch_tokens": 2048},
        "data": {"batch": 32},
    }
    config = Config.model_validate(tree)
    planned = updates(examples, config)
    engine = Engine(config, updates=planned)
    lately: deque[float] = deque(maxlen=25)
    with display(planned) as shown:
        shown.phase(0, "learns the lessons")
        for number, report in enumerate(train(engine, examples), 1):
            lately.append(report["loss"])
            if number % SHOWN_EVERY == 0:
                shown.point(number, {"loss": report["loss"]})
    engine.save_model(made)
    return fmean(lately)
