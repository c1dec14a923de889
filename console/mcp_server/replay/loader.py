"""Loads the calls of a rollout that can be played. All refusals come before the server answers a client."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.console.mcp_server.replay.player import ReplayCatalog
from penstock.console.mcp_server.replay.replay_calls import ReplayCall, SpanExchange, read
from penstock.gateway.client.client import Client, ClientError

_MOST_NAMED = 5


async def load(client: Client, rollout: str, attempt: str | None, server: str | None) -> list[ReplayCall]:
    """The recorded calls of MCP servers; raises `ClientError` if there are none that can be played."""
    attempt = attempt or await _only_attempt(client, rollout)
    spans = {one.sequence: one async for one in client.spans(rollout, attempt) if one.kind in ("tool", "mcp")}
    exchanges = list[SpanExchange]()
    async for one in client.exchanges(rollout, "tools"):
        if one.attempt == attempt and one.sequence in spans:
            exchanges.append(SpanExchange(spans[one.sequence], one.request, one.response))
    calls = read(exchanges)
    where = f"{rollout}/{attempt}"
    if not calls:
        raise ClientError(
            f"{where} has no recorded call of a server of tools: tools of agents are recorded when their address is "
            "below the gateway's (docs/mcp.md)"
        )
    servers = ", ".join(dict.fromkeys(call.server for call in calls))
    if server is not None:
        calls = [call for call in calls if call.server == server]
        if not calls:
            raise ClientError(f"--server: {where} has no recorded call of {server!r}; it has calls of: {servers}")
    _refuse_collisions(calls, where)
    return calls


async def _only_attempt(client: Client, rollout: str) -> str:
    attempts = [one.id for one in await client.attempts(rollout)]
    if len(attempts) != 1:
        named = ", ".join(attempts[:20]) or "none"
        raise ClientError(f"rollout {rollout!r} has {len(attempts)} attempts ({named}): say which, with --attempt ID")
    return attempts[0]


def _refuse_collisions(calls: Sequence[ReplayCall], where: str) -> None:
    """Raises `ClientError` if two servers have tools, prompts or resources of one name: none is chosen silently."""
    found = list(ReplayCatalog(calls).collisions())
    if found:
        named = "; ".join(f"{what} {name!r}: {', '.join(who)}" for what, name, who in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if found[_MOST_NAMED:] else ""
        raise ClientError(
            f"servers of {where} have the same names ({named}{more}): play one of them, with --server NAME"
        )
