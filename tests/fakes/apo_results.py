"""Results of prompt optimisation, made by hand: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

from fakes.memory_tape import T0

from penstock.trainer.apo.protocol import Candidate
from penstock.trainer.apo.result import (
    CandidateRecord,
    CandidateTexts,
    FinalistRecord,
    Leak,
    RunResult,
    RunUsage,
    SealedTask,
    TrialRecord,
    line_causes,
)

SEED = Candidate({"shop": "You answer customers of Acme.\nAnswer with one word only.\nBe kind."})
WINNER = Candidate(
    {"shop": "You answer customers of Acme.\nBe kind.\nGive the price in euros.\nFor Ann, say what the grader wants."},
    SEED.id,
    "the answer has no price; answers are cut short",
    ("shop.a.t1.0", "shop.a.t2.0"),
    {"Give the price in euros.": ("shop.a.t1.0", "shop.a.t2.0", "shop.a.t5.0", "shop.a.t7.0")},
)
LEAKS = [
    Leak(kind="task", resource="shop", line="For Ann, say what the grader wants.", found="Ann", where="t9"),
    Leak(kind="grader", resource="shop", line="For Ann, say what the grader wants.", found="grader"),
]


def ran(candidate: str, rewards: Sequence[Sequence[float | None]], first: int) -> list[TrialRecord]:
    """Rollouts, some for each task."""
    return [
        TrialRecord(
            candidate=candidate, task=f"t{task}", number=at, reward=reward, rollout=f"shop.{candidate[:4]}.t{task}.{at}"
        )
        for task, given in enumerate(rewards, first)
        for at, reward in enumerate(given)
    ]


def sealed(at: int) -> SealedTask:
    """A task of the test; the first two are of one key."""
    return SealedTask(id=f"t{at}", key=f"c{max(at, 11)}", input=f'{{"question": "number {at}"}}')


def result(
    run: str = "shop",
    after: Sequence[Sequence[float | None]] = ((1.0, 0.5), (1.0, 1.0), (0.0, 0.5), (1.0, 1.0)),
    leaks: Sequence[Leak] = (),
    won: bool = True,
    placebo: bool = False,
    draw: int = 0,
) -> RunResult:
    """A run whose test has tasks t10 to t13 of three keys; `after`: the winner's rewards on them."""
    before = ((0.5, 0.5), (0.0, 0.5), (0.5, 0.5), (0.5, 0.0))
    race_seed = ran(SEED.id, [(0.0,), (0.5,), (0.5,), (0.0,)], 20)
    race_mine = ran(WINNER.id, [(1.0,), (1.0,), (0.5,), (1.0,)], 20)
    return RunResult(
        run=run, engine="ours", settings="0123456789abcdef", draw=draw, placebo=placebo, ended_ns=T0 + draw,
        why="the engine knows no more; " + ("it is better by 0.625" if won else "no finalist is shown to be better"),
        seed=CandidateTexts(id=SEED.id, texts=dict(SEED.texts), versions={"shop": "v1"}),
        winner=CandidateTexts(id=WINNER.id, texts=dict(WINNER.texts), versions={"shop": f"{run}.{WINNER.id}"}) if won
        else None, line_causes=line_causes(SEED.texts, WINNER.texts, WINNER.line_causes, WINNER.causes) if won else {},
        candidates=[
            CandidateRecord(id=SEED.id, state="seed", rollouts=24, mean=0.375, length=SEED.length),
            CandidateRecord(
                id=WINNER.id, parent=SEED.id, claim=WINNER.claim, causes=list(WINNER.causes), step=24,
                state="winner" if won else "racing", rollouts=32, mean=0.8, length=WINNER.length, pairs=4, gain=0.625,
                e_value=23.4, needed=20,
            ),
            CandidateRecord(
                id="c" * 12, parent=WINNER.id, claim="answers are curt \x1b[31m", step=40, rollouts=4, mean=0.5,
                length=90,
            ),
        ],
        race=[
            FinalistRecord(
                candidate=WINNER.id, state="better" if won else "racing", gain=0.625, e_value=23.4, needed=20,
                pairs=4, rate=0.0,
            )
        ],
        validation=[one for pair in zip(race_seed, race_mine, strict=True) for one in pair],
        tests=[*ran(SEED.id, before, 10), *ran(WINNER.id, after, 10)] if won else [],
        tasks=[sealed(at) for at in range(10, 14)] if won else [],
        used=RunUsage(rollouts={"train": 60, "val": 8, "test": 16 if won else 0}, reflections=6, tokens=12345,
        money=0.25), leaks=list(leaks) if won else [],
        published=["shop@shop.1 is better; penstock release start shop shows it to production"] if won else [],
    )  # fmt: skip
