"""Production's rollouts for a step: noted when their rewards come, inspected when they are quiet, taken once.

    run      follows the gateway's changes: a reward makes a rollout known, every later call or reward delays it
    look     inspects the rollouts that have been quiet for `online.quiet_seconds` seconds
    take     picks rollouts, writes down which are taken (`ConsumedLog`), and reads them as samples

When the run begins it reads from the tape the rollouts that came while it was not running, from the newest back to the
creation of the oldest version that is not too old: earlier rollouts cannot have been served by it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.adapters.episode import Episode, EpisodeAttempt
from penstock.adapters.samples import Options
from penstock.adapters.source import load
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Change
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import RolloutBatch, add_episode
from penstock.trainer.data.selection import SILENT, RolloutInspector, TrainableRollout, pick
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import write_directory

LOOKS: Final = 100
"""Rollouts inspected in one go before other work has its turn."""


class ProductionRollouts:
    """The rollouts of production for one run. `run` must run beside the loop; `begin` once the model is a resource."""

    def __init__(self, client: Client, config: TrainConfig, taken: ConsumedLog) -> None:
        self._client, self._config, self._taken = client, config, taken
        self._inspector = RolloutInspector(client, config)
        self._due: dict[str, float] = {}
        """Rollouts with a reward that wait for inspection, each with its time in seconds of the loop's clock."""
        self._known: set[str] = set()
        """Rollouts that have a reward and may be taken."""
        self._ready: dict[str, TrainableRollout] = {}
        self._left = Counter[str]()
        """Number of rollouts left out since the last step, by reason."""
        self._told: set[str] = {*SILENT}
        """Reasons that were explained to a person already, or need no explanation."""
        self._news, self._follows = asyncio.Event(), asyncio.Event()
        self._begun = self._released = False

    async def run(self) -> None:
        """Follows the changes, for ever."""
        cursor = (await self._client.stats(spans=0)).cursor
        self._follows.set()
        async with aclosing(self._client.changes(cursor)) as changes:
            async for change in changes:
                self._note(change)

    async def begin(self, version: int) -> None:
        """Read the rollouts that are on the tape already. `version`: the step of the newest weights. Raises
        `ConfigError`."""
        if self._begun:
            return
        self._begun = True
        await self._follows.wait()
        versions = await self._inspector.begin()
        oldest = min(
            it.created_ns for it in versions if self._fresh(self._inspector.versions.step(it.version), version)
        )
        found: list[str] = []
        async for rollout in self._client.rollouts("mode:online"):
            if rollout.created_ns < oldest:
                break
            found += [rollout.id] if rollout.reward is not None else []
        for name in reversed(found):
            self._touch(name)

    def _fresh(self, step: int | None, version: int) -> bool:
        return step is not None and version - step <= self._config.rollouts.staleness

    def age(self, version: str | None, newest: int) -> int:
        """Return how many versions a version is behind the newest; 0 if it is not of this run."""
        step = self._inspector.versions.step(version)
        return 0 if step is None else max(0, newest - step)

    # -- news of rollouts --------------------------------------------------------------------------------------------

    def _note(self, change: Change) -> None:
        if change.kind == "release":
            self._released = True
            self._news.set()
        elif change.span is not None and change.span.kind == "reward":
            self._touch(change.span.rollout)
        else:
            about = change.span or change.attempt
            name = about.rollout if about is not None else change.rollout.id if change.rollout is not None else ""
            if name in self._known:
                self._touch(name)

    def _touch(self, name: str) -> None:
        """Note a change of a rollout that has a reward: it is inspected when it is quiet."""
        if name in self._taken:
            return
        if not self._due:
            # Otherwise `wait_for_news` already waits for a rollout that is due earlier.
            self._news.set()
        self._known.add(name)
        self._ready.pop(name, None)
        self._due[name] = asyncio.get_running_loop().time() + self._config.online.quiet_seconds

    async def wait_for_news(self) -> bool:
        """Wait until something may have changed; return True if a release has."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(self._due.values(), default=None)):
                await self._news.wait()
        self._news.clear()
        released, self._released = self._released, False
        return released

    async def inspect_quiet(self) -> list[str]:
        """Inspect some of the quiet rollouts; return messages for a person."""
        now, told = asyncio.get_running_loop().time(), list[str]()
        for name in [name for name, due in self._due.items() if due <= now][:LOOKS]:
            del self._due[name]
            found = await self._inspector.inspect(name)
            if name in self._due:
                # It changed during the inspection: inspect it again later.
                continue
            if isinstance(found, TrainableRollout):
                self._ready[name] = found
            elif found is not None:
                told += self._leave_out(name, found)
        return told

    def _leave_out(self, name: str, reason: str) -> list[str]:
        """Count a rollout that is left out; return a sentence if it is the first with this reason."""
        self._known.discard(name)
        self._left[reason] += reason not in SILENT
        if reason in self._told:
            return []
        self._told.add(reason)
        return [self._inspector.explain(name, reason)]

    # -- taking ------------------------------------------------------------------------------------------------------

    async def take(self, step: int, version: int) -> RolloutBatch | None:
        """Return the rollouts that a step learns from; None when there are not enough. `version`: the step of the
        newest weights. Raises `CheckpointError`."""
        names = self._taken.rollouts_of(step)
        if names is None:
            self._drop_stale(version)
            least = self._config.rollouts.group_size if self._config.compares_groups else None
            chosen = pick(self._ready.values(), self._config.online.batch_rollouts, least)
            if not chosen:
                return None
            names = self._taken.take(step, chosen)
        for name in names:
            self._forget(name)
        return await self._read(names)

    @property
    def stale(self) -> int:
        """Number of rollouts left out since the last step because their weights are too old."""
        return self._left["stale"]

    def _drop_stale(self, version: int) -> None:
        old = [name for name, it in self._ready.items() if not self._fresh(it.version, version)]
        self._left["stale"] += len(old)
        for name in old:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._known.discard(name)
        self._ready.pop(name, None)
        self._due.pop(name, None)

    async def _read(self, names: Mapping[str, AttemptSpans]) -> RolloutBatch:
        done = RolloutBatch(figures={f"left_out/{name}": float(count) for name, count in (+self._left).items()})
        self._left.clear()
        options, gone = Options(model=self._config.model.name), list[str]()
        async with aclosing(load(self._client, names, gone.append)) as episodes:
            async for episode in episodes:
                add_episode(
                    done,
                    truncate_episode(episode, names[episode.rollout.id]),
                    options,
                    self._config.rollouts.temperature,
                )
        if gone:
            done.figures["left_out/gone"] = done.figures.get("left_out/gone", 0.0) + len(gone)
        return done


def truncate_episode(episode: Episode, seen: AttemptSpans) -> Episode:
    """Return an episode as it was when it was inspected: without later attempts, calls and rewards."""

    def cut(whole: EpisodeAttempt, last: int) -> EpisodeAttempt:
        calls = tuple(call for call in whole.calls if call.span.sequence <= last)
        return replace(whole, calls=calls, spans=tuple(span for span in whole.spans if span.sequence <= last))

    tries = [cut(it, seen[it.attempt.id]) for it in episode.attempts if it.attempt.id in seen]
    return replace(episode, attempts=tuple(tries))


# Writes down the production rollouts that each step takes, before anything is learnt from them.
#
# Each step has a directory, complete or absent. So a rollout is learnt from once, whichever process dies when. A step
# that is repeated, because the checkpoint is older, takes the same rollouts as they were then, and comes to the same
# weights; no other step takes any of them.

AttemptSpans = Mapping[str, int]
"""Attempts of a rollout, each with its highest span."""
_STEP: Final = re.compile(r"step-\d{8}")


class ConsumedLog:
    """The rollouts that the steps of one run have taken."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: set[str] = set()
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if _STEP.fullmatch(path.name):
                self._names |= _read(path).keys()

    def __contains__(self, rollout: str) -> bool:
        """True if a step has taken the rollout."""
        return rollout in self._names

    def rollouts_of(self, step: int) -> dict[str, AttemptSpans] | None:
        """Return the rollouts that a step has taken; None when it has taken none. Raises `CheckpointError` when the
        file cannot be read."""
        path = self._path(step)
        return _read(path) if path.exists() else None

    def take(self, step: int, chosen: Iterable[TrainableRollout]) -> dict[str, AttemptSpans]:
        """Note the rollouts that a step takes; on disk when this returns. Raises `CheckpointError`."""
        found = {one.rollout: dict(one.seen) for one in chosen}
        write_directory(self._path(step), lambda beside: _write(beside / "rollouts.json", found))
        self._names |= found.keys()
        return {**found}

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"


def _read(path: Path) -> dict[str, AttemptSpans]:
    try:
        return json.loads((path / "rollouts.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; it says what a step of the run has learnt from"
        ) from None


def _write(path: Path, found: Mapping[str, AttemptSpans]) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")
