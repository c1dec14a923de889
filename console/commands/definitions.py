"""`penstock mcp definitions`, `approve`, `adopt`: the definitions that servers of tools list."""

from __future__ import annotations

import json as jsons
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.console.commands.audit import ACTION_DEFAULTS, ActionOptions
from penstock.console.commands.resources import new_version, person
from penstock.console.commands.terminal import show
from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Json, Url, note, validated_model, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.resource import Resource
    from penstock.gateway.model.tools import ServerView

Flag = Annotated[bool, Parameter(negative="")]


def definitions(
    server: str | None = None,
    /,
    *,
    diff: Flag = False,
    version: int | None = None,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Show what servers of tools list, since when, and what has changed in it.

    Parameters
    ----------
    server
        One server, with every definition; all of them, list by list, if not given.
    diff
        Show what has changed, word by word: what the server lists now against what was approved.
    version
        With --diff: this version against the one before it.
    """
    from penstock.console.views import definitions as display

    if server is None and diff:
        raise CommandError("--diff needs a server: penstock mcp definitions SERVER --diff", 2)
    if version is not None and not diff:
        raise CommandError("--version is for --diff: it shows what that version has changed", 2)

    async def ask(client: Client) -> None:
        now = time.time_ns()
        if server is None:
            rows = await client.definitions()
            none = "There are no MCP servers: add [mcp.servers.NAME] to penstock.toml."
            show(rows, json, lambda: display.servers(rows, now), none)
            return
        found = await client.server_definitions(server)
        if version is not None and found.version(version) is None:
            raise _no_version(found, version)
        picture = (lambda: display.difference(found, version, now)) if diff else (lambda: display.server(found, now))
        show([found], json, picture)

    with_client(gateway, ask)


def approve(
    server: str,
    /,
    *,
    version: int | None = None,
    said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Approve what a server of tools lists, where changes are held back or denied.

    Parameters
    ----------
    server
        Name of the server.
    version
        The version to serve, which may be an older one; the newest of every list if not given.
    """
    from penstock.console.views import definitions as display
    from penstock.gateway.model.tools import ApproveRequest

    asked = validated_model(ApproveRequest, version=version, who=person(said.who), why=said.why)

    async def ask(client: Client) -> None:
        found = await client.approve_definitions(server, asked)
        show([found], json, lambda: display.approved(found))

    with_client(gateway, ask)


def adopt(
    server: str,
    tool: str,
    /,
    *,
    name: str | None = None,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Register what a server has said of a tool as versions of a resource, which releases can change.

    Parameters
    ----------
    server
        Name of the server.
    tool
        Name of the tool, as the server lists it.
    name
        Name of the resource; SERVER.TOOL if not given.
    """
    from penstock.console.views import resources
    from penstock.gateway.model.resource import Template

    async def ask(client: Client) -> None:
        texts = _texts(await client.server_definitions(server), tool)
        added: list[Resource] = []
        for text, version in texts:
            content = {"tool": tool, "text": Template((text,), ()).source, "sent": True}
            about = f"server {server}, version {version}"
            new = new_version(kind="tool-text", content=content, author=person(None), note=about)
            added.append(await client.add_version(name or f"{server}.{tool}", new))
        show(added, json, lambda: resources.registered(added))

    with_client(gateway, ask)


def _texts(server: ServerView, tool: str) -> list[tuple[str, int]]:
    """(description, first version with it) of a tool, the approved description first: a resource begins with it."""
    approved, found = server.pinned.get("tools"), dict[str, int]()
    versions = sorted(server.of("tools"), key=lambda one: (one.version != approved, one.version))
    for version in versions:
        definition = jsons.loads(server.texts.get(version.items.get(tool, ""), "{}"))
        text = definition.get("description")
        if isinstance(text, str) and text:
            found.setdefault(text, version.version)
    if not found:
        known = ", ".join(sorted({name for one in versions for name in one.items})[:20]) or "none"
        raise CommandError(f"server {server.server!r} has described no tool {tool!r}; tools that it lists: {known}")
    if len(found) > 1:
        note(f"{server.server} has said {len(found)} different things of {tool}: each is a version.")
    return list(found.items())


def _no_version(server: ServerView, version: int) -> CommandError:
    has = ", ".join(str(one.version) for one in server.versions[-20:]) or "none"
    return CommandError(f"server {server.server!r} has no version {version}; it has {has}")
