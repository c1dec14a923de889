"""`gepa`: the library of that name (0.1.4), with several parents and several proposals of each at once.

The library keeps a pool of candidates, chooses parents among those that lead on some task, lets a model rewrite one
text of the parent after a few of its rollouts, and runs the child on the same tasks. A child that is better there is
run on all held-out tasks (half of the train split at most), and joins the pool. Its winner is the candidate with the
highest mean on those.

Our additions: rollouts of a step run at the same time; budgets are never exceeded, and a step that they do not cover
ends the search with the best so far; a text that has lost a slot scores 0 without a rollout; a rollout without a
reward counts as the mean of the others of its candidate in the batch, and is not shown to the reflecting model. The
evaluation cache stays off (in 0.1.4 it confuses the two sets of tasks), and nothing is written to disk: a run that was
killed begins again and finds its rollouts. The search ends by itself after `IDLE` minibatches in a row with the best
rewards only or without any reward.

The library blocks, so it runs in a thread, and the event loop does the work that it requests. The thread sends one
request after the other and waits for each. Between `yield` and the next step it waits too. So the thread stands still
while nobody iterates, and its course follows from the answers alone. When the iteration is cancelled, or a request has
failed, the thread ends at its next request.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar, cast

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch
from gepa.core.callbacks import EvaluationSkippedEvent, ProposalStartEvent, ValsetEvaluatedEvent
from gepa.proposer.reflective_mutation.reflection_lm import ReflectionJob, ReflectionProposal, StatelessReflectionLM
from gepa.strategies.instruction_proposal import InstructionProposalSignature
from gepa.strategies.proposal_sampling import PxNSampling
from gepa.strategies.proposal_selection import AllImprovements

from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, Trial, hold_out
from penstock.trainer.apo.reflection import clipped

IDLE: Final = 20
"""Minibatches in a row without anything to learn after which the search ends."""
SHARE: Final = 40
"""The held-out part has one task for so many rollouts of the budget."""
FEWEST: Final = 8
MOST: Final = 64
"""Fewest and most tasks of the held-out part."""
ASK: Final = InstructionProposalSignature.default_prompt_template + (" Keep every {slot} of the instructions as it is.")

T = TypeVar("T")
Texts = dict[str, str]
Batch = EvaluationBatch[Trial | str, None]
Work = Callable[[], Awaitable[Any]]


class BridgeExit(BaseException):
    """The iteration has ended. No `Exception`, because libraries go on after those."""


class LoopPortal:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.requests: asyncio.Queue[tuple[Work | None, Any, Future[Any]]] = asyncio.Queue()
        """(work to do, or None with news or an error, the future of the answer)."""
        self._answer: Future[Any] | None = None
        self._over = False
        self._lock = threading.Lock()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Let the event loop do `work`, and return the result. Raises `BridgeExit`."""
        return cast(T, self._send(work, None))

    def emit(self, news: Any) -> None:
        """Yield news to the iteration, and wait for its next step. Raises `BridgeExit`."""
        self._send(None, news)

    def run(self, function: Callable[[LoopPortal], None]) -> None:
        """Run the function, then report the end of the thread: its error, or `BridgeExit`."""
        error: BaseException = BridgeExit()
        try:
            function(self)
        except BaseException as raised:
            error = raised
        self._post(None, error)

    def close(self) -> None:
        """End the connection because the iteration has ended; called in the event loop."""
        with self._lock:
            self._over = True
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(BridgeExit())

    def _send(self, work: Work | None, news: Any) -> Any:
        answer = self._post(work, news)
        if answer is None:
            raise BridgeExit
        return answer.result()

    def _post(self, work: Work | None, news: Any) -> Future[Any] | None:
        """Send a request; return the future of its answer, or None if the iteration has ended."""
        with self._lock:
            if self._over:
                return None
            self._answer = answer = Future[Any]()
            self._loop.call_soon_threadsafe(self.requests.put_nowait, (work, news, answer))
            return answer


async def iterate_in_thread(function: Callable[[LoopPortal], None]) -> AsyncGenerator[Any]:
    """Run a function in a thread and do the work that it requests; yield its news. Raises the error of either."""
    line = LoopPortal()
    threading.Thread(target=line.run, args=(function,), daemon=True).start()
    try:
        while True:
            work, news, answer = await line.requests.get()
            if isinstance(news, BridgeExit):
                return
            if isinstance(news, BaseException):
                raise news
            if work is None:
                yield news
            answer.set_result(None if work is None else await work())
    finally:
        line.close()


class GepaEngine:
    """The engine of one run. `parents`: parents of a step; `mutations`: children of each."""

    def __init__(self, parents: int = 2, mutations: int = 2) -> None:
        self._sampling = PxNSampling(parents, mutations)
        self._best: Candidate | None = None
        self._steps: AsyncGenerator[Candidate] | None = None

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """Return the next candidate that the library takes into its pool."""
        if self._steps is None:
            self._steps = self._search(pool, evidence)
        candidate = await anext(self._steps, None)
        return [] if candidate is None else [candidate]

    def finalists(self, pool: Pool) -> list[Candidate]:
        return [] if self._best is None else [self._best]

    async def _search(self, pool: Pool, evidence: Evidence) -> AsyncGenerator[Candidate]:
        learn, choose = hold_out(evidence, min(MOST, max(FEWEST, evidence.budget.left // SHARE)))
        seed = evidence.random.getrandbits(32)

        def search(line: LoopPortal) -> None:
            adapter = _GepaAdapter(pool, evidence, line)
            optimize(
                dict(pool.seed.texts),
                learn,
                choose,
                adapter,  # pyright: ignore[reportArgumentType]  # it has the methods that are called
                reflection_strategy=_GepaReflection(adapter),
                reflection_minibatch_size=min(3, len(learn)),
                sampling_strategy=self._sampling,
                selection_strategy=AllImprovements(),
                callbacks=[adapter],  # pyright: ignore[reportArgumentType]  # it has some of the callbacks
                stop_callbacks=adapter.should_stop,
                cache_evaluation=False,
                logger=adapter,
                seed=seed,
            )

        async for candidate, leads in iterate_in_thread(search):
            self._best = candidate if leads else self._best
            yield candidate


class _ReflectiveDataset(dict[str, list[dict[str, str]]]):
    """The input of a reflection, with the rollouts that it is made of."""

    rollouts: tuple[str, ...] = ()


class _GepaAdapter:
    """The library's adapter, callbacks, logger and model, implemented by the evidence."""

    propose_new_texts = None

    def __init__(self, pool: Pool, evidence: Evidence, line: LoopPortal) -> None:
        self._evidence, self._line = evidence, line
        self._made: dict[str, Candidate] = {pool.seed.id: pool.seed}
        self._inputs = {task.id: task.input for task in evidence.tasks}
        self._idle = 0

    def note_origin(self, parent: Texts, changed: Texts, rollouts: tuple[str, ...]) -> None:
        claim = f"written anew: {', '.join(sorted(changed))}"
        child = Candidate({**parent, **changed}, self._candidate(parent).id, claim, rollouts)
        self._made.setdefault(child.id, child)

    def _candidate(self, texts: Texts) -> Candidate:
        found = Candidate(dict(texts))
        return self._made.get(found.id, found)

    def evaluate(self, batch: list[str], candidate: Texts, capture_traces: bool = False) -> Batch:
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[Texts, list[str]]]) -> list[Batch]:
        found = [
            (one, self._evidence.problem(one), tasks) for texts, tasks in items for one in [self._candidate(texts)]
        ]
        pairs = [(candidate, task) for candidate, problem, tasks in found if not problem for task in tasks]
        trials = iter(self._line.call(lambda: self._evidence.run_all(pairs)))
        return [_batch(tasks, problem, [] if problem else [next(trials) for _ in tasks]) for _, problem, tasks in found]

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Batch, components_to_update: list[str]
    ) -> _ReflectiveDataset:
        """Return the input of a reflection. Raises `ValueError` if no rollout has a reward: the library goes on."""
        trials = [one for one in eval_batch.trajectories or [] if isinstance(one, Trial) and one.reward is not None]
        if not trials:
            self._idle += 1
            raise ValueError("no rollout has a reward")
        records = [
            {
                "Inputs": json.dumps(self._inputs[trial.task], ensure_ascii=False),
                "Generated Outputs": clipped(trial.transcript),
                "Feedback": f"Reward {trial.reward:.2f} of 1. {trial.reason or 'No reason was given.'}",
            }
            for trial in trials
        ]
        seen = _ReflectiveDataset({name: records for name in components_to_update})
        seen.rollouts = tuple(trial.rollout for trial in trials)
        return seen

    def on_valset_evaluated(self, event: ValsetEvaluatedEvent) -> None:
        self._line.emit((self._candidate(event["candidate"]), event["is_best_program"]))

    def on_evaluation_skipped(self, event: EvaluationSkippedEvent) -> None:
        self._idle += event["reason"] == "all_scores_perfect"

    def on_proposal_start(self, event: ProposalStartEvent) -> None:
        self._idle = 0

    def should_stop(self, gepa_state: Any) -> bool:
        return self._idle >= IDLE

    def log(self, message: str) -> None:
        """Ignore the message; without a logger the library prints."""

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        return self._ask([str(prompt)])[0]

    def batch_complete(self, messages: list[list[dict[str, Any]]]) -> list[str]:
        return self._ask([str(one[0]["content"]) for one in messages])

    def _ask(self, prompts: Sequence[str]) -> list[str]:
        """Return the answers; empty where the budget allowed none."""
        return [answer or "" for answer in self._line.call(lambda: self._evidence.reflect_all(prompts))]


class _GepaReflection(StatelessReflectionLM):
    """The library's own question, and its own parser of the answer."""

    def __init__(self, adapter: _GepaAdapter) -> None:
        super().__init__(adapter, ASK)
        self._adapter = adapter

    def reflect_many(self, jobs: list[ReflectionJob]) -> list[tuple[ReflectionProposal, StatelessReflectionLM]]:
        answers = super().reflect_many(jobs)
        for (parent, seen, _), (proposal, _) in zip(jobs, answers, strict=True):
            proposal.new_texts = {name: text for name, text in proposal.new_texts.items() if text}
            if proposal.new_texts and isinstance(seen, _ReflectiveDataset):
                self._adapter.note_origin(parent, proposal.new_texts, seen.rollouts)
        return answers


def _batch(tasks: Sequence[str], problem: str, trials: Sequence[Trial]) -> Batch:
    """Return the library's form of trials; of a candidate with a problem there are none."""
    count, refused = len(tasks), list[Trial | str]([problem] * len(tasks))
    if problem:
        return EvaluationBatch([None] * count, [0.0] * count, refused, num_metric_calls=0)
    given = [trial.reward for trial in trials if trial.reward is not None]
    mean = sum(given) / len(given) if given else 0.0
    scores = [mean if trial.reward is None else trial.reward for trial in trials]
    return EvaluationBatch([None] * count, scores, list(trials))
