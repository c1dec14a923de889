"""Releases a winner to production: one release by canary of all texts that have changed.

They were tested together, so a rollout gets all of them or none, and they are promoted or rolled back together. If the
leak test has found something, `publish.release = "auto"` counts as "canary": the release waits for a person.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.run import EventLevel, RunChange, VersionReference
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.serving.publisher import PRODUCTION, release_command, release_policy, release_status


def check_publish(config: ApoConfig) -> None:
    """Raise `ConfigError` for a policy that cannot be read, or one that promotes tool texts without any rollout: a
    canary that waits for no rollout shows nothing."""
    policy = release_policy(config.publish)
    unseen = [stage.name for stage in policy.stages if not stage.rollouts]
    if config.texts.tools and config.publish.release == "auto" and unseen:
        raise ConfigError(
            f"publish.policy: the stage {unseen[0]} waits for 0 rollouts; tool texts are released by a canary that "
            'somebody has seen: set its rollouts, or publish.release = "canary"'
        )


async def release_texts(
    client: Client, config: ApoConfig, seed: Candidate, winner: Candidate, versions: Mapping[str, str]
) -> list[tuple[str, EventLevel]]:
    """Release the changed texts, as `publish.release` says; return the results for a person. An error here fails
    nothing: the versions are there, and a person can release them."""
    changed = {name: version for name, version in versions.items() if winner.texts[name] != seed.texts[name]}
    await client.change_run(
        config.run.name,
        RunChange(made=[VersionReference(name=name, version=version) for name, version in changed.items()]),
    )
    if not changed:
        return []
    told, command = _told(changed), release_command(changed)
    if config.publish.release == "none":
        return [(f"{told} better; {command} shows {_it(changed)} to production", "info")]
    try:
        release = await _start(client, config, changed)
    except (ClientError, ConfigError) as error:
        return [(f"{told} not released: {error}; {command} does it", "warning")]
    return [release_status(release, " and ".join(_named(changed)), command)]


def _named(changed: Mapping[str, str]) -> list[str]:
    return [f"{name}@{version}" for name, version in changed.items()]


def _told(changed: Mapping[str, str]) -> str:
    return f"{' and '.join(_named(changed))} {'is' if len(changed) == 1 else 'are'}"


def _it(changed: Mapping[str, str]) -> str:
    return "it" if len(changed) == 1 else "them"


async def _start(client: Client, config: ApoConfig, changed: Mapping[str, str]) -> Release:
    """Start the release of these versions, or return the one that an earlier process of this run started."""
    (name, version), *others = changed.items()
    for release in await client.releases(name):
        if (release.author, release.only, release.arm_versions("candidate")) == (config.run.name, PRODUCTION, changed):
            return release
    new = NewRelease(
        candidate=version,
        companions=dict(others),
        only=PRODUCTION,
        policy=release_policy(config.publish),
        author=config.run.name,
        why=f"made by {config.run.name}",
    )
    return await client.start_release(name, new)
