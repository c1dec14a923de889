"""The cost of a base URL for agents that behave otherwise behind one, derived from their calls on the tape alone. Pure.

Claude Code and Codex leave things out where the host that they call is not their maker's own. Claude Code then sends
its version without the hash that it adds for its own host (`x-anthropic-billing-header: cc_version=...; cch=...`); this
was measured for 2.1.197 and 2.1.330. Codex from 0.169 on sends its calls by POST instead of a WebSocket, and with each
call all earlier items.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.model.attributes import WEBSOCKET
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.finding_codes import FindingCode
from penstock.gateway.model.span import Span
from penstock.gateway.model.validation_messages import pluralized
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import Json, dumps, loads, obj, objs, text

_CLAUDE_CODE: Final = re.compile(r"claude-cli/([0-9.]+)")
_CODEX: Final = re.compile(r"codex[\w -]*/([0-9]+)\.([0-9]+)", re.IGNORECASE)
_WEBSOCKETS_SINCE: Final = (0, 169)
_BILLING: Final = "x-anthropic-billing-header:"
_HASH: Final = "cch="
_BETAS: Final = ("prompt-caching-scope", "advanced-tool-use")
"""Beta flags that each measured version sends to its own host."""
_SEARCH: Final = "ToolSearch"
"""The tool by which Claude Code finds other tools, if their schemas are not in its calls."""


@dataclass(slots=True)
class BaseUrlEffects:
    """The effects of a base URL in the calls of one attempt."""

    claude_code: str | None = None
    """Version of Claude Code, if it was given a base URL."""
    betas: list[str] = field(default_factory=list[str])
    scoped: bool = False
    """Whether a part of its system prompt is cached for everybody."""
    tools: int = 0
    """Highest number of tool schemas in one of its calls without tool search."""
    tool_bytes: int = 0
    """Bytes of these schemas in all its calls."""
    calls: int = 0
    """Number of calls that contain schemas."""
    searches: bool = False
    """Whether it searches for tools; then calls with few schemas are a sub-agent's."""
    codex: str | None = None
    """Version of Codex, if its calls come by POST."""
    posts: int = 0
    sent: int = 0
    """Bytes of these calls."""
    repeated: int = 0
    """Bytes of these calls that the call before in the same thread contained as well."""
    _before: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    """The items of the last call, by thread."""

    def add(self, span: Span, exchange: Exchange) -> None:
        """Adds a model call; calls come in their order."""
        headers = {name.lower(): value for name, value in exchange.request_headers}
        agent = headers.get("user-agent", "")
        if found := _CLAUDE_CODE.match(agent):
            self._of_claude_code(found[1], headers.get("anthropic-beta", ""), obj(loads(plain_bodies(exchange)[0])))
        elif (found := _CODEX.match(agent)) and WEBSOCKET not in (span.attributes or {}):
            thread = headers.get("thread-id", "")
            self._of_codex((int(found[1]), int(found[2])), thread, by_name(span.dialect), plain_bodies(exchange)[0])

    def _of_claude_code(self, version: str, betas: str, asked: Json) -> None:
        system, tools = objs(asked.get("system")), objs(asked.get("tools"))
        billing = (text(system[0].get("text")) if system else None) or ""
        if not billing.startswith(_BILLING) or _HASH in billing or not tools:
            return  # the maker's own host, or a call for a title
        self.claude_code, self.betas = version, [beta for beta in betas.split(",") if beta]
        self.scoped |= any("scope" in obj(part.get("cache_control")) for part in system)
        if any(tool.get("name") == _SEARCH for tool in tools):
            self.searches = True
        else:
            self.calls, self.tools = self.calls + 1, max(self.tools, len(tools))
            self.tool_bytes += len(dumps(tools))

    def _of_codex(self, version: tuple[int, int], thread: str, dialect: Dialect, body: bytes) -> None:
        if version < _WEBSOCKETS_SINCE:
            return
        story = [bytes(item) for item in dialect.items(body).raw]
        same = 0
        for old, new in zip(self._before.get(thread, ()), story, strict=False):
            if old != new:
                break
            same += len(new)
        self.codex, self._before[thread] = ".".join(map(str, version)), story
        self.posts, self.sent, self.repeated = self.posts + 1, self.sent + len(body), self.repeated + same

    def reasons(self) -> Iterator[tuple[FindingCode, str]]:
        """The code of each finding, and its reason."""
        if self.claude_code is not None:
            missing = [beta for beta in _BETAS if not any(sent.startswith(beta) for sent in self.betas)]
            lacks = (
                [] if self.scoped else ["no part of its system prompt is cached beyond its own account (scope global)"]
            )
            lacks += [f"its {len(self.betas)} beta flags lack {' and '.join(missing)}"] if missing else []
            if lacks:
                yield "base_url", f"Claude Code {self.claude_code} runs degraded behind a base URL: {', '.join(lacks)}"
        if self.tools and not self.searches:
            yield (
                "inlined_tools",
                f"{pluralized(self.calls, 'call')} brought the schemas of all its tools along, {self.tools:,} at most, "
                f"{_kilobytes(self.tool_bytes)} in all: it does not search for tools behind a base URL",
            )
        if self.codex is not None and self.repeated:
            yield (
                "no_websocket",
                f"{_kilobytes(self.repeated)} of the {_kilobytes(self.sent)} in {pluralized(self.posts, 'call')} were "
                f"sent before: Codex {self.codex} has lost its WebSocket, on which it sends them once",
            )


def _kilobytes(size: int) -> str:
    return f"{size / 1000:,.0f} KB"
