"""Verification: whatever is changed afterwards, in any of its parts, is found, and named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from itertools import count
from typing import Any

import pytest
from fakes.mistakes import tells
from fakes.some import some
from fakes.trials import Trial, steady

from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import Assignment, AuditTrailEntry, EarlyEvidence
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.releases.canary.decision import add_early_looks, add_outcomes, empty_evidence
from penstock.gateway.releases.canary.evidence import CanaryEvidence
from penstock.gateway.releases.canary.outcomes import share
from penstock.gateway.releases.canary.verification import circumstances, verify

SHORT = ReleasePolicy(
    stages=[CanaryStage(split=0.2, rollouts=5), CanaryStage(split=0.5, rollouts=5)], margin_absolute=0.1
)


@pytest.fixture
def trial() -> Trial:
    """One that was rolled back for harm; nothing was made of its first rollout."""
    made = Trial.of(SHORT).prepare()
    made.assign()
    made.look_early(None)
    made.count(steady(0, 0), left_out="it was cancelled")
    made.run(3000, steady(0.7, 0.3))
    assert (made.release.stage, made.audit[-1].action, made.audit[-2].action) == ("rolled_back", "roll_back", "advance")
    return made


def found(trial: Trial) -> list[str]:
    return list(verify(trial.release, trial.assigned, trial.seen, trial.audit))


def resealed(trial: Trial, audit: Sequence[AuditTrailEntry], **release: Any) -> Trial:
    """The same with other entries: somebody has worked out their hashes, numbers and the release's head again."""
    links, previous = list[AuditTrailEntry](), ""
    for number, entry in enumerate(audit, 1):
        links.append(entry.model_copy(update={"number": number}).sealed(previous))
        previous = links[-1].hash
    forged = copy(trial)
    forged.release = trial.release.model_copy(update={"head": previous, "revision": len(links)} | release)
    forged.audit, forged.assigned, forged.seen = links, list(trial.assigned), list(trial.seen)
    return forged


def test_what_nobody_has_touched_agrees(trial: Trial) -> None:
    assert found(trial) == []
    assert found(resealed(trial, trial.audit)) == []


def test_a_hash_is_what_other_programs_work_out_too(trial: Trial) -> None:
    for before, entry in zip(trial.audit, trial.audit[1:], strict=False):
        fields = json.loads(entry.model_dump_json(exclude={"hash", "signature"}))
        text = before.hash + "\n" + json.dumps(fields, sort_keys=True, separators=(",", ":"))
        assert entry.hash == hashlib.sha256(text.encode()).hexdigest()


def test_an_entry_that_follows_no_other_is_found(trial: Trial) -> None:
    last = trial.audit[-1].sealed("00" * 32)
    forged = resealed(trial, trial.audit)
    forged.audit[-1], forged.release.head = last, last.hash
    (problem,) = found(forged)
    assert tells(problem, f"entry {last.number} was changed", "hash")


def test_an_entry_that_was_changed_is_found(trial: Trial) -> None:
    trial.audit[2] = trial.audit[2].model_copy(update={"why": "I like it"})
    assert found(trial) == ["entry 3 was changed, or the one before it: its hash does not agree"]


def test_a_rollout_on_the_arm_that_its_share_does_not_give_is_found(trial: Trial) -> None:
    one = trial.assigned[5]
    name = next(
        name
        for name in (f"other-{number}" for number in count())
        if (share(trial.release.salt, name) < one.probability) != (one.arm == "candidate")
    )
    trial.assigned[5] = one.model_copy(update={"rollout": name})
    trial.seen[5] = trial.seen[5].model_copy(update={"rollout": name})
    assert found(trial) == [f"assignment 6: rollout {name} is on the arm {one.arm}, its share says otherwise"]


def test_a_probability_that_is_not_its_stages_is_found(trial: Trial) -> None:
    one = trial.assigned[0]
    near = one.probability + (-1e-9 if one.arm == "stable" else 1e-9)
    trial.assigned[0] = one.model_copy(update={"probability": near})
    (problem,) = found(trial)
    assert tells(problem, "assignment 1 had the probability 0.2", "stage '20%' has 0.2")


def test_an_observation_of_another_rollout_is_found(trial: Trial) -> None:
    trial.seen[0] = trial.seen[0].model_copy(update={"rollout": "other"})
    assert found(trial) == [f"assignment 1 is {trial.assigned[0].rollout}, what was seen is of other"]


def test_an_observation_that_was_changed_gives_other_figures(trial: Trial) -> None:
    at = next(at for at, one in enumerate(trial.seen) if one.reward == 1.0)
    trial.seen[at] = trial.seen[at].model_copy(update={"reward": 0.999})
    assert found(trial)
    assert all("figures" in one or "recomputed" in one for one in found(trial))


def test_another_margin_gives_other_figures(trial: Trial) -> None:
    trial.release = trial.release.model_copy(update={"margin": 0.2})
    assert found(trial)


def test_an_observation_that_is_not_there_is_found(trial: Trial) -> None:
    trial.seen.pop()
    (problem,) = found(trial)
    assert tells(problem, f"{len(trial.seen)} of {trial.release.counted} observations")


def test_another_policy_than_the_one_that_was_frozen_is_found(trial: Trial) -> None:
    shadow = trial.release.policy.shadow.model_copy(update={"calls": 1})
    policy = trial.release.policy.model_copy(update={"shadow": shadow})
    trial.release = trial.release.model_copy(update={"policy": policy})
    for problem, entry in zip(found(trial), trial.audit, strict=True):
        assert tells(problem, f"entry {entry.number}", "another policy")


def test_a_rollback_by_early_looks_is_made_again() -> None:
    """Outcomes of earlier rollouts are counted in between; looks and outcomes may come in any order."""
    trial = Trial.of(SHORT).prepare()
    for number in range(400):
        if trial.release.stage != "canary":
            break
        trial.assign()
        trial.look_early(0.0 if trial.assigned[-1].arm == "candidate" else None if number % 7 == 0 else 1.0)
        if number % 3 == 0 and trial.release.stage == "canary":
            trial.count(steady(0.7, 0.7))
    last = trial.audit[-1]
    assert (trial.release.stage, last.why.split(":")[0]) == ("rolled_back", "guard early_error")
    assert (last.assignment, last.early) == (trial.release.counted, trial.release.early)
    assert 0 < trial.release.counted < trial.release.early
    assert found(trial) == []
    at = next(at for at, one in enumerate(trial.assigned) if one.early is not None and one.early.good == 0.0)
    early = some(trial.assigned[at].early)
    trial.assigned[at] = trial.assigned[at].model_copy(update={"early": early.model_copy(update={"good": 1.0})})
    assert found(trial)
    trial.assigned[at] = trial.assigned[at].model_copy(update={"early": None})
    number = trial.release.early
    assert any(tells(one, f"{number - 1} of {number} early looks") for one in found(trial))


def test_early_looks_from_after_this_state_of_a_release_change_nothing(trial: Trial) -> None:
    more = EarlyEvidence(seen_ns=1, good=0.0, counted=trial.release.counted)
    added = Assignment.model_validate(
        trial.assigned[-1].model_dump() | {"number": len(trial.assigned) + 1, "early": more}
    )
    assert list(verify(trial.release, [*trial.assigned, added], trial.seen, trial.audit))[1:] == []


def test_a_decision_that_was_taken_out_is_found(trial: Trial) -> None:
    last = trial.audit[-1]
    gone = resealed(trial, trial.audit[:-1], stage="canary")
    assert found(gone) == [f"after assignment {last.assignment} the rules say roll_back, no entry does: {last.why}"]


def test_a_decision_that_the_rules_did_not_make_is_found(trial: Trial) -> None:
    early = resealed(trial, [*trial.audit[:-1], trial.audit[-1].model_copy(update={"assignment": 20})])
    (problem,) = found(early)
    last = trial.audit[-1]
    assert f"says roll_back after assignment 20 ({last.early} looked at early); recomputed it is roll_back" in problem


def test_a_decision_of_the_rules_names_its_assignment(trial: Trial) -> None:
    """A forger who leaves it out does not thereby keep it from being made again."""
    promoted = AuditTrailEntry(
        number=0, at_ns=1, who=GATEWAY, action="promote", before="canary", after="promoted", why="so good"
    )
    links = [*trial.audit[:-1], promoted.model_copy(update={"config": trial.release.config()})]
    forged = resealed(trial, links, stage="promoted")
    assert any(tells(one, f"entry {len(links)} says promote", "names no assignment") for one in found(forged))


def test_a_rollback_for_violations_that_are_allowed_is_found(trial: Trial) -> None:
    made = AuditTrailEntry(number=0, at_ns=1, who=GATEWAY, action="roll_back", before="canary", after="rolled_back")
    link = made.model_copy(update={"config": trial.release.config(), "evidence": {"violations": 0}})
    forged = resealed(trial, [*trial.audit[:-1], link])
    assert any(tells(one, f"entry {len(trial.audit)} rolled back", "0 hard violations") for one in found(forged))


# --- what people decided from ---


def weighed(trial: Trial) -> CanaryEvidence:
    seen = add_outcomes(empty_evidence(trial.release), zip(trial.assigned, trial.seen, strict=False))
    return add_early_looks(seen, trial.assigned)


@pytest.fixture
def decided() -> Trial:
    """Somebody has held it, gone on, and promoted it, each time with the evidence of that moment."""
    made = Trial.of(SHORT).prepare().run(100, steady(0.7, 0.7))
    made.assign()
    made.look_early(None)
    made.count(steady(0, 0), left_out="it was cancelled")
    split = made.release.split
    made.person("hold", "held", held_in="canary", evidence=circumstances(weighed(made), split))
    made.person("resume", "canary", held_in=None, evidence=circumstances(weighed(made), split))
    made.run(60, steady(0.7, 0.7, seed=8))
    made.assign()
    return made.person("promote", "promoted", split=0.0, evidence=circumstances(weighed(made), made.release.split))


def test_the_evidence_that_a_person_had_is_that_of_the_moment(decided: Trial) -> None:
    assert found(decided) == []
    held, promoted = (entry.evidence for entry in decided.audit if entry.action in ("hold", "promote"))
    assert (held["seen"], promoted["seen"], promoted["split"]) == (100, 160, 0.5)
    assert held["harm"] != promoted["harm"]
    assert {"harm", "non_inferiority", "stable.reward", "candidate.assigned", "srm.50%", "number"} <= promoted.keys()


@pytest.mark.parametrize("figure", ["harm", "split", "candidate.reward", "seen"])
@pytest.mark.parametrize("action", ["hold", "promote"])
def test_evidence_that_a_person_did_not_have_is_found(decided: Trial, action: str, figure: str) -> None:
    at = next(at for at, entry in enumerate(decided.audit) if entry.action == action)
    forged = decided.audit[at].evidence | {figure: 0.125}
    links = [*decided.audit]
    links[at] = links[at].model_copy(update={"evidence": forged})
    problem = f"entry {at + 1}: the evidence that ann had is not what follows from the tape"
    assert found(resealed(decided, links)) == [problem]


def test_evidence_grows_by_what_was_counted_since_and_by_nothing_twice(decided: Trial) -> None:
    pairs = list(zip(decided.assigned, decided.seen, strict=False))
    evidence = add_outcomes(add_outcomes(empty_evidence(decided.release), pairs[:40]), pairs)
    evidence = add_early_looks(add_early_looks(evidence, decided.assigned[:90]), decided.assigned)
    assert circumstances(evidence, 0.5) == circumstances(weighed(decided), 0.5)
