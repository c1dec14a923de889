"""`penstock run --image`: what docker is asked, and that a container goes with its attempt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fakes.mistakes import tells
from fakes.process import Gateway
from fakes.runs import AGENTS, LEASE, PYTHON, StartRun, enqueue, only_attempt
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Rollout
from penstock.sidecar.run.agent.environment import launch_plan
from penstock.sidecar.run.engines import local
from penstock.sidecar.run.settings import AgentSettings, RunnerSettings

CLAIM = Claim(rollout=Rollout(id="r", input={"q": 1}), attempt=Attempt(rollout="r", id="a1"), address="/r", token="t")


def fake(home: Path) -> dict[str, str]:
    """The variables that put the fake in docker's place."""
    return {"PATH": f"{AGENTS / 'bin'}:{os.environ['PATH']}", "FAKE_DOCKER": str(home)}


def asked(home: Path, *about: str) -> list[list[str]]:
    """What docker was asked so far: about containers, if nothing else is named."""
    file = home / "asked"
    every = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [words for words in every if words[0] in (about or ("run", "rm"))]


async def test_an_agent_in_a_container(gateway: Gateway, client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, {"q": "why?"})
    words = ("--image", "example/agent:1", "--image-arg", "--gpus=all", "--arg", "{q}", "--env", "COLOUR=blue")
    run = await start_run(*words, agent=(PYTHON, str(AGENTS / "report.py")), env=fake(tmp_path))
    assert await run.ended() == 0, run.stderr
    outcome = (await only_attempt(client)).outcome
    assert outcome is not None
    seen = outcome.output
    assert (seen["argv"], json.loads(seen["stdin"])) == (["why?"], {"q": "why?"})
    assert seen["env"]["OPENAI_BASE_URL"].startswith(gateway.url)
    ran, removed = asked(tmp_path)
    assert ran[:4] == ["run", "--rm", "--init", "-i"]
    assert "--network=host" in ran  # the gateway of this test listens on this machine alone
    assert ran[ran.index("example/agent:1") - 1] == "--gpus=all"
    assert "--env=COLOUR" in ran
    assert not [word for word in ran if seen["env"]["PENSTOCK_TOKEN"] in word]
    name = next(word.removeprefix("--name=") for word in ran if word.startswith("--name="))
    assert removed == ["rm", "--force", name]


async def test_a_container_goes_when_its_runner_is_killed(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None)
    words = ("--image", "stubborn", *LEASE)
    run = await start_run(*words, agent=("sleep", "600"), env=fake(tmp_path))
    await until(lambda: len(asked(tmp_path)) == 1)
    run.process.kill()
    await until(lambda: len(asked(tmp_path)) == 2)
    ran, removed = asked(tmp_path)
    assert removed == ["rm", "--force", next(word[7:] for word in ran if word.startswith("--name="))]
    again = await start_run(agent=("true",))
    assert await again.ended() == 0, again.stderr
    assert [attempt.status for attempt in await client.attempts("r1")] == [
        AttemptStatus.UNRESPONSIVE,
        AttemptStatus.SUCCEEDED,
    ]


async def test_nothing_that_runs_containers_is_told(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    run = await start_run("--image", "x", agent=("true",), env={"PATH": str(tmp_path)})
    assert (await run.ended(), tells(run.stderr, "--image", "docker or podman", "PATH")) == (2, True), run.stderr


@pytest.mark.parametrize(
    ("without", "words", "message"),
    [
        (
            "daemon",
            (),
            "--image example/agent:1: docker cannot run containers: start it, or let this user reach it. It says:",
        ),
        ("registry", (), "--image example/agent:1: it is not on this machine and cannot be pulled: no such image"),
        ("image", ("--image-arg", "--pull=never"), "it is not on this machine, and --pull=never forbids to get it"),
    ],
)
async def test_a_container_engine_that_cannot_is_told_before_anything_is_claimed(
    client: Client, start_run: StartRun, tmp_path: Path, without: str, words: tuple[str, ...], message: str
) -> None:
    _ = await enqueue(client, None)
    env = fake(tmp_path) | {"FAKE_DOCKER_WITHOUT": without}
    run = await start_run("--image", "example/agent:1", *words, agent=("true",), env=env)
    assert await run.ended() == 2
    assert message in run.stderr
    assert (await client.rollout("r1")).tries == 0


async def test_an_image_is_pulled_once_before_all_attempts(client: Client, start_run: StartRun, tmp_path: Path) -> None:
    _ = await enqueue(client, None, None)
    env = fake(tmp_path) | {"FAKE_DOCKER_WITHOUT": "image"}
    run = await start_run("--image", "example/agent:1", "--image-arg=--platform=linux/arm64", agent=("true",), env=env)
    assert await run.ended() == 0, run.stderr
    assert asked(tmp_path, "pull") == [["pull", "--platform=linux/arm64", "example/agent:1"]]


@pytest.mark.parametrize(
    ("gateway", "host"),
    [("http://127.0.0.1:1", True), ("http://localhost:1", True), ("http://[::1]:1", True), ("https://g:1", False)],
)
def test_the_machines_network_is_for_a_gateway_on_it(gateway: str, host: bool) -> None:
    agents = AgentSettings(image="x", image_args=("--workdir=/app",))
    settings = RunnerSettings(gateway=gateway, name="w", agents=agents)
    made = local.container_command("docker", settings, CLAIM, launch_plan(CLAIM, gateway, agents, Path("/tmp/f")), {})
    assert ("--network=host" in made.argv) == host
    assert {"--workdir=/app", "--env=CLAUDE_CODE_GATEWAY_HINT_HEADERS"} <= {*made.argv}
    assert made.after == ("docker", "rm", "--force", local.container("w", CLAIM))
