"""`penstock train apo advise`: wires a probe together.

The names of the probe's rollouts and versions begin with RUN.advise, so they are never those of a run; a repeated probe
finds them on the tape, and costs nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from penstock.console.views.table import ENDLESS
from penstock.gateway.client.client import Client
from penstock.gateway.client.console import note
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.advice.decision import derive_findings
from penstock.trainer.apo.advice.page import page
from penstock.trainer.apo.advice.probe import Probe
from penstock.trainer.apo.advice.regrader import regrader
from penstock.trainer.apo.advice.report import Advice, advice
from penstock.trainer.apo.advice.tape_observations import TapeObservationReader
from penstock.trainer.apo.budget import SearchBudget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory, seed_versions, text_of
from penstock.trainer.apo.reflection_client import ReflectionClient
from penstock.trainer.apo.session import reflection_rollout, reflection_session, splits_of
from penstock.trainer.data.rollout_waiter import RolloutWaiter
from penstock.trainer.runs.retry_client import RetryClient
from penstock.trainer.runs.run_end import run_blocking
from penstock.trainer.runs.runner import keep_running, run_alongside


def advise(config: ApoConfig, gateway: str, key: str | None, agent: str | None, rollouts: int) -> Advice:
    """Return the advice. `agent`: the command that a runner beside the probe executes on each task; `rollouts`: budget
    of the probe. Raises `RunError` when it fails."""
    found: list[Advice] = []
    run_blocking(_advise(config, gateway, key, agent, rollouts, found))
    return found[0]


def show(found: Advice, json: bool) -> None:
    """Print the advice, as a page or as JSON."""
    if json:
        print(found.model_dump_json(exclude_none=True))
        return
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else ENDLESS
    Console(width=width, highlight=False, emoji=False, markup=False).print(page(found), crop=False)


async def _advise(
    config: ApoConfig, gateway: str, key: str | None, agent: str | None, rollouts: int, found: list[Advice]
) -> None:
    # An error in the grader's options must show before the probe, not after.
    again = regrader(config.rollouts.run)
    train = splits_of(config).train
    probing = config.model_copy(update={"run": config.run.model_copy(update={"name": f"{config.run.name}.advise"})})
    async with Client(gateway, key) as client:
        # A run waits for a gateway that restarts; advice fails at once without a gateway.
        await client.whoami()
    async with RetryClient(gateway, key) as client, reflection_session(client, reflection_rollout(probing)) as http:
        resources = await seed_versions(client, config)
        awaited = RolloutWaiter(client)
        reflecting = ReflectionClient(client, http, gateway, reflection_rollout(probing), config.reflection)
        laboratory = GatewayLaboratory(client, awaited, reflecting, probing, resources, train)
        tape = TapeObservationReader(client, config.reward, again)
        limits = config.budget
        budget = SearchBudget(rollouts, limits.reflections, limits.tokens, limits.money)
        seed = Candidate({name: text_of(version) for name, version in resources.items()})
        probe = Probe(laboratory, tape, seed, train, budget, config.run.seed)
        beside = [awaited.run()]
        if agent or config.rollouts.run:
            words = [*config.rollouts.run, *(["--", *shlex.split(agent)] if agent else [])]
            log = _writable(config.run.directory) / "advise-runner.log"
            beside.append(keep_running(["--mode", "train", *words], gateway, key, log))

        async def work() -> None:
            found.append(await _probed(config, probe, tape, resources, budget))

        await run_alongside(work(), beside)


def _writable(path: Path) -> Path:
    """Return the directory of a run; create it if it does not exist. Raises `ConfigError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: {path} cannot be made: {error}") from None
    return path


async def _probed(
    config: ApoConfig, probe: Probe, tape: TapeObservationReader, resources: dict[str, Resource], budget: SearchBudget
) -> Advice:
    """Run the probe, and return the advice from it and from the tape."""

    async def say(text: str) -> None:
        note(text)

    probe.watch = say
    probed = await probe.run()
    earlier = await tape.earlier_observations(resources, splits_of(config).train, probed.arms[0].candidate.id)
    found = derive_findings(probed.arms, [*earlier, *probed.observations], config.budget.rollouts)
    return advice(config, found, budget, len(earlier), probed.failures, [*probed.problems, *tape.problems])
