"""Resources, whose versions releases change: prompts, weights of models, texts of tools; and whom a prompt reaches."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.gateway.model.base import Id, Mode, Noun
from penstock.gateway.model.toml import sentence

# A version of a prompt: text with named slots, `Hello {customer}, it is {date}.` A literal brace is doubled: `{{`.
#
# The texts between the slots are its *anchors*; there is one more of them than slots, and the first and the last may
# be empty. Values are data: a value is never expanded, whatever it looks like.

SHORTEST = 6
"""Least characters of a template's longest anchor: with fewer it cannot be told from other text."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_BRACE = re.compile(r"\{\{|\}\}|\{[^{}\n]*\}|[{}]")


class TemplateError(ValueError):
    """A text that is no template, values or a candidate that do not fit one. The message names the slot."""


@dataclass(frozen=True)
class Template:
    """Anchors with a slot between each two."""

    anchors: tuple[str, ...]
    """Literal text, one more than slots."""
    slots: tuple[str, ...]
    """Names of the slots in order; a name may occur several times and then has one value."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """The template that a text defines; raises TemplateError, which gives the mistake and its place."""
        anchors, slots, at = [""], list[str](), 0
        for brace in _BRACE.finditer(source):
            anchors[-1] += source[at : brace.start()]
            at, found = brace.end(), brace.group()
            if found in ("{{", "}}"):
                anchors[-1] += found[0]
            else:
                slots.append(_slot(source, brace.start(), found))
                anchors.append("")
        anchors[-1] += source[at:]
        return cls(tuple(anchors), tuple(slots))

    @cached_property
    def source(self) -> str:
        """The text that `parse` reads as this template."""
        literal = [anchor.replace("{", "{{").replace("}", "}}") for anchor in self.anchors]
        slots = [f"{{{slot}}}" for slot in self.slots]
        return "".join(piece for pair in zip(literal, [*slots, ""], strict=True) for piece in pair)

    @cached_property
    def literal(self) -> int:
        """Number of characters of literal text."""
        return sum(map(len, self.anchors))

    @cached_property
    def utf8(self) -> Template:
        """The template as bytes: each character of its anchors is a byte of their UTF-8."""
        return Template(tuple(map(utf8, self.anchors)), self.slots)

    @cached_property
    def written(self) -> Template:
        """The template as a JSON string, quotes included, with no more escapes than JSON requires: bytes, as in
        `utf8`."""
        first, *others = (json.dumps(anchor, ensure_ascii=False)[1:-1] for anchor in self.anchors)
        *inner, last = (f'"{first}', *others)
        anchors = (one.encode("utf-8", "backslashreplace").decode("latin-1") for one in (*inner, f'{last}"'))
        return Template(tuple(anchors), self.slots)

    def check(self, values: Mapping[str, str]) -> None:
        """Raise TemplateError, which names the slots that have no value and the values that have no slot, if there are
        any."""
        if set(values) != set(self.slots):
            check_slots(Counter(set(self.slots)), Counter(values.keys()))

    def render(self, values: Mapping[str, str]) -> str:
        """The text with a value in each slot; raises TemplateError as `check`."""
        self.check(values)
        pieces = [self.anchors[0]]
        for slot, anchor in zip(self.slots, self.anchors[1:], strict=True):
            pieces += [values[slot], anchor]
        return "".join(pieces)

    @property
    def weakness(self) -> str | None:
        """Why texts cannot be recognised by this template, for a person; None when they can."""
        if max(map(len, self.anchors)) < SHORTEST:
            return (
                f"its longest text between slots is shorter than {SHORTEST} characters: it would match almost anything"
            )
        touching = zip(self.slots, self.slots[1:], self.anchors[1:-1], strict=False)
        pair = next(((one, other) for one, other, between in touching if not between), None)
        return None if pair is None else f"nothing stands between {{{pair[0]}}} and {{{pair[1]}}}"


def utf8(text: str) -> str:
    """A text with a character for each byte of the given text's UTF-8; such a text takes a byte of memory for each. No
    character's UTF-8 is part of another's, so that a search in it finds what a search in the text itself would."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")


def _slot(source: str, at: int, found: str) -> str:
    """The name in `{name}`; raises TemplateError if it is no slot."""
    line, column = source.count("\n", 0, at) + 1, at - source.rfind("\n", 0, at)
    where = f"line {line}, column {column}"
    if len(found) == 1:
        raise TemplateError(f"{where}: a single {found}; a slot is {{name}}, a literal brace is written {found * 2}")
    if _NAME.fullmatch(found[1:-1]) is None:
        raise TemplateError(
            f"{where}: {found[:80]} is no slot: a name is a letter or _, then at most 63 letters, digits or _; "
            "a literal brace is doubled"
        )
    return found[1:-1]


def check_candidate(stable: Template, candidate: Template) -> None:
    """Refuse a candidate that loses or adds a slot: raises TemplateError with `missing {x}`, `added {y}`."""
    check_slots(Counter(stable.slots), Counter(candidate.slots))


def check_slots(wanted: Counter[str], given: Counter[str]) -> None:
    """Refuse slots that are not exactly the wanted ones, each as often; raises TemplateError."""
    missing = [f"missing {{{slot}}}" for slot in (wanted - given).elements()]
    added = [f"added {{{slot}}}" for slot in (given - wanted).elements()]
    if missing or added:
        raise TemplateError(", ".join(missing + added))


# Versions of weights: their server, their name there, and the versions that a server must hold. Pure.
#
# A version is served in one of two ways. A LoRA *adapter* is loaded beside its base model under a name of its own
# (`policy@v12`) before it gets traffic, and unloaded when nothing needs it. A *replica* is a server that was started
# with the version: nothing is loaded, and the server must already have the name.
#
# A server must hold every version that a call may still ask for: the stable version, the candidate, and every version
# that an unfinished rollout is pinned to. `Residency.plan` compares that with what a server lists. A name belongs to
# one version for good: engines cache by name and would answer with a mixture of old and new weights. So a name that
# stands for other weights is reported and never replaced. Adapters that Penstock did not publish are left alone.

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
        """The changes to make. `present`: the names that the server lists, as `VllmClient.adapters` gives them;
        `wanted`: names, the most important first.

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


ResourceKind = Literal["prompt", "model", "tool-text"]
"""The text of a prompt, the weights of a model, the description of a tool."""


MOST_TEXT = 4 << 20
"""Most characters of a version."""


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
    """The calls that a release applies to. Each list that is not empty restricts; `*` and `?` are wildcards."""

    agents: list[str] = Field(default_factory=list[str], max_length=100)
    """Names of agents, as the address gives them; an unnamed one is the empty name."""
    models: list[str] = Field(default_factory=list[str], max_length=100)
    """Models asked for."""
    modes: list[Mode] = Field(default_factory=list[Mode])
    """Modes of rollouts."""
    metadata: dict[str, str] = Field(default_factory=dict[str, str], max_length=20)
    """Keys of the rollout's metadata and the values that they must have."""


class Version(Noun):
    """The content of a version, and who made it from which parent and why."""

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
    """The version that new rollouts get while no release is live."""

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
    """All resources of the tape, by name."""

    resources: list[ResourceView]
    """One each."""
    unread: dict[str, int] = Field(default_factory=dict[str, int])
    """Requests since the gateway started that it could not look into, by why."""


class Need(Noun):
    """The calls, releases and rollouts that need a version of a resource: it may not be taken from a server or a disk
    meanwhile."""

    version: Id
    """The version."""
    audiences: list[Audience] = Field(default_factory=list[Audience])
    """Calls whose stable version it is; an empty audience is everybody."""
    releases: list[Id] = Field(default_factory=list[str])
    """Live releases of it."""
    rollouts: list[Id] = Field(default_factory=list[str])
    """Rollouts that are pinned to it and may still call, ten at most."""


class NeedList(Noun):
    """The versions of a resource that are needed, each with what needs it."""

    needs: list[Need]
    """One for each version that somebody needs."""


def audience_terms(only: Audience) -> list[str]:
    """An audience as terms of the option `--only`."""
    pieces = [f"agent={name}" for name in only.agents]
    pieces += [f"model={name}" for name in only.models]
    pieces += [f"mode={mode}" for mode in only.modes]
    pieces += [f"metadata.{key}={value}" for key, value in only.metadata.items()]
    return pieces


# Coverage of a prompt: the numbers of calls that had its text, and of those that had nearly the same.

UnreadReason = Literal["encoding", "utf8", "nan", "depth", "shape", "json"]
"""Why a request's texts cannot be read, so that it passes as it came: an unknown or wrong content encoding; no UTF-8;
nested too deep; JSON that is not of this API; no JSON. Tapes of earlier versions also have `nan`, for `NaN` or
`Infinity`, which are read now."""
MissReason = Literal["miss", "ambiguous", "placeholder", "slots", "unknown"]
"""Why a text passes as it came: it is no registered prompt; it could be two, or one in two ways; it has a placeholder
that cannot be read; the version has other slots; there is no version."""


class TextDifference(Noun):
    """The first difference between the text of a call and the version that it is nearest to."""

    version: Id
    """The version."""
    at: int
    """Where; characters from the beginning of the text."""
    found: str
    """What the text has there, its first words."""
    wanted: str
    """What the version has there."""


class LastMiss(Noun):
    """The latest call whose text was nearly a prompt."""

    rollout: Id
    """Its rollout."""
    at_ns: int
    """When it was counted; ns since the epoch."""
    why: MissReason | UnreadReason
    """Why its text passed as it came."""
    difference: TextDifference | None = None
    """Where the text differs; None where it does not, could not be read, or has a secret."""


class Coverage(Noun):
    """Whom a resource reaches, since the newest text that agents send was registered."""

    since_ns: int
    """When that was, or when the first call was counted; ns since the epoch."""
    matched: int = 0
    """Calls in which its text was recognised."""
    missed: dict[str, int] = Field(default_factory=dict[str, int])
    """Calls with a text that is nearly its own and passed as it came, by why."""
    recent: str = ""
    """The last rollouts by their first call, the oldest first: `+` where it matched, `-` where it missed."""
    before: float = 0.0
    """Weight of the rollouts before these; older ones count less."""
    before_matched: float = 0.0
    """Weight of those of them that matched."""
    last: LastMiss | None = None
    """The latest miss."""
    fell_ns: int | None = None
    """Since when it is lower than it was before; None while it is not."""
    fell: str = ""
    """In words."""
