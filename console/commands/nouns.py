"""The commands that list a noun of `console.views.registry`: `nouns:upstreams` is that of `upstreams`."""

from __future__ import annotations

import time
from collections.abc import Callable
from inspect import Parameter as Argument
from inspect import Signature
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.console.commands.terminal import show
from penstock.console.views.noun import POSITIONAL, NounError
from penstock.console.views.registry import NOUNS, noun_view
from penstock.gateway.client.console import (
    LOCAL,
    CommandError,
    Json,
    Url,
    joined_terms,
    note,
    validated_model,
    with_asked,
    with_client,
)

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from penstock.console.views.noun import NounSelection
    from penstock.gateway.client.client import Client


def __getattr__(name: str) -> Callable[..., None]:
    """The command that lists the noun of this name."""
    if name not in NOUNS:
        raise AttributeError(f"{name} is no noun of console.views.registry")
    selection, entry = noun_view(name).selection, NOUNS[name]

    def command(*words: Any, json: bool = False, gateway: str = LOCAL, **options: Any) -> None:
        places = [at.name for at in arguments if at.kind is Argument.POSITIONAL_ONLY]
        options |= dict(zip(places, words, strict=False))
        if "filter" in selection.model_fields:
            options["filter"] = joined_terms(words[len(places) :])
        list_rows(name, validated_model(selection, *places, **options), json, gateway)

    arguments = [_argument(field, about) for field, about in selection.model_fields.items()]
    arguments.sort(key=lambda one: one.kind)
    arguments += [
        Argument("json", Argument.KEYWORD_ONLY, default=False, annotation=Json),
        Argument("gateway", Argument.KEYWORD_ONLY, default=LOCAL, annotation=Url),
    ]
    command.__doc__ = "\n\n".join(filter(None, (entry.help, entry.more)))
    command.__name__ = command.__qualname__ = name
    command.__annotations__ = {one.name: one.annotation for one in arguments}
    vars(command)["__signature__"] = Signature(arguments)
    return command


def _argument(name: str, about: FieldInfo) -> Argument:
    """The argument of a command for a field of a selection."""
    if name == "filter":
        words = Annotated[str, Parameter(allow_leading_hyphen=True, help=about.description)]
        return Argument(name, Argument.VAR_POSITIONAL, annotation=words)
    kind = Argument.POSITIONAL_ONLY if POSITIONAL in about.metadata else Argument.KEYWORD_ONLY
    negative, validator = ("" if about.annotation is bool else None), (Number(gte=1) if name == "limit" else None)
    told = Annotated[about.annotation, Parameter(help=about.description, negative=negative, validator=validator)]
    default = Argument.empty if about.is_required() else about.default
    return Argument(name, kind, default=default, annotation=told)


def list_rows(name: str, selection: NounSelection, json: bool, gateway: str) -> None:
    """Prints the selected rows of a noun."""
    view = noun_view(name)

    async def ask(client: Client) -> None:
        try:
            found = await view.fetch(client, selection)
        except NounError as e:
            raise CommandError(with_asked(str(e))) from None
        if found.more:
            limit = selection.model_dump()["limit"]
            note(f"There are more than {limit:,}: --limit {limit * 10} shows more of them.")
        if found.part and found.rows:
            note(found.part)
        show(found.rows, json, lambda: view.picture(found, time.time_ns()), found.none)

    with_client(gateway, ask)
