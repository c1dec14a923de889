"""What `penstock doctor` says and what `penstock samples` makes: the same rows of the same calls, for the same reasons.

The turn trees are random: forks, parallel calls, several choices, retries, tokens that changed, calls that fail.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from fakes.memory_tape import exchange
from fakes.tokens import Talk, message
from fakes.turn_trees import STEPS, Step, played
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.samples import Sample, samples
from penstock.adapters.selection import SampleReport
from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.diagnosis.diagnosis import diagnose

Json = dict[str, Any]
ASK = message("user", [1, 2])


def both(talk: Talk) -> tuple[Diagnosis, list[Sample], SampleReport]:
    """The two, of the same rollout."""
    episode = talk.episode()

    def bytes_of(span: Span) -> Exchange:
        return exchange(*talk.bodies[span.attempt, span.sequence])

    return diagnose(episode.rollout, talk.heads, bytes_of), *samples(episode)


def agree(talk: Talk) -> Diagnosis:
    """Rows, why they begin, which calls are in them, and what is kept out of them and why."""
    told, made, report = both(talk)
    assert told.sequences == len(made)
    calls = [call for attempt in told.attempts for call in attempt.calls]
    assert Counter(why for call in calls for why in call.begins) == report.starts
    used = {segment.sequence for sample in made for segment in sample.segments}
    assert {call.sequence for call in calls if call.trainable} == used
    firsts = {sample.segments[0].sequence for sample in made}
    assert {call.sequence for call in calls if call.begins} == firsts
    rewritten = Counter(one.code for call in calls for one in call.findings if one.code in ("retokenised", "template"))
    assert all(rewritten[why] == report.starts[why] for why in ("retokenised", "template"))
    whole = [one for one in report.dropped if one.choice is None]
    why = {call.sequence: {one.code for one in call.findings if one.blocks} for call in calls}
    assert all(one.reason in why[one.sequence] for one in whole)
    return told


@given(STEPS)
def test_whatever_an_agent_has_done_they_agree(steps: list[Step]) -> None:
    agree(played(steps)[0])


def test_a_fork_is_two_rows() -> None:
    talk = Talk()
    first = talk.call([1, 2], [[7]], [ASK])
    for more in (3, 4):
        talk.call([*first.whole(), more], [[8]], [*first.said(), message("user", [more])])
    told = agree(talk)
    assert told.sequences == 2
    assert [(call.goes_on, call.begins) for call in told.attempts[0].calls] == [
        (None, ["first"]),
        (1, []),
        (None, ["forked"]),
    ]


def test_three_answers_are_three_rows_and_one_of_them_goes_on() -> None:
    talk = Talk()
    first = talk.call([1, 2], [[7], [8], [9]], [ASK])
    talk.call([*first.whole(1), 3], [[8]], [*first.said(1), message("user", [3])])
    told = agree(talk)
    assert told.sequences == 3
    assert [(call.goes_on, call.begins) for call in told.attempts[0].calls] == [
        (None, ["first", "forked", "forked"]),
        (1, []),
    ]


def test_parallel_branches_are_rows_of_their_own() -> None:
    talk = Talk()
    ends = [talk.call([1, 2], [[7]], [ASK]) for _ in range(3)]
    for one in ends:
        talk.call([*one.whole(), 3], [[8]], [*one.said(), message("user", [3])])
    assert agree(talk).sequences == 3


def test_each_call_that_was_tokenised_anew_is_found() -> None:
    talk = Talk()
    one = talk.call([1, 2], [[7, 7]], [ASK])
    for turn in range(4):
        prompt = [*one.prompt, 9, 0] if turn % 2 else [*one.prompt, 0]
        one = talk.call(prompt, [[7, 7]], [*one.said(), message("user", [turn])])
    told = agree(talk)
    found = [one.code for call in told.attempts[0].calls for one in call.findings]
    assert (told.sequences, found) == (5, ["retokenised"] * 4)


def test_a_choice_without_log_probabilities_leaves_the_others() -> None:
    talk = Talk()
    talk.call([1, 2], [[7], [8]], [ASK])
    request, response = talk.bodies["a1", 1]
    cut = response.replace(b'"logprob"', b'"gone"', 1)
    assert cut != response
    talk.bodies["a1", 1] = request, cut
    told = agree(talk)
    assert told.sequences == 1
    assert [(one.code, one.blocks) for one in told.attempts[0].calls[0].findings] == [("no_logprobs", False)]


# -- ids of other numbers of tokens than the engine counted --


def counted(events: list[Any], prompts: int, made: int) -> Talk:
    """A rollout of one streamed call, whose engine counts so many tokens."""
    talk = Talk()
    talk.call([1, 2], [[7, 8, 9], [5, 6]], [ASK], stream=True)
    usage: Any = {"choices": [], "usage": {"prompt_tokens": prompts, "completion_tokens": made}}
    body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in [*events, usage]) + b"data: [DONE]\n\n"
    talk.bodies["a1", 1] = talk.bodies["a1", 1][0], body
    return talk


def events() -> list[Any]:
    """The events of that call: ids of the prompt, then a token each, by turns of the two choices, then the ends."""
    talk = Talk()
    talk.call([1, 2], [[7, 8, 9], [5, 6]], [ASK], stream=True)
    return [json.loads(line[6:]) for line in talk.bodies["a1", 1][1].split(b"\n\n") if line.startswith(b"data: {")]


def without(event: Any) -> Any:
    """An event that lost its ids and log-probabilities and kept its text, as parsers of tools lose them."""
    return event | {"choices": [{"index": it["index"], "delta": it["delta"]} for it in event["choices"]]}


WHOLE = events()
TOKENS = [at for at, event in enumerate(WHOLE) if event["choices"] and event["choices"][0]["token_ids"]]


@given(st.lists(st.tuples(st.sampled_from(TOKENS), st.sampled_from(["lost", "dropped", "twice"])), max_size=2))
def test_a_stream_that_lost_or_repeated_tokens_is_never_a_row(damages: list[tuple[int, str]]) -> None:
    harm = dict(damages)
    story: list[Any] = []
    for at, event in enumerate(WHOLE):
        made = {"lost": [without(event)], "dropped": [], "twice": [event, event]}
        story += made[harm[at]] if at in harm else [event]
    told = agree(counted(story, 2, 5))
    balanced = sorted(harm.values()) in (["lost", "twice"], ["dropped", "twice"])
    assert told.trainable == (not harm or balanced), "a count tells of each loss that another one does not make up for"


@pytest.mark.parametrize(("prompts", "made"), [(2, 8), (2, 6), (2, 4), (3, 5), (1, 5), (50, 5)])
def test_no_difference_to_the_engines_count_is_let_pass(prompts: int, made: int) -> None:
    told = agree(counted(WHOLE, prompts, made))
    assert [one.code for one in told.attempts[0].calls[0].findings if one.blocks] == ["token_counts"]


@pytest.mark.parametrize(
    ("usage", "kept"),
    [
        ({"prompt_tokens": "2", "completion_tokens": 5.0}, True),
        ({"prompt_tokens": "2", "completion_tokens": "8"}, False),
        ({"input_tokens": 2, "output_tokens": 8}, False),
        ({"total_tokens": 7}, True),
        ({"total_tokens": 30}, False),
        ({"completion_tokens": "some"}, True),
    ],
)
def test_counts_are_read_however_an_engine_writes_them(usage: Json, kept: bool) -> None:
    talk = counted(WHOLE, 0, 0)
    request, body = talk.bodies["a1", 1]
    talk.bodies["a1", 1] = (
        request,
        body.replace(b'{"prompt_tokens": 0, "completion_tokens": 0}', json.dumps(usage).encode()),
    )
    assert agree(talk).trainable == kept


@pytest.mark.parametrize("at", TOKENS)
def test_what_is_said_without_ids_is_told_also_where_nobody_counts(at: int) -> None:
    for said, kept in ((WHOLE, True), ([*WHOLE[:at], without(WHOLE[at]), *WHOLE[at + 1 :]], False)):
        talk = counted(said, 0, 0)
        request, body = talk.bodies["a1", 1]
        talk.bodies["a1", 1] = request, body.replace(b'"usage"', b'"other"')
        assert agree(talk).trainable == kept


def test_choices_without_an_index_are_told_apart() -> None:
    talk = Talk()
    talk.call([1, 2], [[7, 8], [5]], [ASK])
    request, response = talk.bodies["a1", 1]
    answer = json.loads(response)
    for choice in answer["choices"]:
        del choice["index"]
    talk.bodies["a1", 1] = request, json.dumps(answer).encode()
    assert agree(talk).sequences == 2


def test_prompts_of_completions_are_counted_together() -> None:
    """Two prompts with two answers each: a prompt counts once, however many answers it has."""
    choices = [
        {"index": at, "prompt_token_ids": prompt, "token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}}
        for at, prompt in enumerate(([1, 2], [1, 2], [3, 4, 5], [3, 4, 5]))
    ]
    for prompts, trainable in ((5, True), (10, True), (2, False), (4, False)):
        talk = counted([{"choices": choices}], prompts, 4)
        talk.heads[0].dialect = "completions"
        assert both(talk)[0].trainable == trainable
