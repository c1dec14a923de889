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

from penstock.gateway.client.client import Client
from penstock.gateway.client.console import note
from penstock.gateway.display.table import ENDLESS
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.advice.decision import find
from penstock.trainer.apo.advice.evidence import Tape
from penstock.trainer.apo.advice.page import page
from penstock.trainer.apo.advice.probe import Probe
from penstock.trainer.apo.advice.regrading import regrader
from penstock.trainer.apo.advice.report import Advice, advice
from penstock.trainer.apo.budget import Budget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import Config
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory, seeds, text_of
from penstock.trainer.apo.reflecting import Reflecting
from penstock.trainer.apo.session import reflection_session, reflections, splits_of
from penstock.trainer.data.awaiting import Awaited
from penstock.trainer.runs.ending import whole
from penstock.trainer.runs.patient_client import Patient
from penstock.trainer.runs.runner import keep_running, with_others


def advise(config: Config, gateway: str, key: str | None, agent: str | None, rollouts: int) -> Advice:
    """Return the advice. `agent`: the command that a runner beside the probe executes on each task; `rollouts`: budget
    of the probe. Raises `RunError` when it fails."""
    found: list[Advice] = []
    whole(_advise(config, gateway, key, agent, rollouts, found))
    return found[0]


def show(found: Advice, json: bool) -> None:
    """Print the advice, as a page or as JSON."""
    if json:
        print(found.model_dump_json(exclude_none=True))
        return
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else ENDLESS
    Console(width=width, highlight=False, emoji=False, markup=False).print(page(found), crop=False)


async def _advise(
    config: Config, gateway: str, key: str | None, agent: str | None, rollouts: int, found: list[Advice]
) -> None:
    # An error in the grader's options must show before the probe, not after.
    again = regrader(config.rollouts.run)
    train = splits_of(config).train
    probing = config.model_copy(update={"run": config.run.model_copy(update={"name": f"{config.run.name}.advise"})})
    async with Client(gateway, key) as client:
        # A run waits for a gateway that restarts; advice fails at once without a gateway.
        await client.whoami()
    async with Patient(gateway, key) as client, reflection_session(client, reflections(probing)) as http:
        resources = await seeds(client, config)
        awaited = Awaited(client)
        reflecting = Reflecting(client, http, gateway, reflections(probing), config.reflection)
        laboratory = GatewayLaboratory(client, awaited, reflecting, probing, resources, train)
        tape = Tape(client, config.reward, again)
        limits = config.budget
        budget = Budget(rollouts, limits.reflections, limits.tokens, limits.money)
        seed = Candidate({name: text_of(version) for name, version in resources.items()})
        probe = Probe(laboratory, tape, seed, train, budget, config.run.seed)
        beside = [awaited.run()]
        if agent or config.rollouts.run:
            words = [*config.rollouts.run, *(["--", *shlex.split(agent)] if agent else [])]
            log = _writable(config.run.directory) / "advise-runner.log"
            beside.append(keep_running(["--mode", "train", *words], gateway, key, log))

        async def work() -> None:
            found.append(await _probed(config, probe, tape, resources, budget))

        await with_others(work(), beside)


def _writable(path: Path) -> Path:
    """Return the directory of a run; create it if it does not exist. Raises `ConfigError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: {path} cannot be made: {error}") from None
    return path


async def _probed(config: Config, probe: Probe, tape: Tape, resources: dict[str, Resource], budget: Budget) -> Advice:
    """Run the probe, and return the advice from it and from the tape."""

    async def say(text: str) -> None:
        note(text)

    probe.watch = say
    probed = await probe.run()
    earlier = await tape.earlier(resources, splits_of(config).train, probed.arms[0].candidate.id)
    found = find(probed.arms, [*earlier, *probed.observations], config.budget.rollouts)
    return advice(config, found, budget, len(earlier), probed.failures, [*probed.problems, *tape.problems])
