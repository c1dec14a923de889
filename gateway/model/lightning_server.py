"""Agent Lightning 1.0's nouns on the wire, and what the tape keeps of its rollouts beside the gateway's own. Pure.

It has four states of a rollout: the gateway's others are told by the nearest one. Statuses and field names are those of
its 1.0.2 server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, RootModel

from penstock.gateway.model.base import LONGEST_S, Id
from penstock.gateway.model.lightning import AnyJson, Json, JsonObject, seconds
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutConfig, RolloutStatus

StateWord = Literal["queuing", "running", "succeeded", "failed"]
WORDS: Final[dict[RolloutStatus, StateWord]] = {
    RolloutStatus.QUEUING: "queuing",
    RolloutStatus.REQUEUING: "queuing",
    RolloutStatus.PREPARING: "running",
    RolloutStatus.RUNNING: "running",
    RolloutStatus.SUCCEEDED: "succeeded",
    RolloutStatus.ENDED: "succeeded",
    RolloutStatus.FAILED: "failed",
    RolloutStatus.CANCELLED: "failed",
}
"""Agent Lightning's word for each state."""
MOVES: Final[dict[StateWord, tuple[StateWord, ...]]] = {
    "queuing": ("running", "failed"),
    "running": ("succeeded", "failed"),
    "succeeded": (),
    "failed": (),
}
"""The states that a client may set, by the state before."""
FIRST: Final = "0"
"""The attempt of Agent Lightning's controllers, which make one of each rollout."""
GRACE_S: Final = 60.0
"""Seconds that a controller has to end a rollout that takes too long, before the gateway does: it looks every 10."""


class ServerLocalConfig(BaseModel):
    """The agent that a local controller runs."""

    agent_class: str | None = None
    env_map: dict[str, str] = Field(default_factory=dict[str, str])


class ServerClusterConfig(BaseModel):
    """The job by which a controller in Kubernetes runs an agent."""

    job_template: str | None = None


class ServerConfig(BaseModel):
    """The limits of a rollout and its agent."""

    timeout_seconds: int = 3600
    local: ServerLocalConfig | None = None
    k8s: ServerClusterConfig | None = None


class ServerTask(BaseModel):
    """A task to be queued."""

    input: AnyJson
    is_train: bool = True
    config: ServerConfig | None = None
    metadata: JsonObject | None = None
    rollout_id: Id | None = None

    def spec(self) -> RolloutSpec:
        """The task in the gateway's words. It is tried once; its group is what its input calls its data."""
        named = data_id(self.input)
        limit = (self.config or ServerConfig()).timeout_seconds
        return RolloutSpec(
            input=self.input,
            mode="train" if self.is_train else "val",
            group=named[:256] or None,
            metadata=self.metadata,
            config=RolloutConfig(
                timeout_s=min(limit + GRACE_S, LONGEST_S) if limit > 0 else None, max_attempts=1, retry_on=[]
            ),
        )


def data_id(said: Any) -> str:
    """The name that a task gives its data; empty where it gives none."""
    if not isinstance(said, dict):
        return ""
    found = cast(Json, said)
    return str(found.get("data_id") or found.get("instance_id") or "")


class ServerTasks(RootModel[list[ServerTask]]):
    """Tasks to be queued: a bare list."""


class ServerListing(BaseModel):
    """Rollouts that are asked for."""

    state_in: list[StateWord]
    limit: int = 500


class TerminalListing(BaseModel):
    """Rollouts that have ended, after the first so many."""

    after: int = 0
    limit: int = 1000


class StatusPatch(BaseModel):
    """Changes of a rollout's status. A field that is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    state: StateWord | None = None
    k8s_job_name: str | None = None
    last_attempt_id: Id | None = None
    error_message: str | None = None


class ServerPatch(BaseModel):
    """Changes of a rollout, which are of its status."""

    status: StatusPatch | None = None


class ServerEvent(BaseModel):
    """Something that happened in an attempt."""

    event_type: str = Field(min_length=1, max_length=256)
    data: JsonObject = Field(default_factory=dict[str, Any])


class EventListing(BaseModel):
    """Events that are asked for."""

    event_type: str | None = None
    format: str | None = None
    include_routed_experts: bool = True


class ServerModel(BaseModel):
    """An engine that serves a model."""

    model: str = Field(min_length=1, max_length=256)
    endpoint: str = Field(min_length=1, max_length=2048)
    version: int = 0


class ServerModels(RootModel[list[ServerModel]]):
    """Engines to be registered: a bare list."""


class ServerPause(BaseModel):
    """Asks that calls of models in training wait."""

    retry_after_seconds: int = 5
    reason: str | None = Field(default=None, max_length=2000)


class ServerRecord(msgspec.Struct):
    """The fields of a rollout that the gateway's own noun lacks, as the tape keeps them."""

    config: Json
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    version: int = 1
    """1, and the number of its changes."""
    updated_ns: int = 0
    hidden: bool = False
    """True if its client has deleted it: it is on the tape, and not in this API."""


def last_attempt(rollout: Rollout, record: ServerRecord) -> str | None:
    """The attempt that counts: the one that its controller names, else the queue's last one."""
    return record.last_attempt_id or rollout.attempt


def rollout_answer(rollout: Rollout, record: ServerRecord, attempts: Sequence[Attempt]) -> Json:
    """A rollout in Agent Lightning's words."""
    state = WORDS[rollout.status]
    held = next((one for one in attempts if one.id == rollout.attempt), None)
    updated = max(record.updated_ns, rollout.ended_ns or 0, 0 if held is None else held.created_ns)
    said = None if held is None or held.outcome is None or state != "failed" else held.outcome.reason
    return {
        "rollout_id": rollout.id,
        "input": rollout.input,
        "is_train": rollout.mode == "train",
        "config": record.config,
        "metadata": {"batch_idx": None, "sample_idx_in_batch": None} | (rollout.metadata or {}),
        "status": {
            "state": state,
            "k8s_job_name": record.k8s_job_name,
            "last_attempt_id": last_attempt(rollout, record),
            "error_message": record.error_message or said,
            "version": record.version,
            "created_at": seconds(rollout.created_ns),
            "updated_at": seconds(updated),
        },
    }


def terminal_answer(rollout: Rollout) -> Json:
    """A rollout that has ended, in brief."""
    return {
        "rollout_id": rollout.id,
        "state": WORDS[rollout.status],
        "data_id": data_id(rollout.input),
        "is_train": rollout.mode == "train",
    }
