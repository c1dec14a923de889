"""A request + the pinned versions of its prompts -> the request to send. Pure.

`find` says which resources a request uses, so that their versions can be resolved; `write` puts those versions in.
Every byte outside the texts that change stays as it was, and when none changes the body is the very same object.

What a text is comes from, in this order: the resource that the caller's header or path names, placeholders, the
recogniser. A placeholder inside a slot's value is data and is not expanded. What is not recognised, or cannot take the
pinned version, passes untouched and is a `Miss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

from gateway.dialects.base import Dialect
from gateway.dialects.places import Place, spliced
from gateway.prompts.placeholder import MARK, PlaceholderError, placeholders
from gateway.prompts.recognise import Recognised, Recogniser, sha256
from gateway.prompts.template import Template, TemplateError

Why: TypeAlias = Literal["miss", "ambiguous", "placeholder", "slots", "unknown"]
Way: TypeAlias = Literal["explicit", "placeholder", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Use:
    """A resource that a text of the request is, or asks for."""

    resource: str
    """Its name."""
    slots: Mapping[str, str]
    """What is in its slots."""
    sha256: str
    """Of the whole text as the agent sent it; hex."""
    way: Way
    """How it was found."""
    place: Place
    """The text."""
    begin: int
    end: int
    """The part of the text that the resource is; characters."""
    template: Template | None = None
    """The version that the agent itself sent, where it was recognised."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A text that passes untouched."""

    place: Place
    why: Why
    """`miss`: no registered prompt; `ambiguous`: it could be two, or one in two ways; `placeholder`: one that cannot be
    read; `slots`: the pinned version has other slots than there are values; `unknown`: there is no version of it."""
    detail: str = ""
    """What is wrong, for a person."""


@dataclass(slots=True)
class Findings:
    """What a request's texts are."""

    uses: list[Use] = field(default_factory=list[Use])
    misses: list[Miss] = field(default_factory=list[Miss])


@dataclass(slots=True)
class Rewritten:
    """A request as it is to be sent."""

    body: bytes
    uses: list[Use]
    """Those whose pinned version stands in it now."""
    misses: list[Miss]


def rewrite(
    body: bytes, dialect: Dialect, recogniser: Recogniser, versions: Mapping[str, Template], explicit: str | None = None
) -> Rewritten:
    """Finds and writes in one go."""
    return write(body, find(body, dialect, recogniser, explicit), versions)


def find(body: bytes, dialect: Dialect, recogniser: Recogniser, explicit: str | None = None) -> Findings:
    """What each text of a request is. `explicit`: the resource that the first system text is said to be."""
    found = Findings()
    for place in dialect.system_texts(body):
        named = explicit if place.index == 0 else None
        _note(found, place, _explicit(place, recogniser, named) if named else _uses(place, recogniser))
    for place in dialect.tool_texts(body) if recogniser.tools else ():
        if place.name in recogniser.tools:
            _note(found, place, _fingerprint(place, recogniser))
    return found


def _note(found: Findings, place: Place, what: list[Use] | Miss) -> None:
    if isinstance(what, Miss):
        found.misses.append(what)
    else:
        found.uses += what


def _uses(place: Place, recogniser: Recogniser) -> list[Use] | Miss:
    known = _fingerprint(place, recogniser)
    if MARK not in place.text or (isinstance(known, list) and any(MARK in value for value in known[0].slots.values())):
        return known
    try:
        asked, digest = placeholders(place.text), sha256(place.text)
    except PlaceholderError as error:
        return Miss(place, "placeholder", str(error))
    return [Use(it.resource, it.slots, digest, "placeholder", place, it.begin, it.end) for it in asked]


def _fingerprint(place: Place, recogniser: Recogniser, way: Way = "fingerprint") -> list[Use] | Miss:
    it = recogniser.recognise(place.text, place.name)
    if not isinstance(it, Recognised):
        return Miss(place, it)
    return [Use(it.known.resource, it.slots, it.sha256, way, place, 0, len(place.text), it.known.template)]


def _explicit(place: Place, recogniser: Recogniser, resource: str) -> list[Use] | Miss:
    """Where the text is not recognised the whole of it is taken to be the resource, without slots."""
    known = _fingerprint(place, recogniser.only(resource), "explicit")
    if isinstance(known, Miss):
        return [Use(resource, {}, sha256(place.text), "explicit", place, 0, len(place.text))]
    return known


def write(body: bytes, found: Findings, versions: Mapping[str, Template]) -> Rewritten:
    """The request with the pinned versions in it."""
    done = Rewritten(body, [], list(found.misses))
    texts = [text for _, uses in groupby(found.uses, _start) for text in _text(list(uses), versions, done)]
    if texts:
        done.body = spliced(body, texts)
    return done


def _start(use: Use) -> int:
    return use.place.start


def _text(uses: list[Use], versions: Mapping[str, Template], done: Rewritten) -> Iterator[tuple[Place, str]]:
    """The new text of one place, if it is another."""
    place, pieces, at = uses[0].place, list[str](), 0
    for use in uses:
        version = versions.get(use.resource)
        if version is None:
            done.misses.append(Miss(place, "unknown", f"there is no version of {use.resource!r}"))
            continue
        try:
            pieces += [place.text[at : use.begin], _rendered(use, version)]
        except TemplateError as error:
            done.misses.append(Miss(place, "slots", f"{use.resource}: {error}"))
            continue
        done.uses.append(use)
        at = use.end
    text = "".join([*pieces, place.text[at:]])
    if text != place.text:
        yield place, text


def _rendered(use: Use, version: Template) -> str:
    return use.place.text[use.begin : use.end] if version == use.template else version.render(use.slots)
