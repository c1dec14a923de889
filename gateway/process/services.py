"""The services of a gateway: they start in their order and end in the reverse one. And the end of what runs beside
them: waits with a limit, and calls that have not ended by themselves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from penstock.gateway.config import (
    ConfigError,
    GatewayConfig,
    RouteSettings,
    UpstreamSettings,
    admin_key,
    audit_key,
    read_key,
)
from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.toml import pluralized
from penstock.gateway.process.other_writers import ReleaseChangeFollower
from penstock.gateway.releases.operations import LiveReleases
from penstock.gateway.tape.store import MAP_BYTES, MEMORY_BYTES, Store
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.budgets.operations import Limit
from penstock.gateway.traffic.calls.admission import Auth, Holder
from penstock.gateway.traffic.proxy.proxy_context import ActiveCall
from penstock.gateway.work.queue import MemoryQueue, record_sign_of_life

RETRY_S: Final = 1.0
"""Seconds until a service that could not start is started again."""
_NAMED: Final = 5
"""Rollouts that are named in the log at most."""
_log = logging.getLogger("penstock.app")


class Service(Protocol):
    """A part of a gateway that works by itself."""

    async def start(self) -> None:
        """Begin. Raises `TapeError` where the tape does not let it."""
        ...

    async def stop(self) -> None:
        """End what has begun, and leave the rest to the next process."""
        ...


class ServiceGroup:
    """Services that start and stop together. Each may need those before it: it starts after them, and ends before
    them."""

    def __init__(self, services: Mapping[str, Service], patient: bool = False) -> None:
        """`services`: by their names, which the log tells. `patient`: one that a full tape does not let start is
        started again until it does; otherwise its `TapeError` is raised."""
        self._services, self._patient = dict(services), patient
        self.begun = False
        """True from `start` to `stop`."""
        self._retrying: asyncio.Future[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._said = dict[str, str]()
        """What was logged of services that could not start."""

    async def start(self) -> None:
        """Start all that can start. If one fails, those before it are stopped."""
        self.begun, self._ending = True, None
        try:
            waiting = await self._start(self._services)
        except BaseException:
            await self.stop()
            raise
        if waiting:
            self._retrying = asyncio.ensure_future(self._start_later(waiting))

    async def _start(self, services: Mapping[str, Service]) -> Mapping[str, Service]:
        """Start services and return those that the tape did not let start."""
        left = dict[str, Service]()
        for name, service in services.items():
            try:
                await service.start()
            except TapeError as error:
                if not self._patient:
                    raise
                # The recorder logs once that it cannot write the tape, but not what cannot be read.
                level = logging.ERROR if isinstance(error, DamagedRecordError) else logging.DEBUG
                if self._said.get(name) != str(error):
                    _log.log(level, "a part of the gateway (%s) waits for the tape: %s", name, error)
                self._said[name], left[name] = str(error), service
            except Exception:
                if self._retrying is None:
                    raise
                _log.exception("a part of the gateway (%s) does not start", name)
                left[name] = service
        return left

    async def _start_later(self, waiting: Mapping[str, Service]) -> None:
        """Calls are served meanwhile: a process that has handed over to this one does not serve any more."""
        while waiting:
            await asyncio.sleep(RETRY_S)
            waiting = await self._start(waiting)
        _log.info("all that only one process may do has begun")

    async def stop(self) -> None:
        """Stop them in the reverse order, once, also if the wait for it is cancelled: a second call waits for the same
        end."""
        if self.begun:
            self.begun = False
            self._ending = asyncio.ensure_future(self._end())
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)
        await stop_all({name: service.stop for name, service in reversed(self._services.items())})


async def stop_all(parts: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
    """End one part after the other. If one fails, the others still end, and the queue still reaches the tape."""
    for name, end in parts.items():
        try:
            await end()
        except Exception:
            _log.exception("a part of the gateway (%s) has not ended as it should", name)


async def wait_for_any(events: Sequence[asyncio.Event], seconds: float | None = None) -> None:
    """Wait until one of these events is set, or until `seconds` have passed."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


def cut_off(running: Iterable[ActiveCall]) -> None:
    """End calls that have not ended by themselves, and log their rollouts."""
    left = list(running)
    for call in left:
        call.give_up()
    if left:
        rollouts = sorted({call.rollout for call in left})
        named = ", ".join(rollouts[:_NAMED])
        if len(rollouts) > _NAMED:
            named += f" and {len(rollouts) - _NAMED} more"
        calls = pluralized(len(left), "call")
        _log.warning("cut off %s that had not ended (limits.drain_seconds): of rollout %s", calls, named)


# Opens the tape and the access control of a gateway before it serves.


def open_store(
    path: Path,
    map_bytes: int = MAP_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    secrets: Secrets = NO_SECRETS,
    lock: int | None = None,
) -> Store:
    """Return a tape for writing, with the followers of the queue and of releases. `lock`: the writer's lock, if another
    process hands it over."""
    return Store(
        path,
        followers=(MemoryQueue(), LiveReleases(audit_key()), ReleaseChangeFollower()),
        woken=record_sign_of_life,
        map_bytes=map_bytes,
        memory_bytes=memory_bytes,
        secrets=secrets,
        lock=lock,
    )


def make_auth(store: Store, config: GatewayConfig) -> Auth:
    """Return the access control; raises `ConfigError`, and closes the tape then."""
    named = [(one.sha256, Holder(one.name, one.role)) for one in config.key if one.role != "call"]
    callers = [(one.sha256, one.name) for one in config.key if one.role == "call"]
    try:
        return Auth(admin_key(), store.secret(), read_key(), named, callers, config.local_names())
    except ValueError as error:
        store.close()
        raise ConfigError(str(error)) from None


# The state behind the health endpoints.


@dataclass(slots=True)
class ProcessHealth:
    """The state that the health endpoints report."""

    recorder: Recorder
    started: bool = False
    draining: bool = False

    @property
    def not_ready(self) -> str | None:
        """The reason why the gateway takes no calls or cannot record them; None while it does both."""
        if self.draining:
            return "the gateway is draining: it stops soon"
        if not self.started:
            return "the gateway is not ready yet: it is starting"
        failing = self.recorder.failing
        return None if failing is None else f"recording has stopped: {failing}"


# Warnings, when a gateway starts, about settings that are allowed and hardly ever intended.


def warn(config: GatewayConfig, prices: Prices) -> None:
    """Log a warning for each such setting."""
    old = prices.staleness_warning(time.time_ns())
    for problem in (*([old] if old else []), *_unpriced(config, prices), *_keys_of_others(config)):
        _log.warning("%s", problem)


def _unpriced(config: GatewayConfig, prices: Prices) -> Iterator[str]:
    """Yield models of routes that a budget in money refuses, because they have no price."""
    now = time.time_ns()
    money = [Limit(one) for one in config.budget if one.unit == "usd" and one.refuses_unknown]
    # A pattern names no model.
    routes = [route for route in config.route if "*" not in route.model and "?" not in route.model]
    for route in routes if money else ():
        names = [route.model, *_aliases(route)]
        if not any(prices.price(name, now) for name in names):
            for limit in money:
                if limit.is_about(route.model):
                    yield (
                        f"budget {limit.budget.name!r} refuses calls for model {route.model!r} of [[route]], which has "
                        'no price: add one to the file that `prices` names, or set unknown = "pass"'
                    )


def _aliases(route: RouteSettings) -> list[str]:
    if route.alias is None:
        return []
    return list(route.alias.values()) if isinstance(route.alias, dict) else [route.alias]


def _keys_of_others(config: GatewayConfig) -> Iterator[str]:
    """Yield upstreams that would get an agent's key for another upstream of their route, at another owner's site."""
    known = {one.name: one for one in config.upstreams()}
    told = set[str]()
    for route in config.route:
        keyless = [known[name] for name in route.upstream if not known[name].has_key]
        for other in keyless[1:]:
            if _site(other) not in (None, _site(keyless[0])) and other.name not in told:
                told.add(other.name)
                yield (
                    f"upstream {other.name!r} has no key_env: it gets the key that an agent brings for "
                    f"{keyless[0].name!r}, which comes first for model {route.model!r}; give it a key of its own"
                )


def _site(upstream: UpstreamSettings) -> str | None:
    """Return the last two names of a public host; None for a host of a private network."""
    host = urlsplit(upstream.base_url).hostname or ""
    try:
        return None if ipaddress.ip_address(host).is_private else host
    except ValueError:
        names = host.split(".")
        return None if len(names) == 1 or names[-1] in ("local", "internal", "test") else ".".join(names[-2:])
