"""Lessons: of groups the good ones, of pairs both sides whole, held out by task, everything else counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.tiny_model import config, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.chat import ChatConversation
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.training_examples import ExampleBuilder, TrainingSet, group_by_attempt, held_out

TOKENIZER = make_tokenizer()


def chat(rollout: str, group: str, reward: float | None, answer: str = "the water", **more: Any) -> ChatConversation:
    said = [{"role": "user", "content": "wheel?"}, {"role": "assistant", "content": answer, "weight": 1}]
    parts: dict[str, Any] = {"agent": None, "model": "m", "calls": (1,), "messages": said, "tools": [], "rewards": {}}
    return ChatConversation(rollout, "a1", group, reward=reward, **parts | more)


def settings(**sections: dict[str, Any]) -> TrainConfig:
    return config(Path("model"), **sections)


def owners(lessons: TrainingSet) -> list[list[str]]:
    return [[side[0].owner[0] for side in lesson.sides] for lesson in lessons.training]


def supervised(chats: list[ChatConversation], **sections: dict[str, Any]) -> TrainingSet:
    return ExampleBuilder(settings(**sections), TOKENIZER).from_rollouts(group_by_attempt(chats))


def preferences(chats: list[ChatConversation], **sections: dict[str, Any]) -> TrainingSet:
    return ExampleBuilder(settings(**sections), TOKENIZER).from_pairs(group_by_attempt(chats))


def test_of_each_group_the_best_that_are_good_enough() -> None:
    rewards: list[tuple[str, float | None]] = [
        ("a", 0.2), ("a", 0.9), ("a", None), ("a", 0.7), ("a", 0.9), ("b", 0.1), ("b", 0.6)
    ]  # fmt: skip
    chats = [chat(str(number), group, reward) for number, (group, reward) in enumerate(rewards)]
    made = supervised(chats, sft={"reward": 0.5, "best": 2})
    assert owners(made) == [["1"], ["4"], ["6"]]
    assert made.dropped == {"rollouts_no_reward": 1, "rollouts_reward": 2, "rollouts_beaten": 1}
    # Without a word everything is taken, judged or not.
    assert len(supervised(chats).training) == len(chats)


def test_conversations_of_a_rollout_count_together() -> None:
    chats = [chat("r", "a", 1.0), chat("r", "a", 1.0, "the wheel"), chat("s", "a", 0.0)]
    made = supervised(chats)
    assert [len(lesson.sides[0]) for lesson in made.training] == [2, 1]
    # Lines of a file may be in any order.
    for order in (chats, [chats[0], chats[2], chats[1]]):
        (pair,) = preferences(order).training
        assert [len(side) for side in pair.sides] == [2, 1]


def test_pairs_are_of_whole_rollouts_and_groups_without_one_are_counted() -> None:
    chats = [
        chat("good", "a", 1.0), chat("bad", "a", 0.0), chat("middle", "a", 0.5),
        chat("alone", "b", 1.0),
        chat("x", "c", 0.5), chat("y", "c", 0.5),
        # Of the better side something cannot be used: what is left of it is not the rollout.
        chat("long", "d", 1.0), chat("long", "d", 1.0, "wheel " * 99), chat("short", "d", 0.0),
    ]  # fmt: skip
    made = preferences(chats)
    assert owners(made) == [["good", "bad"]]
    assert made.dropped == {"groups_alone": 1, "groups_equal": 1, "chats_long": 1, "pairs_incomplete": 1}
    assert owners(preferences(chats, dpo={"pairs": "all"})) == [["good", "middle"], ["good", "bad"], ["middle", "bad"]]
    assert owners(preferences(chats, dpo={"pairs": "all", "margin": 0.6})) == [["good", "bad"]]


def test_when_nothing_is_left_it_is_said_why() -> None:
    picture = [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "x", "weight": 1}]
    with pytest.raises(ConfigError, match=r"nothing to learn from \(chats_content 1\); r: it has content of the type"):
        supervised([chat("r", "a", 1.0, messages=picture)])
    with pytest.raises(ConfigError, match=r"data\.held_out: there is one group only \(a\)"):
        supervised([chat("r", "a", 1.0), chat("s", "a", 1.0)], data={"held_out": 0.5})


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1), st.floats(0.01, 0.99), st.integers(0, 9))
def test_what_is_held_out_is_some_and_never_all(groups: list[str], share: float, seed: int) -> None:
    if len(set(groups)) == 1:
        return
    out = held_out(groups, share, seed)
    assert 0 < len(out) < len(set(groups))
    assert abs(len(out) - share * len(set(groups))) <= 1
    # It follows from the names and the seed, not from their order or how often they come.
    assert held_out([*reversed(groups), *groups], share, seed) == out
    assert held_out(groups, 0.0, seed) == frozenset()


def test_a_task_is_on_one_side_only() -> None:
    made = supervised([chat(f"{group}{n}", group, 1.0) for group in "abcdef" for n in range(3)], data={"held_out": 0.3})
    taught, out = ({lesson.group for lesson in lessons} for lessons in (made.training, made.held_out))
    assert (len(taught), len(out), taught & out) == (4, 2, set())
    assert (len(made.training), len(made.held_out)) == (12, 6)
