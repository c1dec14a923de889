"""One attempt, from its claim to its end.

    the agent runs      its output goes to the journal; it is killed on timeout, when the attempt is lost or given back
    it is judged        if it succeeded, by a transcript of every call that has ended
    it is finished      end, outcome, last events and rewards in one request, sent until the gateway answers it

An attempt is *lost* when the gateway says that this runner does not hold it any more, or when the gateway has been
unreachable for so long that it may have given the attempt to another worker. Then the agent is killed before the lease
is over, and nothing is finished. An attempt is *returned* when the runner has to leave: the agent is killed, and the
gateway gives the rollout to another worker. An attempt that failed through no fault of the agent is handed back
(`find_fault`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import Conflict
from penstock.gateway.model.queue import Claim, Event, FinishAnswer, FinishRequest, Scalar
from penstock.gateway.model.rollout import Judgement, Outcome, Reward
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.times import Backoff
from penstock.sidecar.run.agent.environment import TaskTemplateError
from penstock.sidecar.run.agent.process import AgentHandle, AgentOutput, ExitStatus, Stream
from penstock.sidecar.run.engines.local import AgentEngine
from penstock.sidecar.run.progress import AttemptResult, LineProgress
from penstock.sidecar.run.reward_judge import RewardJudge, parse_printed_reward
from penstock.sidecar.run.settings import RunnerSettings
from penstock.sidecar.run.user_code import UserCodeError

PAUSES = Backoff(0.1, 2.0)
MOST_FAILURES = 8
"""The number of failures (such as 500) of a reachable gateway after which it is not asked again."""
AWAY = frozenset({None, 502, 503, 504})
T = TypeVar("T")
StopCause = Literal["timeout", "lost", "returned"]
LAST_EVENTS_S = 5.0
"""The longest time that an attempt may take to send what is left after it was cancelled, or has ended; s."""


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
        self.answer: FinishAnswer | None = None
        """The gateway's answer to the attempt's end; None until then, and when the attempt was lost or returned."""
        self.over = asyncio.Event()
        """Set when the attempt is lost or returned."""
        self._settings, self._client, self._engine = settings, client, engine
        self._judge, self._progress = judge, progress
        self._journal = Journal(self._send, settings.keep_output)
        self._outputs = AgentOutput(self._line)
        self._why: StopCause | None = None
        self._fault: str | None = None
        """The fault of the surroundings, in words; None when the agent itself failed, or when nothing is known yet."""
        self._reason: str | None = None
        self._reward_error: str | None = None
        self._finishing = False
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

    def hand_back(self, reason: str) -> None:
        """Hand the attempt back, because the agent was not left to try its task: it counts as no try."""
        if not self._finishing:
            self._fault = reason
            if self.agent is not None:
                self.agent.terminate()

    def _end(self, why: StopCause, reason: str) -> None:
        if self._why in (None, "timeout"):
            self._why, self._reason = why, reason
        if why != "timeout":
            self.over.set()
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
            rewards = await cancel_on(self.over, self._rewards(outcome))
            self._journal.close()
            if rewards is not None:
                self.answer = await cancel_on(self.over, self._finish(outcome, rewards, sender))
            if self.answer is None and self._wants_events:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_EVENTS_S):
                        _ = await self._send(await self._last_events(sender))
            return self._result(self.answer, outcome, time.monotonic() - began)
        finally:
            _ = sender.cancel()
            if self._lease is not None:
                self._lease.cancel()

    async def _run_agent(self) -> ExitStatus:
        try:
            async with self._engine.running(self.claim, self._outputs.feed) as agent:
                self.agent = agent
                if self.over.is_set() or self._fault is not None:
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
        elif self._fault is not None:
            made.reason = self._fault
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
        except UserCodeError as e:
            self._no_reward(str(e))
        except Exception as e:
            self._no_reward(f"{type(e).__name__}: {e}")
        return found

    def _no_reward(self, reason: str) -> None:
        self._reward_error = reason
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
            if isinstance(e, Conflict):
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

    async def stored_rewards(self) -> list[Reward]:
        """All rewards that the gateway has of the attempt, whoever gave them."""
        return [Reward.of(span) async for span in self._client.spans(*self.key, filter="kind:reward")]

    async def add_event(self, name: str, attributes: dict[str, Scalar]) -> None:
        """Add an event, also after the attempt's end; then it is lost if the gateway is away."""
        if not self._journal.closed:
            self._journal.event(name, attributes)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_S):
                _ = await self._send([Event(name=name, time_ns=time.time_ns(), attributes=attributes)])

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
            *(*key, self._status(outcome), seconds, known.reward, outcome.reason, outcome, known.totals.calls, lines),
            no_reward=self._reward_error if known.reward is None else None,
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


# The journal of an attempt: lines of output and other events, in their order, on their way to the tape.
#
# An agent never waits for it: its output is taken at once, and up to `keep` bytes of it are kept. The first half of
# these goes to the gateway as it comes, in batches. Later output waits in a ring of the other half's size, so that
# the end of a long output, where errors are, is kept too. An event `output_dropped` counts the characters that were
# dropped between the two. While the gateway is away, everything waits here. The last batch goes with the attempt's
# end, in one request. A batch whose answer was lost is sent again: `piece` numbers the events of a runner, so that a
# repeated one can be recognised.

BATCH_S = 0.2
"""The time that the first event of a batch waits for others; s."""
LARGEST_EVENT, LARGEST_BATCH, MOST_EVENTS = 16 << 10, 256 << 10, 500
"""Limits: characters of one event's text, characters of one request, events of one request."""

Send = Callable[[list[Event]], Awaitable[bool]]


@dataclass(slots=True)
class _OutputLine:
    stream: Stream
    time_ns: int
    text: str


class Journal:
    """The events of one attempt. `send` returns True once they are stored, or False when the gateway wants no more."""

    def __init__(self, send: Send, keep: int) -> None:
        self._send = send
        self._waiting: deque[_OutputLine | Event] = deque()
        self._head, self._half = keep - keep // 2, keep // 2
        self._tail: deque[_OutputLine] = deque()
        self._tail_size = self._dropped = self._pieces = 0
        self._news, self._closed = asyncio.Event(), asyncio.Event()
        self._refused = False

    @property
    def closed(self) -> bool:
        """True when it takes no more events."""
        return self._closed.is_set()

    def line(self, stream: Stream, text: str) -> None:
        """Add a line of output."""
        for at in range(0, len(text) or 1, LARGEST_EVENT):
            piece = _OutputLine(stream, time.time_ns(), text[at : at + LARGEST_EVENT])
            size = len(piece.text) + 1
            if not self._tail and not self._dropped and size <= self._head:
                self._head -= size
                self._put(piece)
            else:
                self._keep_last(piece, size)

    def event(self, name: str, attributes: dict[str, Scalar]) -> None:
        """Add an event that is not output."""
        self._put(Event(name=name, time_ns=time.time_ns(), attributes=attributes))

    def _keep_last(self, piece: _OutputLine, size: int) -> None:
        self._tail.append(piece)
        self._tail_size += size
        while self._tail_size > self._half:
            gone = len(self._tail.popleft().text) + 1
            self._tail_size -= gone
            self._dropped += gone

    def _put(self, item: _OutputLine | Event) -> None:
        self._waiting.append(item)
        self._news.set()

    def release(self) -> None:
        """Send the held back end of the output too, because the agent has ended."""
        if self._dropped:
            self.event("output_dropped", {"characters": self._dropped})
        self._waiting.extend(self._tail)
        self._tail.clear()
        self._tail_size = self._dropped = 0
        self._news.set()

    async def run(self) -> None:
        """Send events until the journal is closed, or the gateway wants no more."""
        while not self._closed.is_set():
            _ = await self._news.wait()
            await self._gather()
            while not self._closed.is_set() and (batch := self._batch()):
                if not await self._send(batch):
                    self._refused = True
                    return
            self._news.clear()

    async def _gather(self) -> None:
        """Wait for the batch to grow, or until the journal is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BATCH_S):
                _ = await self._closed.wait()

    def close(self) -> None:
        """Take no more events; `run` ends after the batch that it is sending."""
        self.release()
        self._closed.set()

    async def last(self) -> list[Event]:
        """Send the rest after `run` has ended, except the last batch, which is returned for the caller to send."""
        while not self._refused and (batch := self._batch()):
            if not self._waiting:
                return batch
            self._refused = not await self._send(batch)
        return []

    def _batch(self) -> list[Event]:
        events: list[Event] = []
        size = 0
        while self._waiting and size < LARGEST_BATCH and len(events) < MOST_EVENTS:
            event = self._next()
            self._pieces += 1
            event.attributes["piece"] = self._pieces
            events.append(event)
            size += len(str(event.attributes.get("text", "")))
        return events

    def _next(self) -> Event:
        """The next event; consecutive lines of one stream become one event."""
        first = self._waiting.popleft()
        if isinstance(first, Event):
            return first
        texts, size = [first.text], len(first.text)
        while self._waiting and isinstance(after := self._waiting[0], _OutputLine) and after.stream == first.stream:
            size += len(after.text) + 1
            if size > LARGEST_EVENT:
                break
            texts.append(after.text)
            _ = self._waiting.popleft()
        return Event(name=first.stream, time_ns=first.time_ns, attributes={"text": "\n".join(texts)})


# Decides whether the surroundings of an agent ended its attempt: the gateway, or the engine behind it. Pure.
#
# An agent that fails because nothing answered it has not tried its task. Its attempt is handed back (`environment`):
# the rollout waits again, keeps all its tries, and gets no reward for failing. The surroundings are at fault in two
# cases only:
#
#     the gateway    did not answer the runner while the agent ran or when it ended
#     the engine     the newest call of the attempt ended because no upstream could be reached, it broke off in the
#                    middle, it said that it cannot serve now (502, 503, 504), or the gateway died
#
# A runner that goes on handing back the same rollout waits longer each time (`FAULT_PAUSES`), and after `MOST_FAULTS`
# times the end counts: a wrong address does not mend itself.

MOST_FAULTS: Final = 30
"""How many times a runner hands back one rollout: about a quarter of an hour in all."""
FAULT_PAUSES: Final = Backoff(0.5, 30.0)
"""The pauses before a worker takes more work, by how often a rollout was handed back."""
UPSTREAM_AWAY: Final = frozenset(
    {"connect", "connect_timeout", "upstream_closed", "paused", "http_502", "http_503", "http_504"}
)
"""Errors of a call whose upstream is absent, or unavailable for now."""


def find_fault(calls: Sequence[Span], gateway_away: bool) -> str | None:
    """The fault of the surroundings, in words; None when the agent itself failed. `calls`: the calls of the attempt."""
    if gateway_away:
        return "the gateway was away"
    newest = max(calls, key=lambda span: span.sequence, default=None)
    if newest is None:
        return None
    if newest.status == SpanStatus.INTERRUPTED:
        return f"the gateway went away during call #{newest.sequence}"
    if newest.status == SpanStatus.ERROR and newest.error in UPSTREAM_AWAY:
        return f"the engine did not answer call #{newest.sequence} ({newest.error})"
    return None
