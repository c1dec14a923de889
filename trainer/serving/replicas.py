"""Serves the weights of runs that train all of them: two vLLMs of ours take turns (blue/green).

    one        serves the version that training gets; rollouts that are pinned to it stay there to their end
    the other  gets the next version: it waits until no call may ask for its present one, ends, and starts again with
               the new directory
    names      a server answers to MODEL@VERSION and to nothing else. A call for weights that are gone gets a 404 and
               never an answer of others, no cache outlives its weights, and the development mode of vLLM stays off
    an end     of a server is repaired as with adapters (`trainer.serving.server_supervisor`): it starts again with the
    same
weights

The rollouts of a step have ended when the next version but one is published, so two versions are enough. The gateway
knows what else may need a version: a release to production, or a rollout of another client. Training never takes
production's server, and it waits for rollouts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from penstock.adapters.source import ENDED
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.resource import Audience, Need, ResourceView
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.serving.pruning import step_of
from penstock.trainer.serving.publisher import NOT_FOUND, PublishError, training_version
from penstock.trainer.serving.server_supervisor import ServerSupervisor
from penstock.trainer.serving.vllm import VllmServer, server_arguments


class Replica:
    """One of the servers. `run` must run beside the loop."""

    def __init__(self, upstream: str, server: VllmServer, flags: Sequence[str], upkeep: ServerSupervisor) -> None:
        """`upstream`: the gateway's name of the server; `flags`: further flags of vLLM."""
        self.upstream = upstream
        self.version: str | None = None
        """The version that it serves; None before the first."""
        self._server, self._flags, self._upkeep = server, flags, upkeep
        self._given = asyncio.Event()

    async def run(self) -> None:
        """Keep the server running, for ever, from its first version on. Raises `InferenceError`."""
        await self._given.wait()
        await self._upkeep.run()

    async def ready(self) -> None:
        """Wait until it runs, if it has a version. Raises `InferenceError`."""
        if self.version is not None:
            await self._upkeep.ready()

    async def serve(self, name: str, version: str, directory: Path) -> None:
        """Restart it with these weights. Raises `InferenceError`."""
        await self._server.restart_with(server_arguments(directory, name, self._server.url, self._flags))
        self._has(version)

    async def restore(self, name: str, version: str, directory: Path) -> None:
        """Start it with the weights that it had before; calls wait meanwhile. Raises `InferenceError`."""
        self._server.arguments = server_arguments(directory, name, self._server.url, self._flags)
        self._has(version)
        await self._upkeep.ready()

    async def stop(self) -> None:
        await self._server.stop()

    def _has(self, version: str) -> None:
        self.version = version
        self._given.set()


class Replicas:
    """Both servers, for the versions of one run."""

    def __init__(
        self, client: Client, model: str, run: str, directory: Path, replicas: Sequence[Replica], patience_s: float
    ) -> None:
        """`model`: the resource; `directory`: the directory of the versions; `patience_s`: time limit of pinned
        rollouts."""
        self._client, self._model, self._run, self._directory = client, model, run, directory
        self._replicas, self._patience_s = replicas, patience_s
        self._restored = False

    async def run(self) -> None:
        """Keep both running, for ever. Raises `InferenceError` when there can be no server."""
        tasks = [asyncio.ensure_future(one.run()) for one in self._replicas]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def ready(self) -> None:
        """Wait until the servers that have a version run; called before each step. The first call gives them the
        versions that they had before. Raises `InferenceError`, `PublishError`, `ConfigError`."""
        if not self._restored:
            await self._refuse_unknown()
            await self._restore()
            self._restored = True
        await asyncio.gather(*(one.ready() for one in self._replicas))

    async def serve(self, version: str, directory: Path) -> str:
        """Let one of them serve a version, and return its upstream when it does. Raises `PublishError` when none is
        free, and `InferenceError`."""
        replica = await self._free(version)
        if replica.version != version:
            if replica.version is not None:
                await self._drained(replica.upstream, replica.version, version)
            await replica.serve(f"{self._model}@{version}", version, directory)
        return replica.upstream

    async def stop(self) -> None:
        await asyncio.gather(*(one.stop() for one in self._replicas))

    # -- which one? --------------------------------------------------------------------------------------------------

    async def _free(self, version: str) -> Replica:
        """Return a server that does not serve training's present version. Raises `PublishError`."""
        view = await self._client.resource(self._model)
        given, places = training_version(view), _places(view)
        others = [one for one in self._replicas if one.version is None or one.version != given]
        found = [one for one in others if places.get(version, one.upstream) == one.upstream]
        if not found:
            raise PublishError(
                f"{self._model}@{version} is registered for upstream {places[version]!r}, which serves what training "
                "gets: go on with the settings that the run was begun with, or name a new run"
            )
        return min(found, key=lambda one: one.version is not None)

    async def _drained(self, upstream: str, served: str, version: str) -> None:
        """Wait until no call may ask for a server's present version. Raises `PublishError`."""
        trouble = f"no server is free for {self._model}@{version}: upstream {upstream!r} serves {self._model}@{served}"
        cursor = (await self._client.stats(spans=0)).cursor
        rollouts = await self._pinned(served, trouble)
        ended = self._client.changes(cursor, ["rollout"], status=ENDED)
        try:
            async with asyncio.timeout(self._patience_s), aclosing(ended) as changes:
                while rollouts:
                    async for change in changes:
                        if change.rollout and change.rollout.id in rollouts:
                            break
                    rollouts = await self._pinned(served, trouble)
        except TimeoutError:
            raise PublishError(
                f"{trouble}, and after {self._patience_s:g} s (rollouts.timeout) rollouts that are pinned to it may "
                f"still call: {', '.join(rollouts)}; end them, and give the same command again"
            ) from None

    async def _pinned(self, served: str, trouble: str) -> list[str]:
        """Return the rollouts that need a version. Raises `PublishError` when a release does."""
        needs = {one.version: one for one in await self._client.needed_versions(self._model)}
        need = needs.get(served, Need(version=served))
        if need.releases or need.audiences:
            raise PublishError(
                f"{trouble}, which {_who(need)}: release what a server of production's own serves in its place, and "
                "give the same command again"
            )
        return need.rollouts

    # -- an earlier life ---------------------------------------------------------------------------------------------

    async def _refuse_unknown(self) -> None:
        listed = json.loads(await self._client.read("GET", "/api/upstreams"))["upstreams"]
        names = [one["name"] for one in listed]
        for replica in self._replicas:
            if replica.upstream not in names:
                raise ConfigError(
                    f"inference.upstream: the gateway has no [[upstream]] {replica.upstream!r}; it has "
                    f"{', '.join(names)}"
                )

    async def _restore(self) -> None:
        """Give each server the version that calls may still ask it for: training's present one if it is there, else the
        newest."""
        try:
            view = await self._client.resource(self._model)
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
            return
        needed = {one.version for one in await self._client.needed_versions(self._model)}
        given, places = training_version(view), _places(view)
        mine = [version for version in places if version in needed and step_of(self._run, version) is not None]
        await asyncio.gather(
            *(
                self._restore_one(one, max(here, key=lambda version: (version == given, here.index(version))))
                for one in self._replicas
                if (here := [version for version in mine if places[version] == one.upstream])
            )
        )

    async def _restore_one(self, replica: Replica, version: str) -> None:
        directory = self._directory / version
        if not directory.is_dir():
            raise PublishError(
                f"{self._model}@{version} is what calls may ask upstream {replica.upstream!r} for, and {directory} is "
                "not there: bring it back, or name a new run"
            )
        await replica.restore(f"{self._model}@{version}", version, directory)


def replicas_of(
    config: TrainConfig, client: Client, say: Callable[[str], Awaitable[None]], python: Path, cpu: bool
) -> Replicas:
    """Return the servers of a configuration. `say`: called with messages for a person; `cpu`: there is no GPU."""
    wanted, logs = config.inference, config.run.directory
    places = ((wanted.upstream, wanted.port, "vllm.log"), (f"{wanted.upstream}-2", wanted.port + 1, "vllm-2.log"))
    replicas: list[Replica] = []
    for upstream, port, log in places:
        server = VllmServer(python, [], f"http://127.0.0.1:{port}/v1", logs / log, cpu)
        replicas.append(Replica(upstream, server, wanted.flags, ServerSupervisor(client, server, upstream, say)))
    return Replicas(
        client, config.model.name, config.run.name, config.versions_directory, replicas, config.rollouts.timeout
    )


def _places(view: ResourceView) -> dict[str, str]:
    """Return the upstream of each version, oldest first."""
    return {one.version: one.content["upstream"] for one in view.versions}


def _who(need: Need) -> str:
    releases = [f"release {name} tries" for name in need.releases]
    return " and ".join([*(f"is stable for {_described(only)}" for only in need.audiences), *releases])


def _described(only: Audience) -> str:
    parts = only.model_dump(exclude_defaults=True).items()
    return " ".join(f"{key}={value}" for key, value in parts) or "every call"
