"""`penstock policy`: tries rules on recorded tool calls, and answers calls that wait for a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.console.commands.resources import person
from penstock.console.commands.terminal import show
from penstock.gateway.client.console import (
    LOCAL,
    CommandError,
    Json,
    Limit,
    Terms,
    Url,
    joined_terms,
    note,
    validated_model,
    with_client,
)

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.reading.policy.rules import PolicyRule

Who = Annotated[str | None, Parameter(help="Who decides; the name you are logged in with if not given.")]
Why = Annotated[str, Parameter(help="Why, in a sentence; the agent's model is told if the call is refused.")]
Id = Annotated[str, Parameter(help="Id of the call, as `penstock policy waiting` shows it.")]
NONE_FOUND = "No recorded tool call matches: tools are recorded where an agent reaches its MCP servers at /mcp/NAME."


def try_rules(file: Path, /, *filter: Terms, limit: Limit = 20, json: Json = False, gateway: Url = LOCAL) -> None:
    """Say what rules would have done to recorded tool calls, and how the rollouts that they touch were rewarded.

    Parameters
    ----------
    file
        TOML with `[[policy]]` rules: penstock.toml, or a file of its own.
    limit
        How many of the calls that would not simply have run are listed.
    """
    from penstock.console.mcp_server.comparison import difference
    from penstock.console.views import policy
    from penstock.gateway.reading.policy.report import build_report

    async def ask(client: Client) -> None:
        found = [call async for call in client.try_policy(rules, terms)]
        told = build_report(rules, found, difference, limit)
        if not found and not json:
            note(NONE_FOUND)
        else:
            show([told], json, lambda: policy.report(told))

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


def approve(call: Id, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Let a tool call run that waits for a person."""
    _say(call, "approve", who, why, json, gateway)


def refuse(call: Id, /, *, who: Who = None, why: Why = "", json: Json = False, gateway: Url = LOCAL) -> None:
    """Do not let a tool call run that waits for a person."""
    _say(call, "refuse", who, why, json, gateway)


def _say(call: str, verdict: Literal["approve", "refuse"], who: str | None, why: str, json: bool, url: str) -> None:
    from penstock.console.views import policy
    from penstock.gateway.reading.policy.questions import PolicyAnswer

    said = validated_model(PolicyAnswer, verdict=verdict, who=person(who), why=why)

    async def ask(client: Client) -> None:
        found = await client.answer_waiting(call, said)
        show([found], json, lambda: policy.answered(found, verdict))

    with_client(url, ask)
