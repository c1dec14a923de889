"""Agents on a Ray cluster: one actor for each worker, each with the usual runner and one agent at a time.

Ray places the actors, spreads them over the nodes and restarts one elsewhere when its node is gone; the attempt that
was lost with it returns to the queue when its lease is over. The queue is the gateway's: actors claim from it by
themselves. Only results go through the driver, which shows them and passes signals on. The driver also decides when
agents cannot work (`runner`), because one actor alone would see too few failures.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray as _ray
from ray.exceptions import RayError

from penstock.gateway.client.client import Client
from penstock.sidecar.run.attempt import hand_back
from penstock.sidecar.run.engines.local import LocalEngine
from penstock.sidecar.run.progress import AttemptResult, AttemptTally, LineProgress, progress
from penstock.sidecar.run.runner import FailureBreaker, Runner
from penstock.sidecar.run.settings import RunnerError, RunnerSettings, UsageError

ray: Any = _ray
"""As `Any`, because its annotations are too incomplete to type-check against."""
LOOK_S, SILENCE_S = 0.5, 5.0
"""Time between two looks at the actors' results; time after which an actor that does not answer counts as idle; s."""
CONNECT_S = 10.0
"""The longest time that a cluster may take to accept a connection; s."""
OPTIONS: dict[str, Any] = {
    "num_cpus": 1,
    "max_concurrency": 4,  # the runner takes one thread; orders and questions for results take others
    "max_restarts": -1,
    "max_task_retries": -1,
    "scheduling_strategy": "SPREAD",
}


class ResultCollector(LineProgress):
    """Collects results for the driver; messages go to the actor's own log."""

    def __init__(self, echo: bool) -> None:
        super().__init__(echo)
        self.results: list[AttemptResult] = []

    def on_end(self, result: AttemptResult, tally: AttemptTally) -> None:
        """Keep the result until the driver asks for it."""
        self.results.append(result)


class RunnerActor:
    """A worker: an actor that runs a runner."""

    def __init__(self, settings: RunnerSettings, home: str | None) -> None:
        if home is not None and Path(home).is_dir():
            os.chdir(home)
        self._settings = settings
        self._shown = ResultCollector(settings.echo)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: Runner | None = None
        self._told: str | None = None

    def run(self) -> None:
        """Run attempts until there are no more."""

        # Not an async method: with one, Ray would run all methods of the actor in an event loop of its own.
        async def work() -> None:
            async with LocalEngine(self._settings) as engine:
                with self._lock:
                    self._loop = asyncio.get_running_loop()
                    self._runner = runner = Runner(self._settings, engine, self._shown)
                    if self._told is not None:
                        getattr(runner, self._told)()
                _ = await runner.run()

        asyncio.run(work())

    def tell(self, order: str) -> None:
        """Pass the order `stop` or `abandon` to the runner, also before it has started."""
        with self._lock:
            self._told = order
            if self._loop is not None and self._loop.is_running():
                _ = self._loop.call_soon_threadsafe(getattr(self._runner, order))

    def results(self) -> list[AttemptResult]:
        """The results since the last call."""
        found, self._shown.results = self._shown.results, []
        return found


class ActorGroup:
    """The actors, seen from the driver."""

    def __init__(self, settings: RunnerSettings, actor: Any, options: dict[str, Any]) -> None:
        """`actor`: the class that Ray makes of `RunnerActor` with these options."""
        # Actors must stay in a working directory that Ray itself brings to the nodes.
        home = None if "working_dir" in options.get("runtime_env", {}) else str(Path.cwd())
        shares = _shares(settings)
        self.slots: list[Any] = [actor.remote(share, home) for share in shares]
        self.runs: dict[Any, Any] = {slot.run.remote(): slot for slot in self.slots}
        self._asked: dict[Any, tuple[Any, float]] = {}
        self._ended: list[Any] = []

    def is_running(self) -> bool:
        """False when there is no more work for any actor. Raises `RunnerError` with the error of a runner."""
        done, _ = ray.wait(list(self.runs), num_returns=len(self.runs), timeout=0)
        for run in done:
            self._ended.append(self.runs.pop(run))
            try:
                ray.get(run)
            except RayError as e:
                raise RunnerError(f"a worker on Ray failed: {_cause(e)}") from None
        if self._ended:
            # One actor found no more work: those that Ray has not placed, or not placed again, need not be waited for.
            silent = {slot for slot, at in self._asked.values() if time.monotonic() - at > SILENCE_S}
            self.runs = {run: slot for run, slot in self.runs.items() if slot not in silent}
        return bool(self.runs)

    def results(self) -> list[AttemptResult]:
        """The results since the last call. An actor that is not placed yet does not answer, and is asked again
        later.
        """
        for slot in set(self.slots) - {slot for slot, _ in self._asked.values()}:
            self._asked[slot.results.remote()] = slot, time.monotonic()
        return self._answers(list(self._asked), LOOK_S)

    def last_results(self) -> list[AttemptResult]:
        """The remaining results of actors that have ended."""
        under_way = [asked for asked, (slot, _) in self._asked.items() if slot in self._ended]
        return self._answers([*under_way, *(slot.results.remote() for slot in self._ended)], SILENCE_S)

    def _answers(self, asked: list[Any], patience_s: float) -> list[AttemptResult]:
        found: list[AttemptResult] = []
        done: list[Any] = ray.wait(asked, num_returns=len(asked), timeout=patience_s)[0] if asked else []
        for answered in done:
            _ = self._asked.pop(answered, None)
            with suppress(RayError):
                found += ray.get(answered)
        return found

    def tell(self, order: str) -> None:
        """Pass the order `stop` or `abandon` to all actors."""
        for slot in self.slots:
            slot.tell.remote(order)


def run(settings: RunnerSettings, options: str | None) -> AttemptTally:
    """Run attempts on a cluster until there are no more: on that of RAY_ADDRESS, or the one that Ray finds. Returns the
    tally.
    """
    given, address = _options(options), os.environ.get("RAY_ADDRESS")
    actor = _actor(given)
    _check_address(address)
    _ = os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=settings.echo, logging_level=logging.WARNING, namespace="penstock")
    except Exception as e:  # Ray raises a bare Exception when a cluster that it starts is not ready in time
        raise RunnerError(f"cannot reach the Ray cluster at {address or 'this machine'}: {e}") from None
    try:
        with progress(settings.echo, settings.most) as shown:
            return _drive(ActorGroup(settings, actor, given), settings, shown)
    finally:
        ray.shutdown()


def _actor(options: dict[str, Any]) -> Any:
    """The class of the actors. Ray rejects wrong options here, before there is an actor: raises `UsageError`."""
    try:
        return ray.remote(**(OPTIONS | options))(RunnerActor)
    except (TypeError, ValueError) as e:
        raise UsageError(f"--ray-options: {' '.join(str(e).split())}") from None


def _check_address(address: str | None) -> None:
    """Raise `RunnerError` at once when nothing answers at HOST:PORT; Ray itself would try for minutes, and write the
    reason to its own log.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError):
        raise RunnerError(
            f"cannot reach the Ray cluster at {address}: nothing answers there; correct "
            "RAY_ADDRESS, or start it with `ray start --head`"
        ) from None


def _drive(fleet: ActorGroup, settings: RunnerSettings, shown: LineProgress) -> AttemptTally:
    tally, orders, breaker = AttemptTally(), ["stop", "abandon"], FailureBreaker(settings.keep_going)

    def heed(*_: object) -> None:
        order = orders.pop(0) if len(orders) > 1 else orders[0]
        shown.say("taking no more work; once more kills the agents" if order == "stop" else "killing the agents")
        fleet.tell(order)

    before = {number: signal.signal(number, heed) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while fleet.is_running():
            _mind(fleet, _tell(fleet.results(), tally, shown), breaker, settings, tally, shown)
            time.sleep(LOOK_S)
        _mind(fleet, _tell(fleet.last_results(), tally, shown), breaker, settings, tally, shown)
    finally:
        for number, handler in before.items():
            _ = signal.signal(number, handler)
    return tally


def _tell(results: list[AttemptResult], tally: AttemptTally, shown: LineProgress) -> list[AttemptResult]:
    for result in results:
        tally.add(result)
        shown.on_end(result, tally)
    return results


def _mind(
    fleet: ActorGroup,
    results: list[AttemptResult],
    breaker: FailureBreaker,
    settings: RunnerSettings,
    tally: AttemptTally,
    shown: LineProgress,
) -> None:
    """Stop the actors when agents cannot work, and hand back attempts that do not count as tries."""
    found = [each for result in results for each in breaker.record(result)]
    if breaker.tripped is not None and tally.stopped is None:
        fleet.tell("stop")
        tally.stopped = breaker.explanation()
        shown.say(tally.stopped)
    if found:
        for result in asyncio.run(_hand_back(settings, found, shown)):
            tally.hand_back(result)


async def _hand_back(
    settings: RunnerSettings, results: list[AttemptResult], shown: LineProgress
) -> list[AttemptResult]:
    """Hand attempts back; return those that the gateway accepted."""
    async with Client(settings.gateway, settings.key) as client:
        return [result for result in results if await hand_back(client, result, shown.report_away)]


def _shares(settings: RunnerSettings) -> list[RunnerSettings]:
    """The settings of each actor: one worker, a name of its own, and its share of the attempts."""
    count = settings.workers if settings.most is None else min(settings.workers, settings.most)
    shares = [
        None if settings.most is None else settings.most // count + (n < settings.most % count) for n in range(count)
    ]
    alone = replace(settings, workers=1, keep_going=True)  # the driver has the breaker for all of them
    return [replace(alone, name=f"{settings.name}-{n}", most=most) for n, most in enumerate(shares, 1)]


def _options(text: str | None) -> dict[str, Any]:
    try:
        given = json.loads(text or "{}")
    except ValueError as e:
        raise UsageError(f"--ray-options: {text!r} is not JSON: {e}") from None
    if not isinstance(given, dict):
        raise UsageError(f"--ray-options: {text!r} is not a JSON object")
    return cast("dict[str, Any]", given)


def _cause(error: RayError) -> str:
    cause = getattr(error, "cause", None)
    said = str(cause or error).strip() or type(cause or error).__name__
    return said.splitlines()[-1]
