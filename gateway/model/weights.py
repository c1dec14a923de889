"""Versions of weights: their server, their name there, and the versions that a server must hold. Pure.

A version is served in one of two ways. A LoRA *adapter* is loaded beside its base model under a name of its own
(`policy@v12`) before it gets traffic, and unloaded when nothing needs it. A *replica* is a server that was started with
the version: nothing is loaded, and the server must already have the name.

A server must hold every version that a call may still ask for: the stable version, the candidate, and every version
that an unfinished rollout is pinned to. `Residency.plan` compares that with what a server lists. A name belongs to one
version for good: engines cache by name and would answer with a mixture of old and new weights. So a name that stands
for other weights is reported and never replaced. Adapters that Penstock did not publish are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

ServedName = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]
"""The `model` of requests: printable ASCII without spaces."""


class ModelVersion(BaseModel):
    """The content of a resource of kind `model`: one version of weights."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    upstream: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the `[[upstream]]` that serves it."""
    base: ServedName
    """Name under which that upstream serves the base model, or the whole model where there is no adapter."""
    adapter: str | None = None
    """Directory of the LoRA adapter, as an absolute path on the server; None where the server was started with it."""
    also: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]] = Field(default_factory=list)
    """Names of more upstreams that serve it, in the same way and under the same name."""
    served: ServedName | None = None
    """Name to send as `model`. Default: `{resource}@{version}` with an adapter, `base` without."""

    @field_validator("adapter")
    @classmethod
    def _is_a_path(cls, value: str | None) -> str | None:
        """Refuse a relative path: engines look it up on a hub, where its content may change."""
        if value is not None and not (value.startswith("/") and value.isprintable() and ".." not in value.split("/")):
            raise ValueError(f"{value!r} must be an absolute path on the server, without '..'")
        return value

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.adapter is not None and self.served == self.base:
            raise ValueError(f"served: {self.served!r} is the base model's name; the adapter needs one of its own")
        return self

    @property
    def upstreams(self) -> tuple[str, ...]:
        """The upstreams that serve the version, `upstream` first."""
        return tuple(dict.fromkeys((self.upstream, *self.also)))

    def name(self, resource: str, version: str) -> str:
        """The `model` of requests for this version of the resource."""
        return self.served or (self.base if self.adapter is None else f"{resource}@{version}")


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Changes to make on a server, in this order, and problems for a person."""

    unload: list[str] = field(default_factory=list[str])
    """Names to unload."""
    load: dict[str, ModelVersion] = field(default_factory=dict[str, ModelVersion])
    """Versions to load by name, in the order in which they were wanted."""
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Wanted names that can neither be served nor loaded, and why."""
    warnings: list[str] = field(default_factory=list[str])
    """Problems that do not prevent serving."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The versions that one server should hold."""

    known: Mapping[str, ModelVersion]
    """Every version registered for the server, by the name under which it is served."""
    slots: int | None = None
    """Adapters that the server computes with at a time (`--max-loras`); None when it is not known."""

    def plan(self, present: Mapping[str, str | None], wanted: Iterable[str]) -> ResidencyPlan:
        """The changes to make. `present`: the names that the server lists, as `Engine.adapters` gives them; `wanted`:
        names, the most important first.

        Raises `KeyError` for a wanted name that is not known.
        """
        made = ResidencyPlan()
        names = dict.fromkeys(wanted)
        for name in names:
            self._place(made, name, self.known[name], present)
        made.unload.extend(name for name, path in present.items() if name not in names and self._is_ours(name, path))
        adapters = sum(self.known[name].adapter is not None for name in names)
        if self.slots is not None and adapters > self.slots:
            made.warnings.append(
                f"{adapters} adapters are needed at once and the server computes with {self.slots} (--max-loras): "
                "calls to the others wait for their turn; start it with more, or wait until pinned rollouts end"
            )
        return made

    def _place(self, made: ResidencyPlan, name: str, version: ModelVersion, present: Mapping[str, str | None]) -> None:
        if name not in present:
            if version.adapter is None:
                made.problems[name] = (
                    f"the server does not serve {name!r}, and the version has no adapter that could be loaded: "
                    f"start the server with --served-model-name {name}"
                )
            else:
                made.load[name] = version
        elif present[name] != version.adapter:
            made.problems[name] = other_weights(name, version.adapter, present[name])

    def _is_ours(self, name: str, path: str | None) -> bool:
        """True if Penstock published the adapter: its name has the form of a version, is registered, and has this
        path."""
        return "@" in name and path is not None and name in self.known and self.known[name].adapter == path


def other_weights(name: str, wanted: str | None, found: str | None) -> str:
    """The error message for a name that stands for other weights than it should."""
    shown = "a base model" if found is None else f"the adapter in {found}"
    meant = "a model that the server was started with" if wanted is None else f"the one in {wanted}"
    return (
        f"the server serves {name!r} from {shown}, not {meant}. A name is never given to other weights: "
        f"register the new weights as a new version, or unload {name!r} from the server first"
    )
