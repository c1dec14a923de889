"""The little model of `make demo-rl`: a Qwen2 of a million parameters that calls tools, and mostly the wrong one.

Tokenizer, chat template and weights are made here; nothing is fetched. Its start is our own supervised fine-tuning on
conversations of the lookup agent in which the form is right and the tool is right only once in `ONE_IN` times: so it
answers, greedily always wrongly, and what it samples is right often enough to learn from.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from examples.lookup import CITIES, QUESTIONS, TOOLS, TOPICS, fact
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.training_examples import tokenise
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.batch import TokenExample
from penstock.trainer.mathematics.update import sft_updates, train_sft
from penstock.trainer.runs.supervision import display

ONE_IN = 5
MOST_LAPS, TAUGHT = 3, 0.99
"""How often the model goes through the lessons at most, and the share of all questions from which it does what they
show: it calls a tool for the right city and says what that answered. Some starts take two laps. What a start still
copies wrongly it does not unlearn in a few steps of training, because it is rarely right by chance."""
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
        topic, city = rng.choice(TOPICS), rng.choice(CITIES)
        called = tools_for(topic)[rng.randrange(ONE_IN) > 0]
        yield Lesson(f"lesson-{number}", "a1", conversation(topic, city, called))


def tools_for(topic: str) -> tuple[str, str]:
    """The right tool for a topic, and the one that the lessons mostly show."""
    return topic, TOPICS[(TOPICS.index(topic) + 1) % len(TOPICS)]


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
        teach(source, made, examples, seed)
        shutil.rmtree(source)
        source = made
        share = does_as_shown(made)
        print(f"asked greedily, {share:.0%} of the answers are as the lessons show them", file=sys.stderr, flush=True)
        if share >= TAUGHT:
            break
    source.rename(home / "model")


def does_as_shown(directory: Path) -> float:
    """Share of all questions that the model goes through as in the lessons when it is asked greedily: it calls one of
    the tools that they show, for the right city, and says what any of these answers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model = Qwen2ForCausalLM.from_pretrained(directory).eval()
    asked = [*product(TOPICS, CITIES)]
    shown = [
        Lesson(called, "a1", conversation(topic, city, called)) for topic, city in asked for called in tools_for(topic)
    ]
    examples = tokenise(shown, tokenizer)[0]
    turns = [one for at in range(0, len(examples), 64) for one in likeliest(model, examples[at : at + 64])]
    right: list[bool] = []
    for both in zip(turns[::2], turns[1::2], strict=True):
        calls, answers = zip(*both, strict=True)
        right.append(any(calls) and all(answers))
    return fmean(right)


def likeliest(model: Qwen2ForCausalLM, examples: Sequence[TokenExample]) -> list[list[bool]]:
    """For each turn of each example, whether every token is the likeliest after those before it."""
    rows = [torch.from_numpy(np.concatenate([one.prompt, one.response]).astype(np.int64)) for one in examples]
    # What pads the end of a row is after all that is looked at.
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.inference_mode():
        best = model(input_ids=ids).logits.argmax(-1).numpy()
    found: list[list[bool]] = []
    for row, one in zip(best, examples, strict=True):
        start = len(one.prompt) - 1
        said = row[start : start + len(one.response)] == one.response
        turns = np.split(np.where(one.mask, said, True), turns_of(one.mask))
        found.append([bool(turn.all()) for turn in turns])
    return found


def turns_of(mask: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Where a later turn of the model's begins."""
    return np.flatnonzero(mask[1:] & ~mask[:-1]) + 1


def teach(source: Path, made: Path, examples: Sequence[TokenExample], seed: int) -> None:
    """A model that has gone through the lessons once more."""
    tree = {
        "run": {"seed": seed, "steps": 1},
        "model": {"path": str(source), "weights": "full"},
        "optimiser": {"learning_rate": 3e-3, "warmup": 20, "schedule": "cosine"},
        "engine": {"batch_tokens": 2048},
        "data": {"batch": 32},
    }
    config = TrainConfig.model_validate(tree)
    planned = sft_updates(examples, config)
    engine = TrainingEngine(config, updates=planned)
    with display(planned) as shown:
        shown.phase(0, "learns the lessons")
        for number, report in enumerate(train_sft(engine, examples), 1):
            if number % SHOWN_EVERY == 0:
                shown.point(number, {"loss": report["loss"]})
    engine.save_model(made)
