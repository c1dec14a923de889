"""The schema of ATIF 1.0 to 1.8 (Harbor's Agent Trajectory Interchange Format): what a trajectory may hold. Pure.

Source: harbor 0.26.0, `harbor/models/trajectories/`. Unknown fields are refused, as Harbor refuses them; `extra` takes
anything. The models only check: documents are handled as the JSON that they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.gateway.wire.dialects.loose_json import obj, objs

SchemaVersion = Literal[
    "ATIF-v1.0", "ATIF-v1.1", "ATIF-v1.2", "ATIF-v1.3", "ATIF-v1.4", "ATIF-v1.5", "ATIF-v1.6", "ATIF-v1.7", "ATIF-v1.8"
]
DEEPEST = 16
"""Most levels of embedded trajectories."""


def _time(value: str) -> str:
    _ = datetime.fromisoformat(value.replace("Z", "+00:00"))
    return value


Json = dict[str, Any]
Time = Annotated[str, AfterValidator(_time)]


class AtifNoun(BaseModel):
    """A part of a trajectory; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class AtifSource(AtifNoun):
    """An image or a sound, by the place of its file."""

    media_type: str
    path: str
    duration_sec: float | None = Field(default=None, ge=0)


class AtifPart(AtifNoun):
    """A part of a message or of a tool's result."""

    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: AtifSource | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.type == "text") != (self.text is not None) or (self.type == "text") == (self.source is not None):
            raise ValueError("a part has `text` if its type is text, else `source`, and never both")
        return self


Content = str | list[AtifPart]


class AtifToolCall(AtifNoun):
    """A tool call of a step."""

    tool_call_id: str
    function_name: str
    arguments: Json
    extra: Json | None = None


class AtifReference(AtifNoun):
    """The way from a tool's result to the trajectory of the sub-agent that it was."""

    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Json | None = None

    @model_validator(mode="after")
    def _leads(self) -> Self:
        if self.trajectory_id is None and self.trajectory_path is None:
            raise ValueError("a reference needs `trajectory_id` or `trajectory_path`")
        return self


class AtifResult(AtifNoun):
    """The result of a tool call, or of what the agent did without one."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[AtifReference] | None = None
    extra: Json | None = None


class AtifObservation(AtifNoun):
    """The results of a step."""

    results: list[AtifResult]


class AtifMetrics(AtifNoun):
    """Counts, cost and tokens of a step."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Json | None = None


class AtifStep(AtifNoun):
    """A turn of system, user or agent."""

    step_id: int = Field(ge=1)
    timestamp: Time | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = Field(default=None, ge=0)
    extra: Json | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        agents = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
        given = [name for name in agents if getattr(self, name) is not None]
        if self.source != "agent" and given:
            raise ValueError(f"only steps of the agent have `{given[0]}`, and its source is {self.source}")
        models = [name for name in ("metrics", "reasoning_content") if name in given]
        if self.llm_call_count == 0 and models:
            raise ValueError(f"a step with `llm_call_count` 0 has no `{models[0]}`")
        known = {call.tool_call_id for call in self.tool_calls or ()}
        for result in () if self.observation is None else self.observation.results:
            if result.source_call_id is not None and result.source_call_id not in known:
                raise ValueError(f"no tool call of the step has the `source_call_id` {result.source_call_id!r}")
        return self


class AtifAgent(AtifNoun):
    """The agent of a trajectory."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: Json | None = None


class AtifTotals(AtifNoun):
    """The sums over a trajectory's steps."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = Field(default=None, ge=0)
    extra: Json | None = None


class AtifTrajectory(AtifNoun):
    """A whole trajectory, sub-agents included."""

    schema_version: SchemaVersion
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: list[AtifStep] = Field(min_length=1)
    notes: str | None = None
    final_metrics: AtifTotals | None = None
    continued_trajectory_ref: str | None = None
    extra: Json | None = None
    subagent_trajectories: list[AtifTrajectory] | None = None

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        for number, step in enumerate(self.steps, 1):
            if step.step_id != number:
                raise ValueError(f"steps[{number - 1}].step_id is {step.step_id}: steps are numbered 1, 2, 3 ...")
        names = [one.trajectory_id for one in self.subagent_trajectories or ()]
        if None in names or len(set(names)) < len(names):
            raise ValueError("each of `subagent_trajectories` needs a `trajectory_id` of its own")
        return self


def flaws(document: object) -> list[str]:
    """The faults that keep a document from being a trajectory, each as field and reason; empty for a good one."""
    try:
        if depth(document) > DEEPEST:
            return [f"subagent_trajectories: more than {DEEPEST} levels of trajectories within each other"]
        _ = AtifTrajectory.model_validate(document)
    except ValidationError as error:
        return [f"{_place(one['loc'])}: {one['msg']}" for one in error.errors(include_url=False, include_input=False)]
    return []


def depth(document: object) -> int:
    """The number of levels of embedded trajectories, up to one more than `DEEPEST`."""
    level, found = [obj(document)], 0
    while level and found <= DEEPEST:
        found += 1
        level = [one for it in level for one in objs(it.get("subagent_trajectories"))]
    return found


def _place(location: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".") or "trajectory"
