"""`penstock train apo advise`: wires a probe together, and shows the advice on one screen of 80 columns.

The names of the probe's rollouts and versions begin with RUN.advise, so they are never those of a run; a repeated probe
finds them on the tape, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.console.views.table import Column, Listing, clean, figure, joined, plain
from penstock.gateway.client.client import Client
from penstock.gateway.client.console import note
from penstock.trainer.apo.advice.decision import Advice, Cost, advice, derive_findings, words_of
from penstock.trainer.apo.advice.probe import Probe
from penstock.trainer.apo.advice.tape_observations import TapeObservationReader, reward_judge
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.session import open_laboratory, runner_beside, search_budget, splits_of
from penstock.trainer.runs.companions import run_alongside
from penstock.trainer.runs.report import run_blocking

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
