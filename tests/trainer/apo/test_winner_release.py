"""A winner goes to production by a release for each text that has changed, once, and an error there fails nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.experiment import policy, prompt
from fakes.mistakes import tells
from fakes.rig import inside

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.run import NewRun
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.protocol import Candidate
from penstock.trainer.apo.session import release_texts
from penstock.trainer.serving.publisher import PRODUCTION

SEED = Candidate({"desk": "Answer {name}.", "door": "Open."})
BETTER = Candidate({"desk": "Answer {name} kindly.", "door": "Open."}, SEED.id)
VERSIONS = {"desk": "apo.1", "door": "v1"}


@pytest.fixture
async def client(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Client]:
    """Of a gateway that knows the texts, and a run that has made another."""
    async with inside(tmp_path, http) as here, Client(here.base.url) as made:
        for name, text in SEED.texts.items():
            await made.add_version(name, prompt(text, sent=True))
        await made.add_version("desk", prompt(BETTER.texts["desk"], version="apo.1"))
        await made.start_run(NewRun(id="apo", kind="apo"))
        yield made


@pytest.fixture
def margin(tmp_path: Path) -> Path:
    """A policy that needs no rewards and no calls of before, so that its releases go on until somebody ends them."""
    path = tmp_path / "policy.toml"
    path.write_text('margin_absolute = 0.1\nreplayed = "skip"\nshadowed = "skip"\n')
    return path


def config(release: str, path: Path | None = None) -> ApoConfig:
    publish: dict[str, Any] = {"release": release, "policy": path}
    texts = {"prompts": list(SEED.texts)}
    return ApoConfig.model_validate({"texts": texts, "reflection": {"model": "m"}, "publish": publish})


async def test_without_a_release_a_person_is_told_how(client: Client) -> None:
    told = await release_texts(client, config("none"), SEED.texts, BETTER.texts, VERSIONS)
    command = "penstock release start desk --candidate apo.1 --only mode=online"
    assert told == [(f"desk@apo.1 is better; {command} shows it to production", "info")]
    assert await client.releases() == []
    made = (await client.run("apo")).made
    assert [(one.name, one.version) for one in made] == [("desk", "apo.1")]


@pytest.mark.parametrize(("release", "waits"), [("canary", True), ("auto", False)])
async def test_a_release_shows_what_has_changed_and_is_started_once(
    client: Client, margin: Path, release: str, waits: bool
) -> None:
    for _ in range(2):
        # The second is another life of the same run.
        told = await release_texts(client, config(release, margin), SEED.texts, BETTER.texts, VERSIONS)
        assert told == [("release desk-1 shows desk@apo.1 to production", "info")]
    (started,) = await client.releases()
    assert (started.resource, started.candidate, started.author, started.only) == ("desk", "apo.1", "apo", PRODUCTION)
    assert started.policy.stages[-1].approval == waits


BOTH = Candidate({"desk": BETTER.texts["desk"], "door": "Open wide."}, SEED.id)
TOGETHER = {"desk": "apo.1", "door": "apo.2"}


@pytest.fixture
async def two(client: Client) -> Client:
    """Of a gateway where both texts have a better version."""
    await client.add_version("door", prompt("Open wide.", version="apo.2"))
    return client


async def test_a_release_that_was_ended_is_not_said_to_show_anything(client: Client, margin: Path) -> None:
    _ = await release_texts(client, config("canary", margin), SEED.texts, BETTER.texts, VERSIONS)
    await client.decide("desk-1", "abort", ActionRequest(who="ann", why="too kind"))
    (told,) = await release_texts(client, config("canary", margin), SEED.texts, BETTER.texts, VERSIONS)
    assert tells(told[0], "release desk-1 of desk@apo.1 was aborted", "too kind", "start desk --candidate apo.1")
    assert told[1] == "warning"


async def test_texts_that_were_tested_together_are_released_together(two: Client, margin: Path) -> None:
    for _ in range(2):
        told = await release_texts(two, config("canary", margin), SEED.texts, BOTH.texts, TOGETHER)
        ((text, level),) = told
        assert (level, tells(text, "desk-1", "desk@apo.1 and door@apo.2")) == ("info", True), text
    (started,) = await two.releases()
    assert started.arm_versions("candidate") == TOGETHER
    assert started.arm_versions("stable") == {"desk": "v1", "door": "v1"}


async def test_a_person_is_told_how_to_release_several(two: Client) -> None:
    ((text, _),) = await release_texts(two, config("none"), SEED.texts, BOTH.texts, TOGETHER)
    command = "penstock release start desk --candidate apo.1 --with door=apo.2 --only mode=online"
    assert text == f"desk@apo.1 and door@apo.2 are better; {command} shows them to production"


async def test_a_release_that_cannot_be_started_is_told(two: Client, margin: Path) -> None:
    await two.add_version("door", prompt("Open now.", version="mine"))
    await two.start_release("door", NewRelease(candidate="mine", policy=policy(0.5)))
    ((text, level),) = await release_texts(two, config("canary", margin), SEED.texts, BOTH.texts, TOGETHER)
    assert level == "warning"
    command = "penstock release start desk --candidate apo.1 --with door=apo.2 --only mode=online"
    assert tells(text, "desk@apo.1 and door@apo.2 are not released", "release door-1 is live", command)


async def test_a_winner_that_changes_nothing_is_not_released(client: Client, margin: Path) -> None:
    assert await release_texts(client, config("canary", margin), SEED.texts, SEED.texts, VERSIONS) == []
    assert await client.releases() == []


async def test_what_the_gateway_says_to_a_release_is_told(client: Client) -> None:
    # The usual policy is relative to rewards that were recorded before.
    ((text, level),) = await release_texts(client, config("canary"), SEED.texts, BETTER.texts, VERSIONS)
    assert level == "warning"
    assert tells(text, "no reward", "margin_absolute")


async def test_a_policy_that_is_gone_by_then_fails_nothing(client: Client, tmp_path: Path) -> None:
    ((text, level),) = await release_texts(
        client, config("auto", tmp_path / "gone.toml"), SEED.texts, BETTER.texts, VERSIONS
    )
    assert level == "warning"
    assert "publish.policy" in text
