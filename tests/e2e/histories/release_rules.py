"""Releases: one version for each rollout unless a rollback took it away, the version that the tape names is the one
that was served, and what a person decided stands."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from e2e.histories.history import Operation, of
from e2e.histories.tape import Tape, versions

RESOURCE = "travel"
TEXT = "You are a travel agent of Acme Air. Today is {date}. Never refund a basic fare. Rule %d is the newest."
"""The prompt, in which each version says which one it is."""
DECIDED = {"promote": "promoted", "rollback": "rolled_back"}


def one_version(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A rollout has one version and one arm; where it has seen two, its release was rolled back and its pin says so."""
    arms: defaultdict[str, set[str]] = defaultdict(set)
    for span in tape.spans:
        if span.arm is not None:
            arms[span.rollout].add(span.arm)
    yield from (f"rollout {rollout} has the arms {sorted(found)}" for rollout, found in arms.items() if len(found) > 1)
    for rollout, found in versions(tape.spans, RESOURCE).items():
        pins = tape.pins.get(rollout, [])
        marked = any(pin.mixed and tape.stages.get(str(pin.release)) == "rolled_back" for pin in pins)
        if len(found) > 2 or (len(found) == 2 and not marked):
            yield f"rollout {rollout} was served by the versions {sorted(found)}; its pins: {pins}"


def as_served(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """The provider has seen the text of the version that the span names; without one, the agent's own."""
    for span in tape.spans:
        text = tape.seen.get(str(span.parent_id), "")
        said = re.search(r"Rule (\d+) is", text)
        if said is not None and span.kind == "llm":
            named = (span.versions or {}).get(RESOURCE, "v1")
            if named != f"v{said[1]}":
                yield f"{span.rollout}#{span.sequence} names {named}, and was served by v{said[1]}"


def decided(history: Sequence[Operation], tape: Tape) -> Iterator[str]:
    """A release that was answered to be promoted or rolled back is."""
    for one in of(history, "decide"):
        if one.result == "ok" and tape.stages.get(one.asked["release"]) != DECIDED[one.asked["action"]]:
            yield f"the tape has it as {tape.stages.get(one.asked['release'])}: {one}"
    for one in of(history, "release"):
        if one.result == "ok" and one.answer["release"] not in tape.stages:
            yield f"a release that was started is not there: {one}"
