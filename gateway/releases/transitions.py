"""The changes of a release by a rule or by a person, and the audit entry of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shlex import join
from typing import Any, Final

from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.model.resource import audience_terms
from penstock.gateway.tape.store.transaction import OperationRefusedError


def entry(action: str, who: str, why: str, assignment: int | None = None, early: int = 0) -> AuditTrailEntry:
    """Return a link of the chain, as far as it is known before it is written. `assignment` and `early`: numbers of the
    assignments that were counted last and examined early last."""
    return AuditTrailEntry(
        number=0, at_ns=0, who=who, action=action, before=None, after="draft", why=why, assignment=assignment,
        early=early,
    )  # fmt: skip


ROLLED_BACK: Final[Mapping[str, Any]] = {"stage": "rolled_back", "split": 0.0, "waits": None, "held_in": None}


def _advance(release: Release) -> Mapping[str, Any]:
    step = release.step + 1
    return {"stage": "canary", "step": step, "split": release.policy.ramp[step].split, "waits": None}


def _hold(release: Release) -> Mapping[str, Any]:
    if release.stage == "held":
        ways = "resume, promote, rollback or abort" if release.held_in == "canary" else "resume, rollback or abort"
        message = f"release {release.id} is held already: {ways} it"
        raise OperationRefusedError("conflict", message, "release", release.id)
    return {"stage": "held", "held_in": release.stage}


def _resume(release: Release) -> Mapping[str, Any]:
    if release.held_in is None:
        raise OperationRefusedError(
            "conflict", f"release {release.id} is {release.stage.replace('_', ' ')}, not held", "release", release.id
        )
    return {"stage": release.held_in, "held_in": None}


def _approve(release: Release) -> Mapping[str, Any]:
    if release.waits != "approval":
        stage = release.stage.replace("_", " ")
        message = f"release {release.id} ({stage}) does not wait for approval: there is nothing to approve"
        raise OperationRefusedError("conflict", message, "release", release.id)
    return {"waits": None}


def _roll_back(release: Release) -> Mapping[str, Any]:
    if release.stage == "promoted":
        again = ["penstock", "release", "start", release.resource, "--candidate", release.stable]
        again += [word for name, it in release.companions_stable.items() for word in ("--with", f"{name}={it}")]
        again += [word for one in audience_terms(release.only) for word in ("--only", one)]
        message = f"release {release.id} is promoted: {release.candidate} is stable; {join(again)} takes it back"
        raise OperationRefusedError("conflict", message, "release", release.id)
    return ROLLED_BACK


Update = Callable[[Release], Mapping[str, Any]]
RULE_CHANGES: Final[Mapping[str, Update]] = {
    "advance": _advance,
    "promote": lambda _: {"stage": "promoted", "split": 0.0, "waits": None},
    "roll_back": lambda _: ROLLED_BACK,
    "hold": _hold,
    "wait": lambda _: {"waits": "approval"},
}
"""Changes of a release by each decision of the rules."""
PERSON_CHANGES: Final[Mapping[str, Update]] = {
    "promote": lambda _: {"stage": "promoted", "split": 0.0, "waits": None, "held_in": None},
    "rollback": _roll_back,
    "abort": lambda _: {"stage": "aborted", "split": 0.0, "waits": None, "held_in": None},
    "hold": _hold,
    "resume": _resume,
    "approve": _approve,
}
"""Changes of a release by each decision of a person."""
