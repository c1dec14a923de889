"""Starts the vLLM that serves agents' calls, from vLLM's own environment.

`ServerSupervisor` restarts one that has died; `Replicas` restarts one with other weights.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from penstock.gateway.client.child_process import STOP_S, ChildProcess, spawn
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotFound
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.resource import Audience, Need, ResourceView
from penstock.gateway.model.rollout import FINAL
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.serving.publisher import PublishError, step_of, training_version

START_S: Final = 900.0
"""Time limit for a start: a large model takes minutes to load."""
POLL_S: Final = 0.2
"""Seconds between two polls of vLLM's health, because it does not report that it is ready."""
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM has kernels for."""
ON_CPU: Final[Mapping[str, str]] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without it the first answer waits for a compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


class InferenceError(Exception):
    """There is no server; the message says why and what to do."""


def server_arguments(model: Path, name: str, url: str, more: Sequence[str]) -> list[str]:
    """Return vLLM's arguments to serve a model under a name."""
    parts = urlsplit(url)
    return [
        f"--model={model}",
        f"--served-model-name={name}",
        f"--host={parts.hostname}",
        f"--port={parts.port}",
        # Log-probabilities of the distribution that was sampled from: after temperature and nucleus.
        "--logprobs-mode=processed_logprobs",
        # Agents' sampling parameters count, not defaults in a file of the model.
        "--generation-config=vllm",
        *more,
    ]


def adapter_arguments(rank: int, slots: int) -> list[str]:
    """Return further arguments to serve adapters of the model. `slots`: adapters in use at a time."""
    most = next((known for known in RANKS if known >= rank), rank)
    return ["--enable-lora", f"--max-lora-rank={most}", f"--max-loras={slots}"]


class VllmServer:
    """A vLLM process that is ours, with its arguments."""

    def __init__(self, python: Path, arguments: Sequence[str], url: str, log: Path, cpu: bool) -> None:
        """`python`: the Python of vLLM's environment; `url`: with `/v1`; `log`: the file of its output."""
        self.url = url
        self.arguments = arguments
        """Arguments of the next start."""
        self._python = python
        self._log, self._cpu = log, cpu
        self._child: ChildProcess | None = None
        self._turn = asyncio.Lock()
        """Held during a start, and during a restart with other arguments."""

    @property
    def runs(self) -> bool:
        """True if it was started and has not ended."""
        return self._child is not None and self._child.code is None

    async def wait_exit(self) -> int:
        """Wait until it dies by itself; return its exit code. Raises RuntimeError if it was never started."""
        while True:
            child = self._child
            if child is None:
                raise RuntimeError("`start` it first")
            code = await child.wait()
            async with self._turn:
                if self._child is child:
                    return code

    def tail(self) -> str:
        """Return the end of its log."""
        return "" if self._child is None else self._child.tail()

    async def start(self) -> None:
        """Start it if it does not run; return when it is ready. Raises `InferenceError`."""
        async with self._turn:
            if not self.runs:
                await self._start()

    async def restart_with(self, arguments: Sequence[str]) -> None:
        """Restart it with other arguments. Raises `InferenceError`."""
        async with self._turn:
            await self.stop()
            self.arguments = arguments
            await self._start()

    async def _start(self) -> None:
        if self._child is not None:
            self._child.kill()
        async with aiohttp.ClientSession() as http:
            await self._refuse_another(http)
            command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", *self.arguments]
            try:
                self._child = await spawn(command, self._environment(), self._log)
            except OSError as error:
                raise InferenceError(f"{self._python} cannot be started (inference.python): {error}") from None
            await self._ready(http, self._child)

    async def _refuse_another(self, http: aiohttp.ClientSession) -> None:
        """Wait until a killed earlier process's server of this run is gone; raise `InferenceError` if it stays."""
        try:
            async with asyncio.timeout(STOP_S):
                while await _healthy(http, self.url):  # noqa: ASYNC110 - it does not report its end
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{self.url} answers already: stop what serves there, or name it in inference.urls"
            raise InferenceError(message) from None

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ours = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return {**ours, **(ON_CPU if self._cpu else {}), **inherited}

    async def _ready(self, http: aiohttp.ClientSession, child: ChildProcess) -> None:
        try:
            async with asyncio.timeout(START_S):
                while not await _healthy(http, self.url):
                    with suppress(TimeoutError):
                        code = await asyncio.wait_for(child.wait(), POLL_S)
                        raise InferenceError(f"vLLM ended with {code}; {child.tail()}")
        except TimeoutError:
            await child.stop()
            message = f"vLLM was not ready after {START_S:g} s; {child.tail()}"
            raise InferenceError(message) from None

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()


async def _healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url.removesuffix("/v1") + "/health", timeout=aiohttp.ClientTimeout(5)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


# Keeps a vLLM of ours running: after its death it is started again at once, and agents wait meanwhile.
#
#     it does not run      the gateway pauses its upstream: new calls wait at the socket, calls under way fail
#     it is started        which may take minutes; the pause is a lease, and is renewed
#     it is ready          the gateway lets the calls go, and loads the adapters that they ask for
#
# A vLLM that dies again and again within a step ends the run, which would otherwise never end.

MOST_DEATHS: Final = 3
"""Deaths within one step that are repaired; one more ends the run."""
PAUSE_S: Final = 60.0
"""Lease of the pause in seconds: how long calls wait after the trainer has died."""
OPEN_S: Final = 10.0
TRAINER: Final = "trainer"
"""Name in the gateway's audit log of who pauses and opens an upstream."""


class ServerSupervisor:
    """Keeps one server running. `run` must run beside the loop."""

    def __init__(
        self, client: Client, server: VllmServer, upstream: str, say: Callable[[str], Awaitable[None]]
    ) -> None:
        """`upstream`: the gateway's name of the server; `say`: called with messages for a person."""
        self._client, self._server, self._say = client, server, say
        self._upstream = upstream
        self._turn = asyncio.Lock()
        self._deaths = 0

    async def ready(self) -> None:
        """Start the server if it does not run, and wait for it; called before each step. Raises `InferenceError`,
        `ConfigError` and `ClientError`."""
        self._deaths = 0
        await self._up()

    async def ensure_running(self) -> None:
        """Like `ready`, in the middle of a step: deaths are not counted anew."""
        await self._up()

    async def run(self) -> None:
        """Restart the server whenever it dies, for ever. Raises `InferenceError` when there can be no server."""
        await self._up()
        while True:
            code = await self._server.wait_exit()
            self._deaths += 1
            if self._deaths > MOST_DEATHS:
                raise InferenceError(f"vLLM has died {self._deaths} times in one step; {self._server.tail()}")
            await self._up(f"vLLM ended with {code} and is started again; calls to it wait")

    async def _up(self, why: str | None = None) -> None:
        async with self._turn:
            if self._server.runs:
                return
            async with self._paused():
                if why is not None:
                    await self._say(why)
                await self._server.start()

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the upstream: calls wait within the context."""
        await self._pause()
        renewing = asyncio.ensure_future(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            # A gateway that is away needs no opening: it forgets its pauses when it restarts.
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(OPEN_S):
                    await self._client.open_upstream(
                        self._upstream, ActionRequest(who=TRAINER, why="vLLM serves again")
                    )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S / 4)
            await self._pause()

    async def _pause(self) -> None:
        try:
            await self._client.pause_upstream(
                self._upstream, PAUSE_S, ActionRequest(who=TRAINER, why="vLLM is started")
            )
        except NotFound as error:
            raise ConfigError(
                f"inference.upstream: {error}; it is the name of an [[upstream]] of the gateway"
            ) from None


# Serves the weights of runs that train all of them: two vLLMs of ours take turns (blue/green).
#
#     one        serves the version that training gets; rollouts that are pinned to it stay there to their end
#     the other  gets the next version: it waits until no call may ask for its present one, ends, and starts again with
#                the new directory
#     names      a server answers to MODEL@VERSION and to nothing else. A call for weights that are gone gets a 404 and
#                never an answer of others, no cache outlives its weights, and the development mode of vLLM stays off
#     an end     of a server is repaired as with adapters: it starts again with the same weights
#
# The rollouts of a step have ended when the next version but one is published, so two versions are enough. The
# gateway knows what else may need a version: a release to production, or a rollout of another client. Training never
# takes production's server, and it waits for rollouts.


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

    # -- the choice of a server --------------------------------------------------------------------------------------

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
        ended = self._client.changes(cursor, ["rollout"], status=FINAL)
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

    # -- servers that run already ------------------------------------------------------------------------------------

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
        except NotFound:
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
