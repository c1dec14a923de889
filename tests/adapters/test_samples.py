"""Samples: one rule at a time. Random trees are in test_samples_machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from fakes.tokens import Talk, logprob, message

from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.selection import SampleReport
from penstock.gateway.model.rollout import AttemptStatus

U = message("user", [1])
S = message("system", [100])


def of(talk: Talk, **about: Any) -> tuple[list[Sample], SampleReport]:
    return samples(talk.episode(), Options(**about))


def tokens(made: list[Sample]) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, response and mask."""
    return [(s.prompt.tolist(), s.response.tolist(), s.mask.astype(int).tolist()) for s in made]


def reasons(report: SampleReport) -> list[tuple[int, int | None, str]]:
    return [(one.sequence, one.choice, one.reason) for one in report.dropped]


def two_turns(talk: Talk, **about: Any) -> None:
    one = talk.call([1, 2], [(3, 4)], [U], **about)
    talk.call([*one.whole(), 5], [(6,)], [*one.said(), message("tool", [5])], **about)


# --- merging ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_sample(stream: bool) -> None:
    talk = Talk()
    two_turns(talk, stream=stream, agent="planner", versions={"m": "v3", "prompt": "v1"})
    (made,), report = of(talk)
    assert tokens([made]) == [([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])]
    assert made.logprobs.tolist() == [logprob(3, 0), logprob(4, 1), 0.0, logprob(6, 0)]
    assert (made.rollout, made.attempt, made.group, made.agent, made.model) == ("r1", "a1", "g1", "planner", "m")
    assert [(s.sequence, s.choice, s.start, s.end, s.version) for s in made.segments] == [
        (1, 0, 0, 2, "v3"),
        (2, 0, 3, 4, "v3"),
    ]
    assert (made.prompt.dtype, made.response.dtype, made.mask.dtype, made.logprobs.dtype) == (
        np.int32,
        np.int32,
        np.bool_,
        np.float32,
    )
    assert (report.samples, report.choices, report.tokens, report.starts, report.dropped) == (1, 2, 3, {"first": 1}, [])


def test_transitions_are_a_sample_each() -> None:
    talk = Talk()
    two_turns(talk)
    made, report = of(talk, merge=False)
    assert tokens(made) == [([1, 2], [3, 4], [1, 1]), ([1, 2, 3, 4, 5], [6], [1])]
    assert (report.choices, report.starts, report.dropped) == (2, {}, [])


def test_a_prompt_that_adds_nothing_goes_on() -> None:
    talk = Talk()
    one = talk.call([1], [(2, 3)])
    talk.call(one.whole(), [(4,)])
    assert tokens(of(talk)[0]) == [([1], [2, 3, 4], [1, 1, 1])]


def test_the_answer_that_is_gone_on_from_is_merged_and_the_others_stand_alone() -> None:
    talk = Talk()
    one = talk.call([1], [(2,), (3,), (2,)])
    talk.call([*one.whole(1), 9], [(4,)])
    made, report = of(talk)
    assert tokens(made) == [([1], [2], [1]), ([1], [3, 9, 4], [1, 0, 1]), ([1], [2], [1])]
    assert report.starts == {"first": 1, "forked": 2}


def test_the_continuation_with_most_after_it_goes_on_with_the_sample() -> None:
    talk = Talk()
    one = talk.call([1], [(2,)])
    talk.call([*one.whole(), 8], [(3,)])
    long = talk.call([*one.whole(), 9], [(4,)])
    talk.call([*long.whole(), 9], [(5,)])
    made, report = of(talk)
    assert tokens(made) == [([1], [2, 9, 4, 9, 5], [1, 0, 1, 0, 1]), ([1, 2, 8], [3], [1])]
    assert report.starts == {"first": 1, "forked": 1}


def test_equal_parallel_calls_are_all_kept_and_each_goes_on() -> None:
    talk = Talk()
    calls = [talk.call([1], [(2,)], [U]) for _ in range(3)]
    for one in calls:
        talk.call([*one.whole(), 5], [(6,)], [*one.said(), message("user", [5])])
    made, report = of(talk)
    assert tokens(made) == [([1], [2, 5, 6], [1, 0, 1])] * 3
    assert sorted(s.sequence for sample in made for s in sample.segments) == [1, 2, 3, 4, 5, 6]
    assert report.starts == {"first": 1, "forked": 2}


def test_sub_agents_do_not_break_what_they_interrupt() -> None:
    talk = Talk()
    one = talk.call([100, 1], [(2,)], [S, U], agent="planner")
    talk.call([200, 1], [(5,)], [message("system", [200]), U], agent="searcher")
    talk.call([*one.whole(), 9], [(3,)], [*one.said(), message("tool", [9])], agent="planner")
    made, report = of(talk)
    assert [(s.agent, len(s.segments)) for s in made] == [("planner", 2), ("searcher", 1)]
    assert report.starts == {"first": 2}
    made, report = of(talk, agent="planner")
    assert len(made) == 1
    assert reasons(report) == [(2, None, "other_agent")]


# --- why a sample begins ---


LONG = [S, U]
FIRST = (100, 1)
ON = (100, 1, 2, 3, 9)
GONE_ON = [*LONG, message("assistant", (2, 3)), message("tool", [9])]
ANEW = [*LONG, message("user", [50])]
KEPT = [S, message("user", [50]), message("assistant", (2, 3)), message("user", [9])]


@pytest.mark.parametrize(
    ("then", "start"),
    [
        # The same messages, other tokens: within the answer, within the prompt.
        ([((100, 1, 2, 33, 9), GONE_ON)], "retokenised"),
        ([((101, 1, 2, 3, 9), GONE_ON)], "template"),
        # The same prompt again; another continuation of the same answer.
        ([(FIRST, LONG)], "forked"),
        ([(ON, GONE_ON), ((100, 1, 2, 3, 7), [*GONE_ON[:-1], message("tool", [7])])], "forked"),
        # The beginning is kept and the rest is told anew; the beginning is gone and a later answer is kept.
        ([((100, 1, 50), ANEW)], "compacted"),
        ([((100, 50, 2, 3, 9), KEPT)], "compacted"),
        # Only the system prompt is shared.
        ([((100, 60), [S, message("user", [60])])], "first"),
    ],
)
def test_why_a_sample_begins(then: list[tuple[tuple[int, ...], list[Any]]], start: str) -> None:
    talk = Talk()
    talk.call(FIRST, [(2, 3)], LONG)
    for prompt, messages in then:
        talk.call(prompt, [(8,)], messages)
    assert of(talk)[1].starts == Counter(["first", start])


@pytest.mark.parametrize(("prompt", "start"), [((100, 1), "forked"), ((100, 1, 5), "forked"), ((7, 1), "first")])
def test_why_a_sample_begins_where_there_are_no_messages(prompt: tuple[int, ...], start: str) -> None:
    talk = Talk()
    talk.call(FIRST, [(2, 3)], dialect="completions")
    talk.call(prompt, [(8,)], dialect="completions")
    assert of(talk)[1].starts == Counter(["first", start])


def test_reasoning_that_the_template_takes_out_is_told() -> None:
    talk = Talk()
    one = talk.call([1], [(50, 51, 2)], [U])
    request, response = talk.bodies["a1", 1]
    thought = b'"role": "assistant", "reasoning_content": "50 51", "content": "2"'
    talk.bodies["a1", 1] = request, response.replace(b'"role": "assistant", "content": "50 51 2"', thought)
    talk.call([1, 2, 9], [(3,)], [*one.messages, message("assistant", [2]), message("user", [9])])
    assert of(talk)[1].starts == {"first": 1, "template": 1}


# --- what is left out ---


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"status": "error", "error": "http_500"}, "error"),
        ({"status": "cancelled"}, "cancelled"),
        ({"status": "interrupted"}, "interrupted"),
        ({"status": "open", "end_ns": None}, "unfinished"),
        ({"truncated": True}, "truncated"),
        ({"model": "judge"}, "other_model"),
        ({"dialect": "embeddings"}, "no_generation"),
    ],
)
def test_a_call_that_cannot_be_trained_on_is_reported(about: dict[str, Any], reason: str) -> None:
    talk = Talk()
    two_turns(talk)
    talk.call([9], [(1,), (2,)], **about)
    made, report = of(talk)
    assert (len(made), reasons(report), report.calls) == (1, [(3, None, reason)], 3)


def test_choices_without_ids_or_logprobs_are_reported_one_by_one() -> None:
    talk = Talk()
    talk.call([1], [(2,), ()])
    talk.call([1], [(2,)], ids=False)
    talk.call([1], [(2,)], logprobs=False)
    made, report = of(talk)
    assert (len(made), reasons(report)) == (1, [(1, 1, "empty"), (2, 0, "no_token_ids"), (3, 0, "no_logprobs")])
    made, report = of(talk, allow=frozenset({"no_logprobs"}))
    assert len(made) == 2
    assert np.isnan(made[1].logprobs).all()


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"choices": 5}', b'{"choices":[{"token_ids":[-1]}]}', b"[1,"])
@pytest.mark.parametrize("stream", [False, True])
def test_odd_bytes_are_reported(body: bytes, stream: bool) -> None:
    talk = Talk()
    talk.call([1], [(2,)], stream=stream)
    talk.bodies["a1", 1] = b"{}", b"data: " + body + b"\n\n" if stream else body
    made, report = of(talk)
    assert made == []
    expected = "no_token_ids" if stream and body == b"" else "unreadable"
    assert reasons(report) == [(1, None, expected)]


def test_other_dialects_and_bytes_that_are_gone_are_reported() -> None:
    talk = Talk()
    talk.call([1], [(2,)], dialect="messages")
    talk.bodies["a1", 1] = b"{}", b'{"content": [{"type": "text", "text": "hi"}]}'
    talk.call([1], [(2,)])
    del talk.bodies["a1", 2]
    assert reasons(of(talk)[1]) == [(2, None, "unreadable"), (1, None, "no_token_ids")]


def test_of_a_client_s_retries_the_newest_good_one_counts() -> None:
    talk = Talk()
    one = talk.call([1], [(2,)])
    talk.call([1], [(3,)], retry_of=1)
    talk.call([1], [(4,)], retry_of=1, status="error")
    made, report = of(talk)
    assert tokens(made) == [([1], [3], [1])]
    assert sorted(reasons(report)) == [(1, None, "retry"), (3, None, "error")]
    assert one.span.retry_of is None


def test_the_attempt_that_counts() -> None:
    def talk(*ends: AttemptStatus) -> Talk:
        made = Talk()
        for number, end in enumerate(ends, 1):
            made.status = end
            made.call([number], [(7,)], attempt=f"a{number}")
        return made

    bad, good = AttemptStatus.FAILED, AttemptStatus.SUCCEEDED

    def chosen(talk: Talk, which: Any) -> list[str]:
        made, report = of(talk, attempt=which)
        assert len(made) + len(report.dropped) == report.calls
        assert all(one.reason == "other_attempt" for one in report.dropped)
        return [sample.attempt for sample in made]

    assert chosen(talk(good, bad), "final") == ["a1"]
    assert chosen(talk(bad, bad), "final") == ["a2"]
    assert chosen(talk(bad, bad), "succeeded") == []
    assert chosen(talk(good, bad), "last") == ["a2"]
    assert chosen(talk(good, bad), "all") == ["a1", "a2"]


def test_what_blocks_an_attempt() -> None:
    for talk, reason in ((Talk(gaps=1), "gap"), (Talk(status=AttemptStatus.RUNNING), "unfinished")):
        two_turns(talk)
        assert reasons(of(talk)[1]) == [(1, None, reason), (2, None, reason)]
        assert len(of(talk, allow=frozenset({reason}))[0]) == 1
    talk = Talk()
    talk.call([1], [(2,)], versions={"m": "v1"})
    talk.call([1, 2, 3], [(4,)], versions={"m": "v2"})
    assert [one.reason for one in of(talk)[1].dropped] == ["mixed_versions"] * 2
    (made,), _ = of(talk, allow=frozenset({"mixed_versions"}))
    assert [s.version for s in made.segments] == ["v1", "v2"]


# --- lengths and grammars ---


def test_a_sample_that_would_be_too_long_is_split_before_a_call() -> None:
    talk = Talk()
    two_turns(talk)
    made, report = of(talk, longest_response=3)
    assert tokens(made) == [([1, 2], [3, 4], [1, 1]), ([1, 2, 3, 4, 5], [6], [1])]
    assert report.starts == {"first": 1, "too_long": 1}
    assert tokens(of(talk, longest_response=4)[0]) == [([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])]


def test_what_is_too_long_is_reported_and_never_cut() -> None:
    talk = Talk()
    two_turns(talk)
    made, report = of(talk, longest_response=1)
    assert tokens(made) == [([1, 2, 3, 4, 5], [6], [1])]
    assert reasons(report) == [(1, 0, "response_too_long")]
    made, report = of(talk, longest_response=3, longest_prompt=4)
    assert tokens(made) == [([1, 2], [3, 4], [1, 1])]
    assert reasons(report) == [(2, 0, "prompt_too_long")]


@pytest.mark.parametrize(
    ("asked", "forced"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": {"type": "auto"}}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        ({"structured_outputs": {"regex": "a*"}}, True),
        ({"guided_choice": ["a", "b"]}, True),
    ],
)
def test_a_grammar_is_seen_and_its_tokens_can_be_masked(asked: dict[str, Any], forced: bool) -> None:
    talk = Talk()
    one = talk.call([1], [(2,)], asked=asked)
    talk.call([*one.whole(), 9], [(3,)])
    (made,), _ = of(talk)
    assert [s.forced for s in made.segments] == [forced, False]
    (made,), _ = of(talk, forced="mask")
    assert made.mask.tolist() == [not forced, False, True]
    assert (made.logprobs[0] == 0.0) == forced
    made, report = of(talk, forced="mask", merge=False)
    assert len(made) == 2 - forced
    assert reasons(report) == [(1, 0, "forced")] * forced


def test_answers_that_were_cut_off_are_marked() -> None:
    talk = Talk()
    talk.call([1], [(2,)])
    request, response = talk.bodies["a1", 1]
    talk.bodies["a1", 1] = request, response.replace(b'"stop"', b'"length"')
    (made,), report = of(talk)
    assert ([s.truncated for s in made.segments], report.dropped) == ([True], [])
