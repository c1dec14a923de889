"""`penstock train apo advise`: wires a probe together, reads facts about its rollouts from the tape, and shows the
advice on one screen of 80 columns.

The names of the probe's rollouts and versions begin with RUN.advise, so they are never those of a run; a repeated probe
finds them on the tape, and costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.console.views.table import Column, Listing, clean, figure, joined, plain
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.client.console import note
from penstock.gateway.client.environment import CURRENT_GATEWAY
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.rollout import Reward, RolloutSummary
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.model.turn import Part, Transcript
from penstock.gateway.wire.dialects.loose_json import loads, obj
from penstock.sidecar.run.reward_judge import RewardJudge
from penstock.sidecar.run.settings import JudgeSettings, UsageError
from penstock.trainer.apo.advice.decision import Advice, Cost, advice, derive_findings, words_of
from penstock.trainer.apo.advice.estimates import Observation
from penstock.trainer.apo.advice.probe import Probe
from penstock.trainer.apo.config import ApoConfig, RewardSettings
from penstock.trainer.apo.protocol import AgentTask, Trial
from penstock.trainer.apo.session import open_laboratory, runner_beside, search_budget, splits_of
from penstock.trainer.runs.supervision import run_alongside, run_blocking

COLOURS = {"prompts": "green", "nothing": "dim"}
BAR = 24
PARTS = (Column("variance of the reward"), figure("variance"), figure("share"), Column("", 1))
PROMPTS = (
    Column("prompt"), figure("rollouts"), figure("mean"), figure("gain"), Column("90 %"), figure("characters", 1),
)  # fmt: skip


def advise(config: ApoConfig, gateway: str, key: str | None, agent: str | None, rollouts: int) -> Advice:
    """Return the advice. `agent`: command of a runner beside the probe; `rollouts`: its budget. Raises `RunError`."""
    found: list[Advice] = []
    run_blocking(_advise(config, gateway, key, agent, rollouts, found))
    return found[0]


async def _advise(
    config: ApoConfig, gateway: str, key: str | None, agent: str | None, rollouts: int, found: list[Advice]
) -> None:
    # An error in the grader's options must show before the probe, not after.
    judge = reward_judge(config.rollouts.run)
    train = splits_of(config).train
    probing = config.model_copy(update={"run": config.run.model_copy(update={"name": f"{config.run.name}.advise"})})
    _ = CURRENT_GATEWAY.set((gateway, key))
    async with Client(gateway, key) as client:
        # A run waits for a gateway that restarts; advice fails at once without a gateway.
        await client.whoami()
    async with open_laboratory(probing, gateway, key, train) as laboratory:
        tape = TapeObservationReader(laboratory.client, config.reward, judge)
        budget = search_budget(config, rollouts)
        probe = Probe(laboratory, tape, laboratory.seed, train, budget, config.run.seed)
        log = config.run.directory / "advise-runner.log"
        runner = runner_beside(config.rollouts.run, agent, "train", log, gateway, key)
        beside = [*runner, laboratory.awaited.run()]

        async def say(text: str) -> None:
            note(text)

        async def work() -> None:
            probe.watch = say
            probed = await probe.run()
            earlier = await tape.earlier_observations(laboratory.seeds, train, laboratory.seed.id)
            findings = derive_findings(probed.arms, [*earlier, *probed.observations], config.budget.rollouts)
            problems = [*probed.problems, *tape.problems]
            found.append(advice(config, findings, budget, len(earlier), probed.failures, problems))

        await run_alongside(work(), beside)


def page(advice: Advice) -> Group:
    verdict = Text(advice.verdict, style=f"bold {COLOURS.get(advice.verdict, 'yellow')}")
    seen = f"{advice.rollouts} rollouts of {advice.tasks} tasks"
    pieces: list[RenderableType] = [joined(Text(clean(advice.run), style="bold"), "advise:", verdict, seen)]
    pieces += [Padding.indent(plain(sentence), 2) for sentence in advice.why]
    if advice.mean is not None:
        pieces += [Text(), _variance(advice), Text(), _prompts(advice)]
    pieces.append(Text())
    for name, said in _facts(advice):
        row = Table.grid(padding=(0, 2))
        row.add_column(width=10)
        row.add_column()
        row.add_row(Text(name, style="dim"), plain(said, "yellow" if name == "problem" else ""))
        pieces.append(row)
    return Group(*pieces)


def _variance(advice: Advice) -> Listing:
    made, parts, total = Listing(*PARTS), advice.variance, advice.variance.total
    rows = [("task", parts.task), ("prompt", parts.prompt), ("task x prompt", parts.task_prompt)]
    if parts.grader is None:
        rows.append(("agent and grader, not told apart", parts.within))
    else:
        rows += [("agent", parts.within - parts.grader), (f"grader, {parts.judgements} judged again", parts.grader)]
    for name, value in rows:
        share = value / total if total else 0.0
        made.add_row(name, f"{value:.4f}", f"{share:.0%}", "█" * round(share * BAR))
    return made


def _prompts(advice: Advice) -> Listing:
    made = Listing(*PROMPTS)
    for one in advice.prompts:
        gain = one.gain
        made.add_row(
            "as it is" if one.stance == "seed" else one.stance, f"{one.rollouts}",
            "" if one.mean is None else f"{one.mean:.2f}", "" if gain is None else f"{gain.mean:+.2f}",
            "" if gain is None else f"{gain.low:+.2f} to {gain.high:+.2f}", f"{one.characters:,}",
        )  # fmt: skip
    return made


def _facts(advice: Advice) -> Iterator[tuple[str, str]]:
    mean, tools = advice.mean, advice.tools
    if mean is not None and advice.best_by_task is not None:
        best = f"the best of each task's rollouts {advice.best_by_task:.2f}"
        yield "reward", f"{words_of(mean)} as it is; {best}"
    if advice.unrewarded:
        yield "no reward", f"{advice.unrewarded} of {advice.rollouts} rollouts; they are left out"
    if advice.earlier:
        yield "the tape", f"{advice.earlier} earlier rollouts of these tasks count too"
    if advice.failures:
        yield "what fails", "; ".join(advice.failures)
    if tools.calls:
        said = f"{tools.calls} calls; rollouts with misuse {tools.misused}, with a breakdown {tools.broken}"
        yield "tools", f"{said}; misuse costs {tools.cost.mean:.2f}"
    run = "nobody can say" if mean is None else "would not decide within 4,000 rollouts of its race"
    if mean is not None and advice.needs is not None:
        decides = f"it would decide 4 of 5 races, the budget of {advice.budget:,} {advice.decided:.0%}"
        run = f"{_cost(advice.needs)}; {decides}"
    yield "a run", run
    yield "the probe", _cost(advice.spent)
    yield from (("problem", one) for one in advice.problems)


def _cost(cost: Cost) -> str:
    agents = "" if cost.agent_tokens is None else f" ({count(cost.agent_tokens)} tokens)"
    money = f", {cost.money:.2f} at your prices" if cost.money else ""
    return f"{cost.rollouts:,} rollouts{agents}, {cost.reflections} reflections ({count(cost.tokens)} tokens{money})"


def count(number: int) -> str:
    """Return a number as 812, 81k or 1.2M."""
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1000:.0f}k" if number < 1_000_000 else f"{number / 1e6:.1f}M"


# Facts about rollouts on the tape: tools, repeated rewards, outputs, tokens; and earlier rollouts of the same prompt.
#
# Earlier rollouts cost nothing. They count if they had the version of the prompt that the probe begins from, and
# exactly the input of a task of the train split. So nothing of the validation or the test split is used.
#
# A tool call was *misused* when its result complains about the request: an argument that is missing or of the wrong
# type, a tool that does not exist. A better description of the tool may fix that. It *broke* when the tool failed by
# itself, such as by a timeout, which no text fixes; errors that fit neither count as this. A tool that was run behind
# the gateway reports its failure. Of a tool inside the agent only the result is known, so a result counts as a
# failure when it begins like one.
#
# The grader that `rollouts.run` names for the runner, `--reward`, is asked once more about a rollout by the runner's
# own code: a difference is the grader's own noise. The second judgement is kept in memory: a second reward on the
# tape would replace the first.

SHOWN: Final = 400
"""Characters of a result that are checked: an error begins with its kind."""
_FAILED: Final = re.compile(
    r"^\W*(tool |the tool |internal )?(error|exception|traceback|failed|failure|invalid|unknown|cannot|validation)",
    re.IGNORECASE,
)
_BROKE: Final = re.compile(
    r"time[d ]?-?out|timeout|unavailable|connection|refused|unreachable|overloaded|rate.?limit|too many requests|"
    r"\b(429|500|502|503|504)\b|permission|unauthori[sz]ed|forbidden",
    re.IGNORECASE,
)
_MISUSED: Final = re.compile(
    r"argument|parameter|\bfield|required|missing|invalid|unexpected|unknown|unrecogni[sz]ed|no such|not found|"
    r"does not exist|must be|should be|schema|malformed|expected|validation|not a valid|-3260[12]|http_4",
    re.IGNORECASE,
)
Blame = Literal["misused", "broken"]
OPTION: Final = "--reward"
EARLIER: Final = 200


def tool_failures(uses: Sequence[ToolUse], transcript: Transcript | None) -> tuple[int, int, int]:
    """Return (calls, misused, broken) of an attempt; `transcript` has the results that the model was shown."""
    turns = [call.turn for call in transcript.calls if call.turn is not None] if transcript is not None else []
    parts = (part for turn in turns for message in turn.messages for part in message.parts)
    results = {part.id: part for part in parts if part.type == "tool_call_response" and part.id}
    blames = [_blame_of(use, results.get(use.call_id or "")) for use in uses]
    return len(blames), blames.count("misused"), blames.count("broken")


def _blame_of(use: ToolUse, result: Part | None) -> Blame | None:
    """Return the cause of a call's failure; None if it has not failed."""
    said, failed = "", False
    if result is not None:
        said = (result.text or "")[:SHOWN]
        told = obj(result.data) | obj(loads(said))
        failed = bool(told.get("is_error") or told.get("isError") or told.get("error") or _FAILED.match(said))
    return None if use.status == SpanStatus.OK and not failed else blame(f"{use.error or ''} {said}")


def blame(said: str) -> Blame:
    return "misused" if _MISUSED.search(said) and not _BROKE.search(said) else "broken"


def complains_of_tools(reason: str) -> bool:
    return bool(re.search(r"\btools?\b", reason, re.IGNORECASE))


def reward_judge(words: Sequence[str]) -> RewardJudge | None:
    """Return the grader that arguments of `penstock run` name; None if they name none. Raises `ConfigError`."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name == OPTION and (judge := value if equals else after):
            try:
                return RewardJudge(JudgeSettings(judge))
            except UsageError as error:
                raise ConfigError(f"rollouts.run: {error}") from None
    return None


class TapeObservationReader:
    """Reads rollouts of one gateway. `judge`: the grader, if it can be asked again."""

    def __init__(self, client: Client, rewards: RewardSettings, judge: RewardJudge | None) -> None:
        self._client, self._rewards, self._judge = client, rewards, judge
        self.problems: list[str] = []
        """Errors of the grader when it was asked again."""

    async def read(self, trials: Sequence[Trial]) -> list[Observation]:
        async def observe(one: Trial) -> Observation:
            rollout = await self._client.rollout(one.rollout)
            return await self._observed(rollout, one.candidate, one.task, one.reward, one.reason)

        return await map_concurrently(observe, list(trials))

    async def _observed(
        self, rollout: RolloutSummary, prompt: str, task: str, reward: float | None, reason: str
    ) -> Observation:
        if not rollout.attempts:
            return Observation(prompt, task, reward, reason, rollout=rollout.id)
        last, totals = rollout.attempts[-1], rollout.totals
        transcript = await self._client.transcript(rollout.id, last.id)
        tools, misused, broken = tool_failures(await self._client.tools(rollout.id, last.id), transcript)
        counted = None if totals.input_tokens is None else totals.input_tokens + (totals.output_tokens or 0)
        outcome = None if last.outcome is None else last.outcome.output
        output = _text(outcome) if outcome is not None else transcript.text
        return Observation(
            prompt, task, reward, reason, hashlib.sha256(output.encode()).hexdigest()[:16] if output else "",
            await self._judged(rollout.id, last.id), tools,
            misused or int(bool(tools) and complains_of_tools(reason)), broken, counted, rollout.id,
        )  # fmt: skip

    async def _judged(self, rollout: str, attempt: str) -> tuple[float, ...]:
        """Return the rewards of an attempt by the source that has given most, if it has given several."""
        by_source: defaultdict[str, list[float]] = defaultdict(list)
        async for span in self._client.spans(rollout, attempt, filter="kind:reward"):
            said = Reward.of(span)
            if said.trusted and said.span is None and said.value is not None:
                by_source[said.source].append(self._rewards.scaled(said.value))
        most = max(by_source.values(), key=len, default=list[float]())
        return tuple(most) if len(most) > 1 else ()

    async def regrade(self, observations: Sequence[Observation]) -> list[Observation]:
        return await map_concurrently(self._again, list(observations))

    async def _again(self, one: Observation) -> Observation:
        if self._judge is None or one.reward is None or one.judged:
            return one
        transcript = await self._client.transcript(one.rollout)
        first, outcome = transcript.attempt.reward, transcript.attempt.outcome
        if first is None:
            return one
        problem = "the grader, asked again, gives no reward"
        try:
            said = await self._judge.judge(transcript.rollout.input, outcome and outcome.output, transcript)
            for value in (one.value for one in said if one.value is not None):
                # Both without the cost of steps, which is no noise of the grader.
                return replace(one, judged=(self._rewards.scaled(first), self._rewards.scaled(value)))
        # A grader is the user's program: any error is reported, and the advice goes on without it.
        except Exception as error:
            problem = f"the grader, asked again: {type(error).__name__}: {error}"
        self.problems.append(problem)
        return one

    async def earlier_observations(
        self, seeds: Mapping[str, Resource], tasks: Sequence[AgentTask], prompt: str
    ) -> list[Observation]:
        """Return earlier rollouts of tasks of the train split with the seed; of a single text only, because the calls
        of an agent with several do not show together which versions it had."""
        if len(seeds) != 1:
            return []
        by_input = {_text(task.input): task.id for task in tasks}
        ((name, seed),) = seeds.items()
        found: list[Observation] = []
        async for rollout in self._client.rollouts(f"version={name}@{seed.version} status:over", EARLIER):
            task = by_input.get(_text(rollout.input))
            own = "penstock.candidate" in (rollout.metadata or {})
            if task is not None and not own and rollout.reward is not None:
                reward = self._rewards.scaled(rollout.reward, rollout.totals.calls)
                found.append(await self._observed(rollout, prompt, task, reward, ""))
        return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
