"""`penstock resource`: versions of prompts, of weights and of descriptions of tools."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Json, Url, validated_model, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.resource import NewVersion, Resource, ResourceView

Flag = Annotated[bool, Parameter(negative="")]
File = Annotated[str | None, Parameter(allow_leading_hyphen=True)]


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

    new = version.new(*_content(text, weights))

    async def ask(client: Client) -> None:
        before = [version for one in await client.resources() if one.name == name for version in one.versions]
        added = await client.add_version(name, new)
        show([added], json, lambda: resources.added(added, before))

    with_client(gateway, ask)


def show_resource(name: str, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show a resource with its versions, or one version with its text.

    Parameters
    ----------
    name
        NAME or NAME@VERSION.
    """
    from penstock.console.views import resources

    async def ask(client: Client) -> None:
        resource, at, wanted = name.partition("@")
        found = await client.resource(resource)
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


def text_of(file: str) -> str:
    """The text in a file; - is stdin. Raises `CommandError` if it cannot be read."""
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except OSError as e:
        raise CommandError(f"{file}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise CommandError(f"{file} is not UTF-8: byte {e.start + 1}") from None


def person(given: str | None) -> str:
    """The given name, else that of the user who is logged in; empty if there is none."""
    import getpass

    try:
        return getpass.getuser() if given is None else given
    except (KeyError, OSError):
        # A container may have no users: then nobody is logged in.
        return ""


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
