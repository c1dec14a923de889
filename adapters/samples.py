"""Samples to train a policy on: each is a sequence of tokens, some of which the policy sampled.

    made, report = samples(episode, Options(model="policy"))

Calls are merged by the engine's own tokens: a call whose prompt begins with the exact tokens of an earlier call's
prompt and answer extends that sample. Tokens between the two (a tool's result, the template's own tokens) are not
trained on. Any other call begins a sample of its own, and the report says why. Every choice of every call is in exactly
one sample or in the report. Nothing is cut: a sample that is too long is split at a call or reported. Token ids are not
compared one by one: prefixes are hashed, and a sample is made of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.adapters.episode import Episode, EpisodeAttempt, EpisodeCall
from penstock.adapters.selection import (
    AttemptRewards,
    Options,
    Reason,
    SampleReport,
    Start,
    select_attempts,
    select_calls,
)
from penstock.adapters.tokens import CompletionOutput, Ids
from penstock.gateway.reading.diagnosis.findings import CUT
from penstock.gateway.reading.diagnosis.rows import Lack, RowBuilder, TurnNode, lacks
from penstock.gateway.wire.dialects.tokens import count_mismatch

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Segment:
    """One model call inside a sample."""

    sequence: int
    """Sequence of the call's span."""
    choice: int
    """Index of the choice among the n requested."""
    start: int
    """Its beginning in `response`; tokens."""
    end: int
    """Its end in `response`, exclusive; tokens."""
    version: str | None
    """Version of the weights that sampled it; None when the model is no released resource."""
    reward: float | None
    """Reward of this call (per-turn reward); None without one."""
    forced: bool
    """True if a grammar forced its tokens."""
    truncated: bool
    """True when it was cut off at the token limit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence of tokens to train on."""

    rollout: str
    """Rollout id."""
    attempt: str
    """Attempt id."""
    group: str
    """The task that the rollout repeats; the rollout itself if it repeats none."""
    agent: str | None
    """The agent that made its calls."""
    model: str
    """The model that the calls request."""
    prompt: Ids
    """[P] Tokens before the first sampled one."""
    response: Ids
    """[R] All tokens after the prompt: sampled ones, and those between them."""
    mask: Mask
    """[R] True where the policy sampled the token."""
    logprobs: Floats
    """[R] The engine's log-probabilities, in nats; 0.0 where the mask is False; nan where the engine gave none."""
    segments: tuple[Segment, ...]
    """Its calls, in the order of their tokens."""
    reward: float
    """Terminal reward of the rollout; nan when there is none and `allow` permits that."""
    rewards: Mapping[str, float]
    """Dimensions of the reward."""


def samples(episode: Episode, options: Options | None = None) -> tuple[list[Sample], SampleReport]:
    """The samples of an episode, agent by agent in the order of their first calls, and a report of everything else."""
    chosen = options or Options()
    report = SampleReport(rollouts=1, calls=sum(len(one.calls) for one in episode.attempts))
    made = [
        sample
        for one in select_attempts(episode, chosen.attempt, report)
        for sample in _attempt(episode, one, chosen, report)
    ]
    report.samples = len(made)
    report.choices = sum(len(sample.segments) for sample in made)
    report.tokens = sum(int(np.count_nonzero(sample.mask)) for sample in made)
    return made, report


def _attempt(episode: Episode, one: EpisodeAttempt, options: Options, report: SampleReport) -> Iterator[Sample]:
    judged, good = select_calls(episode, one, options, lambda call: call.outputs is not None, report)
    rows: RowBuilder[EpisodeCall] = RowBuilder(lambda call, choice: output_of(call, choice).trainable_tokens.prompt)
    for call in good:
        rows.add(
            call, call.span.agent, call.messages, [one.trainable_tokens for one in _choices(call, options, report)]
        )
    for row in rows.build():
        for place, piece in enumerate(_pieces(row.nodes, options)):
            start: Start = "too_long" if place else row.begins
            yield from _checked(episode, judged, piece, start, options, report)


def _choices(call: EpisodeCall, options: Options, report: SampleReport) -> list[CompletionOutput]:
    """The choices that have everything needed for training."""
    if not call.outputs:
        report.drop(call.span, None, "no_token_ids", f"no engine returns token ids for {call.span.dialect}")
    if "token_counts" not in options.allow and (why := _miscounted(call)) is not None:
        report.drop(call.span, None, "token_counts", why)
        return []
    found: list[CompletionOutput] = []
    for output in call.outputs or ():
        trouble = _trouble(output, options)
        if trouble is None:
            found.append(output)
        else:
            report.drop(call.span, output.choice, *trouble)
    return found


def _miscounted(call: EpisodeCall) -> str | None:
    outputs = list(call.outputs or ())
    generated = sum(len(output.ids) for output in outputs)
    asked = [len(output.prompt) for output in outputs]
    unspelt = any(output.partial_ids for output in outputs)
    return count_mismatch(outputs[0].usage, asked, generated, unspelt) if generated else None


def _trouble(output: CompletionOutput, options: Options) -> tuple[Lack, str] | None:
    lack = lacks(output.given, len(output.ids), "no_logprobs" in options.allow or output.scored)
    said = f"not every one of its {len(output.ids):,} tokens has a log-probability that can be one"
    why: dict[Lack, str] = {"no_token_ids": "the engine returned no token ids", "empty": "nothing was generated"}
    return None if lack is None else (lack, why.get(lack, said))


def _pieces(chain: Sequence[TurnNode[EpisodeCall]], options: Options) -> Iterator[list[TurnNode[EpisodeCall]]]:
    """Cut a chain into as few pieces as the length of a response allows; with `merge` False, one for each node."""
    piece: list[TurnNode[EpisodeCall]] = []
    for node in chain:
        if piece and (not options.merge or _over(_size(piece[0], node), options.longest_response)):
            yield piece
            piece = []
        piece.append(node)
    yield piece


def _size(first: TurnNode[EpisodeCall], last: TurnNode[EpisodeCall]) -> int:
    """The tokens of a response that goes from the first node to the last."""
    begin, end = output_of(first.call, first.choice), output_of(last.call, last.choice)
    return len(end.prompt) + len(end.ids) - len(begin.prompt)


def output_of(call: EpisodeCall, choice: int) -> CompletionOutput:
    """The tokens of an answer; raises StopIteration when the call has no such choice."""
    return next(output for output in call.outputs or () if output.choice == choice)


def _over(size: int, limit: int | None) -> bool:
    return limit is not None and size > limit


def _checked(
    episode: Episode,
    judged: AttemptRewards,
    piece: Sequence[TurnNode[EpisodeCall]],
    start: Start,
    options: Options,
    report: SampleReport,
) -> Iterator[Sample]:
    """The sample of a piece, unless it is too long or nothing in it would be trained on."""
    prompt, response = len(output_of(piece[0].call, piece[0].choice).prompt), _size(piece[0], piece[-1])
    trouble: tuple[Reason, str] | None = None
    if _over(prompt, options.longest_prompt):
        trouble = "prompt_too_long", f"its sample has a prompt of {prompt:,} tokens"
    elif _over(response, options.longest_response):
        trouble = "response_too_long", f"its sample has {response:,} tokens"
    elif options.forced == "mask" and all(node.call.forced for node in piece):
        trouble = "forced", "a grammar forced its tokens"
    if trouble is None:
        if options.merge:
            report.starts[start] += 1
        yield _sample(episode, judged, piece, options)
    else:
        for node in piece:
            report.drop(node.call.span, node.choice, *trouble)


def _sample(
    episode: Episode, judged: AttemptRewards, piece: Sequence[TurnNode[EpisodeCall]], options: Options
) -> Sample:
    outputs = [output_of(node.call, node.choice) for node in piece]
    begin, head = len(outputs[0].prompt), piece[0].call.span
    response = np.concatenate([outputs[-1].prompt[begin:], outputs[-1].ids])
    mask, logprobs = np.zeros(len(response), np.bool_), np.zeros(len(response), np.float32)
    segments: list[Segment] = []
    for node, output in zip(piece, outputs, strict=True):
        segment = _segment(node, output, len(output.prompt) - begin, judged)
        segments.append(segment)
        if not (segment.forced and options.forced == "mask"):
            mask[segment.start : segment.end] = True
            logprobs[segment.start : segment.end] = output.logprobs
    return Sample(
        rollout=head.rollout,
        attempt=head.attempt,
        group=episode.group,
        agent=head.agent,
        model=head.model or "",
        prompt=outputs[0].prompt,
        response=response,
        mask=mask,
        logprobs=logprobs,
        segments=tuple(segments),
        reward=float("nan") if judged.reward is None else judged.reward,
        rewards=judged.dimensions,
    )


def _segment(node: TurnNode[EpisodeCall], output: CompletionOutput, start: int, judged: AttemptRewards) -> Segment:
    call = node.call
    return Segment(
        sequence=call.span.sequence,
        choice=node.choice,
        start=start,
        end=start + len(output.ids),
        version=call.version,
        reward=judged.turns.get(call.span.sequence),
        forced=call.forced,
        truncated=(output.finish or call.span.finish) in CUT,
    )


def returns(samples: Sequence[Sample], gamma: float = 1.0) -> list[npt.NDArray[np.float32]]:
    """The discounted return of every segment (Sutton and Barto, 2018, §3.3): for each sample an array [S].

    `samples` are all those of one attempt, merged or not. The return of a call is its own reward plus the later
    rewards of the attempt, discounted by `gamma` for each later call; the terminal reward belongs to the last call.
    Choices of one call have the same return. Raises ValueError for samples of several attempts and for gamma outside
    0 to 1.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}: it must be from 0 to 1")
    names = {(sample.rollout, sample.attempt) for sample in samples}
    if len(names) > 1:
        raise ValueError(f"returns are made attempt by attempt, and these samples are of {len(names)}")
    own = {part.sequence: part.reward or 0.0 for sample in samples for part in sample.segments}
    after, total = (samples[0].reward if samples else 0.0), dict[int, float]()
    for place, sequence in enumerate(sorted(own, reverse=True)):
        after = own[sequence] + (after if place == 0 else gamma * after)
        total[sequence] = after
    return [np.array([total[part.sequence] for part in sample.segments], np.float32) for sample in samples]


def triplets(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Triplets of the samples of any number of rollouts, merged or not, in their order: a prompt, a response and a
    reward for each call, in Agent Lightning's format. Arrays are numpy's.

    A call has its own reward; the last call of an attempt has the terminal one added. As in Agent Lightning, calls
    without a reward have null. Unlike there, all calls with equal prompts are kept, and so is every choice.
    """
    last: dict[tuple[str, str], int] = {}
    for sample in samples:
        name, newest = (sample.rollout, sample.attempt), max(segment.sequence for segment in sample.segments)
        last[name] = max(newest, last.get(name, 0))
    for sample in samples:
        yield from _of_sample(sample, last[sample.rollout, sample.attempt])


def _of_sample(sample: Sample, last: int) -> Iterator[dict[str, Any]]:
    for segment in sample.segments:
        here = slice(segment.start, segment.end)
        yield {
            "prompt": {"token_ids": np.concatenate([sample.prompt, sample.response[: segment.start]])},
            "response": {"token_ids": sample.response[here], "logprobs": sample.logprobs[here]},
            "reward": _reward(segment.reward, sample.reward if segment.sequence == last else None),
            "metadata": {
                "rollout_id": sample.rollout,
                "attempt_id": sample.attempt,
                "data_id": sample.group,
                "agent_name": sample.agent,
                "model": sample.model,
                "sequence_id": segment.sequence,
                "choice": segment.choice,
                "version": segment.version,
            },
        }


def _reward(own: float | None, terminal: float | None) -> float | None:
    given = [reward for reward in (own, terminal) if reward is not None]
    return sum(given) if given else None
