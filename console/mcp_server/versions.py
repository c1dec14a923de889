"""Tools that read resources: prompts, descriptions of tools and models, and their versions."""

from __future__ import annotations

import time
from typing import Annotated, Any

from pydantic import Field

from penstock.console.mcp_server.tool import (
    Characters,
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolDefinition,
    ToolError,
    ToolResult,
    moment,
    piece,
    plain,
)
from penstock.console.views import resources as display
from penstock.console.views.table import abbreviate, clean, compact
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import NotFound
from penstock.gateway.model.base import Id
from penstock.gateway.model.resource import Resource, ResourceView

MOST = 100
"""Most resources of one answer, and most versions."""
NOTE = 300
"""Most characters of a note in a list."""


class ListResourcesArguments(ToolArguments):
    name: Id | None = None
    """Only this one, with its versions."""


class VersionRow(ToolAnswer):
    """A version in a list."""

    version: str
    parent: str | None
    author: str
    created: str | None
    note: str
    """Why it was made, shortened."""


class ResourceRow(ToolAnswer):
    """A resource in a list."""

    name: str
    kind: str
    stable: str
    """The version that new rollouts get."""
    newest: str
    versions: int
    """How many there are."""
    live_releases: list[str]


class ResourceRows(ToolAnswer):
    """Resources by name; of a single one its versions too."""

    resources: list[ResourceRow]
    versions: list[VersionRow] = Field(default_factory=list[VersionRow])
    """Of the resource that was named, the newest last."""
    left_out: int = 0
    """How many more there are: resources, or older versions of the one that was named."""


async def list_resources(context: ToolContext, asked: ListResourcesArguments) -> ToolResult:
    """Read all resources, or one of them with its versions."""
    if asked.name is not None:
        return await _one(context.client, asked.name)
    found = await context.client.resources()
    shown = found[:MOST]
    answer = ResourceRows(resources=[_row(one) for one in shown], left_out=len(found) - len(shown))
    if not found:
        none = "There are no resources yet: `penstock resource add` and `penstock prompts discover` register them."
        return ToolResult(answer, none)
    more = f"\n{answer.left_out:,} more are not shown: name one." if answer.left_out else ""
    return ToolResult(answer, plain(display.RESOURCES.table(shown, time.time_ns())) + more)


async def _one(client: Client, name: str) -> ToolResult:
    found = await resource_of(client, name)
    shown = found.model_copy(update={"versions": found.versions[-MOST:]})
    left_out = len(found.versions) - len(shown.versions)
    rows = [
        VersionRow(
            version=one.version,
            parent=one.parent,
            author=one.author,
            created=moment(one.created_ns),
            note=abbreviate(one.note, NOTE),
        )
        for one in shown.versions
    ]
    more = f"\n{left_out:,} older versions are not shown; read_version reads any of them." if left_out else ""
    answer = ResourceRows(resources=[_row(found)], versions=rows, left_out=left_out)
    return ToolResult(answer, plain(display.resource(shown, time.time_ns())) + more)


def _row(one: ResourceView) -> ResourceRow:
    return ResourceRow(
        name=one.name,
        kind=one.kind,
        stable=one.stable.version,
        newest=one.versions[-1].version,
        versions=len(one.versions),
        live_releases=one.releases[:MOST],
    )


async def resource_of(client: Client, name: str) -> ResourceView:
    """The resource of that name. Raises `ToolError`, with the names of all, if there is none."""
    try:
        return await client.resource(name)
    except NotFound:
        pass
    names = ", ".join(one.name for one in (await client.resources())[:MOST])
    raise ToolError(f"there is no resource {name!r}; there {f'are {names}' if names else 'is none yet'}")


def version_of(found: ResourceView, wanted: str | None) -> Resource:
    """A version, the stable one if `wanted` is None. Raises `ToolError` if there is none."""
    name = wanted or found.stable.version
    one = next((one for one in found.versions if one.version == name), None)
    if one is None:
        names = ", ".join(one.version for one in found.versions[-20:])
        raise ToolError(f"{found.name!r} has no version {name!r}; its newest are {names}")
    return one


class ReadVersionArguments(ToolArguments):
    name: Id
    """The resource."""
    version: Id | None = None
    """The version; the stable one if not given."""
    offset: Annotated[int, Field(ge=0)] = 0
    """`next_offset` of the answer before, to go on."""
    max_characters: Characters = 12_000
    """How much of its text to show."""


class VersionAnswer(ToolAnswer):
    """A version of a resource with its text, or with the part of it from `offset` on."""

    name: str
    version: str
    kind: str
    stable: bool
    """Whether new rollouts get it while no release is live."""
    parent: str | None
    author: str
    note: str
    created: str | None
    slots: list[str] | None = None
    """What is filled in for each call; a new version must keep each as often as it stands here."""
    content: dict[str, Any]
    """What it is, besides its text."""
    text: str | None = None
    """Its text as it is written: {slots} in braces, literal braces doubled."""
    next_offset: int | None = None
    """Pass it as `offset` to go on; none at the end."""


async def read_version(context: ToolContext, asked: ReadVersionArguments) -> ToolResult:
    """One version with its text."""
    found = await resource_of(context.client, asked.name)
    one = version_of(found, asked.version)
    template = one.template
    part = piece(one.content.get("text", ""), asked.offset, asked.max_characters)
    answer = VersionAnswer(
        name=one.name,
        version=one.version,
        kind=one.kind,
        stable=one.version == found.stable.version,
        parent=one.parent,
        author=one.author,
        note=one.note,
        created=moment(one.created_ns),
        slots=None if template is None else list(template.slots),
        content={name: value for name, value in one.content.items() if name != "text"},
        text=None if template is None else part.text,
        next_offset=part.next,
    )
    return ToolResult(answer, _version_text(answer))


def _version_text(told: VersionAnswer) -> str:
    facts = {"parent": told.parent, "author": told.author, "note": told.note, "content": compact(told.content or None)}
    if told.slots is not None:
        facts["slots"] = ", ".join(told.slots) or "none"
    lines = [f"{told.name}@{told.version}  {told.kind}{'  stable' if told.stable else ''}"]
    lines += [clean(f"{name}: {value}") for name, value in facts.items() if value]
    if told.text is not None:
        lines += ["", clean(told.text)]
    if told.next_offset is not None:
        lines += ["", f"There is more: offset={told.next_offset} goes on."]
    return "\n".join(lines)


class DiffVersionsArguments(ToolArguments):
    name: Id
    """The resource."""
    one: Id
    """The older version, such as v1."""
    other: Id
    """The newer version, such as v2."""
    offset: Annotated[int, Field(ge=0)] = 0
    """`next_offset` of the answer before, to go on."""


class DiffAnswer(ToolAnswer):
    """The difference between the texts of two versions."""

    diff: str
    """Unified diff, by lines; a sentence where they are the same."""
    next_offset: int | None = None
    """Pass it as `offset` to go on; none at the end."""


DIFF = 15_000
"""Most characters of a difference in one answer."""


async def diff_versions(context: ToolContext, asked: DiffVersionsArguments) -> ToolResult:
    """Compare two versions of a resource, as `penstock resource diff` does."""
    found = await resource_of(context.client, asked.name)
    whole = display.difference(version_of(found, asked.one), version_of(found, asked.other)).plain
    part = piece(whole, asked.offset, DIFF)
    more = "" if part.next is None else f"\nThere is more: offset={part.next} goes on."
    return ToolResult(DiffAnswer(diff=part.text, next_offset=part.next), part.text + more)


TOOLS = (
    ToolDefinition(
        "list_resources",
        "List prompts and models",
        "List Penstock's resources, which is what releases can change without touching the agent: prompts, "
        "descriptions of tools (tool-text) and models, each with its stable version. With `name` also its versions. "
        f"At most {MOST} of each.",
        ListResourcesArguments,
        ResourceRows,
        list_resources,
    ),
    ToolDefinition(
        "read_version",
        "Read a version",
        "Read one version of a prompt, of a tool's description or of a model: its text, its slots, who made it and "
        "why. Without `version` the stable one. Long texts come in pieces; `next_offset` goes on.",
        ReadVersionArguments,
        VersionAnswer,
        read_version,
    ),
    ToolDefinition(
        "diff_versions",
        "Diff two versions",
        "Show what two versions of a resource say differently, as a unified diff. For how well they did use "
        f"compare_versions. At most {DIFF:,} characters; `next_offset` goes on.",
        DiffVersionsArguments,
        DiffAnswer,
        diff_versions,
    ),
)
