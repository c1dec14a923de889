"""Releases: one version for each rollout unless a rollback took it away, the version that the tape names is the one
that was served, and what a person decided stands."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from e2e.histories import weights
from e2e.histories.history import Operation, of
from e2e.histories.tape import Tape, versions

RESOURCE = "travel"
RESOURCES = (RESOURCE, weights.RESOURCE)
TEXT = "You are a travel agent of Acme Air. Today is {date}. Never refund a basic fare. Rule %d is the newest."
"""The prompt, in which each version says which one it is."""
DECIDED = {"promote": "promoted", "rollback": "rolled_back"}


def one_version(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A rollout has one version and one arm of each resource; where it has seen two, its release was rolled back and
    its pin says so."""
    arms: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for span in tape.spans:
        for arm in (span.arm or "").split(",") if span.arm else ():
            arms[span.rollout, tape.released[arm.partition(":")[0]]].add(arm)
    for (rollout, resource), found in arms.items():
        if len(found) > 1:
            yield f"rollout {rollout} has the arms {sorted(found)} of {resource}"
    for resource in RESOURCES:
        yield from _versions(resource, tape)


def _versions(resource: str, tape: Tape) -> Iterator[str]:
    for rollout, found in versions(tape.spans, resource).items():
        pins = [pin for pin in tape.pins.get(rollout, []) if pin.resource == resource]
        marked = any(pin.mixed and tape.stages.get(str(pin.release)) == "rolled_back" for pin in pins)
        if len(found) > 2 or (len(found) == 2 and not marked):
            yield f"rollout {rollout} was served by the versions {sorted(found)} of {resource}; its pins: {pins}"


def as_served(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """The provider has seen the text of the version that the span names; without one, the agent's own."""
    for span in tape.spans:
        text = tape.seen.get(str(span.parent_id), "")
        said = re.search(r"Rule (\d+) is", text)
        if said is not None and span.kind == "llm":
            named = (span.versions or {}).get(RESOURCE, "v1")
            if named != f"v{said[1]}":
                yield f"{span.rollout}#{span.sequence} names {named}, and was served by v{said[1]}"


def adapters(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """The weights that the span names have answered; whoever asks for weights gets some, whatever became of their
    server meanwhile."""
    for span in tape.spans:
        served, version = tape.served.get(str(span.parent_id)), (span.versions or {}).get(weights.RESOURCE)
        named = None if version is None else f"{weights.RESOURCE}@{version}"
        if span.kind == "llm" and served is not None and served != named:
            yield f"{span.rollout}#{span.sequence} names {named}, and was served by {served}"
    for one in of(history, "call"):
        if one.asked.get("model") == weights.RESOURCE and one.answer.get("status") == 404:
            yield f"its weights were not there: {one}: {one.answer['error']}"


def decided(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A release that was answered to be promoted or rolled back is."""
    for one in of(history, "decide"):
        if one.result == "ok" and tape.stages.get(one.asked["release"]) != DECIDED[one.asked["action"]]:
            yield f"the tape has it as {tape.stages.get(one.asked['release'])}: {one}"
    for one in of(history, "release"):
        if one.result == "ok" and one.answer["release"] not in tape.stages:
            yield f"a release that was started is not there: {one}"
