"""Real trajectories as the calls that their agents must have made: conversations and preferences are what the source
files say, message by message. Skipped where the data is not there."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import pytest
from fakes.tokens import Talk

from bench.trajectories import DATA, calls_of, wire_answer
from penstock.adapters.chat import conversations
from penstock.adapters.episode import Episode
from penstock.adapters.export import preferences
from penstock.adapters.selection import SampleReport

pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"{DATA.name} is not here")
Source = dict[str, Any]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """As they were recorded."""
    with gzip.open(DATA) as lines:
        return [json.loads(line) for line in lines]


def named(source: Source) -> str:
    return f"t{source['task_id']}.{source['trial']}"


def episode(source: Source) -> Episode:
    """A call for every answer, each with all that was said before."""
    talk, rng = Talk(source["reward"], named(source), group=f"t{source['task_id']}"), random.Random(1)
    for number, (request, said) in enumerate(calls_of(source["messages"])):
        span = talk.call([0], model="gpt-4o").span
        talk.bodies[span.attempt, span.sequence] = request, wire_answer(request, said, f"c{number}", rng)
    return talk.episode()


@pytest.fixture(scope="module")
def episodes(sources: list[Source]) -> list[Episode]:
    """What was read is remembered from test to test."""
    return [episode(source) for source in sources]


def plain(messages: list[Any]) -> list[Any]:
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def until_the_last_answer(messages: list[Any]) -> list[Any]:
    """What comes after it no call has told."""
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


def test_conversations_are_the_source_message_by_message(sources: list[Source], episodes: list[Episode]) -> None:
    for source, talk in zip(sources, episodes, strict=True):
        (made,), report = conversations(talk)
        told = until_the_last_answer(source["messages"])
        assert len(made.messages) == len(told)
        for ours, theirs in zip(plain(made.messages), told, strict=True):
            assert ours == theirs
        answers = [message for message in made.messages if message["role"] == "assistant"]
        assert [message["weight"] for message in answers] == [1] * len(answers)
        assert (made.calls, made.reward) == (tuple(range(1, len(answers) + 1)), source["reward"])
        assert (report.calls, report.choices, report.dropped) == (len(answers), len(answers), [])


def test_preferences_are_two_sources_of_one_task(sources: list[Source], episodes: list[Episode]) -> None:
    by_name = {named(source): source for source in sources}
    held = [made for talk in episodes for made in conversations(talk)[0]]
    report = SampleReport()
    rows = preferences(held, 0.5, report)
    for row in rows:
        good, bad = by_name[row["chosen_rollout"]], by_name[row["rejected_rollout"]]
        assert good["task_id"] == bad["task_id"]
        assert good["reward"] - bad["reward"] == row["margin"] == 1.0
        assert row["prompt"] + row["chosen"] == until_the_last_answer(good["messages"])
        assert row["prompt"] + row["rejected"] == until_the_last_answer(bad["messages"])
        # Simulated users seldom begin alike; the system prompt is always the same.
        assert row["prompt"][0]["role"] == "system"
        assert row["chosen"] != row["rejected"]
    # Every task is in a pair or counted with the reason why not.
    assert len(rows) == report.pairs > 0
    # Two trials of a task differ in reward, or they do not; nothing else keeps a task out, and the report says so.
    by_task: dict[Any, set[float]] = {}
    for source in sources:
        by_task.setdefault(source["task_id"], set()).add(source["reward"])
    equal = sum(len(rewards) == 1 for rewards in by_task.values())
    assert report.unpaired == {"equal": equal}
    assert f"the rewards of {equal} groups are all equal" in report.lines()[-1]
    assert report.pairs + sum(report.unpaired.values()) == len({source["task_id"] for source in sources})
