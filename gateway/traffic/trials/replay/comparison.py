"""The common part of a replay and a rehearsal: answers of both versions are scored, in order, until it is decided."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from penstock.gateway.model.release import Release
from penstock.gateway.model.release_policy import REPLAY_ALPHA
from penstock.gateway.releases.canary.pass_test import PassTest
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.traffic.trials.replay.judges import AnswerJudge, JudgeError, make_judge
from penstock.gateway.traffic.trials.replay.sender import ReleaseContext, ReleaseSender, background

T = TypeVar("T")
HOPELESS: Final = 10
"""After this many comparisons without any result the stage is given up."""
SHOWN: Final = 20
"""Calls that the candidate lost, and reasons for missing results, that the evidence names at most."""


class ArmComparison(ABC):
    """A replay or a rehearsal."""

    def __init__(self, context: ReleaseContext, release: Release, progress: JobProgress, stage: str) -> None:
        """`stage`: its name, as in `ReleaseSender`."""
        policy = release.policy.replay
        self.sender = ReleaseSender(context, release, stage, policy.budget, policy.concurrency)
        self._context = context
        self._release = release
        self._policy = policy
        self._progress = progress
        self._trial = PassTest(policy.margin, REPLAY_ALPHA)
        self._judge: AnswerJudge
        self._unknown: Counter[str] = Counter()
        self._passed_over: Counter[str] = Counter()
        self._worse: list[str] = []

    async def report(self) -> JobReport:
        """Compare until it is decided."""
        try:
            self._judge = await make_judge(self._release.policy.judge, self.sender, self._context.routes)
            report = await self._run()
        except JudgeError as error:
            report = JobReport(False, str(error), self.evidence())
        await self.sender.close(report.why)
        return report

    @abstractmethod
    async def _run(self) -> JobReport:
        """Send and count; raises `JudgeError`."""

    @abstractmethod
    def evidence(self) -> dict[str, Any]:
        """Return the evidence for the audit chain."""

    async def _drawn(self, draw: Callable[[Callable[[], bool]], T]) -> T:
        """Return what `draw` draws from the tape on a thread; its argument tells when nobody wants the result any
        more."""
        stopped = threading.Event()
        try:
            return await background(lambda: draw(stopped.is_set))
        finally:
            stopped.set()

    @property
    def _over(self) -> bool:
        hopeless = not self._trial.calls and self._unknown.total() >= HOPELESS
        return hopeless or self._trial.verdict() is not None

    def _scored(self, name: str, candidate: float, incumbent: float) -> None:
        self._trial.add(candidate, incumbent)
        if candidate < incumbent:
            self._worse.append(name)

    def _nothing(self, what: str, way_out: str) -> JobReport:
        why = f"there are no recorded {what}"
        for reason, count in self._passed_over.most_common(1):
            why += f" ({count} were passed over: {reason})"
        return JobReport(False, f"{why}; record some, or set {way_out}", self.evidence())
