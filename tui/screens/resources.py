"""The screen of resources: versions, the changes of each, and their users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import resources as shown
from penstock.console.views.noun import NounRows
from penstock.console.views.releases import audience
from penstock.console.views.table import Column, Listing, clean, joined, plain
from penstock.gateway.model.resource import Need, Resource, ResourceView
from penstock.tui.screens.noun import NounScreen
from penstock.tui.view import Pane, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

DIFFERENCES: Final = 20
"""The newest versions, whose changes are shown."""
USED = (
    Column("version"), Column("stable for", narrows="words", least=16), Column("live releases", 1, narrows="words"),
    Column("pinned rollouts", 2, narrows="fold", least=16),
)  # fmt: skip


class ResourcesView(NounScreen[ResourceView, list[Need]]):
    noun = shown.RESOURCES
    help = "prompts, tool texts and models: versions, differences, and where each is used; c compares two versions"

    def head(self, data: NounRows[ResourceView], now_ns: int) -> Text:
        versions = sum(len(one.versions) for one in data.rows)
        return Text(f"{len(data.rows):,} resources, {versions:,} versions")

    async def load_details(self, client: Client, data: NounRows[ResourceView], id: str) -> list[Need]:
        return await client.needed_versions(id)

    def panes(
        self, data: NounRows[ResourceView], id: str | None, closer: list[Need] | None, now_ns: int
    ) -> Sequence[Pane]:
        one = self.noun.find(data, id)
        if one is None:
            return ()
        stable = next((version for version in one.versions if version.version == one.stable.version), one.versions[-1])
        return [
            pane("Versions", shown.resource(one, now_ns)),
            pane("Stable", shown.version(stable)),
            pane("Differences", Group(*_differences(one))),
            pane("Where used", Text("asking ...", style="dim") if closer is None else _used(closer)),
        ]


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
