"""`penstock resource` and `penstock prompts`: versions of prompts, of weights and of descriptions of tools, and the
prompts that unmodified agents send.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.console.commands.terminal import console, person, show, text_of
from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    CommandError,
    Json,
    Limit,
    Terms,
    Url,
    joined_terms,
    validated_model,
    with_client,
)

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.resource import NewVersion, Resource, ResourceView
    from penstock.gateway.releases.prompt_induction import PromptProposal

Flag = Annotated[bool, Parameter(negative="")]
File = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Text = Annotated[str, Parameter(allow_leading_hyphen=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The text of a prompt or of a tool's description."""

    file: File = None
    """The text, byte for byte, with {slots}; literal braces are doubled. - is stdin."""
    sent: Flag = False
    """Agents send this text by themselves: it is to be recognised in their requests."""
    tool: str | None = None
    """The tool whose description the text is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOptions:
    """Weights, and who serves them."""

    upstream: str | None = None
    """The upstream that serves the model."""
    also: Annotated[list[str] | None, Parameter(negative="")] = None
    """One more that serves it, under the same name; may be given several times."""
    base: str | None = None
    """Name under which it serves the base model, or the whole model."""
    adapter: str | None = None
    """Directory of the LoRA adapter, as an absolute path on the server."""
    served: str | None = None
    """Name to send as model; NAME@VERSION for an adapter if not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOptions:
    """Options of a new version of any kind: its name, its parent, its author and a note."""

    version: str | None = None
    """Name of the version; the next free v1, v2 ... if not given."""
    parent: str | None = None
    """The version that it was made from."""
    author: str | None = None
    """Who or what made it; the name you are logged in with if not given."""
    note: str = ""
    """Why, in a sentence."""

    def new(self, kind: str, content: dict[str, Any]) -> NewVersion:
        """A version with this content."""
        about = {"version": self.version, "parent": self.parent, "author": person(self.author), "note": self.note}
        return new_version(kind=kind, content=content, **{key: value for key, value in about.items() if value})


TEXT, WEIGHTS, VERSION = TextOptions(), WeightsOptions(), VersionOptions()


def add(
    name: str,
    /,
    *,
    text: Annotated[TextOptions, FLAT] = TEXT,
    weights: Annotated[WeightsOptions, FLAT] = WEIGHTS,
    version: Annotated[VersionOptions, FLAT] = VERSION,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Register a version of a prompt, of a model or of a tool's description.

    Parameters
    ----------
    name
        Name of the resource; for a model the name that agents ask for.
    """
    from penstock.console.views import resources

    with _of_file(text.file):
        new = version.new(*_content(text, weights))

    async def ask(client: Client) -> None:
        before = [version for one in await client.resources() if one.name == name for version in one.versions]
        with _of_file(text.file):
            added = await client.add_version(name, new)
        show([added], json, lambda: resources.added(added, before))

    with_client(gateway, ask)


@contextmanager
def _of_file(file: str | None) -> Generator[None]:
    """Names the file in what is said of the text in it."""
    from penstock.gateway.client.connection import Refused

    try:
        yield
    except (CommandError, Refused) as error:
        what, colon, why = str(error).partition(": ")
        if file is None or what != "content.text" or not colon:
            raise
        raise CommandError(f"{file}: {why}", error.code if isinstance(error, CommandError) else 1) from None


def show_resource(name: str, /, *, text: Flag = False, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show a resource with its versions, or one version with its text.

    Parameters
    ----------
    name
        NAME or NAME@VERSION.
    text
        Print only the version's text, byte for byte, as `resource add --file` takes it: `> FILE` keeps it.
    """
    from penstock.console.views import resources

    resource, at, wanted = name.partition("@")
    if text and (json or not at):
        raise CommandError(f"--text prints one version: {resource}@VERSION --text, without --json", 2)

    async def ask(client: Client) -> None:
        found = await client.resource(resource)
        if text:
            content = _version(found, wanted).content
            if "text" not in content:
                raise CommandError(f"{name} is a model: it has no text")
            sys.stdout.buffer.write(content["text"].encode())
            return
        if at:
            one = _version(found, wanted)
            show([one], json, lambda: resources.version(one))
        else:
            show([found], json, lambda: resources.resource(found, time.time_ns()))

    with_client(gateway, ask)


def diff(name: str, one: str, other: str, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show what two versions say differently.

    Parameters
    ----------
    name
        Name of the resource.
    one
        A version.
    other
        Another version. As JSON both are printed.
    """
    from penstock.console.views import resources

    async def ask(client: Client) -> None:
        found = await client.resource(name)
        both = [_version(found, one), _version(found, other)]
        show(both, json, lambda: resources.difference(*both))

    with_client(gateway, ask)


def new_version(**fields: Any) -> NewVersion:
    """A version made of values from the command line."""
    from penstock.gateway.model.resource import NewVersion

    return validated_model(NewVersion, **fields)


def _content(text: TextOptions, served: WeightsOptions) -> tuple[str, dict[str, Any]]:
    """(kind, content); the kind follows from the options."""
    weights = {key: value for key, value in asdict(served).items() if value is not None}
    if weights and text != TEXT:
        raise CommandError(f"--{next(iter(weights))} is for a model, which has neither --file nor --tool nor --sent", 2)
    if weights:
        missing = next((name for name in ("upstream", "base") if name not in weights), None)
        if missing is not None:
            raise CommandError(f"a model needs --{missing}", 2)
        return "model", weights
    if text.file is None:
        raise CommandError("say what it is: --file TEXT for a prompt or, with --tool, a tool; --upstream and --base", 2)
    content = {"text": text_of(text.file)} | ({"sent": True} if text.sent else {})
    return ("prompt", content) if text.tool is None else ("tool-text", content | {"tool": text.tool})


def _version(found: ResourceView, wanted: str) -> Resource:
    one = next((one for one in found.versions if one.version == wanted), None)
    if one is None:
        names = ", ".join(one.version for one in found.versions[:20])
        raise CommandError(f"{found.name!r} has no version {wanted!r}; it has {names}")
    return one


# -- `penstock prompts` ----


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
        known = await client.resources()
        found = recogniser(known).recognise(text, tool)
        if not isinstance(found, TextMatch):
            other = recogniser(known, unsent=True).recognise(text, tool)
            raise CommandError(
                f"{file}: {UNSENT.format(other.known.resource) if isinstance(other, TextMatch) else UNKNOWN[found]}"
            )
        told = PromptMatch(resource=found.known.resource, slots=dict(found.slots), sha256=found.sha256)
        show([told], json, lambda: resources.recognised(found))

    with_client(gateway, ask)


UNSENT = "a version of {} that agents do not send, so the gateway does not look for it (resource add --sent)"
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

    note = f"discovered in {one.messages} messages, coverage {one.coverage:.1%}"
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
