"""Resources and releases in the form that calls need, and the pinned versions of prompts in a request. Pure.

A `Catalog` is made anew when a resource or a release changes. `find_resources` returns the resources that a request
uses, so that their versions can be resolved; `write_versions` puts these versions into the request. Every byte outside
the texts that change stays as it was, and when none changes the body is the very same object.

A text is identified, in this order, by the resource that the client's header or path names, by placeholders, or by the
recogniser. A placeholder inside a slot's value is data and is not expanded. A text that is not recognised, or cannot
take the pinned version, passes untouched and is a `TextMiss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

from penstock.gateway.model.release import Pin, Release
from penstock.gateway.model.resource import (
    MissReason,
    ModelVersion,
    Resource,
    StableVersion,
    Template,
    TemplateError,
    ToolText,
    UnreadReason,
    sent_by_agents,
)
from penstock.gateway.releases.prompt_recogniser import (
    MARK,
    PlaceholderError,
    Recogniser,
    RecognitionResult,
    RegisteredText,
    SentVersion,
    TextMatch,
    placeholders,
    sha256,
)
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.json_scan import Path
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, RequestFields
from penstock.gateway.wire.dialects.request_body import TextLocation, encoded, replace_model, spliced, unreadable_reason


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


# -- prompts in a request ---------------------------------------------------------------------------------------------

MatchedBy: TypeAlias = Literal["explicit", "placeholder", "fingerprint"]


@dataclass(frozen=True, slots=True)
class TextUse:
    """A use of a resource in a request: a text that is the resource, or asks for it."""

    resource: str
    """Name of the resource."""
    slots: Mapping[str, str]
    """The values of its slots."""
    sha256: str
    """Hash of the whole text as the agent sent it; hex."""
    matched_by: MatchedBy
    """The way by which it was found."""
    place: TextLocation
    """The text and its place."""
    part: tuple[int, int] | None = None
    """(begin, end) of the resource in the text, characters; None where it is the whole text."""
    template: Template | None = None
    """The version that the agent itself sent, where it was recognised."""


@dataclass(frozen=True, slots=True)
class TextMiss:
    """A text that passes untouched."""

    place: TextLocation
    why: MissReason | UnreadReason
    """The reason, for the text, or for the whole request where its texts could be read but not written."""
    detail: str = ""
    """The problem, for a person."""
    resource: str | None = None
    """The resource that the text should be; None where that is not known."""


@dataclass(slots=True)
class TextFindings:
    """The resources in a request's texts."""

    uses: list[TextUse] = field(default_factory=list[TextUse])
    misses: list[TextMiss] = field(default_factory=list[TextMiss])
    asked: RequestFields | None = None
    """The other fields that were read of the request."""
    unread: UnreadReason | None = None
    """Why the request could not be read."""


@dataclass(slots=True)
class RewriteResult:
    """A request as it is to be sent."""

    body: bytes
    uses: list[TextUse]
    """The uses whose pinned version is in the body."""
    misses: list[TextMiss]


def find_resources(body: bytes, dialect: Dialect, recogniser: Recogniser, explicit: str | None = None) -> TextFindings:
    """The resources in the texts of a request. `explicit`: the resource that the client names for the first system
    text."""
    found = TextFindings()
    texts = dialect.system_texts(body)
    found.asked, found.unread = texts.asked, texts.unread
    for place in texts.places:
        named = explicit if place.index == 0 else None
        _note(found, _explicit(place, recogniser, named) if named else _uses(place, recogniser))
    for place in dialect.tool_texts(body) if recogniser.tools else ():
        name = place.name if place.name in recogniser.tools else _unprefixed(place.name)
        if name in recogniser.tools:
            _note(found, _fingerprint(place, recogniser.recognise_literal(place.literal, name)))
    return found


def names_of(place: TextLocation) -> tuple[str | None, ...]:
    """The names under which the tool of a description may be registered; `(None,)` for a system text."""
    return (None,) if place.role != "tool" else (place.name, _unprefixed(place.name))


def _unprefixed(name: str | None) -> str | None:
    """A tool's name without the prefix of its host: `search` of `mcp__github__search`."""
    return name and name.rpartition("__")[2]


def find_tools(
    places: Iterable[TextLocation], recogniser: Recogniser, called: Callable[[str, str], bool]
) -> TextFindings:
    """The resources in the descriptions that a server gives of its tools. `called`: returns True if the tool that a
    resource describes, by the name that agents send, is the server's tool of this name."""
    found = TextFindings()
    for place in places:
        tool = next((tool for tool in recogniser.tools if tool and place.name and called(tool, place.name)), None)
        if tool is not None:
            _note(found, _fingerprint(place, recogniser.recognise_literal(place.literal, tool)))
    return found


def _note(found: TextFindings, what: list[TextUse] | TextMiss) -> None:
    if isinstance(what, TextMiss):
        found.misses.append(what)
    else:
        found.uses += what


def _uses(place: TextLocation, recogniser: Recogniser) -> list[TextUse] | TextMiss:
    told = recogniser.recognise_literal(place.literal)
    known = _fingerprint(place, told)
    if not told.marked or (isinstance(known, list) and any(MARK in value for value in known[0].slots.values())):
        return known
    try:
        text = place.text
        asked, digest = placeholders(text), sha256(text)
    except PlaceholderError as error:
        return TextMiss(place, "placeholder", str(error))
    return [TextUse(it.resource, it.slots, digest, "placeholder", place, (it.begin, it.end)) for it in asked]


def _fingerprint(
    place: TextLocation, told: RecognitionResult, way: MatchedBy = "fingerprint"
) -> list[TextUse] | TextMiss:
    it = told.what
    if not isinstance(it, TextMatch):
        return TextMiss(place, it)
    return [TextUse(it.known.resource, it.slots, it.sha256, way, place, template=it.known.template)]


def _explicit(place: TextLocation, recogniser: Recogniser, resource: str) -> list[TextUse] | TextMiss:
    """A use of a named resource: if its text is not recognised, the whole text counts as the resource, without
    slots."""
    known = _fingerprint(place, recogniser.only(resource).recognise_literal(place.literal), "explicit")
    if isinstance(known, TextMiss):
        return [TextUse(resource, {}, sha256(place.text), "explicit", place)]
    return known


def write_versions(body: bytes, found: TextFindings, versions: Mapping[str, Template]) -> RewriteResult:
    """The request with the pinned versions in it."""
    done = RewriteResult(body, [], list(found.misses))
    literals = [new for _, uses in groupby(found.uses, _path) for new in _changed(list(uses), versions, done)]
    try:
        done.body = spliced(body, literals) if literals else body
    except UNREADABLE as error:
        why = unreadable_reason(body)
        return RewriteResult(
            body, [], [*done.misses, *(TextMiss(use.place, why, str(error), use.resource) for use in done.uses)]
        )
    return done


def _path(use: TextUse) -> Path:
    return use.place.path


def _changed(
    uses: list[TextUse], versions: Mapping[str, Template], done: RewriteResult
) -> Iterator[tuple[TextLocation, bytes]]:
    """The new literal of one place, if it differs."""
    place = uses[0].place
    taken = [(use, version) for use in uses if (version := _taken(use, versions, done)) is not None]
    for use, version in taken[:1]:
        new = _parts(place.text, taken) if use.template is None else _whole(use, use.template, version)
        if new is not None:
            yield place, new


def _taken(use: TextUse, versions: Mapping[str, Template], done: RewriteResult) -> Template | None:
    """The version that can be written; if there is none, None, and a miss is noted."""
    version = versions.get(use.resource)
    if version is None:
        done.misses.append(TextMiss(use.place, "unknown", f"there is no version of {use.resource!r}", use.resource))
        return None
    try:
        version.check(use.slots)
    except TemplateError as error:
        done.misses.append(TextMiss(use.place, "slots", f"{use.resource}: {error}", use.resource))
        return None
    done.uses.append(use)
    return version


def _whole(use: TextUse, sent: Template, version: Template) -> bytes | None:
    """The literal of a text that is one resource from end to end, None if unchanged. Neither the text nor its anchors
    are encoded anew."""
    if version == sent:
        return None
    values = {slot: str(memoryview(encoded(value))[1:-1], "latin-1") for slot, value in use.slots.items()}
    new = version.written.render(values)
    return None if new == sent.written.render(values) else new.encode("latin-1")


def _parts(text: str, taken: list[tuple[TextUse, Template]]) -> bytes | None:
    """The literal of a text that holds resources at several places, or that is one by name only; None if unchanged."""
    pieces, at = list[str](), 0
    for use, version in taken:
        begin, end = use.part or (0, len(text))
        pieces += [text[at:begin], version.render(use.slots)]
        at = end
    new = "".join([*pieces, text[at:]])
    return None if new == text else encoded(new)
