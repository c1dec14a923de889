"""The screen of tools: their runs and failures, and the definitions that their servers list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import rollouts, tools
from penstock.console.views.table import Column, abbreviate, joined
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import ApproveRequest, ServerView, ToolStats
from penstock.gateway.reading.policy.questions import PolicyAnswer, Question
from penstock.tui.view import Pane, ScreenView, TableModel, ViewAction, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

COUNTED: Final = 5_000
"""The newest spans, over which figures are computed."""
NEWEST: Final = 30
LONGEST: Final = 300
"""The most characters of arguments in a question; the pane Policy has more."""
NONE = "No tool was listed or run yet: `[mcp.servers.NAME]` in penstock.toml names a server, docs/mcp.md the rest."
SAID = Column("definition", narrows="words", least=10)


@dataclass(frozen=True, slots=True)
class ToolsData:
    """Tools by `SERVER/TOOL`, the busiest first; those that are listed but were not run come last."""

    tools: dict[str, ToolStats]
    servers: dict[str, ServerView]
    waiting: Sequence[Question]
    """Calls that wait for a person's answer."""

    def question(self, id: str | None) -> Question | None:
        """The waiting call of a tool that has waited longest; None when there is none."""
        return next((one for one in self.waiting if f"{one.server}/{one.tool}" == id), None)

    def server(self, id: str | None) -> ServerView | None:
        """The server of a row's tool; None when it is unknown."""
        tool = self.tools.get(id or "")
        return None if tool is None else self.servers.get(tool.server)


@dataclass(frozen=True, slots=True)
class ToolDetails:
    """The details of a tool, as far as the pane in sight needs them."""

    calls: Sequence[Span] = ()
    denied: Sequence[Span] = ()
    server: ServerView | None = None
    """The tool's server with the texts of its definitions."""


# -- actions -----------------------------------------------------------------------------------------------------------


def _cannot_approve(data: ToolsData, id: str | None) -> str | None:
    server = data.server(id)
    if server is None:
        return "no tool of a server is chosen"
    return None if server.pending("tools") else f"what {server.server} says of its tools is approved already"


def _ask_approve(data: ToolsData, id: str | None) -> str:
    server = data.server(id)
    assert server is not None
    changed = [name for name in _names(server) if _state(data, server, name)]
    return (
        f"Approve all that {server.server} says of its tools now ({', '.join(changed)})? Agents are given these words "
        "from then on. Read the pane Definition first."
    )


async def _approve(client: Client, data: ToolsData, id: str | None, said: ActionRequest) -> str:
    server = data.server(id)
    assert server is not None
    request = ApproveRequest(version=server.newest["tools"], who=said.who, why=said.why)
    await client.approve_definitions(server.server, request)
    return f"What {server.server} says of its tools is approved."


def _no_question(data: ToolsData, id: str | None) -> str | None:
    return None if data.question(id) else "no call of this tool waits for a person"


def _answer(id: str, verdict: Literal["approve", "refuse"]) -> ViewAction[ToolsData]:
    def ask(data: ToolsData, row: str | None) -> str:
        one = data.question(row)
        assert one is not None
        does = "run" if verdict == "approve" else "refuse"
        return (
            f"{does.capitalize()} {one.tool} on {one.server} with {abbreviate(one.arguments, LONGEST)}? "
            f"Rollout {one.rollout} waits for it."
        )

    async def act(client: Client, data: ToolsData, row: str | None, said: ActionRequest) -> str:
        one = data.question(row)
        assert one is not None
        answer = PolicyAnswer(verdict=verdict, who=said.who, why=said.why[:1000])
        await client.answer_waiting(one.id, answer)
        return tools.answered(one, verdict).plain

    return ViewAction(id, _no_question, ask, act, reason=verdict == "refuse")


class ToolsView(ScreenView[ToolsData, ToolDetails]):
    name = "tools"
    title = "Tools"
    help = "calls, errors and latency of each tool, how failed rollouts used it, and changes of its definition"
    concerns = frozenset({"rollouts"})
    every_s = 5.0
    actions: ClassVar[Sequence[ViewAction[Any]]] = (
        ViewAction("definitions.approve", _cannot_approve, _ask_approve, _approve, reason=True),
        _answer("question.allow", "approve"),
        _answer("question.deny", "refuse"),
    )

    async def load(self, client: Client) -> ToolsData:
        stats, servers, waiting = await asyncio.gather(client.stats(COUNTED), client.definitions(), client.waiting())
        used = {f"{one.server}/{one.tool}": one for one in stats.by_tool}
        listed = {
            f"{one.server}/{name}": ToolStats(server=one.server, tool=name) for one in servers for name in _names(one)
        }
        return ToolsData({**used, **{id: one for id, one in listed.items() if id not in used}},
                     {one.server: one for one in servers}, waiting)  # fmt: skip

    async def load_details(self, client: Client, data: ToolsData, id: str) -> ToolDetails:
        """Ask for the data of the pane in sight."""
        tool = data.tools.get(id)
        if tool is None:
            return ToolDetails()
        terms = f'server="{tool.server}" name="tools/call {tool.tool}"'

        async def calls(more: str) -> list[Span]:
            return [span async for span in client.recent_spans(f"{terms} {more}".strip(), NEWEST)]

        async def said() -> ServerView | None:
            return await client.server_definitions(tool.server) if tool.server in data.servers else None

        wanted = self.pane
        return ToolDetails(
            await calls("") if wanted in (None, "", "Calls") else (),
            await calls("error:policy_violation") if wanted in (None, "Policy") else (),
            await said() if wanted in (None, "Definition") else None,
        )

    def head(self, data: ToolsData, now_ns: int) -> Text:
        changed = [name for name, server in data.servers.items() if server.pending("tools")]
        words = f"{', '.join(changed)} changed what is said of tools: A approves" if changed else ""
        waiting = len(data.waiting)
        asks = f"{waiting:,} {'call waits' if waiting == 1 else 'calls wait'} for a person" if waiting else ""
        return joined(f"{len(data.tools):,} tools", Text(asks, style="bold yellow"), Text(words, style="bold red"))

    def table(self, data: ToolsData, now_ns: int) -> TableModel:
        made = rollouts.tool_figures(list(data.tools.values()))
        rows = dict(zip(data.tools, made.rows, strict=True))

        def cells(id: str) -> Sequence[Text | str]:
            server = data.server(id)
            state = "" if server is None else _state(data, server, data.tools[id].tool)
            waits = "asks a person" if data.question(id) else ""
            return [*rows[id], joined(Text(waits, style="yellow"), Text(state, style="bold red"))]

        return TableModel([*made.columns, SAID], list(data.tools), cells, NONE, _orders(data))

    def panes(self, data: ToolsData, id: str | None, closer: ToolDetails | None, now_ns: int) -> Sequence[Pane]:
        if id not in data.tools or closer is None:
            return ()
        return [
            pane("Calls", rollouts.recent(closer.calls, now_ns) if closer.calls else Text("It was not run lately.")),
            pane("Definition", _definition(data, data.tools[id], closer.server, now_ns)),
            pane("Policy", _policy(data, id, closer.denied, now_ns)),
        ]

    def command(self, id: str | None) -> str:
        return "penstock stats" if id is None else f"penstock mcp definitions {id.partition('/')[0]} --diff"


def _orders(data: ToolsData) -> dict[str, Callable[[str], Any]]:
    return {
        "calls": lambda id: data.tools[id].calls,
        "errors": lambda id: data.tools[id].errors,
        "p95": lambda id: data.tools[id].p95_ns,
        "in failed rollouts": lambda id: data.tools[id].share_of_failed,
    }


def _names(server: ServerView) -> list[str]:
    """The tools that a server lists now, and those that were approved."""
    versions = (server.version(server.newest.get("tools")), server.version(server.pinned.get("tools")))
    return list(dict.fromkeys(name for version in versions if version is not None for name in version.items))


def _state(data: ToolsData, server: ServerView, tool: str) -> str:
    """The change of a tool's definition since it was approved: `new`, `removed` or `changed`; empty without one."""
    now, approved = server.version(server.newest.get("tools")), server.version(server.pinned.get("tools"))
    if now is None or approved is None or now is approved:
        return ""
    if tool not in now.items:
        return "removed" if tool in approved.items else ""
    if tool not in approved.items:
        return "new"
    return "changed" if now.items[tool] != approved.items[tool] else ""


def _definition(data: ToolsData, tool: ToolStats, server: ServerView | None, now_ns: int) -> RenderableType:
    if server is None:
        known = tool.server in data.servers
        return Text("asking ..." if known else "Its server has not said what it is.", style="dim")
    return Group(tools.difference(server, None, now_ns), Text(), tools.server(server, now_ns))


def _policy(data: ToolsData, id: str, denied: Sequence[Span], now_ns: int) -> RenderableType:
    asked = [one for one in data.waiting if f"{one.server}/{one.tool}" == id]
    pieces: list[RenderableType] = (
        [tools.question(one, now_ns) for one in asked] if asked else [Text("No call of it waits for a person.")]
    )
    if denied:
        pieces += [
            Text(),
            Text("Calls that a rule did not let run, newest first", style="bold"),
            rollouts.recent(denied, now_ns),
        ]
    else:
        pieces.append(Text("No rule has stopped a call of it lately."))
    return Group(*pieces)
