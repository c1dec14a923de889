"""`penstock mcp` and `penstock policy`: tools for coding agents, recorded tools for agents under test, the definitions
of servers of tools, and rules for calls of tools.
"""

from __future__ import annotations

import json as jsons
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.console.commands.resources import new_version
from penstock.console.commands.terminal import ACTION_DEFAULTS, ActionOptions, person, show
from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    CommandError,
    Json,
    Limit,
    Terms,
    Url,
    joined_terms,
    note,
    validated_model,
    with_asked,
    with_client,
)
from penstock.gateway.model.codes import install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.console.mcp_server.replay_calls import ReplayCall
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.resource import Resource
    from penstock.gateway.model.tools import ServerView
    from penstock.gateway.reading.policy.rules import PolicyRule

Flag = Annotated[bool, Parameter(negative="")]
Who = Annotated[str | None, Parameter(help="Who decides; the name you are logged in with if not given.")]
Why = Annotated[str, Parameter(help="Why, in a sentence; the agent's model is told if the call is refused.")]
Id = Annotated[str, Parameter(help="Id of the call, as `penstock policy waiting` shows it.")]
PERSON = (
    "This is an MCP server: a coding agent starts it and speaks with it on stdin and stdout, in JSON. How to add it to "
    "one is in docs/mcp-server.md. Ctrl-C ends it."
)
NONE_FOUND = "No recorded tool call matches: tools are recorded where an agent reaches its MCP servers at /mcp/NAME."


# -- MCP servers on stdin and stdout ----


def serve(*, write: Annotated[bool, Parameter(negative="")] = False, gateway: Url = LOCAL) -> None:
    """Give a coding agent tools to improve your agents: an MCP server on stdin and stdout.

    Parameters
    ----------
    write
        Let it post rewards and propose versions of prompts, too. It never starts or ends a release.
    """
    _refuse_closed()
    try:
        from penstock.console.mcp_server.server import serve as speak
    except ModuleNotFoundError as e:
        # The SDK installs anyio.
        if (e.name or "").partition(".")[0] not in ("anyio", "mcp", "mcp_types"):
            raise
        raise CommandError(f"an MCP server needs mcp: {install_hint('mcp')}") from None

    async def ask(client: Client) -> None:
        if sys.stdin.isatty():
            note(PERSON)
        await speak(client, write)

    with_client(gateway, ask)


def replay(rollout: str, /, *, attempt: str | None = None, server: str | None = None, gateway: Url = LOCAL) -> None:
    """Play the recorded servers of a rollout as one MCP server on stdin and stdout.

    Parameters
    ----------
    rollout
        Id of the rollout.
    attempt
        Its attempt; needed where there are several.
    server
        The only server to play, by its name in the gateway's configuration.
    """
    import asyncio

    from penstock.console.mcp_server.replay import load_calls

    _refuse_closed()
    found = list["ReplayCall"]()

    async def ask(client: Client) -> None:
        found.extend(await load_calls(client, rollout, attempt, server))

    with_client(gateway, ask)
    if sys.stdin.isatty():
        note("This is an MCP server: an MCP client starts it and speaks with it in JSON, one message a line.")
    asyncio.run(_play(found))


async def _play(calls: Sequence[ReplayCall]) -> None:
    """Plays the recorded servers until stdin ends, or the reader of stdout has gone."""
    import asyncio

    from penstock.console.mcp_server.replay import LineReader, Player

    gone = asyncio.Event()

    def write(line: bytes) -> None:
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(sys.stdout.fileno(), rest) :]
        except BrokenPipeError:
            gone.set()

    playing = asyncio.ensure_future(Player(calls, write, note).play(LineReader(sys.stdin.fileno())))
    leaving = asyncio.ensure_future(gone.wait())
    await asyncio.wait((playing, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if playing.done():
        playing.result()


def _refuse_closed() -> None:
    if sys.stdin is None or sys.stdout is None:
        raise CommandError("stdin or stdout is closed: an MCP client starts this command and speaks with it there")


# -- definitions ----


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
    from penstock.console.views import tools as display

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


def approve_definitions(
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
    from penstock.console.views import tools as display
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


# -- policy ----


def try_policy(file: Path, /, *filter: Terms, limit: Limit = 20, json: Json = False, gateway: Url = LOCAL) -> None:
    """Say what rules would have done to recorded tool calls, and how the rollouts that they touch were rewarded.

    Parameters
    ----------
    file
        TOML with `[[policy]]` rules: penstock.toml, or a file of its own.
    limit
        How many of the calls that would not simply have run are listed.
    """
    from penstock.console.mcp_server.comparison import difference
    from penstock.console.views import tools
    from penstock.gateway.reading.policy.report import build_report

    async def ask(client: Client) -> None:
        found = [call async for call in client.try_policy(rules, terms)]
        told = build_report(rules, found, difference, limit)
        if not found and not json:
            note(with_asked(NONE_FOUND))
        else:
            show([told], json, lambda: tools.report(told))

    rules, terms = _rules(file), joined_terms(filter)
    with_client(gateway, ask)


def _rules(file: Path) -> list[PolicyRule]:
    """The rules in a file. The rest of the file must be a valid configuration, too."""
    from penstock.gateway.config import load
    from penstock.gateway.model.toml import ConfigError

    try:
        rules = load(file).policy
    except ConfigError as e:
        raise CommandError(str(e)) from None
    if not rules:
        raise CommandError(f"{file} has no [[policy]]: add a rule with a name and a verdict")
    return rules


def approve_call(call: Id, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Let a tool call run that waits for a person."""
    _say(call, "approve", who, why, json, gateway)


def refuse_call(call: Id, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Do not let a tool call run that waits for a person."""
    _say(call, "refuse", who, why, json, gateway)


def _say(call: str, verdict: Literal["approve", "refuse"], who: str | None, why: str, json: bool, url: str) -> None:
    from penstock.console.views import tools
    from penstock.gateway.reading.policy.questions import PolicyAnswer

    said = validated_model(PolicyAnswer, verdict=verdict, who=person(who), why=why)

    async def ask(client: Client) -> None:
        found = await client.answer_waiting(call, said)
        show([found], json, lambda: tools.answered(found, verdict))

    with_client(url, ask)
