"""The laboratory behind a gateway: candidates are versions of resources, trials are rollouts that have these versions.

The id of a rollout is RUN.CANDIDATE.TASK.NUMBER, so ordering it again, after a crash or on purpose, queues nothing
twice and finds ended rollouts. Releases stay as they are: each rollout names its versions itself, and many candidates
run at once.

A rollout that has failed, or has not ended in time, has the worst reward unless it was given another: leaving it out
would favour texts that make an agent hang. One that has succeeded and was not judged has none, and is left out. The
cost of steps (`reward.step_cost`) is subtracted from the reward, down to 0. The first rollouts show errors that make
every later one worthless: an agent that always fails, calls that do not reach the gateway or have other prompts, or
missing rewards.

The reflecting model is any model that the gateway reaches. Each question is an attempt of one rollout on the tape. The
attempt's id follows from the model and the question, so a restarted run finds its earlier answers on the tape, and asks
nothing twice. If the gateway is away, the question waits. If the model is busy or fails, it is asked again, a little
later each time. A question that it refuses is not asked again. An empty answer is an answer: it was paid for, and
engines leave it out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from penstock.console.views.rollout_tree import ConversationPrefixes
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotFound, base_of, map_concurrently
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion, Resource, ResourceView, Template, TemplateError, check_candidate
from penstock.gateway.model.rollout import Reward, RolloutConfig, RolloutStatus, RolloutSummary
from penstock.gateway.model.run import EventLevel
from penstock.gateway.model.span import Estimate, Span, Usage
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.model.turn import Message, Transcript
from penstock.gateway.wire.dialects.loose_json import obj
from penstock.trainer.apo.config import ApoConfig, ReflectionSettings
from penstock.trainer.apo.protocol import AgentTask, Candidate, Reflection, Trial, TrialSpec, ignore
from penstock.trainer.data.collector import RolloutWaiter
from penstock.trainer.runs.supervision import RetryClient, RunError

NOTE: Final = 4000
FIRST_ROLLOUTS: Final = 8
"""Rollouts after which their common problem is reported."""
RESTART_HINT: Final = "Mend that, and take another run.name: rollouts that were run stay as they are"
SYSTEM: Final = ("system", "developer")
"""Roles whose texts are left out: they are the optimised texts, and are shown once, in the candidate's version."""
PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)
"""Pauses before a busy or failed model is asked again; after the last one the run stops."""
AWAY_S: Final = 1.0
PATIENCE_S: Final = 900.0
"""Time limit of an answer, and of waiting for a gateway that is away."""
RECORDED_S: Final = 10.0
"""Time limit for an answer to be on the tape: it takes milliseconds unless the gateway was killed."""
BUSY: Final = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same question may be answered."""
TEMPLATE_TOKENS: Final = 64
AGENT: Final = "reflection"


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    rollout: str
    calls: int
    versions: Collection[str]
    """Resources that were found in its calls."""
    rewarded: bool
    failure: str = ""
    """How it failed; empty if it succeeded."""


def missing_texts(seen: Sequence[RolloutFacts], wanted: Collection[str]) -> list[str]:
    return sorted(set(wanted) - {name for one in seen for name in one.versions})


def common_problem(seen: Sequence[RolloutFacts], wanted: Collection[str]) -> str:
    """Return what makes a run worthless, for a person; empty without a problem, and for fewer than `FIRST_ROLLOUTS`.
    `wanted`: the resources whose texts are tried."""
    count, missing = len(seen), missing_texts(seen, wanted)
    if count < FIRST_ROLLOUTS:
        return ""
    first = seen[0]
    if all(one.failure and not one.rewarded for one in seen):
        failed = f"all of the first {count} rollouts have failed, such as {first.rollout}"
        return f"{failed}: {first.failure}. {RESTART_HINT}"
    if not any(one.calls for one in seen):
        return (
            f"none of the first {count} rollouts has made a call of a model through the gateway; an agent must use "
            f"the base URL that its runner gives it, see `penstock show {first.rollout}`. {RESTART_HINT}"
        )
    if set(missing) == set(wanted):
        return (
            f"{' and '.join(missing)}: not found in any call of the first {count} rollouts, so every candidate would "
            "be the same. `penstock prompts discover` shows what agents send, `penstock prompts check FILE` which "
            f"prompt a text is. {RESTART_HINT}"
        )
    if not any(one.rewarded for one in seen):
        return (
            f"none of the first {count} rollouts has a reward. Give `penstock run` a judge "
            f"(--reward), or let the agent or your application give one. {RESTART_HINT}"
        )
    return ""


async def run_rollouts(
    awaited: RolloutWaiter, specs: Sequence[RolloutSpec], timeout_s: float, modes: str, setting: str = ""
) -> list[str]:
    """Queue rollouts, which have names, and wait for them; return the names. Raises `ConfigError` when none has ended,
    with `modes` as the runner's option and `setting` as the name of the timeout."""
    names = [spec.id or "" for spec in specs]
    await awaited.enqueue(specs)
    late = await awaited.wait_for(names, timeout_s)
    if late == len({*names}):
        raise ConfigError(
            f"none of {len(names)} rollouts has ended in {timeout_s:g} s{setting}; is there a runner? penstock run "
            f"--watch --mode {modes} -- COMMAND, or --agent COMMAND here"
        )
    awaited.forget(names)
    return names


def slot_problem(seed: Resource, text: str) -> str:
    """Return how the slots of a text differ from those of the seed's; empty if they do not."""
    try:
        if seed.template is not None:
            check_candidate(seed.template, Template.parse(text))
    except TemplateError as error:
        return f"{seed.name}: {error}"
    return ""


class GatewayLaboratory:
    """The laboratory of one run. `awaited` must run beside it."""

    def __init__(
        self, client: Client, awaited: RolloutWaiter, reflecting: ReflectionClient, config: ApoConfig,
        seeds: Mapping[str, Resource], tasks: Sequence[AgentTask],
    ) -> None:  # fmt: skip
        """`seeds`: the version that each resource begins with."""
        self.client, self.awaited, self._config, self.seeds = client, awaited, config, seeds
        self.reflect, self.most = reflecting.ask, reflecting.most
        self._tasks = {task.id: task for task in tasks}
        self._versions: dict[tuple[str, str], str] = {(name, text_of(one)): one.version for name, one in seeds.items()}
        """Registered versions by (resource, text)."""
        self._first: list[RolloutFacts] = []
        """The first rollouts, at least `FIRST_ROLLOUTS` of them once they were checked."""
        self.tell: Callable[[str, EventLevel], Awaitable[None]] = ignore
        """Called with messages for a person."""

    @property
    def seed(self) -> Candidate:
        return Candidate({name: text_of(version) for name, version in self.seeds.items()})

    def problem(self, candidate: Candidate) -> str:
        """See `Laboratory`: a text must have the slots of the seed's."""
        problems = (slot_problem(self.seeds[name], text) for name, text in candidate.texts.items())
        return next(filter(None, problems), "")

    async def versions(self, candidate: Candidate) -> dict[str, str]:
        """Return the version of each resource that has the candidate's text; registers missing ones."""
        run, found = self._config.run.name, dict[str, str]()
        for name, text in candidate.texts.items():
            if (name, text) not in self._versions:
                note = f"{run}: {candidate.claim}"[:NOTE]
                new = version_with(self.seeds[name], text, f"{run}.{candidate.id}", "apo", note)
                self._versions[name, text] = (await self.client.add_version(name, new)).version
            found[name] = self._versions[name, text]
        return found

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        versions = {candidate.id: await self.versions(candidate) for candidate in candidates}
        specs = [self._spec(order, versions[order.candidate], mode) for order in orders]
        if not specs:
            return []
        timeout = self._config.rollouts.batch_timeout
        names = await run_rollouts(self.awaited, specs, timeout, "train,val,test", " (rollouts.attempt_timeout)")
        found = await map_concurrently(lambda pair: self._trial(*pair, mode), list(zip(orders, names, strict=True)))
        if len(self._first) < FIRST_ROLLOUTS:
            self._first += [seen for _, seen in found]
            if problem := common_problem(self._first, self.seeds):
                raise ConfigError(problem)
            missing = missing_texts(self._first, self.seeds)
            if missing and len(self._first) >= FIRST_ROLLOUTS:
                await self.tell(f"{' and '.join(missing)}: not found in any call of the first rollouts", "warning")
        return [trial for trial, _ in found]

    def _spec(self, order: TrialSpec, versions: Mapping[str, str], mode: Mode) -> RolloutSpec:
        run, task = self._config.run.name, self._tasks[order.task]
        return RolloutSpec(
            id=f"{run}.{order.candidate}.{order.task}.{order.number}", group=f"{run}.{order.task}", mode=mode,
            input=task.input,
            config=RolloutConfig(timeout_s=self._config.rollouts.attempt_timeout, versions=dict(versions)),
            metadata={"penstock.run": run, "penstock.candidate": order.candidate},
        )  # fmt: skip

    async def _trial(self, order: TrialSpec, name: str, mode: Mode) -> tuple[Trial, RolloutFacts]:
        rollout = await self.client.rollout(name)
        spans = [span async for span in self.client.spans(name)]
        reward, reason = self._judged(rollout, spans)
        text = ""
        # Reflections see rollouts of the search only.
        if mode == "train" and rollout.attempts:
            text = render_transcript(await self.client.transcript(name))
        calls, versions = rollout.totals.calls, {one for span in spans for one in span.versions or ()}
        failure = "" if rollout.status == RolloutStatus.SUCCEEDED else reason
        seen = RolloutFacts(name, calls, versions, rollout.reward is not None, failure)
        return Trial(*order, reward, reason, text, calls, name), seen

    def _judged(self, rollout: RolloutSummary, spans: Sequence[Span]) -> tuple[float | None, str]:
        """Return (reward between 0 and 1, the reason for it). Raises `ConfigError` for one beyond its range."""
        reasons = [said for span in spans if span.kind == "reward" and (said := Reward.of(span).reason)]
        value, settings, calls = rollout.reward, self._config.reward, rollout.totals.calls
        if value is None and rollout.status == RolloutStatus.SUCCEEDED:
            return None, ""
        if value is None:
            outcome = rollout.attempts[-1].outcome if rollout.attempts else None
            last = f": {outcome.reason}" if outcome is not None and outcome.reason else ""
            return 0.0, "; ".join(reasons) or f"the rollout has {rollout.status}{last}"
        low, high = settings.range
        if not low <= value <= high:
            raise ConfigError(
                f"rollout {rollout.id} has the reward {value:g}, which is not within {low:g} and {high:g}: set "
                "reward.range to the range of your rewards"
            )
        if settings.step_cost * calls:
            reasons.append(f"it took {calls} calls of the model; fewer are better")
        return settings.scaled(value, calls), "; ".join(reasons)


def render_transcript(transcript: Transcript) -> str:
    """Return the task and the conversation of an attempt, for the reflecting model: the messages that each call added,
    and tools that failed; with several agents in the order of the calls."""
    lines = [f"Task: {json.dumps(transcript.rollout.input, ensure_ascii=False)}"]
    conversations = ConversationPrefixes()
    for call in transcript.calls:
        if call.turn is None:
            continue
        agent = f"{call.span.agent}, " if call.span.agent else ""
        skip = conversations.known_length(call.turn.messages)
        for message in call.turn.messages[skip:]:
            if message.role not in SYSTEM:
                lines += (f"[{agent}{message.role}] {text}" for text in _texts(message))
        for choice in call.turn.choices[:1]:
            lines += (f"[{agent}assistant] {text}" for text in _texts(choice.message))
        if call.turn.error:
            lines.append(f"[{agent}error] {call.turn.error}")
        conversations.add(call.turn)
    lines += (f"[refused by a rule] {span.name or span.model or 'a tool call'}" for span in transcript.violations)
    if transcript.outcome.reason:
        lines.append(f"[ended] {transcript.outcome.reason}")
    return "\n".join(lines)


def _texts(message: Message) -> Iterator[str]:
    for part in message.parts:
        if part.type == "tool_call":
            yield f"calls {part.name}({part.arguments or ''})"
        elif part.type == "tool_call_response":
            failed = obj(part.data).get("is_error")
            said = part.text or ("" if part.data is None else json.dumps(part.data, ensure_ascii=False))
            yield f"{'failed' if failed else 'result'}: {said}"
        elif part.type in ("text", "refusal") and part.text:
            yield part.text


def text_of(version: Resource) -> str:
    return str(version.content["text"])


def stable_version(view: ResourceView) -> Resource:
    return next(one for one in view.versions if one.version == view.stable.version)


def version_with(base: Resource, text: str, version: str, author: str, note: str) -> NewVersion:
    content = {**base.content, "text": text, "sent": False}
    return NewVersion(kind=base.kind, content=content, version=version, parent=base.version, author=author, note=note)


async def seed_versions(client: Client, config: ApoConfig) -> dict[str, Resource]:
    """Return the stable version of each optimised resource. Raises `ConfigError` if there is none of the kind."""
    found: dict[str, Resource] = {}
    for key, kind, names in (("prompts", "prompt", config.texts.prompts), ("tools", "tool-text", config.texts.tools)):
        for name in names:
            try:
                view = await client.resource(name)
            except ClientError as error:
                raise ConfigError(f"texts.{key}: {name!r}: {error}") from None
            if view.kind != kind:
                raise ConfigError(f"texts.{key}: {name!r} is a {view.kind}, not a {kind}")
            found[name] = stable_version(view)
    return found


def reflection_rollout(config: ApoConfig) -> str:
    """Return the id of the rollout that all reflections of a run belong to."""
    return f"{config.run.name}.reflections"


@asynccontextmanager
async def reflection_session(client: RetryClient, rollout: str) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield an HTTP session for questions to a model, with a token for their rollout if the gateway issues tokens."""
    headers: dict[str, str] = {}
    try:
        token = (await client.make_token(rollout)).token
        headers["Authorization"] = f"Bearer {token}"
    except ClientError as error:
        if error.status is None:
            raise
    async with aiohttp.ClientSession(headers=headers, connector=client.connector()) as http:
        yield http


class ReflectionClient:
    def __init__(
        self, client: Client, http: aiohttp.ClientSession, url: str, rollout: str, settings: ReflectionSettings
    ) -> None:
        """`url`: the gateway's; `http`: carries the agent token of `rollout`, to which all calls belong."""
        self._client, self._http, self._url, self._settings = client, http, base_of(url), settings
        self._rollout = rollout

    def most(self, prompt: str) -> tuple[int, float]:
        """See `Laboratory`. Each byte counts as a token; four bytes a token are usual."""
        read, written = len(prompt.encode()) + TEMPLATE_TOKENS, self._settings.most_tokens
        return read + written, self._price(read, written)

    def _price(self, read: int, written: int) -> float:
        price_in, price_out = self._settings.price
        return (read * price_in + written * price_out) / 1e6

    async def ask(self, prompt: str, number: int) -> Reflection:
        """Return the answer, from the tape if it is there. Raises `RunError`."""
        question = f"{self._settings.model}\0{prompt}"
        attempt = f"{hashlib.sha256(question.encode()).hexdigest()[:16]}-{number}"
        clock = asyncio.get_running_loop().time
        pauses, end = iter(PAUSES_S), clock() + PATIENCE_S
        while True:
            if (answered := await self._answered(attempt)) is not None:
                return self._read(answered)
            cursor = (await self._client.stats(spans=0)).cursor
            failed = await self._post(prompt, attempt)
            if failed is None:
                await self._recorded(attempt, cursor)
                if (answered := await self._answered(attempt)) is not None:
                    return self._read(answered)
                # Each attempt may be paid for, so their number is limited.
                failed = 502, f"no good answer is on the tape; penstock show {self._rollout} has what it said"
            status, text = failed
            pause = AWAY_S if status is None else next(pauses, None)
            final = status is not None and status < 500 and status not in BUSY
            if final or pause is None or clock() > end:
                raise RunError(f"the reflecting model {self._settings.model!r} does not answer: {text}")
            await asyncio.sleep(pause)

    async def _answered(self, attempt: str) -> SpanDetail | None:
        try:
            spans = [span async for span in self._client.spans(self._rollout, attempt)]
        except NotFound:
            return None
        found = next(filter(_good, spans), None)
        return None if found is None else await self._client.span(self._rollout, attempt, found.sequence, "none")

    async def _recorded(self, attempt: str, cursor: int) -> None:
        """Wait until the call of an attempt is on the tape: a decision that depends on an answer must find it there
        again. If the gateway was killed it may have lost it; then the wait times out, and the question is asked again.
        """
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(RECORDED_S),
                aclosing(self._client.changes(cursor, ["span"], [self._rollout])) as changes,
            ):
                async for change in changes:
                    span = change.span
                    if span is not None and (span.rollout, span.attempt) == (self._rollout, attempt) and _good(span):
                        return

    async def _post(self, prompt: str, attempt: str) -> tuple[int | None, str] | None:
        """Return None if the question was answered, else (the gateway's status, or None if it is away; the error)."""
        asked: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": self._settings.most_tokens,
        }
        address = f"{self._url}/rollout/{self._rollout}/attempt/{attempt}/agent/{AGENT}/mode/train/v1/chat/completions"
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        try:
            async with self._http.post(address, json=asked, timeout=timeout) as answer:
                said = await answer.text(errors="replace")
        except TimeoutError:
            return 504, f"no answer in {PATIENCE_S:g} s"
        except aiohttp.ClientError as error:
            return None, str(error) or type(error).__name__
        if answer.ok:
            return None
        # The message of an error, in whatever shape its API gives it.
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        return answer.status, f"{answer.status}: {str(said)[:500]}"

    def _read(self, detail: SpanDetail) -> Reflection:
        choices = [] if detail.turn is None else detail.turn.choices
        parts = choices[0].message.parts if choices else []
        text = "".join(part.text or "" for part in parts if part.type == "text")
        counted, guessed = detail.span.usage or Usage(), detail.span.estimate or Estimate()
        read = counted.input_tokens or guessed.input_tokens or 0
        written = counted.output_tokens or guessed.output_tokens or 0
        return Reflection(text, read + written, self._price(read, written))


def _good(span: Span) -> bool:
    return span.kind == "llm" and span.status == "ok"
