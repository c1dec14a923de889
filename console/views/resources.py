"""Resources and proposals of prompts for a terminal. Pure, as `console.views.rollouts` is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import releases
from penstock.console.views.noun import NounRows, NounSelection, NounView
from penstock.console.views.releases import audience
from penstock.console.views.rollouts import BRIEF, pluralized
from penstock.console.views.table import Column, Listing, abbreviate, age, ago, clean, figure, joined, plain
from penstock.gateway.model.resource import Resource, ResourceList, ResourceView, Template, sent_by_agents
from penstock.gateway.releases.prompt_induction import FEWEST, PromptProposal, find_volatile_values
from penstock.gateway.releases.prompt_recogniser import TextMatch

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

SLOT = "bold cyan"
"""Style of slots, which stand in braces too, for terminals without colours."""
SELDOM = "not by agents: they get it by a release, or by its name"
"""How a version reaches calls that agents do not send."""
WIDEST, CONTEXT = 60, 12
"""Characters of a version's text in a list, and how many of them at least stand before what differs."""
FEW = 4
"""Number of values that are named; more are counted."""
_UNSENT = (
    "No version of {name} is known to be what agents send: only calls that name it get one. If agents send one of its "
    "texts by themselves, register that with --sent."
)
SIGNS = {"+": "green", "-": "red", "@": "cyan"}
VERSIONS = (
    Column("version"), Column("parent", 3), Column("author", 1), figure("made", 2),
    Column("what", narrows="fold", least=24), Column("note", 4, narrows="fold", least=16),
)  # fmt: skip


async def _fetch(client: Client, selection: NounSelection) -> NounRows[ResourceView]:
    return listed(await client.resource_list())


def listed(found: ResourceList) -> NounRows[ResourceView]:
    """All resources, and the number of requests that could not be searched for them, by reason."""
    counts = found.unread
    unread = f"{pluralized(sum(counts.values()), 'request')} passed unread: {releases.miss_reasons(counts)}."
    none = (
        "There are no resources yet: `penstock resource add NAME --file FILE` registers a prompt, `penstock prompts "
        "discover` finds those that agents send."
    )
    return NounRows(found.resources, none, below=[Text(unread, "yellow")] if counts else [])


def _covered(one: ResourceView) -> Text:
    if one.coverage is None and one.kind != "model" and not sent_by_agents(one.versions):
        return Text("no text sent", "yellow")
    fell = one.coverage is not None and one.coverage.fell_ns is not None
    return Text(releases.coverage_brief(one.coverage), "yellow" if fell else "")


def _stable(one: ResourceView) -> str:
    """The stable version for everybody, and the number of exceptions."""
    rules = pluralized(len(one.stable.rules), "exception")
    return one.stable.version + (f" ({rules})" if one.stable.rules else "")


RESOURCES = NounView[NounSelection, ResourceView](
    "resources",
    ResourceView,
    _fetch,
    key=lambda one: one.name,
    columns={
        Column("resource"): lambda one, _: plain(one.name),
        Column("kind", 3): lambda one, _: one.kind,
        Column("stable"): lambda one, _: plain(_stable(one)),
        Column("newest"): lambda one, _: plain(one.versions[-1].version),
        figure("versions", 2): lambda one, _: f"{len(one.versions):,}",
        figure("age", 1): lambda one, now_ns: age(one.versions[-1].created_ns, now_ns),
        Column("coverage", 5): lambda one, _: _covered(one),
        Column("live releases", 4, narrows="words"): lambda one, _: plain(" ".join(one.releases)),
    },
    concerns=frozenset({"resources", "releases"}),
    every_s=15.0,
)


def resource(one: ResourceView, now_ns: int) -> Group:
    """A resource and its versions."""
    head = joined(Text(clean(one.name), style="bold"), one.kind, f"stable {clean(one.stable.version)}")
    rules = [joined(f"stable {clean(rule.version)}", f"for {clean(audience(rule.only))}") for rule in one.stable.rules]
    live = [joined("live", clean(release)) for release in one.releases]
    reach: Iterable[str] = () if one.coverage is None else releases.coverage_lines(one.name, one.coverage, now_ns)
    live += [joined("coverage", line) for line in reach]
    made, shared = Listing(*VERSIONS), _shared(one.versions)
    for it in one.versions:
        names = (plain(it.version), plain(it.parent), plain(it.author), ago(it.created_ns, now_ns))
        made.add_row(*names, plain(_brief(it, shared)), plain(it.note))
    return Group(head, *rules, *live, made)


def _shared(versions: Sequence[Resource]) -> int:
    """The number of characters that may be left out at the beginning of each text, because all texts have them: what
    differs begins some words later. 0 where that is near the beginning, or there is one text."""
    texts: list[str] = sorted({it.content["text"] for it in versions if "text" in it.content})
    if len(texts) < 2:
        return 0
    first, last = texts[0], texts[-1]
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return 0 if same < WIDEST // 2 else first.rfind(" ", 0, same - CONTEXT) + 1


def _brief(version: Resource, shared: int) -> str:
    """The weights of a model, or a text from its first `shared` characters on."""
    if version.kind == "model":
        return " ".join(f"{name}={value}" for name, value in version.content.items() if value is not None)
    tool = f"{version.content['tool']}: " if "tool" in version.content else ""
    return f"{tool}{'… ' if shared else ''}{abbreviate(version.content['text'][shared:], WIDEST)}"


def version(one: Resource) -> Group:
    """A version with its metadata and its whole text."""
    facts = {"parent": one.parent, "author": one.author, "note": one.note, "sha256": one.sha256}
    facts |= {name: value for name, value in one.content.items() if name not in ("text", "sent")}
    if "text" in one.content:
        facts["sent"] = "by agents: it is recognised in their calls" if one.content.get("sent") else SELDOM
    lines = [joined(Text(name, style="dim"), clean(value)) for name, value in facts.items() if value not in (None, "")]
    template = one.template
    shown: list[RenderableType] = [] if template is None else [Text(), text(template)]
    return Group(joined(Text(clean(one.qualified_name), style="bold"), one.kind), *lines, *shown)


def added(one: Resource, before: Sequence[Resource]) -> Group:
    """A sentence about a version that was registered, or existed already. `before`: the versions that existed."""
    slots = "" if one.template is None else f" with {_slots(one.template)}"
    there = one.version in {version.version for version in before}
    head = Text(f"{clean(one.qualified_name)} {'was registered already' if there else 'is registered'}{slots}.")
    known = one.kind == "model" or sent_by_agents([*before, one])
    return Group(head, *([] if known else [Text(_UNSENT.format(name=clean(one.name)), "yellow")]), *_frozen(one))


def _frozen(one: Resource) -> Iterator[Text]:
    """A warning about values in a text that agents send, which will differ in later calls."""
    if one.template is None or not one.content.get("sent"):
        return
    found = [
        (anchor[it.begin : it.end], it.kind) for anchor in one.template.anchors for it in find_volatile_values(anchor)
    ]
    if found:
        some = ", ".join(f"{abbreviate(value, 40)} ({kind})" for value, kind in dict(found[:FEW]).items())
        more = f" and {len(found) - FEW} more" if len(found) > FEW else ""
        yield Text(f"Written as text: {some}{more}. A call with another value will not match; a slot would.", "yellow")


def registered(versions: Iterable[Resource]) -> Text:
    """A line for each version that is registered now."""
    return Text("\n").join(Text(f"{clean(one.qualified_name)} is registered.") for one in versions)


def _slots(template: Template) -> str:
    names = list(dict.fromkeys(template.slots))
    return f"the slots {', '.join(names)}" if names else "no slots"


def text(template: Template) -> Text:
    """A template as text, with its slots highlighted."""
    made = Text()
    for anchor, slot in zip(template.anchors, [*template.slots, None], strict=True):
        made.append(clean(anchor.replace("{", "{{").replace("}", "}}")))
        if slot is not None:
            made.append(f"{{{slot}}}", SLOT)
    return made


def difference(one: Resource, other: Resource) -> Text:
    """The differences between two versions: a unified diff of texts, fields of models."""
    lines = difflib.unified_diff(_lines(one), _lines(other), one.qualified_name, other.qualified_name, lineterm="")
    made = Text("\n").join(plain(line, SIGNS.get(line[0], "")) for line in lines)
    return made or Text(f"{one.qualified_name} and {other.qualified_name} say the same.")


def _lines(version: Resource) -> list[str]:
    rest = [f"{name}: {value}" for name, value in version.content.items() if name not in ("text", "sent")]
    said: str = version.content.get("text", "")
    ends = [] if not said or said.endswith("\n") else ["\\ no line break at the end"]
    # Not `splitlines`: versions that differ in other line breaks do not say the same.
    return [*rest, *(said.removesuffix("\n").split("\n") if said else []), *ends]


def proposals(found: Sequence[tuple[PromptProposal, str | None]], calls: int, left_out: int, rollouts: int) -> Group:
    """The prompts that were found in so many calls of so many rollouts, each with the resource that it is registered
    as."""
    pieces: list[RenderableType] = [Text(f"{pluralized(len(found), 'prompt')} in {pluralized(calls, 'call')}.")]
    if left_out:
        pieces.append(
            Text(f"{pluralized(left_out, 'call')} left out: the gateway wrote their text, or made them itself.")
        )
    if not found:
        shared = f"A prompt is what {FEWEST} rollouts share; these calls with a system text are of"
        pieces.append(Text(f"{shared} {pluralized(rollouts, 'rollout')}."))
    for number, (one, known) in enumerate(found, 1):
        pieces += [Text(), *_proposal(number, one, known)]
    return Group(*pieces)


def _proposal(number: int, one: PromptProposal, known: str | None) -> Iterator[RenderableType]:
    agent = f"agent {clean(one.agent)}" if one.agent else "no agent named"
    covered = f"coverage {one.coverage:.1%}"
    registered = f"registered as {clean(known)}" if known else "not registered yet"
    yield joined(Text(f"{number}.", style="bold"), pluralized(one.messages, "message"), covered, agent, one.call_site)
    yield joined(Text(registered, style="green" if known else "yellow"))
    yield text(one.template)
    yield values(one.slots)


def values(slots: Mapping[str, Sequence[str]]) -> RenderableType:
    """The values of slots, a few examples each."""
    made = Listing(Column("slot"), Column("examples", narrows="fold", least=30))
    for name, examples in slots.items():
        made.add_row(Text(name, style=SLOT), plain(" | ".join(abbreviate(it, BRIEF) for it in examples)))
    return made if slots else Text("no slots", style="dim")


def recognised(found: TextMatch) -> Group:
    """The prompt that a text is recognised as, and the values of its slots."""
    named = f" of the tool {clean(found.known.tool)}" if found.known.tool else ""
    head = Text(f"This is {clean(found.known.resource)}{named}.")
    return Group(head, values({name: [value] for name, value in found.slots.items()}))
