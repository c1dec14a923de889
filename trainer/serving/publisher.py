"""Brings weights to agents: a directory becomes a version of the model resource, and a release gives it to calls.

Training gets a version at once: a release for the modes `train`, `val` and `test` alone, which loads the adapter,
checks and warms it, and which the trainer promotes when that has worked. Production (`online`) gets a version only
through a release of its own, with the canary of its policy. When the gateway refuses something, or weights do not load,
a `PublishError` has the gateway's own words.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Final, Literal, Protocol

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotFound
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.release_policy import CanaryStage, Guards, ReleasePolicy
from penstock.gateway.model.resource import Audience, NewVersion, ResourceView
from penstock.gateway.model.run import EventLevel
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import PublishSettings

# Removes directories of old versions: those beyond the newest that no release and no rollout can need any more.
#
# The gateway says which versions are needed, for every model, because an adapter may have been registered under
# another name too. A directory is renamed before it is emptied, so that half a version is never taken for a whole
# one. A version without a directory stays registered; a release of it fails its check, and no agent gets it.

GONE: Final = ".gone"
"""Ending of a directory's name before its removal."""


def step_of(run: str, version: str) -> int | None:
    """Return the step of a version by its name RUN.STEP; None if it is not of this run."""
    name, _, step = version.rpartition(".")
    return int(step) if name == run and step.isdecimal() else None


async def prune(client: Client, directory: Path, run: str, keep: int, steps: frozenset[int] = frozenset()) -> list[str]:
    """Remove directories of a run's versions; return their names. `keep`: number of newest versions that stay; `steps`:
    steps whose versions stay too. Raises OSError."""
    every = await asyncio.to_thread(_versions, directory, run)
    old = [name for name in every[:-keep] if step_of(run, name) not in steps]
    if not old:
        return []
    needed = await _needed(client, directory)
    gone = [name for name in old if name not in needed]
    await asyncio.to_thread(_remove, directory, gone)
    return gone


def _versions(directory: Path, run: str) -> list[str]:
    """Return the names of the run's versions, oldest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = {path.name: step for path in paths if (step := step_of(run, path.name)) is not None}
    return sorted(found, key=lambda name: found[name])


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / name).rename(directory / f".{name}{GONE}")
    # Also the directories that an earlier process began to remove.
    for left in directory.glob(f".*{GONE}"):
        shutil.rmtree(left)


async def _needed(client: Client, directory: Path) -> set[str]:
    """Return the names of the directories of needed versions."""
    found: set[str] = set()
    for resource in await client.resources():
        if resource.kind == "model":
            contents = {one.version: one.content for one in resource.versions}
            for need in await client.needed_versions(resource.name):
                adapter = Path(contents.get(need.version, {}).get("adapter") or directory / need.version)
                found |= {adapter.name} if adapter.parent == directory else set()
    return found


CONFLICT: Final = 409
"""The gateway's status for a conflict; also of a request that is repeated because its answer was lost."""
TRAINING: Final = Audience(modes=["train", "val", "test"])
PRODUCTION: Final = Audience(modes=["online"])
NO_COMPANIONS: Final[Mapping[str, str]] = {}
IMMEDIATE_POLICY: Final = ReleasePolicy(
    stages=[CanaryStage(split=0.5, rollouts=0)], replayed="skip", shadowed="skip", margin_absolute=0.5, horizon=10,
    guards=Guards(margin=0.5),
)  # fmt: skip
"""The policy of training's releases: checked, and then promoted by the trainer."""


class ReleaseSettings(Protocol):
    """A configuration's settings of releases to production."""

    @property
    def release(self) -> Literal["auto", "canary", "none"]:
        """`auto`: a release that promotes itself; `canary`: one that waits for approval; `none`: no release."""
        ...

    @property
    def policy(self) -> Path | None:
        """File with the release's policy."""
        ...


def release_policy(wanted: ReleaseSettings) -> ReleasePolicy:
    """Return the policy of a release to production. Raises `ConfigError`."""
    path = wanted.policy
    try:
        policy = ReleasePolicy() if path is None else ReleasePolicy.load(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"publish.policy: {path} cannot be read: {error}") from None
    if wanted.release == "auto":
        return policy
    last = policy.stages[-1].model_copy(update={"approval": True})
    return policy.model_copy(update={"stages": [*policy.stages[:-1], last]})


def training_version(resource: ResourceView) -> str:
    """Return the version that new rollouts of training get."""
    stable = resource.stable
    return next((rule.version for rule in stable.rules if rule.only == TRAINING), stable.version)


def release_command(given: Mapping[str, str]) -> str:
    """Return the command that releases versions to production, by resource: the first is the candidate, the others are
    its companions."""
    (name, version), *others = given.items()
    together = "".join(f" --with {other}={its}" for other, its in others)
    return f"penstock release start {name} --candidate {version}{together} --only mode=online"


def release_status(release: Release, pair: str, command: str) -> tuple[str, EventLevel]:
    """Return the state of a release to production, for a person. It may be of an earlier process. `command`: starts
    one."""
    if release.live or release.stage == "promoted":
        return f"release {release.id} shows {pair} to production", "info"
    ended = release.stage.replace("_", " ")
    return f"release {release.id} of {pair} was {ended}: {release.reason}; {command} starts another", "warning"


class PublishError(Exception):
    """A version does not reach agents; the message says why."""


class Publisher:
    """Publishes the versions of one model."""

    def __init__(self, client: Client, model: str, upstream: str, base: str, run: str) -> None:
        """`model`: the resource that agents ask for; `upstream`: the gateway's name of its server; `base`: the name
        under which the base model is served; `run`: author of versions and releases."""
        self._client, self._model, self._upstream, self._base, self._run = client, model, upstream, base, run

    async def begin(self) -> None:
        """Create the model's resource if there is none. Its first version, for every call, is the base as it is
        served."""
        try:
            _ = await self._client.resource(self._model)
        except NotFound:
            await self._add("base", {"upstream": self._upstream, "base": self._base}, None, "before any training")

    async def refuse_lost(self, step: int, directory: Path) -> None:
        """Raise `PublishError` if this run has published weights later than those of `step` which are not in the
        directory of its versions. Such a run would read the rollouts of its earlier life, and agents would go on with
        those weights."""
        try:
            versions = (await self._client.resource(self._model)).versions
        except NotFound:
            return
        newest = max((step_of(self._run, one.version) or 0 for one in versions), default=0)
        if newest > step and not (directory / f"{self._run}.{newest}").exists():
            version = f"{self._model}@{self._run}.{newest}"
            raise PublishError(
                f"run.name: {self._run!r} has published {version} already, and {directory} has it not: bring back "
                "the run.directory of that run, or take another run.name"
            )

    async def register(self, version: str, adapter: Path, parent: str | None, note: str) -> None:
        """Register a directory as a version. Servers see it under the same path. Repeating it changes nothing."""
        content = {"upstream": self._upstream, "base": self._base, "adapter": str(adapter)}
        await self._add(version, content, parent, note)

    async def register_replica(self, version: str, upstream: str, parent: str | None, note: str) -> None:
        """Register the weights of a server that serves them as MODEL@VERSION as a version."""
        await self._add(version, {"upstream": upstream, "base": f"{self._model}@{version}"}, parent, note)

    async def _add(self, version: str, content: dict[str, str], parent: str | None, note: str) -> None:
        new = NewVersion(kind="model", version=version, content=content, parent=parent, author=self._run, note=note)
        try:
            await self._client.add_version(self._model, new)
        except ClientError as error:
            raise PublishError(f"{self._model}@{version} cannot be registered: {error}") from None

    async def is_published(self, step: int) -> bool:
        """True if training already gets the version of a step or a later one, because the step is repeated."""
        given = step_of(self._run, training_version(await self._client.resource(self._model)))
        return given is not None and given >= step

    async def train_on(self, version: str) -> None:
        """Give a version to all new rollouts of training; return when they get it."""
        if training_version(await self._client.resource(self._model)) == version:
            return
        cursor = (await self._client.stats(spans=0)).cursor
        release = await self._left(version)
        if release is None:
            release = await self._start(version, TRAINING, IMMEDIATE_POLICY, "the newest weights are what is trained")
        stage = await self._settled(release, cursor)
        if stage.stage != "canary":
            raise PublishError(f"{self._model}@{version} cannot be served: {stage.reason}")
        await self._promote(release)

    async def release(
        self, version: str, policy: ReleasePolicy, companions: Mapping[str, str] = NO_COMPANIONS
    ) -> Release:
        """Start the release of a version to production, or return the one that an earlier process of this run started.
        `companions`: versions of other resources that are released with it."""
        for release in await self._client.releases(self._model):
            if (release.author, release.candidate, release.only) == (self._run, version, PRODUCTION):
                return release
        return await self._start(version, PRODUCTION, policy, f"made by {self._run}", companions)

    async def release_as_configured(
        self, version: str, wanted: PublishSettings, companions: Mapping[str, str] = NO_COMPANIONS
    ) -> tuple[str, EventLevel]:
        """Release a version to production as `publish.release` says; return the result for a person. An error here
        fails nothing: the weights are there, and a person can release them. `companions`: as for `release`."""
        command = release_command({self._model: version, **companions})
        pair = " with ".join([version, *(f"{name}@{one}" for name, one in companions.items())])
        if wanted.release == "none":
            return f"{command} shows {pair} to production", "info"
        try:
            release = await self.release(version, release_policy(wanted), companions)
        except (PublishError, ConfigError) as error:
            return f"not released: {error}; {command} does it", "warning"
        return release_status(release, pair, command)

    async def prune(self, directory: Path, keep: int, steps: frozenset[int] = frozenset()) -> list[str]:
        return await prune(self._client, directory, self._run, keep, steps)

    async def _left(self, version: str) -> Release | None:
        """Return the release of a version to training that an earlier process of this run started; None without one.
        Abort other such releases."""
        for release in await self._live(TRAINING):
            if release.candidate == version:
                return release
            try:
                await self._client.decide(
                    release.id, "abort", ActionRequest(who=self._run, why="the run goes on elsewhere")
                )
            except ClientError as error:
                # It has ended in the meantime.
                if error.status != CONFLICT:
                    raise
        return None

    async def _live(self, only: Audience) -> list[Release]:
        """Return the live releases of this run."""
        live = await self._client.releases(self._model, live=True)
        return [release for release in live if release.author == self._run and release.only == only]

    async def _promote(self, release: Release) -> None:
        try:
            await self._client.decide(
                release.id, "promote", ActionRequest(who=self._run, why="it was loaded and answers")
            )
        except ClientError:
            if (await self._client.release(release.id)).release.stage != "promoted":
                raise

    async def _start(
        self,
        version: str,
        only: Audience,
        policy: ReleasePolicy,
        why: str,
        companions: Mapping[str, str] = NO_COMPANIONS,
    ) -> Release:
        new = NewRelease(
            candidate=version, companions=dict(companions), only=only, policy=policy, author=self._run, why=why
        )
        before = {release.id for release in await self._client.releases(self._model)}
        try:
            return await self._client.start_release(self._model, new)
        except ClientError as error:
            # The answer may have been lost: the release may have begun, and even ended.
            made = await self._client.releases(self._model) if error.status == CONFLICT else []
            for release in made:
                same = (release.author, release.candidate, release.only) == (self._run, version, only)
                if same and release.id not in before:
                    return release
            raise PublishError(f"{self._model}@{version} cannot be released: {error}") from None

    async def _settled(self, release: Release, cursor: int) -> Release:
        """Wait until the release's check is over; return the release."""
        now = (await self._client.release(release.id)).release
        async with aclosing(self._client.changes(cursor, ["release"], [release.id])) as changes:
            while now.stage in ("draft", "checked", "replayed", "shadowed"):
                _ = await anext(changes)
                now = (await self._client.release(release.id)).release
        return now
