"""One attempt, from its claim to its end.

    the agent runs      its output goes to the journal; it is killed on timeout, when the attempt is lost or given back
    it is judged        if it succeeded, by a transcript of every call that has ended
    it is finished      end, outcome, last events and rewards in one request, sent until the gateway answers it

An attempt is *lost* when the gateway says that this runner does not hold it any more, or when the gateway has been
unreachable for so long that it may have given the attempt to another worker. Then the agent is killed before the lease
is over, and nothing is finished. An attempt is *returned* when the runner has to leave: the agent is killed, and the
gateway gives the rollout to another worker. An attempt that failed through no fault of the agent is handed back
(`result`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, TypeVar

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.queue import Claim, Event, FinishAnswer, FinishRequest, Scalar
from penstock.gateway.model.rollout import Judgement, Outcome
from penstock.gateway.model.span import Span
from penstock.gateway.model.times import Backoff
from penstock.sidecar.run.agent.environment import TaskTemplateError
from penstock.sidecar.run.agent.output import AgentOutput, Stream
from penstock.sidecar.run.agent.process import AgentHandle, ExitStatus
from penstock.sidecar.run.engines.local import AgentEngine
from penstock.sidecar.run.journal import Journal
from penstock.sidecar.run.progress import LineProgress
from penstock.sidecar.run.faults import find_fault
from penstock.sidecar.run.result import AttemptResult
from penstock.sidecar.run.reward_judge import RewardError, RewardJudge, parse_printed_reward
from penstock.sidecar.run.settings import RunnerSettings

PAUSES = Backoff(0.1, 2.0)
MOST_FAILURES = 8
"""The number of failures (such as 500) of a reachable gateway after which it is not asked again."""
AWAY = frozenset({None, 502, 503, 504})
T = TypeVar("T")
StopCause = Literal["timeout", "lost", "returned"]
CONFLICT = 409
LAST_EVENTS_S = 5.0
"""The longest time that a cancelled attempt may take to send its remaining output; s."""


class AttemptRun:
    """An attempt that this runner holds."""

    def __init__(
        self,
        claim: Claim,
        settings: RunnerSettings,
        client: Client,
        engine: AgentEngine,
        judge: RewardJudge,
        progress: LineProgress,
        excused: bool = True,
    ) -> None:
        """`excused`: an end that is the fault of the surroundings (the gateway, the engine) does not count as a try."""
        self.claim = claim
        self._excused, self._gateway_away = excused and settings.release is None, False
        self.agent: AgentHandle | None = None
        self._settings, self._client, self._engine = settings, client, engine
        self._judge, self._progress = judge, progress
        self._journal = Journal(self._send, settings.keep_output)
        self._outputs = AgentOutput(self._line)
        self._why: StopCause | None = None
        self._fault: str | None = None
        """The fault of the surroundings, in words; None when the agent itself failed, or when nothing is known yet."""
        self._reason: str | None = None
        self._over, self._finishing = asyncio.Event(), False
        self._lease: asyncio.TimerHandle | None = None
        self._wants_events = True
        self.renew(settings.lease_s)

    @property
    def key(self) -> tuple[str, str]:
        """Rollout id and attempt id."""
        return self.claim.rollout.id, self.claim.attempt.id

    # -- signals from outside ------------------------------------------------------------------------------------------

    def renew(self, seconds: float) -> None:
        """Start the lease again for so many seconds. In its last sixth the agent gets TERM; at its end the agent is
        killed.
        """
        if self._lease is not None:
            self._lease.cancel()
        last = seconds / 6
        self._lease = asyncio.get_running_loop().call_later(seconds - last, self._lapse, last)

    def _lapse(self, left: float) -> None:
        if self.agent is not None:
            _ = asyncio.get_running_loop().call_later(left, self.agent.kill)
            self.lose("the gateway was away for longer than the lease", wants_events=False)

    def lose(self, reason: str, wants_events: bool) -> None:
        """Mark the attempt as held by this runner no more, and end the agent."""
        if not self._finishing:  # while it finishes, the gateway's answer decides
            self._wants_events = wants_events
            self._end("lost", reason)

    def time_out(self, reason: str) -> None:
        """End an agent that has run for longer than it may."""
        if not self._finishing:
            self._end("timeout", reason)

    def give_back(self) -> None:
        """Return the attempt because the runner has to leave: another worker will take it."""
        self._wants_events = False
        self._end("returned", "the runner had to leave")

    def _end(self, why: StopCause, reason: str) -> None:
        if self._why in (None, "timeout"):
            self._why, self._reason = why, reason
        if why != "timeout":
            self._over.set()
        if self.agent is not None:
            self.agent.terminate()

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(self) -> AttemptResult:
        """Run the attempt. On return the gateway knows its end, unless the attempt was lost or returned."""
        began, sender = time.monotonic(), asyncio.ensure_future(self._journal.run())
        try:
            ending = await self._run_agent()
            outcome = self._outcome(ending)
            self._journal.event("exit", _exit(ending))
            rewards = await cancel_on(self._over, self._rewards(outcome))
            self._journal.close()
            attempt = None if rewards is None else await cancel_on(self._over, self._finish(outcome, rewards, sender))
            if attempt is None and self._wants_events:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_EVENTS_S):
                        _ = await self._send(await self._last_events(sender))
            return self._result(attempt, outcome, time.monotonic() - began)
        finally:
            _ = sender.cancel()
            if self._lease is not None:
                self._lease.cancel()

    async def _run_agent(self) -> ExitStatus:
        try:
            async with self._engine.running(self.claim, self._outputs.feed) as agent:
                self.agent = agent
                if self._over.is_set():
                    agent.terminate()
                return await self._timed(agent)
        except (TaskTemplateError, OSError, ValueError) as e:
            return ExitStatus(error=str(e))
        finally:
            self.agent = None
            self._journal.release()

    async def _timed(self, agent: AgentHandle) -> ExitStatus:
        limit = self._limit()
        if limit is None:
            return await agent.wait()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit, self.time_out, f"the agent ran for longer than {limit:g} s")
        try:
            return await agent.wait()
        finally:
            timer.cancel()

    def _limit(self) -> float | None:
        limits = (self._settings.agents.timeout_s, self.claim.rollout.config.timeout_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def _outcome(self, ending: ExitStatus) -> Outcome:
        made = Outcome(exit_code=ending.exit_code, signal=ending.signal, duration_ns=ending.duration_ns)
        made.output = self._outputs.result
        if self._why is not None:
            made.reason = self._reason
        elif ending.error is not None:
            made.reason = ending.error[:2000]
        elif ending.exit_code != 0:
            how = ending.signal or f"exit code {ending.exit_code}"
            made.reason = f"{how}: {self._outputs.last_words}" if self._outputs.last_words else how
        return made

    def _status(self, outcome: Outcome) -> Literal["succeeded", "failed", "timeout", "environment"]:
        if self._fault is not None:
            return "environment"
        if self._why == "timeout":
            return "timeout"
        return "succeeded" if outcome.exit_code == 0 else "failed"

    # -- its rewards ---------------------------------------------------------------------------------------------------

    async def _rewards(self, outcome: Outcome) -> list[Judgement]:
        """The rewards that are stored with the end. A judge that fails never costs the attempt."""
        found: list[Judgement] = []
        if self._settings.release is not None:
            # The release reports the result of a rehearsal.
            return found
        try:
            found += parse_printed_reward(outcome.output, self._judge.configured)
            if self._judge.configured and self._status(outcome) == "succeeded":
                transcript = None
                if self._judge.reads_calls:
                    transcript = await retry_until_answered(lambda: self._client.transcript(*self.key, outcome))
                found += await self._judge.judge(self.claim.rollout.input, outcome.output, transcript)
        except RewardError as e:
            self._no_reward(str(e))
        except Exception as e:
            self._no_reward(f"{type(e).__name__}: {e}")
        return found

    def _no_reward(self, reason: str) -> None:
        self._journal.event("reward_error", {"reason": reason[:2000]})
        self._progress.say(f"{'/'.join(self.key)}: no reward: {reason}")

    # -- the report to the gateway -------------------------------------------------------------------------------------

    async def _finish(
        self, outcome: Outcome, rewards: list[Judgement], sender: asyncio.Future[None]
    ) -> FinishAnswer | None:
        self._finishing = True
        events = await self._last_events(sender)
        try:
            if self._excused and self._status(outcome) == "failed":
                # Once the events are stored, every call that ended before them is stored too.
                _, events = await self._send(events), list[Event]()
                await self._look_around(outcome)
            given = [] if self._fault is not None else rewards
            asked = FinishRequest(
                worker=self._settings.name,
                status=self._status(outcome),
                outcome=outcome,
                events=events,
                rewards=given,
            )
            return await retry_until_answered(lambda: self._client.finish(*self.key, asked), self._away)
        except ClientError as e:
            self._why, self._reason = "lost", str(e)
            if e.status == CONFLICT:
                # The gateway accepts events also for an attempt that has already ended in another way.
                _ = await self._send(events)
            return None

    async def _last_events(self, sender: asyncio.Future[None]) -> list[Event]:
        await sender
        return await self._journal.last()

    async def _look_around(self, outcome: Outcome) -> None:
        """Find out whether the surroundings caused the failure."""
        self._fault = find_fault(await retry_until_answered(self._calls, self._away), self._gateway_away)
        if self._fault is not None:
            outcome.reason = f"{self._fault}: {outcome.reason or 'the agent failed'}"[:2000]

    async def _calls(self) -> list[Span]:
        return [span async for span in self._client.spans(*self.key, filter="kind:llm")]

    def _away(self, reason: str) -> None:
        self._gateway_away = True
        self._progress.report_away(reason)

    async def _send(self, events: list[Event]) -> bool:
        try:
            if events:
                _ = await retry_until_answered(lambda: self._client.add_events(*self.key, events), self._away)
        except ClientError:
            return False
        return True

    def _line(self, stream: Stream, text: str) -> None:
        self._journal.line(stream, text)
        self._progress.line(self.claim, stream, text)

    def _result(self, answer: FinishAnswer | None, outcome: Outcome, seconds: float) -> AttemptResult:
        key, lines = (*self.key, self._settings.name), self._outputs.last_lines
        if answer is None:
            why = self._why if self._why in ("lost", "returned") else "lost"
            return AttemptResult(*key, why, seconds, None, self._reason, last_lines=lines)
        known = answer.attempt
        return AttemptResult(
            *key, self._status(outcome), seconds, known.reward, outcome.reason, outcome, known.totals.calls, lines
        )


async def hand_back(client: Client, result: AttemptResult, away: Callable[[str], None]) -> bool:
    """Report a failed attempt as no try; False when the gateway refuses."""
    asked = FinishRequest(worker=result.worker, status="environment", outcome=result.outcome or Outcome())
    try:
        _ = await retry_until_answered(lambda: client.finish(result.rollout, result.attempt, asked), away)
    except ClientError:
        return False
    return True


def _exit(ending: ExitStatus) -> dict[str, Scalar]:
    """Attributes of the event `exit`: how the agent ended."""
    said: dict[str, Scalar] = {"exit_code": ending.exit_code, "signal": ending.signal, "error": ending.error}
    said["duration_s"] = ending.duration_ns / 1e9
    return {name: part for name, part in said.items() if part is not None}


async def retry_until_answered(ask: Callable[[], Awaitable[T]], away: Callable[[str], None] = lambda _: None) -> T:
    """Ask until the gateway answers, however long it is away: its restart must not cost an agent's work. Raise the
    `ClientError` of a refusal. The request must be safe to send twice. `away` is called with the reason of every
    failure.
    """
    tries = failures = 0
    while True:
        try:
            return await ask()
        except ClientError as e:
            failures += e.status not in AWAY
            if not e.temporary or failures >= MOST_FAILURES:
                raise
            away(str(e))
        tries += 1
        await asyncio.sleep(PAUSES.after(tries))


async def cancel_on(event: asyncio.Event, step: Coroutine[Any, Any, T]) -> T | None:
    """The step's result; None when the event comes first: then the step is cancelled, or not even begun."""
    if event.is_set():
        step.close()
        return None
    task, waiting = asyncio.ensure_future(step), asyncio.ensure_future(event.wait())
    try:
        _ = await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        _ = waiting.cancel()
        _ = task.cancel()
