"""The work of `penstock prompts`: the system texts of recorded calls, and the prompts that the gateway finds in them.

Only texts that agents *send* are used. The tape has the requests that went upstream. If a release has written another
version into a call, or the gateway has made the call itself, its text says nothing about an agent's prompt.
"""

from __future__ import annotations

from pydantic import BaseModel

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.model.facts import is_release_call
from penstock.gateway.model.resource import PromptText, ResourceView, ToolText
from penstock.gateway.model.span import Span
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.releases.prompt_induction import PromptProposal, PromptSample
from penstock.gateway.releases.prompt_recogniser import Recogniser, RegisteredText, TextMatch, sha256
from penstock.gateway.traffic.calls.call_record import PROMPTS
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.parts import STAMP


class ProposalRow(BaseModel):
    """A proposal as JSON."""

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
    texts = (place.text for place in system)
    return [PromptSample(said, head.agent, tools, head.rollout) for said in texts if not said.startswith(STAMP)]


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


def recogniser(resources: list[ResourceView], unsent: bool = False) -> Recogniser:
    """A recogniser of the texts that the gateway recognises, those that agents send; or of the others, if `unsent`."""
    known: list[RegisteredText] = []
    for version in (version for resource in resources for version in resource.versions):
        content = version.read()
        if isinstance(content, PromptText | ToolText) and content.sent != unsent:
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
