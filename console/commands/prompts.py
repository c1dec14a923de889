"""`penstock prompts`: finds the prompts that unmodified agents send, and tells which prompt a text is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.console.commands.resources import new_version, person, text_of
from penstock.console.commands.terminal import console, show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Limit, Terms, Url, joined_terms, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.releases.prompt_induction import PromptProposal

Text = Annotated[str, Parameter(allow_leading_hyphen=True)]


def discover(
    *filter: Terms,
    limit: Limit = 1000,
    register: str | None = None,
    number: int | None = None,
    author: str | None = None,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Find the prompts in recorded calls, and register them if you like.

    Parameters
    ----------
    limit
        How many calls at most, the newest.
    register
        Name to register the prompt under, without asking.
    number
        Which of the prompts to register, as they are numbered, where there are several.
    author
        Who registers it; the name you are logged in with if not given.
    """
    from penstock.console.commands.prompt_discovery import as_json, recogniser, registered_resource, samples_of
    from penstock.console.views import resources
    from penstock.gateway.releases.prompt_induction import propose

    terms = joined_terms(filter)
    found: list[tuple[PromptProposal, str | None]] = []

    async def ask(client: Client) -> None:
        calls = [head async for head in client.recent_spans(f"kind:llm {terms}", limit)]
        # This computes for seconds and blocks the loop, which has nothing else to do.
        samples, left_out = await samples_of(client, calls)
        proposals = propose(samples)
        known = recogniser(await client.resources())
        found.extend((one, registered_resource(known, one)) for one in proposals)
        looked_at = len(calls) - left_out, left_out, len({one.rollout for one in samples})
        show([as_json(*it) for it in found], json, lambda: resources.proposals(found, *looked_at))

    with_client(gateway, ask)
    if register is not None:
        _register(gateway, register, _chosen(found, number), person(author), json)
    elif sys.stdin.isatty() and sys.stdout.isatty() and not json:
        _offer(gateway, found, person(author))


def check(file: Text, /, *, tool: str | None = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Say which registered prompt a text is, and what stands in its slots.

    Parameters
    ----------
    file
        The text, byte for byte; - is stdin.
    tool
        The tool whose description it is; without it the text is a system text.
    """
    from penstock.console.commands.prompt_discovery import PromptMatch, recogniser
    from penstock.console.views import resources
    from penstock.gateway.releases.prompt_recogniser import TextMatch

    text = text_of(file)

    async def ask(client: Client) -> None:
        found = recogniser(await client.resources()).recognise(text, tool)
        if not isinstance(found, TextMatch):
            raise CommandError(f"{file}: {UNKNOWN[found]}")
        told = PromptMatch(resource=found.known.resource, slots=dict(found.slots), sha256=found.sha256)
        show([told], json, lambda: resources.recognised(found))

    with_client(gateway, ask)


UNKNOWN = {
    "miss": "no registered prompt; the gateway passes it as it is (resource add --sent registers one)",
    "ambiguous": "it could be two prompts, or one in two ways; the gateway passes it as it is",
}


def _chosen(found: list[tuple[PromptProposal, str | None]], number: int | None) -> PromptProposal:
    if not found:
        raise CommandError("no prompt was found, and so none is registered; more calls (--limit) may help")
    if number is None and len(found) > 1:
        raise CommandError(f"{len(found)} prompts were found: say which to register, as --number 1", 2)
    chosen = 1 if number is None else number
    if not 1 <= chosen <= len(found):
        raise CommandError(f"--number: {number} is not 1 to {len(found)}", 2)
    return found[chosen - 1][0]


def _register(url: str, name: str, one: PromptProposal, author: str, json: bool) -> None:
    from penstock.console.views import resources

    note = f"discovered in {one.messages} messages, {one.coverage:.1%} of its call-site"
    about = {"author": author} if author else {}
    new = new_version(kind="prompt", content={"text": one.template.source, "sent": True}, note=note, **about)

    async def ask(client: Client) -> None:
        made = await client.add_version(name, new)
        show([made], json, lambda: resources.added(made, []))

    with_client(url, ask)


def _offer(url: str, found: list[tuple[PromptProposal, str | None]], author: str) -> None:
    """Asks for a name for each unregistered prompt, and registers it."""
    for number, (one, known) in enumerate(found, 1):
        if known is None:
            try:
                name = console().input(f"Register prompt {number}? A name, or nothing to leave it: ").strip()
            except EOFError:
                return
            if name:
                _register(url, name, one, author, json=False)
