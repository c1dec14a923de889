"""Drives releases: does the work of a stage, and carries out people's decisions.

Each live release has one task. Before the canary the task runs the stage's job (`StageJobs`) and moves on, or rolls
back; in the canary it counts and decides (`canary_counter`). When the release's revision shows that somebody else has
changed it, the task begins again with the new state.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from penstock.gateway.model.base import GATEWAY, NOBODY, ActionRequest
from penstock.gateway.model.release import Assignment, Forecast, NewRelease, Release, ReleaseStage, ReleaseView
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.model.resource import Coverage, ModelVersion, Need, NewVersion, Resource
from penstock.gateway.releases.canary.decision import (
    NEXT,
    Canary,
    add_early_looks,
    add_outcomes,
    figures,
    hard_stop,
    interval,
    stage_progress,
    warnings,
)
from penstock.gateway.releases.canary.forecast import Baseline, BaselineReader, forecast
from penstock.gateway.releases.canary.outcomes import has_early_guard, is_hard
from penstock.gateway.releases.canary.verification import OUT_OF_TURN, UNCOVERED, circumstances, coverage_figures
from penstock.gateway.releases.canary_counter import OutcomeCounter
from penstock.gateway.releases.operations import DamagedReleaseError, ReleaseOperations, assignments
from penstock.gateway.releases.reader import ReleaseMetrics, ReleaseReader, needs
from penstock.gateway.releases.transitions import PERSON_CHANGES, ROLLED_BACK, entry
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction

T = TypeVar("T")
RETRY_S: Final = 1.0
HISTORY: Final = 2_000
"""Rollouts before the start from which margins are taken."""
_log = logging.getLogger("penstock.releases")


@dataclass(slots=True)
class JobReport:
    """The result of a job."""

    ok: bool
    why: str
    """The reason, in a sentence."""
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class JobProgress:
    """The progress of a job."""

    doing: str
    done: int = 0
    total: int = 0


StageJob = Callable[[Release, JobProgress], Awaitable[JobReport]]
"""The work of a stage before the canary: done when it is known whether the candidate passes."""


@dataclass(frozen=True, slots=True)
class StageJobs:
    """The jobs of the stages before the canary."""

    check: StageJob
    replay: StageJob
    shadow: StageJob


@dataclass(slots=True)
class _ReleaseTask:
    task: asyncio.Task[None]
    progress: JobProgress | None = None
    canary: Canary | None = None

    def show(self, canary: Canary) -> None:
        """Called with the canary that is stepped."""
        self.canary = canary


@dataclass(frozen=True, slots=True)
class DriverCallbacks:
    """The parts that follow a change of a release."""

    reload_pins: Callable[[], Awaitable[None]]
    """Makes the catalog of calls anew."""
    follow_everywhere: Callable[[], Awaitable[None]]
    """Makes the other workers of this gateway follow."""
    changed: Callable[[], None]
    """Called last, after every change."""


class Driver:
    """The driver of all releases of a gateway. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        tape: Store,
        recorder: Recorder,
        now_ns: Callable[[], int],
        feed: ChangeFeed,
        jobs: StageJobs,
        upstreams: Collection[str],
        callbacks: DriverCallbacks,
    ) -> None:
        """`upstreams`: names of the configured upstreams."""
        self.tape = tape
        self.reader = ReleaseReader(tape)
        self._recorder = recorder
        self._callbacks = callbacks
        self._news = asyncio.Event()
        """Set, and replaced, when a release has changed."""
        self._now_ns = now_ns
        self._jobs: Mapping[ReleaseStage, tuple[str, StageJob]] = {
            "draft": ("check", jobs.check),
            "checked": ("replay", jobs.replay),
            "replayed": ("shadow", jobs.shadow),
        }
        self._upstreams = upstreams
        self._counter = OutcomeCounter(tape, recorder, feed, now_ns, self._changed_now)
        self._driven: dict[str, _ReleaseTask] = {}
        self._stopped = False
        self.metrics = ReleaseMetrics(self.reader.audit, self._stepped)

    async def start(self) -> None:
        """Continue the releases that an earlier process has begun."""
        await self._callbacks.reload_pins()
        for release in self.reader.releases():
            for name, coverage in self.reader.coverage(release.resources).items():
                if release.stage == "canary" and (coverage.fell_ns or 0) > release.changed_ns:
                    # The earlier process noticed the fall, but did not hold the release.
                    await self._hold(release.id, name, coverage)
            if release.live:
                self._drive(release.id)

    async def other_writer_committed(self) -> None:
        """Called when another process has changed releases or versions on the tape."""
        await self._changed_now()
        for release in await asyncio.to_thread(self.reader.releases):
            if release.live:
                self._drive(release.id)

    async def stop(self) -> None:
        """Stop all tasks; the releases go on with the next start, or in the process that takes over."""
        self._stopped = True
        tasks = [driven.task for driven in self._driven.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _do(self, operation: Callable[[Transaction], T]) -> T:
        """Run an operation; the next calls follow its result."""
        done = await self._recorder.submit(operation)
        await self._changed_now()
        return done

    async def _changed_now(self) -> None:
        try:
            await self._callbacks.reload_pins()
            await self._callbacks.follow_everywhere()
        finally:
            news, self._news = self._news, asyncio.Event()
            news.set()
            self._callbacks.changed()

    # -- changes by people -------------------------------------------------------------------------------------------

    async def add_version(self, name: str, new: NewVersion) -> Resource:
        """Register a version; raises `OperationRefusedError`."""
        content, now = new.read(), self._now_ns()
        if isinstance(content, ModelVersion):
            missing = next((one for one in content.upstreams if one not in self._upstreams), None)
            if missing is not None:
                field = "content.upstream" if missing == content.upstream else "content.also"
                message = f"{field}: {missing!r} is not configured; there are {', '.join(self._upstreams)}"
                raise OperationRefusedError("invalid", message, field, missing)
        return await self._do(lambda transaction: ReleaseOperations(transaction).add_version(name, new, now))

    async def begin(self, resource: str, new: NewRelease) -> Release:
        """Start a release; raises `OperationRefusedError` and `ConfigError`."""
        found = self.reader.resource(resource)
        if found is None:
            message = f"there is no resource {resource!r}; `penstock resource add {resource}` registers one"
            raise OperationRefusedError("not_found", message, "resource", resource)
        policy, past = new.policy, Baseline()
        if policy.needs_baseline:
            past = await asyncio.to_thread(self._past, policy, resource, found[0].version)
        mean = None if policy.hold_split or policy.margin_absolute is not None else past.mean
        release = Release(
            id="new",
            resource=resource,
            kind=found[1][0].kind,
            stable=found[0].version,
            candidate=new.candidate,
            companions=new.companions,
            only=new.only,
            policy=policy,
            baseline=mean,
            margin=policy.d(mean),
            guard_margins=policy.guard_margins(past.spreads()),
            salt=secrets.token_hex(16),
            author=new.author,
        )
        link = entry("start", new.author or "api", new.why or "it was started")
        link.key = new.key
        now = self._now_ns()
        made = await self._do(lambda transaction: ReleaseOperations(transaction).start(release, link, now))
        self._drive(made.id)
        return made

    def forecast(self, release: Release) -> Forecast:
        """Forecast the effort of a release, from the rollouts of the stable version before its start."""
        past = self._past(release.policy, release.resource, release.stable, release.created_ns)
        return forecast(release, past)

    def _past(self, policy: ReleasePolicy, resource: str, version: str, before_ns: int | None = None) -> Baseline:
        """Return the results of the stable version in the newest rollouts, or in the newest before a time."""
        every = (one for _, one in self.tape.rollouts() if before_ns is None or one.created_ns < before_ns)
        newest = islice(every, HISTORY)
        return BaselineReader(self.reader, policy, resource, version, self._now_ns()).read(newest)

    async def decide(self, name: str, action: str, said: ActionRequest) -> Release:
        """Carry out a person's decision; raises `OperationRefusedError`."""
        now, known = self._now_ns(), self.reader.release(name)
        evidence = None if known is None else await asyncio.to_thread(self._counter.evidence, known)

        def operation(transaction: Transaction) -> Release:
            # The release as of this transaction: a person's decision holds whatever the rules did meanwhile.
            release = ReleaseOperations(transaction).stored(name)
            who, why = said.who or NOBODY, said.why or f"a person said {action}"
            link = entry(action, who, why, release.counted, release.early)
            link.key = said.key
            if evidence is not None and release.assigned:
                counted = assignments(transaction, name, evidence.number, release.counted)
                add_outcomes(evidence, ((one, seen) for one, seen in counted if seen is not None))
                looked = assignments(transaction, name, evidence.early, release.early)
                add_early_looks(evidence, (one for one, _ in looked))
                link.evidence = circumstances(evidence, release.split)
            return ReleaseOperations(transaction).change(name, None, PERSON_CHANGES[action](release), link, now)

        made = await self._do(operation)
        self._drive(name)
        return made

    async def on_violation(self, rollout: str) -> None:
        """Called after a hard violation in a rollout: a release whose candidate it has is stopped without waiting for
        its turn."""
        for pin in self.reader.pins(rollout):
            release = None if pin.release is None else self.reader.release(pin.release)
            if release is not None and release.live and pin.arm == "candidate":
                await self._stop_hard(release, rollout)

    async def _stop_hard(self, release: Release, rollout: str) -> None:
        number = await asyncio.to_thread(self._violations, release, rollout)
        why = hard_stop(number)
        if why is not None:
            link, now = entry("roll_back", GATEWAY, why), self._now_ns()
            link.evidence = {OUT_OF_TURN: number, "rollout": rollout}
            with suppress(OperationRefusedError):
                # Its task, or a person, may have been quicker.
                await self._do(
                    lambda transaction: ReleaseOperations(transaction).change(release.id, None, ROLLED_BACK, link, now)
                )

    async def on_coverage_fall(self, resource: str, coverage: Coverage) -> None:
        """Called when fewer agents match a resource than before: its canaries are held."""
        for release in self.reader.releases():
            if release.stage == "canary" and resource in release.resources:
                await self._hold(release.id, resource, coverage)

    async def _hold(self, name: str, resource: str, coverage: Coverage) -> None:
        link, now = entry("hold", GATEWAY, f"coverage: {resource}: {coverage.fell}"), self._now_ns()
        link.evidence = {UNCOVERED: resource, **coverage_figures(coverage)}

        def operation(transaction: Transaction) -> Release:
            release = ReleaseOperations(transaction).stored(name)
            return ReleaseOperations(transaction).change(name, None, PERSON_CHANGES["hold"](release), link, now)

        with suppress(OperationRefusedError):
            # Its task, or a person, may have been quicker.
            await self._do(operation)

    def _violations(self, release: Release, rollout: str) -> int:
        """Count the hard violations on the candidate, of this rollout and of all that are counted."""
        arm = (one for one in self._assigned(release.id) if one.arm == "candidate")
        rollouts = {member.rollout for one in arm for member in self.reader.members(release.id, one)}
        spans = (span for name in rollouts | {rollout} for span in self.reader.spans(name))
        return sum(is_hard(span.kind, span.name, span.attributes) for span in spans)

    def _assigned(self, name: str) -> list[Assignment]:
        found: list[Assignment] = []
        while page := self.reader.assignments(name, len(found))[0]:
            found += page
        return found

    def view(self, release: Release) -> ReleaseView:
        """Return a release with its evidence."""
        driven = self._driven.get(release.id)
        view = ReleaseView(release=release, waiting=release.assigned - release.counted)
        view.waiting_early = release.assigned - release.early if has_early_guard(release) else 0
        stepped = None if driven is None else driven.canary
        canary = stepped or self._counter.replayed(release)[0]
        view.figures, view.interval = figures(canary.evidence), interval(canary.evidence.latest.reward)
        view.warnings = list(warnings(release.policy, canary.evidence.latest))
        if driven is not None and driven.progress is not None:
            view.doing, view.done, view.total = driven.progress.doing, driven.progress.done, driven.progress.total
        view.coverage = self.reader.coverage(release.resources)
        if oldest := self.reader.assignments(release.id, release.counted, 1)[0]:
            view.oldest, view.oldest_ns = oldest[0].rollout, oldest[0].assigned_ns
        view.rewarded = stage_progress(release, canary.evidence)
        return view

    def _stepped(self, name: str) -> Canary | None:
        driven = self._driven.get(name)
        return None if driven is None else driven.canary

    def needs(self, resource: str) -> list[Need]:
        """Return the needs for each version of a resource."""
        return needs(self.tape, resource, self._now_ns())

    # -- one release -------------------------------------------------------------------------------------------------

    def _drive(self, name: str) -> None:
        driven = self._driven.get(name)
        if (driven is None or driven.task.done()) and not self._stopped:
            self._driven[name] = _ReleaseTask(asyncio.ensure_future(self._run(name)))

    async def _run(self, name: str) -> None:
        while True:
            try:
                if not await self._step(name):
                    self._driven.pop(name, None)
                    return
            except DamagedReleaseError as damage:
                _log.error("%s; it is left alone", damage)
                self._driven.pop(name, None)
                return
            except OperationRefusedError as refusal:
                # Somebody else has changed it: begin again.
                _log.info("release %s: %s", name, refusal)
            except TapeError as error:
                _log.error("release %s waits for the tape: %s", name, error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                _log.exception("release %s cannot go on", name)
                await asyncio.sleep(RETRY_S)

    async def _step(self, name: str) -> bool:
        """Do the next thing; False when there will be none."""
        release = self.reader.release(name)
        if release is None or not release.live:
            return False
        if release.stage == "held":
            await self._changed(release)
        elif release.stage == "canary":
            await self._counter.run(release, self._driven[name].show)
        elif release.stage == "shadowed":
            await self._move(release, "canary", "canary", "new rollouts are assigned", {})
        else:
            await self._prepare(release)
        return True

    async def _prepare(self, release: Release) -> None:
        """Run a stage before the canary."""
        after = NEXT[release.stage]
        action, job = self._jobs[release.stage]
        wish = getattr(release.policy, after) or release.policy.default_replay(release.kind)
        if wish == "skip":
            await self._move(release, action, after, "skipped by the policy", {"skipped": True})
            return
        driven = self._driven[release.id]
        driven.progress = JobProgress(action)
        try:
            report = await self._unless_changed(release, job(release, driven.progress))
        except (OperationRefusedError, TapeError):
            raise
        except Exception:
            _log.exception("release %s: the %s failed", release.id, action)
            report = JobReport(False, "the gateway failed at it; its log says why")
        finally:
            driven.progress = None
        if report is None:
            return
        if report.ok or wish == "report":
            await self._move(release, action, after, report.why, report.evidence | {"ok": report.ok})
        else:
            await self._move(
                release, "roll_back", "rolled_back", f"{action}: {report.why}", report.evidence | {"ok": False}
            )

    async def _unless_changed(self, release: Release, job: Awaitable[JobReport]) -> JobReport | None:
        """Return the job's report; None when somebody has changed the release before."""
        working, changed = asyncio.ensure_future(job), asyncio.ensure_future(self._changed(release))
        try:
            await asyncio.wait([working, changed], return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            for task in (working, changed):
                task.cancel()
            # The job must have ended before the tape is closed.
            await asyncio.gather(working, changed, return_exceptions=True)

    async def _changed(self, release: Release) -> None:
        """Wait until somebody else has changed the release."""
        while (now := self.reader.release(release.id)) is not None and now.revision == release.revision:
            await self._news.wait()

    async def _move(
        self, release: Release, action: str, stage: ReleaseStage, why: str, evidence: dict[str, Any]
    ) -> None:
        link = entry(action, GATEWAY, why)
        link.evidence = evidence
        update: dict[str, Any] = {"stage": stage}
        if stage == "canary":
            update |= {"step": 0, "split": release.policy.stages[0].split}
        now = self._now_ns()
        await self._do(
            lambda transaction: ReleaseOperations(transaction).change(release.id, release.revision, update, link, now)
        )
