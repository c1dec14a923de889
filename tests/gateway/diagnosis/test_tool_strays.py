"""Runs of tools whose address named no rollout: made rollouts whose truth is known, alive at the same time, and real
agents."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fakes.tool_rollouts import MS, rollout

from bench import trajectories
from penstock.gateway.diagnosis.tool_calls import ModelCall
from penstock.gateway.diagnosis.tool_pairs import ToolRun
from penstock.gateway.diagnosis.tool_strays import Asking, whose
from penstock.gateway.dialects import by_name

TOGETHER = 5
"""Rollouts that are alive at the same time."""


def test_made_rollouts_that_are_alive_at_the_same_time() -> None:
    """Every run is matched with all rollouts. What is chosen is right; what is ambiguous has the right one among it."""
    grades: Counter[str] = Counter()
    joinable: Counter[str] = Counter()
    for seed in range(0, 250, TOGETHER):
        made = {f"r{at}/a1": rollout(at) for at in range(seed, seed + TOGETHER)}
        runs = [replace(run, key=f"{place}:{run.key}") for place, one in made.items() for run in one.runs]
        asking = [Asking(place, one.calls) for place, one in made.items()]
        found = whose(asking, sorted(runs, key=lambda it: it.start_ns))
        for place, one in made.items():
            expected = one.joinable()
            for key, truth in one.truth.items():
                it = found[f"{place}:{key}"]
                grades[it.grade] += 1
                joinable[it.grade] += key in expected
                if it.asked is not None:
                    assert (it.place, it.asked) == (place, truth.asked), (seed, key, it)
    assert joinable["certain"] >= 0.99 * joinable.total() > 2000
    assert min(grades.values()) > 100


def agent_of(number: int, agent: trajectories.Agent, begin: int) -> tuple[Asking, list[ToolRun], dict[str, str]]:
    """A real agent as a rollout of its own, its tools as if they had run on a server by an address without a rollout;
    of each run the tool-call id."""
    calls: list[ModelCall] = []
    runs: list[ToolRun] = []
    ids: dict[str, str] = {}
    for at, (request, said) in enumerate(agent):
        start = begin + at * 1000
        answer = json.dumps({"choices": [{"index": 0, "message": said}]}).encode()
        turn = by_name("chat").read(request, answer, False)
        calls.append(ModelCall(at + 1, start * MS, (start + 400) * MS, turn))
        later: list[dict[str, Any]] = json.loads(agent[at + 1][0])["messages"] if at + 1 < len(agent) else []
        results = [it for it in later[len(json.loads(request)["messages"]) + 1 :] if it["role"] == "tool"]
        for k, (wanted, result) in enumerate(zip(said.get("tool_calls") or [], results, strict=False)):
            key = f"{number}-{at}-{k}"
            given = json.loads(wanted["function"]["arguments"])
            words = {"content": [{"type": "text", "text": result["content"]}]}
            begun, ended = (start + 500) * MS, (start + 600) * MS
            runs.append(ToolRun(key, "airline", wanted["function"]["name"], given, words, begun, ended))
            ids[key] = wanted["id"]
    return Asking(f"r{number}/a1", calls), runs, ids


@pytest.mark.skipif(not trajectories.DATA.exists(), reason="no trajectories at ../shared/data")
def test_real_agents_that_are_alive_at_the_same_time() -> None:
    agents = trajectories.agents()
    grades: Counter[str] = Counter()
    for begin in range(0, len(agents), 10):
        group = [agent_of(at, agent, at * 137) for at, agent in enumerate(agents[begin : begin + 10])]
        found = whose([one for one, _, _ in group], [run for _, runs, _ in group for run in runs])
        for asking, runs, ids in group:
            for run in runs:
                it = found[run.key]
                grades[it.grade] += 1
                if it.asked is not None:
                    assert (it.place, it.asked.call_id) == (asking.place, ids[run.key])
    # Two trials of one task ask the same at the same time, with the same results.
    assert set(grades) <= {"certain", "ambiguous"}
    assert grades["certain"] >= 0.9 * grades.total() > 450
