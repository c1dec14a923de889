"""Resources and releases in the form that calls need. Pure.

A `Catalog` finds the resources that a call uses, and writes the request to send. It is made anew when a resource or a
release changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.gateway.model.release import Pin, Release
from penstock.gateway.model.resource import ModelVersion, Resource, StableVersion, Template, ToolText, sent_by_agents
from penstock.gateway.releases.prompts.recogniser import Recogniser, RegisteredText, SentVersion
from penstock.gateway.releases.prompts.rewrite import (
    RewriteResult,
    TextFindings,
    write_versions,
)
from penstock.gateway.wire.dialects.request_body import replace_model


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A version of a model, as calls are sent to it."""

    upstreams: tuple[str, ...]
    """Upstreams that serve it, the preferred one first."""
    served: str
    adapter: bool
    """True if it is a loaded adapter; False for the model that the server was started with."""

    @property
    def upstream(self) -> str:
        """The preferred upstream, for callers that need one."""
        return self.upstreams[0]


class Catalog:
    """Resources and releases in the form that calls need; immutable."""

    def __init__(
        self, resources: Mapping[str, tuple[StableVersion, list[Resource]]], releases: Iterable[Release]
    ) -> None:
        self.stable = {name: stable for name, (stable, _) in resources.items()}
        self.models: dict[str, dict[str, ModelTarget]] = {}
        self.templates: dict[str, dict[str, Template]] = {}
        known: list[RegisteredText] = []
        self.sent: list[SentVersion] = []
        """The versions that agents send."""
        for name, (_, versions) in resources.items():
            for version in versions:
                content = version.read()
                if isinstance(content, ModelVersion):
                    served = content.name(name, version.version)
                    self.models.setdefault(name, {})[version.version] = ModelTarget(
                        content.upstreams, served, content.adapter is not None
                    )
                    continue
                self.templates.setdefault(name, {})[version.version] = content.template
                # If agents send one version of a tool's text, they may send any: a server of tools may have been made
                # to list it, perhaps for another rollout of the same process.
                if content.sent or (isinstance(content, ToolText) and sent_by_agents(versions)):
                    known.append(RegisteredText.of(name, content))
                    self.sent.append(SentVersion(name, version.version, content.template, known[-1].tool))
        self.empty = not (self.models or self.templates)
        """True while nothing is registered."""
        self.recogniser = Recogniser(known)
        found = list(releases)
        self.releases = {one.id: one for one in found}
        self.units = frozenset(one.policy.unit for one in found if one.policy.by_unit)
        """Entries of the baggage that name the unit of assignment."""
        self.rehearses = any(one.policy.replay.closed_loop for one in found)
        """True if there can be an agent in rehearsal."""

    def rewrite(
        self, body: bytes, prompts: TextFindings | None, model: str | None, versions: Mapping[str, str], form: str = ""
    ) -> tuple[RewriteResult, ModelTarget | None]:
        """Return a request with these versions of its resources in it, and its weights. `form`: its type."""
        made, weights = RewriteResult(body, [], []), None
        if prompts is not None and prompts.uses:
            made = write_versions(
                body, prompts, {name: self.templates[name][it] for name, it in versions.items() if name != model}
            )
        if model is not None:
            weights = self.models[model][versions[model]]
            made.body = replace_model(made.body, weights.served, form)
        return made, weights

    def has(self, pin: Pin) -> bool:
        """True if the pin's version and its release are known here."""
        known = self.models.get(pin.resource) or self.templates.get(pin.resource) or {}
        return pin.version in known and (pin.release is None or pin.release in self.releases)

    def rolled_back(self, pin: Pin) -> bool:
        """True if a rollout must get the stable version, because its release was rolled back since."""
        release = None if pin.release is None else self.releases.get(pin.release)
        return pin.arm == "candidate" and not pin.mixed and release is not None and release.stage == "rolled_back"
