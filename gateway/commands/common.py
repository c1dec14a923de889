"""What the commands share: their errors, options and targets, the way to a gateway, and the way to the terminal.

Results go to stdout, everything else to stderr; an error is one line. Nothing here is loaded with it that a command
may not need: neither the client nor a model.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console, RenderableType

    from gateway.client import Client

M = TypeVar("M", bound="BaseModel")

PIPED_WIDTH = 200
PARALLEL = 8
"""Requests of one command at a time."""
TARGET = re.compile(r"(?P<rollout>[^/#]+)(/(?P<attempt>[^/#]+))?(#(?P<sequence>[1-9][0-9]{0,8}))?")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LOCAL = "http://127.0.0.1:4747"

Terms = Annotated[str, Parameter(allow_leading_hyphen=True, help="Terms such as status:failed model:qwen* latency>2s.")]
Filter = Annotated[
    str | None,
    Parameter(name="--filter", allow_leading_hyphen=True, help="Terms in one text, such as 'group:q1 status:failed'."),
]
Url = Annotated[str, Parameter(name="--gateway", env_var="PENSTOCK_GATEWAY", help="URL of the gateway.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON, one object a line.")]


class Failure(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def joined_terms(words: Iterable[str]) -> str:
    """A filter that was given as words."""
    found = list(words)
    unknown = next((word for word in found if word.startswith("--")), None)
    if unknown is not None:
        raise Failure(f"unknown option {unknown!r}", 2)
    return " ".join(found)


def target_of(text: str) -> tuple[str, str | None, int | None]:
    """RID, RID/ATTEMPT or RID/ATTEMPT#SEQUENCE."""
    match = TARGET.fullmatch(text)
    if match is None:
        raise Failure(f"{text!r} is not RID, RID/ATTEMPT or RID/ATTEMPT#SEQUENCE", 2)
    sequence = match["sequence"]
    return match["rollout"], match["attempt"], None if sequence is None else int(sequence)


def seconds(text: str) -> int:
    """A length of time such as 90m; s."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if match is None:
        raise Failure(f"{text!r} is not a time: a whole number and s, m, h or d, such as 90m", 2)
    return int(match[1]) * UNITS[match[2]]


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Values that were given as NAME=VALUE."""
    found = [word.partition("=") for word in words]
    wrong = next((word for word, (name, sign, _) in zip(words, found, strict=True) if not name or not sign), None)
    if wrong is not None:
        raise Failure(f"{option}: {wrong!r} is not NAME=VALUE", 2)
    return {name: value for name, _, value in found}


def made(model: type[M], **fields: Any) -> M:
    """A model of what was given on the command line."""
    from pydantic import ValidationError

    from gateway.connection import brief

    try:
        return model(**fields)
    except ValidationError as e:
        raise Failure(brief(e), 2) from None


async def only_attempt(client: Client, rid: str, example: str = "#1") -> str:
    """The attempt that is meant when none was named; `example` is what stands behind it in a right target."""
    attempts = await client.attempts(rid)
    if len(attempts) != 1:
        names = ", ".join(attempt.id for attempt in attempts[:20])
        raise Failure(
            f"rollout {rid!r} has {len(attempts)} attempts ({names}): say which, as {rid}/ATTEMPT{example}", 2
        )
    return attempts[0].id


def with_client(url: str, ask: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Run a conversation with the gateway."""
    import asyncio

    from gateway.client import Client, ClientError

    async def talk() -> None:
        async with Client(url, os.environ.get("PENSTOCK_KEY")) as client:
            await ask(client)

    try:
        asyncio.run(talk())
    except ClientError as e:
        raise Failure(str(e)) from None


def show(models: Sequence[BaseModel], json: bool, picture: Callable[[], RenderableType]) -> None:
    """Models as JSON lines, or as their picture."""
    if not json:
        console().print(picture())
        return
    for model in models:
        print(model.model_dump_json(exclude_none=True))


def console() -> Console:
    """Tables that are piped somewhere are not squeezed into 80 columns."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED_WIDTH if wide else None, highlight=False, emoji=False, markup=False)
