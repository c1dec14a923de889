"""The hooks of a runner: code of the user that is called around attempts, and at heartbeats for figures of its own.

A hook gets one object: the event, the worker's name, the rollout, the attempt, how it ended, its outcome, and every
reward that is stored. It is a copy: a hook changes nothing. One that fails, or takes longer than it may, is seen (a
line on stderr, the event `hook_error` of the attempt) and stops nothing.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from penstock.gateway.client.client import ClientError
from penstock.gateway.model.rollout import FINAL, MOST_FIGURES, WorkerUsage
from penstock.sidecar.run.attempt import AttemptRun, cancel_on, retry_until_answered
from penstock.sidecar.run.progress import AttemptResult
from penstock.sidecar.run.settings import HookEvent, RunnerSettings, UsageError
from penstock.sidecar.run.user_code import UserCode, UserCodeError, accepts_arguments

FIGURES_S = 1.0
"""The longest time that a heartbeat waits for figures; then it goes out with those of the last time; s. Of a short
lease it is a twelfth, as beats go out every third of it.
"""


class Hooks:
    """The hooks of one runner."""

    def __init__(self, settings: RunnerSettings, say: Callable[[str], None] = lambda _: None) -> None:
        """Raises `UsageError` when there is no such function or command. `say` shows a line to the user."""
        self._worker, self._timeout_s, self._say = settings.name, settings.hooks.timeout_s, say
        self._codes = [(event, UserCode(f"--hook {event}", text)) for event, text in settings.hooks.hooks]
        for event, code in self._codes:
            if code.function is not None and not accepts_arguments(code.function, 1):
                raise UsageError(f"--hook {event}: {code.text} cannot take one argument, the object of the event")
        self._wait_s = min(FIGURES_S, settings.lease_s / 12)
        self._events = {event for event, _ in self._codes}
        self._asking: asyncio.Task[None] | None = None
        self._figures: dict[str, float] = {}
        self._failure: str | None = None

    async def before(self, work: AttemptRun) -> None:
        """Call the hooks of the start of an attempt, until it is lost or returned."""
        first = work.claim.rollout.tries == 1
        for event in self._wanted("on_rollout_start" if first else None, "on_attempt_start"):
            _ = await cancel_on(work.over, self._call(event, work, {}))

    async def after(self, work: AttemptRun, result: AttemptResult) -> None:
        """Call the hooks of the end of an attempt, once the gateway knows it."""
        answer = work.answer
        over = answer is not None and answer.rollout.status in FINAL
        wanted = self._wanted("on_reward", "on_attempt_end", "on_rollout_end" if over else None)
        if not wanted:
            return
        more: dict[str, Any] = {"end": result.end, "rewards": []}
        if result.outcome is not None:
            more["outcome"] = result.outcome.model_dump(mode="json")
        if answer is not None:
            more["rollout"] = answer.rollout.model_dump(mode="json")
            more["attempt"] = answer.attempt.model_dump(mode="json")
            more["rewards"] = await self._rewards(work)
        for event in wanted:
            if event != "on_reward" or more["rewards"]:
                await self._call(event, work, more)

    async def _rewards(self, work: AttemptRun) -> list[dict[str, Any]] | None:
        """All rewards of an attempt; None when the gateway does not tell them in time."""
        with suppress(ClientError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                return [one.model_dump(mode="json") for one in await retry_until_answered(work.stored_rewards)]
        return None

    def _wanted(self, *events: HookEvent | None) -> list[HookEvent]:
        return [event for event in events if event is not None and event in self._events]

    async def _call(self, event: HookEvent, work: AttemptRun, more: dict[str, Any]) -> None:
        """Call the hooks of an event. `more`: what is known besides the claim."""
        claim = work.claim
        given: dict[str, Any] = {
            "event": event,
            "worker": self._worker,
            "rollout": claim.rollout.model_dump(mode="json"),
            "attempt": claim.attempt.model_dump(mode="json"),
            "end": None,
            "outcome": None,
            "rewards": [],
            **more,
        }
        for code in [code for known, code in self._codes if known == event]:
            try:
                _ = await self._answer(code, given)
            except Exception as e:  # the user's code may raise anything
                reason = _reason(e)
                self._say(f"{'/'.join(work.key)}: --hook {event}: {reason}")
                await work.add_event("hook_error", {"hook": event, "reason": reason[:2000]})

    async def _answer(self, code: UserCode, given: dict[str, Any]) -> Any:
        """The answer of one hook; raises `UserCodeError`, and whatever a function raises."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await (code.ask(given) if code.function is None else code.call(copy.deepcopy(given)))
        except TimeoutError:
            if limit.expired():
                raise UserCodeError(f"it took longer than {self._timeout_s:g} s") from None
            raise

    async def figures(self) -> dict[str, float]:
        """The newest figures of the hooks of `on_heartbeat`. A heartbeat never waits for a slow one."""
        if "on_heartbeat" not in self._events:
            return {}
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._measure())
        _ = await asyncio.wait({self._asking}, timeout=self._wait_s)
        return self._figures

    async def _measure(self) -> None:
        """Ask the hooks of `on_heartbeat`. After a failure there are no figures; a new reason of one is shown."""
        try:
            found: dict[str, float] = {}
            for code in [code for event, code in self._codes if event == "on_heartbeat"]:
                answer = await self._answer(code, {"event": "on_heartbeat", "worker": self._worker})
                found |= _checked({} if answer is None else answer)
            self._figures, self._failure = _checked(found), None
        except Exception as e:  # the user's code may raise anything
            self._figures = {}
            before, self._failure = self._failure, _reason(e)
            if self._failure != before:
                self._say(f"--hook on_heartbeat: {self._failure}")


def _checked(figures: Any) -> dict[str, float]:
    """Figures that the gateway takes; raises `UserCodeError` for others."""
    try:
        return WorkerUsage.model_validate({"own": figures}).own
    except ValidationError as e:
        wrong = e.errors()[0]
        place, value = ".".join(map(str, wrong["loc"][1:2])), str(wrong["input"])[:100]
        raise UserCodeError(
            f"{place or 'its answer'}: {value!r}: up to {MOST_FIGURES} finite numbers are wanted, in an object with "
            f"names of A-Z a-z 0-9 . _ / -, at most 64 characters, not beginning with a digit: {wrong['msg']}"
        ) from None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UserCodeError) else f"{type(error).__name__}: {error}"
