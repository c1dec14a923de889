"""`penstock prompts`: finds the prompts that unmodified agents send, and tells which prompt a text is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from pydantic import BaseModel

from penstock.console.commands.resources import new_version, person, text_of
from penstock.console.commands.terminal import console, show
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.client.console import LOCAL, CommandError, Json, Limit, Terms, Url, joined_terms, with_client
from penstock.gateway.model.facts import is_release_call
from penstock.gateway.model.resource import PromptText, ResourceView, ToolText
from penstock.gateway.model.span import Span
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.releases.prompts.induction import PromptProposal, PromptSample
from penstock.gateway.releases.prompts.recogniser import Recogniser, RegisteredText, TextMatch, sha256
from penstock.gateway.traffic.calls.call_record import PROMPTS
from penstock.gateway.wire.dialects import by_name

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.releases.prompts.induction import PromptProposal

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
    pass
    from penstock.console.views import resources
    from penstock.gateway.releases.prompts.induction import propose

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
    pass
    from penstock.console.views import resources
    from penstock.gateway.releases.prompts.recogniser import TextMatch

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


# The work of `penstock prompts`: the system texts of recorded calls, and the prompts that the gateway finds in them.
#
# Only texts that agents *send* are used. The tape has the requests that went upstream. If a release has written
# another version into a call, or the gateway has made the call itself, its text says nothing about an agent's prompt.


class ProposalRow(BaseModel):
    """A proposed prompt, as `--json` prints it."""

    template: str
    """As `penstock resource add` takes it."""
    messages: int
    """How many messages match it."""
    coverage: float
    """Their share of those messages of the call-site that match it or no prompt."""
    agent: str | None
    """Name of the agent."""
    call_site: str
    """A hash of agent, tools and template."""
    slots: dict[str, list[str]]
    """A few values of each slot."""
    registered: str | None
    """The resource that it is already."""


class PromptMatch(BaseModel):
    """A text that was recognised, as JSON."""

    resource: str
    """The resource that it is."""
    slots: dict[str, str]
    """What stands in its slots."""
    sha256: str
    """Of the text."""


async def samples_of(client: Client, heads: list[Span]) -> tuple[list[PromptSample], int]:
    """(the system texts of calls as agents sent them, the number of calls left out), read a few calls at a time."""
    found = await map_concurrently(lambda head: _samples(client, head), heads)
    return [sample for some in found for sample in some or ()], found.count(None)


async def _samples(client: Client, head: Span) -> list[PromptSample] | None:
    """The system texts of a call; None when they are not an agent's."""
    if is_release_call(head):
        return None
    if head.body is None:
        return []
    body, dialect = await _request(client, head), by_name(head.dialect)
    system, tool = dialect.system_texts(body).places, dialect.tool_texts(body)
    if not _as_sent(head, {sha256(place.text) for place in (*system, *tool)}):
        return None
    tools = frozenset(place.name for place in tool if place.name is not None)
    return [PromptSample(place.text, head.agent, tools, head.rollout) for place in system]


async def _request(client: Client, head: Span) -> bytes:
    """The body of a call's request, without its content encoding."""
    name = head.rollout, head.attempt, head.sequence
    body = await client.request_body(*name)
    if body.lstrip()[:1] == b"{":
        return body
    exchange = (await client.span(*name)).exchange
    return body if exchange is None else decode_body(body, encoding(exchange.request_headers))[0]


def _as_sent(head: Span, there: set[str]) -> bool:
    """True if the recognised texts went upstream unchanged: the call's span has their hashes."""
    return there.issuperset((head.attributes or {}).get(PROMPTS, {}).values())


def recogniser(resources: list[ResourceView]) -> Recogniser:
    """A recogniser of the texts that the gateway recognises."""
    known: list[RegisteredText] = []
    for version in (version for resource in resources for version in resource.versions):
        content = version.read()
        if isinstance(content, PromptText | ToolText) and content.sent:
            known.append(RegisteredText.of(version.name, content))
    return Recogniser(known)


def registered_resource(known: Recogniser, one: PromptProposal) -> str | None:
    """The resource that has a proposal's texts, found by an example of them; None without one."""
    values = {slot: examples[0] for slot, examples in one.slots.items()}
    found = known.recognise(one.template.render(values))
    return found.known.resource if isinstance(found, TextMatch) else None


def as_json(one: PromptProposal, known: str | None) -> ProposalRow:
    """A proposal as JSON, with the resource that it is registered as."""
    return ProposalRow(
        template=one.template.source, messages=one.messages, coverage=one.coverage, agent=one.agent,
        call_site=one.call_site, slots=dict(one.slots), registered=known,
    )  # fmt: skip
