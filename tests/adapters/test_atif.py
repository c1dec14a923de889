"""Trajectories as Harbor has them: valid whatever the calls were, and imported spans make up what was imported."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fakes.goldens import check_text
from fakes.memory_tape import call as head
from fakes.tokens import Talk
from fakes.turn_trees import STEPS, Step, played
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.atif import AtifReport, as_line, trajectories
from penstock.adapters.atif_model import flaws
from penstock.adapters.atif_spans import TEXT, BrokenTrajectoryError, pack, spans_of, split, trajectory_of, unpack
from penstock.adapters.harbor import judgement, trial_end
from penstock.gateway.model.facts import AGENT_ID
from penstock.gateway.model.span import Span
from penstock.gateway.wire.dialects.loose_json import arr, obj

Json = dict[str, Any]
SUMMARY = "The parser failed on empty lines; lines.py is mended, tests pass, the changelog is still to be written."


def made(talk: Talk, report: AtifReport | None = None) -> list[Json]:
    return [it for _, it in trajectories(talk.episode(), report or AtifReport())]


def said(talk: Talk, messages: list[Json], *answers: Json, **about: Any) -> list[Json]:
    """A call of messages; the conversation with its first answer."""
    span = head(len(talk.heads) + 1, choices=len(answers), **about)
    choices: list[Json] = [{"index": at, "message": {"role": "assistant"} | it} for at, it in enumerate(answers)]
    body = {"id": f"c{span.sequence}", "model": "m-1", "choices": choices}
    talk.record(
        span, (json.dumps({"messages": messages, "reasoning_effort": "low"}).encode(), json.dumps(body).encode())
    )
    return [*messages, choices[0]["message"]]


def asked(id: str, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shown(id: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": id, "content": text}


def a_long_day() -> Talk:
    """A coding agent that has a sub-agent, fails once, is compacted, and is asked for a title beside."""
    talk = Talk()
    begun = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Mend lines.py."}]
    said(talk, [{"role": "user", "content": "A title?"}], {"content": "Mending"}, at_ms=500)
    tools = [asked("t1", "read", '{"path":"lines.py"}'), asked("t2", "task", '{"prompt":"Find who calls it."}')]
    first = {
        "content": None,
        "reasoning_content": "Look first.",
        "tool_calls": [*tools, asked("t3", "run", "not JSON")],
    }
    so_far = said(talk, begun, first, agent="main")
    said(talk, [{"role": "user", "content": "Find who calls it."}], {"content": "Nobody."}, attributes={AGENT_ID: "s1"})
    so_far += [shown("t1", "def lines(): ..."), shown("t2", "Nobody calls it."), shown("t3", "")]
    talk.record(head(len(talk.heads) + 1, status="error", error="http_529", http_status=529), (b"{}", b"{}"))
    so_far = said(talk, so_far, {"content": SUMMARY}, {"content": "Done."}, cost=0.25, agent="main")
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    again = [*begun, {"role": "user", "content": f"So far: {SUMMARY}"}, {"role": "user", "content": [image]}]
    said(talk, again, {"content": "It is written."}, agent="main")
    talk.call(
        [1, 2], [(3, 4)], [*again, {"role": "assistant", "content": "It is written."}, {"role": "user", "content": "?"}]
    )
    talk.judge(value=0.5, dimensions={"style": 1.0}, trusted=True)
    return talk


def test_a_trajectory_tells_the_whole_attempt() -> None:
    report = AtifReport()
    [whole] = made(a_long_day(), report)
    assert flaws(whole) == []
    check_text("atif.json", json.dumps(whole, indent=1) + "\n")
    check_text("atif-report.txt", "\n".join(report.lines()) + "\n")


@given(STEPS)
def test_every_trajectory_is_valid(steps: list[Step]) -> None:
    """Each answer of a good call is a step once, or stands in `extra`."""
    talk, _ = played(steps)
    report = AtifReport()
    for whole in made(talk, report):
        assert flaws(json.loads(as_line(whole))) == []
    good = sum(span.status == "ok" and bool(talk.bodies) for span in talk.heads)
    beside = report.extra["calls that were sent again"] + report.extra["calls that are no conversation"]
    assert report.answers >= good - beside
    assert report.extra["failed calls"] == len(talk.heads) - good


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("harbor") is None, reason="pip install harbor==0.26.0 (Python >= 3.12) to run its validator"
)
def test_harbor_finds_no_fault(tmp_path: Path) -> None:
    from subprocess import run

    (file := tmp_path / "trajectory.json").write_bytes(as_line(made(a_long_day())[0]))
    done = run([sys.executable, "-m", "harbor.utils.trajectory_validator", str(file)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# -- in --


def kept(document: Json, name: str = "r1/a1") -> list[Span]:
    """The spans of a document as the gateway keeps them."""
    found = spans_of(document, name, 10**18)
    return [
        head(at, kind="otel", span_id=it.span_id, parent_id=it.parent_id, attributes=it.attributes)
        for at, it in enumerate(found, 1)
    ]


def texts(value: Any) -> list[str]:
    """The texts that the gateway would cut."""
    return [it for it in [value, *arr(value)] if isinstance(it, str)]


TEXT_OR_LONG = st.tuples(st.text(st.characters(codec="utf-8"), max_size=40), st.sampled_from([1, 1, 300, 1500]))


@given(st.lists(TEXT_OR_LONG, max_size=6), STEPS)
def test_spans_make_up_what_was_imported(messages: list[tuple[str, int]], steps: list[Step]) -> None:
    talk, _ = played(steps)
    said = [text * often for text, often in messages]
    users = [{"step_id": at, "source": "user", "message": text} for at, text in enumerate(said, 1)]
    odd = [{"schema_version": "ATIF-v1.2", "agent": {"name": "a", "version": "1"}, "steps": users}] if users else []
    for document in [*made(talk), *odd]:
        assert flaws(document) == []
        spans = kept(document)
        assert trajectory_of(reversed(spans)) == document
        assert len({span.span_id for span in spans}) == len(spans)
        for span in spans:
            said = [text for value in (span.attributes or {}).values() for text in texts(value)]
            assert max(map(len, said)) <= TEXT
            assert sum(map(len, said)) <= 65_000
        for at in range(len(spans)):
            with pytest.raises(BrokenTrajectoryError):
                trajectory_of(spans[:at] + spans[at + 1 :])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@given(JSON)
def test_what_is_packed_is_unpacked(value: Any) -> None:
    packed = pack(value)
    assert unpack(packed) == value
    skeleton = "".join(packed[1 : 1 + int(packed[0])])
    assert not set(skeleton) - set("[],.-+0123456789enulltruefalse")


@given(st.text(alphabet="ab, ", max_size=200), st.integers(1, 20), st.integers(0, 20))
def test_pieces_end_between_words(text: str, size: int, back: int) -> None:
    pieces = [*split(text, size, back)]
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)
    assert all(piece[-1] in " ," or not set(piece[len(piece) - back :]) & set(" ,") for piece in pieces[:-1])


FLAWED: list[tuple[Any, str]] = [
    ([], "trajectory: "),
    ({"schema_version": "ATIF-v1.9"}, "schema_version: "),
    ({"agent": {"name": "a"}}, "agent.version: "),
    ({"steps": []}, "steps: "),
    ({"steps": [{"step_id": 2, "source": "user", "message": ""}]}, "trajectory: Value error, steps[0].step_id is 2"),
    (
        {"steps": [{"step_id": 1, "source": "user", "message": "", "metrics": {}}]},
        "steps[0]: Value error, only steps of",
    ),
    ({"more": 1}, "more: "),
]


@pytest.mark.parametrize(("change", "begins"), FLAWED)
def test_a_flaw_has_its_place(change: Any, begins: str) -> None:
    good: Json = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}}
    good["steps"] = [{"step_id": 1, "source": "user", "message": "hi"}]
    assert flaws(good) == []
    found = flaws(good | obj(change) if change else change)
    assert any(flaw.startswith(begins) for flaw in found), found


def test_embedding_ends_somewhere() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"subagent_trajectories": [deep]}
    assert "levels" in flaws(deep)[0]


# -- Harbor's results --


@pytest.mark.parametrize(
    ("scores", "value", "dimensions"),
    [
        ({"reward": 1, "style": 0.5}, 1.0, {"style": 0.5}),
        ({"pass": 0.0}, 0.0, {"pass": 0.0}),
        ({"a": 1, "b": 2}, None, {"a": 1.0, "b": 2.0}),
        ({"reward": float("nan")}, None, None),
        ({"reward": True}, None, None),
    ],
)
def test_a_reward_is_the_verifiers(scores: Json, value: float | None, dimensions: Json | None) -> None:
    found = judgement(scores)
    assert (None, None) if found is None else (found.value, found.dimensions) == (value, dimensions)
    assert (found is None) == (dimensions is None)


def test_a_trial_that_broke_has_failed() -> None:
    raised = {"exception_type": "TimeoutError", "exception_message": "x" * 5000}
    timing = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:02Z"}
    end = trial_end({"exception_info": raised, "task_name": "t", "agent_execution": timing}, {"verifier": "y" * 50_000})
    assert (end.status, end.outcome.duration_ns, end.rewards) == ("failed", 2 * 10**9, [])
    assert (end.outcome.reason or "").startswith("TimeoutError: xx")
    assert [event.name for event in end.events] == ["harbor.result", "harbor.verifier"]
    assert trial_end({"verifier_result": {"rewards": {"reward": 1}}, "agent_execution": 3}, {}).status == "succeeded"
