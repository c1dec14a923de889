"""Resources, whose versions releases change: prompts, weights of models, texts of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from penstock.gateway.model.base import Id, Mode, Noun
from penstock.gateway.model.coverage import Coverage
from penstock.gateway.model.template import Template, TemplateError
from penstock.gateway.model.validation_messages import sentence
from penstock.gateway.model.weights import ModelVersion

ResourceKind = Literal["prompt", "model", "tool-text"]
"""The text of a prompt, the weights of a model, the description of a tool."""


GATEWAY = "gateway"
"""The `who` of decisions by the rules."""


MOST_TEXT = 4 << 20
"""Most characters of a version."""


def _person(name: str) -> str:
    if name == GATEWAY:
        raise ValueError(f"{GATEWAY!r} is what decides by the rules; give the name of a person or a program")
    return name


Person = Annotated[str, Field(max_length=200), AfterValidator(_person)]


class PromptText(Noun):
    """Content of a prompt: text with `{slots}`; literal braces are doubled."""

    text: str = Field(max_length=MOST_TEXT)
    """The template."""
    sent: bool = False
    """Whether agents send this text by themselves, so that it is to be recognised in their requests."""

    @property
    def template(self) -> Template:
        return Template.parse(self.text)


class ToolText(Noun):
    """Content of a tool text: what a request says of a tool. Names and schemas never change."""

    tool: str = Field(min_length=1, max_length=256)
    """Name of the tool, as agents send it."""
    text: str = Field(max_length=MOST_TEXT)
    """Its description; braces are doubled, as in prompts."""
    sent: bool = False
    """Whether agents send this text by themselves."""

    @property
    def template(self) -> Template:
        return Template.parse(self.text)


Content = PromptText | ToolText | ModelVersion


CONTENTS: Mapping[ResourceKind, type[PromptText] | type[ToolText] | type[ModelVersion]] = {
    "prompt": PromptText,
    "model": ModelVersion,
    "tool-text": ToolText,
}


class Audience(Noun):
    """Which calls a release speaks to. Each list that is not empty restricts; `*` and `?` are wildcards."""

    agents: list[str] = Field(default_factory=list[str], max_length=100)
    """Names of agents, as the address gives them; an unnamed one is the empty name."""
    models: list[str] = Field(default_factory=list[str], max_length=100)
    """Models asked for."""
    modes: list[Mode] = Field(default_factory=list[Mode])
    """Modes of rollouts."""
    metadata: dict[str, str] = Field(default_factory=dict[str, str], max_length=20)
    """Keys of the rollout's metadata and the values that they must have."""


class Version(Noun):
    """What a version is."""

    kind: ResourceKind
    """What it is a version of."""
    content: dict[str, Any]
    """Fields of `PromptText`, `ModelVersion` or `ToolText`."""
    parent: Id | None = None
    """The version that it was made from."""
    author: str = Field(default="", max_length=200)
    """Who or what made it."""
    note: str = Field(default="", max_length=4000)
    """Why, in a sentence."""

    def read(self) -> Content:
        """The content as the type of its kind."""
        return CONTENTS[self.kind].model_validate(self.content)

    @property
    def template(self) -> Template | None:
        """The version's text, parsed; None for a model."""
        given = self.read()
        return None if isinstance(given, ModelVersion) else given.template


class NewVersion(Version):
    """A version of a resource, as it is handed in."""

    version: Id | None = None
    """Its name; the next free `v1`, `v2` ... unless given."""

    @model_validator(mode="after")
    def _content_fits_its_kind(self) -> Self:
        try:
            _ = self.template
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(["content", *map(str, first["loc"])])
            raise ValueError(f"{path}: {sentence(first)} (kind {self.kind!r})") from None
        except TemplateError as error:
            raise ValueError(f"content.text: {error}") from None
        return self


class Resource(Version):
    """One version of a resource; it never changes."""

    name: Id
    """Name of the resource; for a model the name that agents ask for."""
    version: Id
    """Its name within the resource."""
    created_ns: int
    """When it was registered."""
    sha256: str
    """Of kind and content as canonical JSON; hex."""

    @property
    def qualified_name(self) -> str:
        """The version's name with its resource's: NAME@VERSION."""
        return f"{self.name}@{self.version}"


def sent_by_agents(versions: Iterable[Resource]) -> bool:
    """True if agents themselves send one of these versions of a text."""
    return any(one.content.get("sent") for one in versions)


class StableRule(Noun):
    """The stable version of some calls: what a release with an audience has promoted."""

    only: Audience
    """Whose."""
    version: Id
    """The version."""


class StableVersion(Noun):
    """Which version new rollouts get while no release is live."""

    version: Id
    """Everybody's, unless a rule says otherwise."""
    rules: list[StableRule] = Field(default_factory=list[StableRule])
    """Exceptions, the latest first."""


class ResourceView(Noun):
    """A resource with its versions."""

    name: Id
    """Its name."""
    kind: ResourceKind
    """What it is."""
    stable: StableVersion
    """The version that new rollouts get."""
    versions: list[Resource]
    """Oldest first."""
    releases: list[Id] = Field(default_factory=list[str])
    """Releases of it that are live."""
    coverage: Coverage | None = None
    """Whom it reaches; None while no call had its text, or nearly."""


class ResourceList(Noun):
    """All resources, by name."""

    resources: list[ResourceView]
    """One each."""
    unread: dict[str, int] = Field(default_factory=dict[str, int])
    """Requests since the gateway started that it could not look into, by why."""


class Need(Noun):
    """Who needs a version of a resource: it may not be taken from a server or a disk meanwhile."""

    version: Id
    """The version."""
    audiences: list[Audience] = Field(default_factory=list[Audience])
    """Calls whose stable version it is; an empty audience is everybody."""
    releases: list[Id] = Field(default_factory=list[str])
    """Live releases of it."""
    rollouts: list[Id] = Field(default_factory=list[str])
    """Rollouts that are pinned to it and may still call, ten at most."""


class NeedList(Noun):
    """Who needs which version."""

    needs: list[Need]
    """One for each version that somebody needs."""


def audience_terms(only: Audience) -> list[str]:
    """An audience as terms of the option `--only`."""
    pieces = [f"agent={name}" for name in only.agents]
    pieces += [f"model={name}" for name in only.models]
    pieces += [f"mode={mode}" for mode in only.modes]
    pieces += [f"metadata.{key}={value}" for key, value in only.metadata.items()]
    return pieces
