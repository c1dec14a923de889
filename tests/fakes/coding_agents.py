"""Claude Code and Codex as `docs/coding-agents.md` trains them: `penstock run` starts the real ones, on a route whose
engine is asked for tokens. Their model uses the shell three times and then answers.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from clients.profiles import PROFILES
from fakes import environments
from fakes.process import Gateway, upstream
from fakes.shell import Shell

from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.source import load
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.model.rollout import RolloutSummary

PROVIDERS = environments.python("providers")
ASK = "Use your shell to run echo 1, then echo 2, then echo 3, one after the other, and say when you are done."
SAID = "All is done."
TURNS = 4
"""Calls of the model: three of the shell, and the answer."""
_PATIENCE = 300.0
CLAUDE = ("-p", "--model", "policy", "--dangerously-skip-permissions")
CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy")


@dataclass(frozen=True)
class Agent:
    """A coding agent."""

    name: str
    shell: str
    """Its tool that runs a command."""
    field: str
    """The field of that for the command."""
    options: tuple[str, ...]
    words: tuple[str, ...]
    env: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        return next(profile for profile in PROFILES if profile.client == self.name).command[0]


AGENTS = (
    Agent(
        "Claude Code",
        "Bash",
        "command",
        ("--arg={question}",),
        CLAUDE,
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS=512", "IS_SANDBOX=1"),
    ),
    Agent(
        "Codex",
        "exec_command",
        "cmd",
        ("--arg=-c", '--arg=openai_base_url="{openai_url}"', "--arg={question}"),
        CODEX,
    ),
)


def missing() -> str | None:
    """Why this cannot run here."""
    if not environments.installed("clients"):
        return "the agents are not here: `make install-clients` installs them"
    if not environments.installed("providers"):
        return "there is no litellm here: `make install-providers` installs it"
    return None


def config(base_url: str) -> str:
    """A gateway's configuration for an exact route to this engine."""
    route = '[[route]]\nmodel = "policy"\nupstream = "vllm"\ntrain = "exact"\n\n'
    return route + upstream("vllm", base_url, "openai")


async def run(gateway: Gateway, agent: Agent, home: Path, rollouts: int) -> list[RolloutSummary]:
    """The agent's rollouts, by `penstock run` with a reward of 1; fails unless each succeeds."""
    for place in (home / "home", home / "work"):
        place.mkdir(parents=True, exist_ok=True)
    (home / "tasks.jsonl").write_text(f'{{"question": "{ASK}"}}\n')
    shell = Shell(gateway.url, home / "work")
    shell.patience = _PATIENCE
    await _penstock(shell, "enqueue", str(home / "tasks.jsonl"), "--repeat", str(rollouts))
    env = [f"--env={variable}" for variable in (f"HOME={home / 'home'}", *agent.env)]
    words = [*env, *agent.options, "--reward", "echo '{\"reward\": 1}'", "--", agent.program, *agent.words]
    told = await _penstock(shell, "run", "--no-stdin", "--echo", "--max", str(rollouts), *words)
    async with Client(gateway.url) as client:
        found = [rollout async for rollout in client.rollouts()]
    assert [rollout.status for rollout in found] == ["succeeded"] * rollouts, told
    assert told.count(SAID) >= rollouts, told
    return found


async def _penstock(shell: Shell, *words: str) -> str:
    done = await shell.run(*words)
    assert done.code == 0, f"{shlex.join(words)}\n{(done.text + done.err)[-5000:]}"
    return done.text + done.err


async def rows(gateway: Gateway, rollout: RolloutSummary) -> tuple[list[Sample], Diagnosis, list[str]]:
    """The rows of a rollout, what the doctor says of it, and the statuses of its calls."""
    async with Client(gateway.url) as client:
        (episode,) = [one async for one in load(client, [rollout])]
        calls = [span async for span in client.spans(rollout.id, filter="kind:llm")]
        told = await client.diagnosis(rollout.id)
    return samples(episode, Options(model="policy"))[0], told, [str(call.status) for call in calls]


async def one_row_each(gateway: Gateway, found: list[RolloutSummary]) -> None:
    """Every rollout is one row of all its calls, and can be trained on."""
    for rollout in found:
        made, told, statuses = await rows(gateway, rollout)
        assert statuses == ["ok"] * TURNS
        assert told.verdict == f"{rollout.id} can be trained on: {TURNS} of {TURNS} calls, 1 sequence, reward 1.0."
        (row,) = made
        assert len(row.segments) == TURNS
        assert row.reward == 1.0
        assert not set(row.logprobs[row.mask].tolist()) & {float("nan")}
