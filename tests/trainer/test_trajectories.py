"""Real trajectories in the tokens that are trained on: no message is lost or doubled, every answer is trained once.

Skipped where the data is not there. Conversations and preferences of it: tests/adapters/test_trajectories.py.
"""

from __future__ import annotations

import gzip
import json
import random
from itertools import groupby
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.tiny_model import make_tokenizer
from fakes.tokens import Talk

from bench.trajectories import DATA, calls_of, wire_answer
from penstock.adapters.chat import ChatConversation, conversations
from penstock.adapters.export import preferences
from penstock.adapters.selection import SampleReport
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.training_examples import ExampleBuilder, group_by_attempt, tokenise
from penstock.trainer.mathematics.batch import TokenExample

pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"{DATA.name} is not here")
TASKS = 12
"""Tasks that are looked at, with all their trials; the tests' tokenizer makes a token of nearly every byte."""


@pytest.fixture(scope="module")
def chats() -> list[ChatConversation]:
    """Of real trajectories, through the bytes of the calls that their agents must have made."""
    with gzip.open(DATA) as lines:
        sources = [json.loads(line) for line in lines]
    return [made for source in sources if source["task_id"] < TASKS for made in _conversations(source)]


def _conversations(source: dict[str, Any]) -> list[ChatConversation]:
    name, rng = f"t{source['task_id']}.{source['trial']}", random.Random(1)
    talk = Talk(source["reward"], name, group=f"t{source['task_id']}")
    for number, (request, said) in enumerate(calls_of(source["messages"])):
        span = talk.call([0], model="gpt-4o").span
        talk.bodies[span.attempt, span.sequence] = request, wire_answer(request, said, f"c{number}", rng)
    return conversations(talk.episode())[0]


def spelled(one: TokenExample, tokenizer: Any) -> list[tuple[str, bool]]:
    """The whole example as runs of text, True where it is trained."""
    ids, mask = [*one.prompt.tolist(), *one.response.tolist()], [*[False] * len(one.prompt), *one.mask.tolist()]
    runs = groupby(zip(ids, mask, strict=True), lambda it: it[1])
    return [(tokenizer.decode([token for token, _ in run]), trained) for trained, run in runs]


def rendered(messages: list[Any], tokenizer: Any) -> str:
    """What the template makes of them at once, arguments of tools opened."""
    opened = json.loads(json.dumps(messages))
    for call in (call for message in opened for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return tokenizer.apply_chat_template(opened, tokenize=False)


def test_every_message_is_in_the_tokens_and_every_answer_is_trained_once(chats: list[ChatConversation]) -> None:
    tokenizer = make_tokenizer()
    for chat in chats:
        (made,), left = tokenise([chat], tokenizer)
        assert not left
        runs = spelled(made, tokenizer)
        assert "".join(text for text, _ in runs) == rendered(chat.messages, tokenizer)
        answers = [message for message in chat.messages if message["role"] == "assistant"]
        trained = [text for text, answer in runs if answer]
        assert len(trained) == len(answers) == len(chat.calls)
        for text, message in zip(trained, answers, strict=True):
            head = "<|im_start|>assistant\n"
            assert head + text + "\n" == rendered([message], tokenizer)


@pytest.mark.parametrize("which", ["best", "all"])
def test_pairs_hold_both_trajectories_whole(chats: list[ChatConversation], which: str) -> None:
    engine = {"batch_tokens": 1 << 20}
    config = TrainConfig.model_validate({"model": {"path": "model"}, "dpo": {"pairs": which}, "engine": engine})
    tokenizer, by_name = make_tokenizer(), {chat.rollout: chat for chat in chats}
    made = ExampleBuilder(config, tokenizer).from_pairs(group_by_attempt(chats))
    assert made.training
    for lesson in made.training:
        good, bad = (by_name[side[0].owner[0]] for side in lesson.sides)
        assert (good.reward or 0) > (bad.reward or 0)
        assert good.group == bad.group == lesson.group
        for chat, side in zip((good, bad), lesson.sides, strict=True):
            (one,) = side
            assert "".join(text for text, _ in spelled(one, tokenizer)) == rendered(chat.messages, tokenizer)
    groups = {chat.group for chat in chats}
    without = sum(count for name, count in made.dropped.items() if name.startswith("groups_"))
    assert len({lesson.group for lesson in made.training}) + without == len(groups)


def test_files_and_training_have_the_same_pairs(chats: list[ChatConversation]) -> None:
    report = SampleReport()
    config = TrainConfig.model_validate({"model": {"path": "model"}, "engine": {"batch_tokens": 1 << 20}})
    made = ExampleBuilder(config, make_tokenizer()).from_pairs(group_by_attempt(chats))
    written = {(row["chosen_rollout"], row["rejected_rollout"]) for row in preferences(chats, 0.0, report)}
    assert {tuple(side[0].owner[0] for side in lesson.sides) for lesson in made.training} == written
    assert made.hints == report.hints
