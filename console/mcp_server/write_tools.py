"""Tools that add to the tape: rewards, and proposals of prompts. They are offered only with `--write`.

Neither changes which version agents get: a new version waits until a person starts a release of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from penstock.console.mcp_server.tool import (
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolDefinition,
    ToolError,
    ToolResult,
    cut,
    problems,
)
from penstock.console.mcp_server.versions import resource_of, version_of
from penstock.console.views import queue as queue_display
from penstock.console.views import resources as display
from penstock.gateway.model.base import Id
from penstock.gateway.model.resource import MOST_TEXT, NewVersion, Resource, Template, TemplateError, check_candidate
from penstock.gateway.model.rollout import Judgement

DIFF = 6000
"""Most characters of the difference that is shown after a proposal."""


class PostRewardArguments(ToolArguments):
    rollout: Id
    """The rollout."""
    value: Annotated[float | None, Field(allow_inf_nan=False)] = None
    """How well it went, on the scale of its other rewards: usually 0 (failed) to 1 (done)."""
    reason: Annotated[str, Field(min_length=1, max_length=10_000)]
    """Why, in a sentence or two: what in the transcript shows it."""
    attempt: Id | None = None
    """The attempt; may be left out when there is one."""
    sequence: Annotated[int | None, Field(ge=1)] = None
    """The call that is judged; the whole attempt if not given."""
    dimensions: dict[str, float] = Field(default_factory=dict[str, float])
    """Named scores beside it, such as {"helpful": 0.5, "cost": 0.02}."""
    source: Literal["judge", "user", "runner"] = "judge"
    """Who says so: `judge` is you, `user` a person whose words you pass on."""
    key: str | None = None
    """Makes it safe to send again: of an attempt's rewards with the same key only the first is kept."""


class PostRewardAnswer(ToolAnswer):
    """A reward that was kept."""

    rollout: str
    attempt: str
    sequence: int
    """Its span."""
    reward: float | None
    """The reward that the attempt has now."""
    trusted: bool
    """Whether it is trained on."""
    late: bool
    """Whether it came after the attempt had ended."""


async def post_reward(context: ToolContext, asked: PostRewardArguments) -> ToolResult:
    """Judge an attempt, or a call of it."""
    said = asked.model_dump(exclude_none=True, include={"value", "reason", "dimensions", "source", "key"})
    try:
        judgement = Judgement(**said, span=asked.sequence)
    except ValidationError as e:
        raise ToolError(problems(e, Judgement)) from None
    attempt = asked.attempt or await _only_attempt(context, asked.rollout)
    kept = await context.client.reward(asked.rollout, attempt, judgement)
    answer = PostRewardAnswer(
        rollout=asked.rollout,
        attempt=attempt,
        sequence=kept.sequence,
        reward=kept.reward,
        trusted=kept.trusted,
        late=kept.late,
    )
    return ToolResult(answer, queue_display.rewarded(f"{asked.rollout}/{attempt}", kept).plain)


async def _only_attempt(context: ToolContext, rollout: str) -> str:
    attempts = await context.client.attempts(rollout)
    if len(attempts) != 1:
        names = ", ".join(one.id for one in attempts[:20])
        raise ToolError(f"rollout {rollout!r} has {len(attempts)} attempts ({names}): say which one with `attempt`")
    return attempts[0].id


class ProposeVersionArguments(ToolArguments):
    name: Id
    """The prompt, or tool-text; list_resources has the names."""
    text: Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]
    """The whole new text. Keep every {slot} of the parent; literal braces are doubled: {{ }}."""
    note: Annotated[str, Field(min_length=1, max_length=4000)]
    """Why it should be better, in a sentence: which failures it answers."""
    parent: Id | None = None
    """The version that it was made from; the stable one if not given."""
    version: Id | None = None
    """Its name; the next free v1, v2 ... if not given."""


class ProposalAnswer(ToolAnswer):
    """A version that was added."""

    name: str
    version: str
    parent: str
    there_already: bool
    """Whether the same text was there before: nothing was added then."""
    diff: str
    """Against its parent, shortened."""
    next: str
    """What a person does to try it."""


async def propose(context: ToolContext, asked: ProposeVersionArguments) -> ToolResult:
    """Add a version of a text."""
    found = await resource_of(context.client, asked.name)
    if found.kind == "model":
        raise ToolError(f"{asked.name!r} is a model: its versions are weights, which trainers publish")
    parent = version_of(found, asked.parent)
    _keeps_slots(parent, asked.text)
    content: dict[str, Any] = {name: value for name, value in parent.content.items() if name == "tool"}
    about = {"parent": parent.version, "author": context.who, "note": asked.note, "version": asked.version}
    try:
        given = {name: value for name, value in about.items() if value}
        new = NewVersion.model_validate({"kind": found.kind, "content": content | {"text": asked.text}} | given)
    except ValidationError as e:
        raise ToolError(problems(e, NewVersion)) from None
    added = await context.client.add_version(asked.name, new)
    there = added.version in {one.version for one in found.versions}
    answer = ProposalAnswer(
        name=added.name,
        version=added.version,
        parent=parent.version,
        there_already=there,
        diff=cut(display.difference(parent, added).plain, DIFF),
        next=f"penstock release start {added.name} --candidate {added.version}",
    )
    return ToolResult(answer, _proposal_text(answer, added))


def _keeps_slots(parent: Resource, text: str) -> None:
    """Raises `ToolError` for a text that loses a slot, because it could never be released."""
    stable = parent.template
    try:
        candidate = Template.parse(text)
        if stable is not None:
            check_candidate(stable, candidate)
    except TemplateError as e:
        slots = ", ".join(f"{{{slot}}}" for slot in (stable.slots if stable else ())) or "none"
        rule = (
            f"A version keeps the slots of {parent.qualified_name}, each as often: {slots}. A literal brace is doubled."
        )
        raise ToolError(f"text: {e}. {rule}") from None


def _proposal_text(answer: ProposalAnswer, added: Resource) -> str:
    if answer.there_already:
        return (
            f"{added.qualified_name} says just this already; nothing was added. To try it a person runs: {answer.next}"
        )
    return (
        f"{added.qualified_name} is added, made from {answer.parent}. No agent gets it yet: a person tries it with\n"
        f"  {answer.next}\n\n{answer.diff}"
    )


TOOLS = (
    ToolDefinition(
        "post_reward",
        "Post a reward",
        "Say how well an attempt of a rollout, or one call of it, went. The newest reward counts: it is trained on, "
        "and decides releases, so read the transcript first and give the reason. Needs a value or dimensions.",
        PostRewardArguments,
        PostRewardAnswer,
        post_reward,
        writes=True,
        idempotent=False,
    ),
    ToolDefinition(
        "propose_version",
        "Propose a version of a prompt",
        "Add a version of a prompt or of a tool's description. No agent gets it by that: a person starts a release, "
        "which tries it on some rollouts. Read the stable version and transcripts of its failures first; keep every "
        "slot. The same text again adds nothing.",
        ProposeVersionArguments,
        ProposalAnswer,
        propose,
        writes=True,
    ),
)
