"""Handles steps that teach nothing: finds the dominant reason, says what to change, and stops the run after too many.

After the first such step the run reports the reason. After `MOST` in a row it fails, because a run that learns nothing
and succeeds looks like one that has learnt. There is one exception: once a run has learnt something, groups whose
rewards are all equal may mean that the tasks are solved, and the run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import ExampleRollout, RolloutBatch
from penstock.trainer.mathematics.update import NOT_FINITE, Metrics
from penstock.trainer.runs.report import RunError

MOST: Final = 3
"""Steps in a row that teach nothing after which a run fails: one may be bad luck, three are a mistake."""
LEFT_OUT: Final[Mapping[str, str]] = {
    "rollouts_stale": "stale",
    "rollouts_reward": "nan_reward",
    "rollouts_single": "single",
    "rollouts_equal": "equal",
    "rollouts_truncated": "truncated",
    "rollouts_not_finite": "not_finite",
    "samples_long": "long",
    "samples_empty": "empty",
    "samples_prompt": "no_prompt",
}
"""Reasons by the names that `learn` counts below `dropped/`."""


class ReasonAdvice(NamedTuple):
    """A reason in words for a person."""

    what: str
    """What happened, as the predicate of "N of M rollouts"."""
    fix: str
    """What to change."""


ADVICE: Final[Mapping[str, ReasonAdvice]] = {
    "failed": ReasonAdvice("failed", "penstock show {rollout} shows what the agent said; mend the agent or its task"),
    "cancelled": ReasonAdvice(
        "had not ended in time and were cancelled", "raise rollouts.timeout ({timeout:g} s), or start more workers"
    ),
    "no_calls": ReasonAdvice(
        "asked no model through the gateway",
        "let the agent use the base URL and key that it is given (OPENAI_BASE_URL, OPENAI_API_KEY)",
    ),
    "no_reward": ReasonAdvice(
        "succeeded and have no reward",
        "name a reward function in rollouts.run (--reward=module:function), or mend the one that is there",
    ),
    "untrusted_reward": ReasonAdvice(
        "have only the reward that the agent gives itself", "name a judge in rollouts.run: --reward=module:function"
    ),
    "nan_reward": ReasonAdvice("have a reward that is no finite number", "mend the reward function"),
    "other_model": ReasonAdvice(
        "asked for another model",
        "let the agent ask for {model!r}, or set model.name to what it asks for and route that",
    ),
    "no_token_ids": ReasonAdvice(
        "have no token ids",
        "set train = true on the [[route]] of {model!r} in penstock.toml, whose upstream must be a vLLM",
    ),
    "no_logprobs": ReasonAdvice(
        "have no log-probabilities",
        'set train = true on the [[route]] of {model!r} in penstock.toml, and let the agent leave "logprobs" out',
    ),
    "token_counts": ReasonAdvice(
        "have token ids of other numbers of tokens than their engine counted",
        "update the engine, or serve without the parser of tools that loses ids: penstock doctor {rollout}",
    ),
    "error": ReasonAdvice("failed in their calls to the model", "penstock doctor {rollout} shows the calls"),
    "cut": ReasonAdvice(
        "were cut off at the limit of tokens, and the rewards of each group are equal",
        "raise the max_tokens that the agent asks for, or vLLM's --max-model-len",
    ),
    "truncated": ReasonAdvice(
        'were cut off at the limit of tokens and have no loss (advantage.overlong = "mask")',
        "raise the max_tokens that the agent asks for, or vLLM's --max-model-len",
    ),
    "equal": ReasonAdvice(
        "are in groups whose rewards are all equal{mean}",
        "give partial credit, take tasks that are sometimes solved, or raise rollouts.group_size ({size})",
    ),
    "single": ReasonAdvice(
        "are alone in their group", "see why the others of their groups have no sample: penstock doctor {rollout}"
    ),
    "stale": ReasonAdvice(
        "are of weights more than {staleness} versions old",
        "raise rollouts.staleness, or let fewer rollouts wait: smaller groups, or no rollouts.ahead",
    ),
    "not_finite": ReasonAdvice("gave a gradient that is not finite, and the weights were left as they are", NOT_FINITE),
    "long": ReasonAdvice(
        "have only samples longer than engine.batch_tokens ({tokens})", "raise it; the longest has {longest} tokens"
    ),
}
"""Words for each reason; other reasons get `DOCTOR`."""
DOCTOR: Final = ReasonAdvice("cannot be trained on ({reason})", "penstock doctor {rollout} says what repairs it")


class DominantReason(NamedTuple):
    """The reason that most rollouts of a step share."""

    reason: str
    rollouts: int
    """Number of rollouts with this reason."""
    example: ExampleRollout | None
    """A rollout with this reason."""


def dominant_reason(collected: RolloutBatch, learnt: Metrics) -> DominantReason:
    """Return why most rollouts of a step taught nothing. Of two reasons with as many rollouts the one that happened
    first counts."""
    fates = collected.outcomes
    lost: Counter[str] = Counter(fates.lost)
    for name, reason in LEFT_OUT.items():
        lost[reason] += int(learnt.get(f"dropped/{name}", 0.0))
    if 0 < lost["equal"] <= 2 * fates.truncated:
        lost["cut"] = lost.pop("equal")
    if collected.late:
        lost["cancelled"] = max(lost["cancelled"], collected.late)
    reason, count = max(lost.items(), key=lambda one: one[1])
    return DominantReason(reason, count, fates.examples.get(reason))


def describe_reason(why: DominantReason, collected: RolloutBatch, config: TrainConfig) -> str:
    """Return the reason and the advice, for a person."""
    about = why.example.rollout if why.example else next(iter(collected.names), "ROLLOUT")
    longest = max((len(one.prompt) + len(one.response) for one in collected.samples), default=0)
    values = {
        "reason": why.reason,
        "rollout": about,
        "model": config.model.name,
        "timeout": config.rollouts.timeout,
        "size": config.rollouts.group_size,
        "staleness": config.rollouts.staleness,
        "tokens": config.engine.batch_tokens,
        "longest": longest,
        "mean": "" if collected.mean is None else f" (mean {collected.mean:.3g})",
    }
    words = ADVICE.get(why.reason, DOCTOR)
    detail = f" ({about}: {why.example.detail})" if why.example and why.example.detail else ""
    what, fix = words.what.format(**values), words.fix.format(**values)
    return f"{why.rollouts} of {collected.ended.total()} rollouts {what}{detail}; {fix}"


class IdleStepCounter:
    """Counts the steps in a row that taught nothing."""

    def __init__(self, config: TrainConfig, reward_error: Callable[[str], Awaitable[str | None]]) -> None:
        """`reward_error`: returns the runner's error about a rollout's missing reward, by rollout id."""
        self._config, self._reward_error = config, reward_error
        self._most = min(MOST, config.run.steps)
        self._steps, self._has_learnt = 0, False

    async def record(self, collected: RolloutBatch, learnt: Metrics, has_learnt: bool) -> str | None:
        """Note a step; return a message for a person, or None. `has_learnt`: an earlier process of the run has learnt
        something. Raises `RunError` after too many such steps."""
        if learnt["updates"]:
            self._steps, self._has_learnt = 0, True
            return None
        self._steps += 1
        why = await self._with_words(dominant_reason(collected, learnt))
        said = describe_reason(why, collected, self._config)
        solved = why.reason == "equal" and (self._has_learnt or has_learnt)
        if self._steps >= self._most and not solved:
            raise RunError(f"{self._steps} steps in a row have taught nothing: {said}")
        return None if solved and self._steps > 1 else f"nothing was learnt: {said}"

    async def _with_words(self, why: DominantReason) -> DominantReason:
        """Add the runner's error about a missing reward, if there is one."""
        if why.reason != "no_reward" or why.example is None:
            return why
        found = await self._reward_error(why.example.rollout)
        return why if found is None else why._replace(example=ExampleRollout(why.example.rollout, found))
