"""Random turn trees of token conversations: forks, tokens that changed, parallel calls, several choices, retries.

Whatever the tree, every choice of every call is in exactly one sample or in the report, and samples hold the recorded
tokens and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from fakes.tokens import Made, logprob
from fakes.turn_trees import STEPS, Step, played
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.samples import Options, Sample, returns, samples
from penstock.adapters.selection import SampleReport


def places(made: Iterable[Sample], report: SampleReport, calls: Iterable[Made]) -> Counter[tuple[int, int]]:
    """How often each choice of each call is somewhere."""
    found = Counter((s.sequence, s.choice) for sample in made for s in sample.segments)
    whole = [one.sequence for one in report.dropped if one.choice is None]
    found.update((one.sequence, one.choice) for one in report.dropped if one.choice is not None)
    found.update(
        (c.span.sequence, at) for c in calls for at in range(len(c.answers)) for s in whole if s == c.span.sequence
    )
    return found


@given(
    STEPS, st.sampled_from([None, 3, 8]), st.sampled_from([None, 5]), st.booleans(), st.sampled_from([None, "other"])
)
def test_every_choice_is_somewhere_once(
    steps: list[Step], response: int | None, prompt: int | None, merge: bool, agent: str | None
) -> None:
    talk, calls = played(steps)
    options = Options(longest_response=response, longest_prompt=prompt, merge=merge, agent=agent)
    made, report = samples(talk.episode(), options)
    expected = {(call.span.sequence, at) for call in calls for at in range(len(call.answers))}
    assert places(made, report, calls) == Counter(expected)
    assert (report.calls, report.samples, report.choices) == (
        len(calls),
        len(made),
        sum(len(sample.segments) for sample in made),
    )
    assert all(prompt is None or len(sample.prompt) <= prompt for sample in made)
    assert all(response is None or len(sample.response) <= response for sample in made)


@given(STEPS, st.booleans())
def test_samples_hold_the_recorded_tokens_and_mark_exactly_the_sampled_ones(steps: list[Step], merge: bool) -> None:
    talk, calls = played(steps)
    by_sequence = {call.span.sequence: call for call in calls}
    for sample in samples(talk.episode(), Options(merge=merge))[0]:
        sampled = np.zeros(len(sample.response), np.bool_)
        scores = np.zeros(len(sample.response), np.float32)
        for segment in sample.segments:
            call, here = by_sequence[segment.sequence], slice(segment.start, segment.end)
            answer = call.answers[segment.choice]
            assert sample.response[here].tolist() == list(answer)
            assert [*sample.prompt.tolist(), *sample.response[: segment.start].tolist()] == list(call.prompt)
            sampled[here] = True
            scores[here] = [logprob(id, at) for at, id in enumerate(answer)]
        assert (sample.mask == sampled).all()
        assert (sample.logprobs == scores).all()
        assert int(sample.mask.sum()) == sum(s.end - s.start for s in sample.segments)
        assert sample.segments[-1].end == len(sample.response)
        order = [segment.sequence for segment in sample.segments]
        assert order == sorted(set(order))


def sampled(made: Iterable[Sample]) -> Counter[tuple[int, int, int, int, float]]:
    """Every sampled token with its place and log-probability."""
    return Counter(
        (s.sequence, s.choice, at - s.start, int(sample.response[at]), float(sample.logprobs[at]))
        for sample in made
        for s in sample.segments
        for at in range(s.start, s.end)
    )


@given(STEPS)
def test_merged_or_not_the_same_tokens_are_sampled_and_credited(steps: list[Step]) -> None:
    episode = played(steps)[0].episode()
    merged, transitions = (samples(episode, Options(merge=merge))[0] for merge in (True, False))
    assert sampled(merged) == sampled(transitions)
    assert len(merged) <= len(transitions)
    credit = [
        {
            (s.sequence, s.choice): float(value)
            for sample, values in zip(made, returns(made, 0.5), strict=True)
            for s, value in zip(sample.segments, values, strict=True)
        }
        for made in (merged, transitions)
    ]
    assert credit[0] == credit[1]


@given(STEPS)
def test_a_call_that_goes_on_from_exact_tokens_is_merged_unless_another_one_was(steps: list[Step]) -> None:
    talk, calls = played(steps)
    made, report = samples(talk.episode())
    assert sum(report.starts.values()) == len(made)
    heads = {(s.segments[0].sequence, s.segments[0].choice) for s in made}
    gone_on = {(a.sequence, a.choice) for s in made for a in s.segments[:-1]}
    by_sequence, agents = {c.span.sequence: c for c in calls}, {c.span.sequence: c.span.agent for c in calls}
    kept = {(s.sequence, s.choice) for sample in made for s in sample.segments}
    for sequence, choice in heads:
        prompt, free = by_sequence[sequence].prompt, set[tuple[int, int]]()
        for earlier in kept:
            if earlier[0] < sequence and agents[earlier[0]] == agents[sequence]:
                whole = by_sequence[earlier[0]].whole(earlier[1])
                if prompt[: len(whole)] == whole:
                    free.add(earlier)
        # Whatever it could have gone on from, the longest of it is continued by another choice.
        longest = max((len(by_sequence[at].whole(c)) for at, c in free), default=0)
        best = {it for it in free if len(by_sequence[it[0]].whole(it[1])) == longest}
        assert not best or best & gone_on, (sequence, choice)


@given(st.lists(STEPS, max_size=3))
def test_reports_add_up(many: list[list[Step]]) -> None:
    episodes = [played(steps)[0].episode() for steps in many]
    apart, report = [samples(episode) for episode in episodes], SampleReport()
    for _, one in apart:
        report.add(one)
    assert sum(len(made) for made, _ in apart) == report.samples
    assert report.rollouts == len(episodes)
    assert report.tokens == sum(one.tokens for _, one in apart)
    assert report.reasons == Counter(it.reason for _, one in apart for it in one.dropped)
    assert len(report.lines()) >= 1
