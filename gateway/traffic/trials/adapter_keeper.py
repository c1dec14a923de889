"""Makes servers hold the adapters that calls may ask for: loads missing ones, unloads those that nobody needs.

Needed are the stable versions, the candidates of live releases, and every version that an unfinished rollout is pinned
to; the tape is read for the last only when there is something to load or unload. An adapter that a check has loaded
stays while its release is checked. The keeper compares after every change of a release, and every half minute, because
a server that was restarted has lost its adapters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

import aiohttp

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.release import Release
from penstock.gateway.model.resource import ModelVersion, Residency, Resource, StableVersion
from penstock.gateway.releases.adapter_server import AdapterChanges, ServingError, VllmClient, settle
from penstock.gateway.releases.reader import ReleaseReader, pinned_versions
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.traffic.upstreams.pool import make_transport

EVERY_S: Final = 30.0
_log = logging.getLogger("penstock.releases")


class AdapterKeeper:
    """The adapters of all servers. `start` before use."""

    def __init__(
        self,
        tape: Store,
        upstreams: Mapping[str, UpstreamSettings],
        session: Callable[[], aiohttp.ClientSession],
        now_ns: Callable[[], int],
    ) -> None:
        """`upstreams` by name; `session` for requests to them."""
        self._tape = tape
        self._reader = ReleaseReader(tape)
        self._upstreams = upstreams
        self._session = session
        self._now_ns = now_ns
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: dict[str, str] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._stopped = False

    async def start(self) -> None:
        """Start the task that keeps the adapters."""
        self._task = asyncio.ensure_future(self._run())

    def changed(self) -> None:
        """Called when a resource or a release has changed: compare the servers again."""
        self._changed.set()

    def repair(self) -> asyncio.Future[None]:
        """Called when a server does not know a version that it should hold. Return a future that is done when all
        servers have been compared once more, or at once where no task does that here any more."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._stopped:
            done.set_result(None)
        else:
            self._waiting.append(done)
            self._changed.set()
        return done

    async def stop(self) -> None:
        """Stop the task; servers stay as they are, and waiting calls go on."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        _let_go(self._waiting)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            waiting, self._waiting = self._waiting, []
            try:
                await self.settle(lost=bool(waiting))
            except TapeError as error:
                _log.error("adapters are not looked after: %s", error)
            except Exception:
                _log.exception("adapters are not looked after for now")
            finally:
                _let_go(waiting)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._changed.wait()

    async def settle(self, lost: bool = False) -> None:
        """Bring every server to its adapters once. `lost`: a call was refused, so versions that rollouts are pinned to
        may be missing."""
        known = await asyncio.to_thread(lambda: _known(self._reader.resources()))
        for name, versions in known.items():
            if name in self._upstreams and any(one.adapter is not None for one, _ in versions.values()):
                await self._settle(self._upstreams[name], versions, lost)

    def _read(self) -> tuple[set[str], set[str]]:
        """Return NAME@VERSION of the wanted versions, and of those that a check may have loaded."""
        releases = self._reader.releases()
        drafts = (one for one in releases if one.stage == "draft" or one.held_in == "draft")
        checked = {f"{name}@{version}" for one in drafts for name, version in one.arm_versions("candidate").items()}
        return _wanted(self._reader.resources(), releases), checked

    async def _settle(
        self, upstream: UpstreamSettings, versions: Mapping[str, tuple[ModelVersion, str]], lost: bool
    ) -> None:
        residency = Residency({served: version for served, (version, _) in versions.items()})
        engine = VllmClient(self._session(), upstream.base_url, upstream.key(), make_transport(upstream).options)
        try:
            # The tape is read after the server: then a loaded adapter of a check belongs to a release on the tape.
            present = await engine.adapters()
            wanted, checked = await asyncio.to_thread(self._read)
            names = [served for served, (_, place) in versions.items() if place in wanted]
            names += [
                served for served, (_, place) in versions.items() if place in checked - wanted and served in present
            ]
            plan = residency.plan(present, names)
            if lost or plan.unload or plan.load or self._said.get(upstream.name):
                # A server that has lost its adapters has lost those of pinned rollouts too, and may have refused some.
                held = await asyncio.to_thread(pinned_versions, self._tape, self._now_ns())
                names += [served for served, (_, place) in versions.items() if place in held and served not in names]
            if sum(versions[name][0].adapter is not None for name in names) > 1:
                residency = replace(residency, slots=await engine.slots())
            done = await settle(engine, residency, names, present)
        except ServingError as error:
            self._say(upstream.name, str(error))
            return
        if done.done:
            _log.info("upstream %r: loaded or unloaded %s", upstream.name, ", ".join(done.done))
        self._say(upstream.name, _trouble(done))

    def _say(self, upstream: str, trouble: str) -> None:
        """Log a message, once each time that it changes."""
        if trouble != self._said.get(upstream, ""):
            self._said[upstream] = trouble
            if trouble:
                _log.error("upstream %r: %s", upstream, trouble)


def _let_go(waiting: Iterable[asyncio.Future[None]]) -> None:
    for done in waiting:
        # The worker that waits may be gone.
        if not done.done():
            done.set_result(None)


def _known(
    resources: Mapping[str, tuple[StableVersion, list[Resource]]],
) -> dict[str, dict[str, tuple[ModelVersion, str]]]:
    """Return by upstream, and by the name under which it serves a version, the version's content and its
    NAME@VERSION."""
    found: dict[str, dict[str, tuple[ModelVersion, str]]] = {}
    for _, versions in resources.values():
        for version in versions:
            content = version.read()
            if isinstance(content, ModelVersion):
                served = content.name(version.name, version.version)
                for upstream in content.upstreams:
                    found.setdefault(upstream, {})[served] = content, version.qualified_name
    return found


def _wanted(resources: Mapping[str, tuple[StableVersion, list[Resource]]], releases: Iterable[Release]) -> set[str]:
    """Return NAME@VERSION of all that new rollouts may be given."""
    stable = {
        f"{name}@{version}"
        for name, (one, _) in resources.items()
        for version in (one.version, *(rule.version for rule in one.rules))
    }
    # A draft's check finds out whether its candidate can be loaded at all.
    live = [release for release in releases if release.live and release.stage != "draft"]
    return stable.union(*(release.qualified_versions for release in live))


def _trouble(done: AdapterChanges) -> str:
    return "; ".join([*done.plan.problems.values(), *map(str, done.failed.values()), *done.plan.warnings])
