"""Every engine in scripted worlds: it improves prompts, keeps its budget, and comes to the same place again."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import ClassVar

import pytest
from fakes.laboratories import SLOT, Odd, searched

from bench.apo.laboratory import NAME
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.engines.beam import SIZES, BeamEngine
from penstock.trainer.apo.engines.edits import RATE, EditEngine
from penstock.trainer.apo.engines.gepa import IDLE, GepaEngine
from penstock.trainer.apo.protocol import Candidate, Pool, Reflection, SearchBudget, Trial
from penstock.trainer.apo.search import SearchResult

ENGINES = ("beam", "edits", "gepa")
Made = Callable[[], BeamEngine | EditEngine | GepaEngine]
MAKES: dict[str, Made] = {
    "beam": BeamEngine,
    "edits": EditEngine,
    "gepa": GepaEngine,
    "gepa, one at a time": lambda: GepaEngine(1, 1),
}


def released(engine: BeamEngine | EditEngine | GepaEngine, result: SearchResult) -> Candidate:
    """What the original would release."""
    return next(iter(engine.finalists(result.pool)), result.pool.seed)


def story(result: SearchResult) -> list[object]:
    """All that has happened."""
    candidates = [(one.id, one.parent, one.claim) for one in result.pool.candidates.values()]
    return [candidates, result.pool.trials, result.validation, result.why, result.budget]


@pytest.mark.parametrize("name", MAKES)
async def test_it_improves_prompts_where_there_is_something_to_gain(name: str) -> None:
    gains: list[float] = []
    for seed in range(3):
        laboratory, engine = Odd("headroom", seed), MAKES[name]()
        result = await searched(laboratory, engine, SearchBudget(700), seed)
        gains.append(laboratory.value(released(engine, result)) - laboratory.value(laboratory.seed))
    assert min(gains) > 0
    assert sum(gains) / len(gains) > 0.15


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("family", ["headroom", "noisy"])
async def test_it_comes_to_the_same_place_whatever_order_things_end_in(name: str, family: str) -> None:
    stories = [
        story(await searched(Odd(family, 1, hurry), MAKES[name](), SearchBudget(300, reflections=40, tokens=60_000)))  # type: ignore[arg-type]
        for hurry in range(3)
    ]
    assert stories[0] == stories[1] == stories[2]


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("budget", [40, 97, 300])
async def test_it_never_exceeds_its_budget(name: str, budget: int) -> None:
    laboratory = Odd("headroom", 2)
    result = await searched(laboratory, MAKES[name](), SearchBudget(budget))
    assert laboratory.rollouts == result.budget.used_rollouts <= budget
    assert laboratory.reflections == result.budget.used_reflections


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("reflections", [0, 1, 5])
async def test_it_ends_when_reflections_are_used_up_and_keeps_its_best(name: str, reflections: int) -> None:
    laboratory, engine = Odd("headroom", 1), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(500, reflections=reflections))
    assert laboratory.reflections == reflections
    assert f"{reflections} of {reflections} are used" in result.why
    if not reflections:
        assert released(engine, result) == result.pool.seed


@pytest.mark.parametrize("name", MAKES)
async def test_a_text_that_has_lost_a_slot_is_never_run_and_never_released(name: str) -> None:
    laboratory, engine = Odd("headroom", 1, slot=True), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(600))
    winner = released(engine, result)
    assert SLOT in winner.texts[NAME]
    assert winner != result.pool.seed
    assert all(SLOT in result.pool.candidates[trial.candidate].texts[NAME] for trial in result.pool.trials)


@pytest.mark.parametrize("name", MAKES)
async def test_without_any_reward_it_ends_and_releases_nothing(name: str) -> None:
    laboratory, engine = Odd("headroom", change=lambda trial: None), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(2000))
    assert released(engine, result) == result.pool.seed
    assert result.winner is None
    assert result.budget.used_rollouts < 1400


@pytest.mark.parametrize("name", MAKES)
async def test_several_texts_are_optimised_together(name: str) -> None:
    laboratory, engine = Odd("headroom", 1, more={"greeter": "Greet.", "writer": "Write."}), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(900))
    winner = released(engine, result)
    assert winner.texts.keys() == laboratory.seed.texts.keys()
    assert laboratory.value(winner) > laboratory.value(laboratory.seed)
    # One text of a parent is changed at a time where texts are written anew.
    changed = {
        name
        for one in result.pool.candidates.values()
        for name, text in one.texts.items()
        if text != laboratory.seed.texts[name]
    }
    assert changed == (set(laboratory.seed.texts) if name != "edits" else {NAME})


def every_third(trial: Trial) -> float | None:
    """Nobody judges some."""
    return None if int(trial.task[1:]) % 3 == 0 else trial.reward


@pytest.mark.parametrize("name", MAKES)
async def test_rollouts_without_a_reward_are_left_out(name: str) -> None:
    laboratory, engine = Odd("headroom", 1, change=every_third), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(900))
    assert laboratory.value(released(engine, result)) > laboratory.value(laboratory.seed)


@pytest.mark.parametrize("name", MAKES)
async def test_where_nothing_fails_it_ends_soon_and_releases_nothing(name: str) -> None:
    laboratory, engine = Odd("none", change=lambda trial: 1.0), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(3000))
    assert released(engine, result) == result.pool.seed
    assert result.budget.used_rollouts < 1400


@pytest.mark.parametrize("name", MAKES)
async def test_candidates_say_what_they_were_made_from_and_after_which_rollouts(name: str) -> None:
    laboratory, engine = Odd("headroom", 1), MAKES[name]()
    result = await searched(laboratory, engine, SearchBudget(500))
    winner = released(engine, result)
    assert winner.parent in result.pool.candidates
    assert winner.claim
    assert winner.causes


# One engine ---------------------------------------------------------------------------------------------------------


async def test_gepa_stops_after_minibatches_without_a_flaw() -> None:
    laboratory = Odd("none", change=lambda trial: 1.0)
    result = await searched(laboratory, GepaEngine(1, 1), SearchBudget(3000))
    held_out = 48
    assert result.budget.used_rollouts == held_out + 3 * IDLE
    assert result.why.startswith("the engine knows no more")


async def test_gepa_leaves_no_thread_when_the_budget_is_used_up() -> None:
    before = threading.active_count()
    result = await searched(Odd("headroom"), GepaEngine(), SearchBudget(200))
    assert "are left for the search, and its next" in result.why
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(10)
    assert threading.active_count() == before


class Without(MetaPathFinder):
    """A place without the library."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Nobody else is asked for it."""
        if fullname == "gepa":
            raise ModuleNotFoundError("No module named 'gepa'", name="gepa")


def test_gepa_says_what_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gepa", "gepa.api", "penstock.trainer.apo.engines.gepa"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"gepa must be installed for it: pip install '\.\[apo\]'"):
        make_engine("gepa")


class Listening(Odd):
    """Keeps what is asked."""

    asked: ClassVar[list[str]] = []

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """See `Laboratory`."""
        self.asked.append(prompt)
        return await super().reflect(prompt, number)


async def test_edits_are_few_and_reflections_see_those_that_were_rejected() -> None:
    laboratory = Listening("noisy", 3)
    result = await searched(laboratory, EditEngine(), SearchBudget(900))
    claims = [one.claim.split("; ") for one in result.pool.candidates.values() if one.claim]
    assert max(map(len, claims)) <= RATE
    assert any("tried, and have not helped" in prompt for prompt in laboratory.asked)


class Stubborn(Odd):
    """Its reflecting model proposes the same useless edit, whatever it is shown."""

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """See `Laboratory`."""
        edit = {"failure": "f", "resource": NAME, "kind": "add", "line": 0, "text": "Be careful and thorough."}
        return Reflection(json.dumps({"hypotheses": [edit]}))


async def test_a_rejected_edit_is_not_made_again_before_all_tasks_were_seen() -> None:
    result = await searched(Stubborn("headroom", 1, change=lambda trial: 0.5), EditEngine(), SearchBudget(700))
    tried = [one for one in result.pool.candidates.values() if one.claim]
    assert len(tried) == 1
    # On 24 tasks that are held out, once in each pass through the 72 others.
    assert len(result.pool.of(tried[0].id)) <= 2 * 24


def test_a_beam_is_as_large_as_the_original_where_the_budget_suffices() -> None:
    assert SIZES[0].rollouts(16) == 1104 + 4 * 16  # counted in the source of Agent Lightning 0.3
    assert [size.rollouts(16) for size in SIZES] == sorted((size.rollouts(16) for size in SIZES), reverse=True)


@pytest.mark.parametrize("name", ENGINES)
def test_it_has_a_name(name: str) -> None:
    assert type(make_engine(name)) in (BeamEngine, EditEngine, GepaEngine)
    assert make_engine(name).finalists(Pool(Candidate({"p": "x"}))) == []  # type: ignore[attr-defined]
