"""The screen of resources: versions, the changes of each, and their users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import resources as shown
from penstock.console.views.release_summary import audience
from penstock.console.views.table import Column, Listing
from penstock.console.views.text import clean, joined, plain
from penstock.gateway.model.resource import Need, Resource, ResourceView
from penstock.tui.view import Pane, ScreenView, TableModel, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

DIFFERENCES: Final = 20
"""The newest versions, whose changes are shown."""
NONE = (
    "There are no resources yet: `penstock resource add NAME --file FILE` registers a prompt, `penstock prompts "
    "discover` finds those that agents send."
)
USED = (
    Column("version"), Column("stable for", narrows="words", least=16), Column("live releases", 1, narrows="words"),
    Column("pinned rollouts", 2, narrows="fold", least=16),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResourcesData:
    """All resources by name."""

    resources: dict[str, ResourceView]


class ResourcesView(ScreenView[ResourcesData, list[Need]]):
    name = "resources"
    title = "Resources"
    help = "prompts, tool texts and models: versions, differences, and where each is used; c compares two versions"
    concerns = frozenset({"resources", "releases"})
    every_s = 15.0

    async def load(self, client: Client) -> ResourcesData:
        return ResourcesData({one.name: one for one in await client.resources()})

    def head(self, data: ResourcesData, now_ns: int) -> Text:
        versions = sum(len(one.versions) for one in data.resources.values())
        return Text(f"{len(data.resources):,} resources, {versions:,} versions")

    def table(self, data: ResourcesData, now_ns: int) -> TableModel:
        def cells(id: str) -> Sequence[Text | str]:
            return shown.RESOURCES.cells(data.resources[id], now_ns)

        return TableModel([*shown.RESOURCES.columns], list(data.resources), cells, NONE)

    async def load_details(self, client: Client, data: ResourcesData, id: str) -> list[Need]:
        return await client.needed_versions(id)

    def panes(self, data: ResourcesData, id: str | None, closer: list[Need] | None, now_ns: int) -> Sequence[Pane]:
        one = data.resources.get(id or "")
        if one is None:
            return ()
        stable = next((version for version in one.versions if version.version == one.stable.version), one.versions[-1])
        return [
            pane("Versions", shown.resource(one, now_ns)),
            pane("Stable", shown.version(stable)),
            pane("Differences", Group(*_differences(one))),
            pane("Where used", Text("asking ...", style="dim") if closer is None else _used(closer)),
        ]

    def command(self, id: str | None) -> str:
        return "penstock resource list" if id is None else f"penstock resource show {id}"


def _differences(one: ResourceView) -> Iterator[RenderableType]:
    """The changes of each version, newest first."""
    by_name = {version.version: version for version in one.versions}
    if len(one.versions) == 1:
        yield Text(f"{clean(one.name)} has one version; there is nothing to compare it with.")
    for version in reversed(one.versions[-DIFFERENCES:]):
        before = _before(one, version, by_name)
        if before is not None:
            note = joined(
                plain(version.note), Text(f"by {clean(version.author)}" if version.author else "", style="dim")
            )
            yield from (note, shown.difference(before, version), Text())


def _before(one: ResourceView, version: Resource, by_name: dict[str, Resource]) -> Resource | None:
    """The version from which it was made; else the one before it; None for the first."""
    if version.parent in by_name:
        return by_name[version.parent]
    place = one.versions.index(version)
    return one.versions[place - 1] if place else None


def _used(needs: Sequence[Need]) -> RenderableType:
    made = Listing(*USED)
    for need in needs:
        whom = "; ".join(audience(only) or "everybody" for only in need.audiences)
        made.add_row(plain(need.version), plain(whom), plain(" ".join(need.releases)), plain(" ".join(need.rollouts)))
    return made if made.rows else Text("Nobody needs any of its versions at the moment.")
