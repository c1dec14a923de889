"""A winner on its way to production: a release by canary for each text that has changed.

Where the leak test has found something, `publish.release = "auto"` counts as "canary": the release waits for a person.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.resource import Audience
from penstock.gateway.model.run import Level, Made, RunChange
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import Config
from penstock.trainer.serving.publish import PRODUCTION, release_policy


def check_publish(config: Config) -> None:
    """Raises `ConfigError` for a policy that cannot be read, and where tool texts would be promoted unseen: a canary
    that waits for no rollout shows nothing."""
    policy = release_policy(config.publish)
    unseen = [stage.name for stage in policy.stages if not stage.rollouts]
    if config.texts.tools and config.publish.release == "auto" and unseen:
        raise ConfigError(
            f"publish.policy: the stage {unseen[0]} waits for 0 rollouts; tool texts are released by a canary that "
            'somebody has seen: set its rollouts, or publish.release = "canary"'
        )


async def show_production(
    client: Client, config: Config, seed: Candidate, winner: Candidate, versions: Mapping[str, str]
) -> list[tuple[str, Level]]:
    """Releases what has changed, as `publish.release` says; what came of it, for a person. An error here fails nothing:
    the versions are there, and a person can release them."""
    changed = {name: version for name, version in versions.items() if winner.texts[name] != seed.texts[name]}
    made = [Made(name=name, version=version) for name, version in changed.items()]
    await client.change_run(config.run.name, RunChange(made=made))
    found: list[tuple[str, Level]] = []
    for name, version in changed.items():
        command = f"penstock release start {name} --candidate {version} --only mode=online"
        if config.publish.release == "none":
            found.append((f"{name}@{version} is better; {command} shows it to production", "info"))
            continue
        try:
            release = await _start(client, config, name, version, PRODUCTION)
            found.append((f"release {release} shows {name}@{version} to production", "info"))
        except (ClientError, ConfigError) as error:
            found.append((f"{name}@{version} is not released: {error}; {command} does it", "warning"))
    return found


async def _start(client: Client, config: Config, name: str, version: str, only: Audience) -> str:
    """The release of a version; the one that an earlier life of this run has started is not doubled."""
    for release in await client.releases(name):
        if (release.author, release.candidate, release.only) == (config.run.name, version, only):
            return release.id
    policy = release_policy(config.publish)
    new = NewRelease(
        candidate=version, only=only, policy=policy, author=config.run.name, why=f"made by {config.run.name}"
    )
    return (await client.start_release(name, new)).id
