"""Parts that the commands share: their errors, options and targets, the way to a gateway, and output to the terminal
and to files.

Results go to stdout, everything else to stderr; an error is one line. Importing this module loads nothing that a
command may not need: neither the client nor a model.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

# Commands take these from here, with the rest that they share.
from penstock.gateway.client.environment import CONFIG_FILE as CONFIG_FILE
from penstock.gateway.client.environment import LOCAL as LOCAL
from penstock.gateway.client.environment import control_key as control_key
from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.foreign_text import terminal_safe

if TYPE_CHECKING:
    from pydantic import BaseModel

    from penstock.gateway.client.client import Client, ClientError
    from penstock.gateway.client.sinks import Format

M = TypeVar("M", bound="BaseModel")
T = TypeVar("T")

OPERATOR = re.compile(r"[:=<>~]")
"""Matches an operator: every term of a filter has one, an id never."""
TARGET = re.compile(r"(?P<rollout>[^/#]+)(/(?P<attempt>[^/#]+))?(#(?P<sequence>[1-9][0-9]{0,8}))?")
OPTIONS = {
    "timeout_s": "--timeout",
    "unresponsive_s": "--unresponsive",
    "dimensions": "--dimension",
    "value": "the reward",
    "agents": "--only agent",
    "models": "--only model",
    "modes": "--only mode",
    "content": "what it is",
}
"""Names of options and arguments that differ from the names of the fields made from them."""
NO_MATCH = "No rollout matches."

Terms = Annotated[str, Parameter(allow_leading_hyphen=True, help="Terms such as status:failed model:qwen* latency>2s.")]
RolloutTerms = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Terms such as status:waiting group:q1 reward>0.5 model:qwen*. Those about calls (model, latency ...) "
        "must all hold for one call of the rollout.",
    ),
]
RolloutSelection = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Ids of rollouts, or a filter such as group:q1 status:failed. What has a : = < > or ~ in it is a term of "
        "a filter, anything else an id.",
    ),
]
Url = Annotated[
    str,
    Parameter(
        name="--gateway",
        env_var="PENSTOCK_GATEWAY",
        help="URL of the gateway; without it that of ./penstock.toml. Its key, if it has one, comes from the variable "
        "PENSTOCK_ADMIN_KEY, or from PENSTOCK_READ_KEY, which opens what changes nothing.",
    ),
]
Limit = Annotated[int, Parameter(validator=Number(gte=1), help="How many at most.")]
PORT, PORT_OR_ANY = Number(gte=1, lte=65535), Number(gte=0, lte=65535)
"""Validators of ports; 0 stands for any free port."""
FLAT = Parameter(name="*")
"""Marks a dataclass of options: each of its fields is an option of the command, and the field's docstring its help."""
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON, one object a line.")]


USUAL_WIDTH: Final = 80
"""Columns of a terminal that does not say how many it has."""
NO_KEY: Final = 401
NOT_FOUND: Final = 404
_GATEWAY: Final = ContextVar("_GATEWAY", default="")
"""URL of the gateway that the running command asks."""


class CommandError(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def asked_gateway(url: str) -> str:
    """Says which gateway was asked, and what names another one; empty where the command line or the environment names
    it."""
    from penstock.gateway.client.environment import configured_gateway
    from penstock.gateway.model.toml import ConfigError

    if os.environ.get("PENSTOCK_GATEWAY"):
        return ""
    if url == LOCAL:
        return f"{url}, the default; --gateway, PENSTOCK_GATEWAY or `port` in {CONFIG_FILE} names another gateway"
    with suppress(ConfigError):
        return f"{url}, which {CONFIG_FILE} names" if url == configured_gateway() else ""
    return ""


def joined_terms(words: Iterable[str]) -> str:
    """The filter made of the words on the command line. Raises `CommandError` for an unknown option."""
    found = [utf8(word) for word in words]
    unknown = next((word for word in found if word.startswith("--")), None)
    if unknown is not None:
        raise CommandError(f"unknown option {unknown!r}; --help has all. Filters need none: status:failed", 2)
    return " ".join(found)


def utf8(word: str) -> str:
    """The same word. Raises `CommandError` if it is not UTF-8: it could not be sent to a gateway, and would silently
    be left out of a URL."""
    try:
        _ = word.encode()
    except UnicodeEncodeError:
        raise CommandError(f"{word!r} is not UTF-8", 2) from None
    return word


def ids_or_filter(words: Sequence[str]) -> tuple[list[str], str]:
    """(ids, filter) of the rollouts that the words name in one way or the other; the other one is empty.

    No id has an operator in it, and every term has one, so each word shows which it is; a `not` belongs to the term
    behind it.
    """
    from penstock.gateway.model.base import ID_PATTERN

    filter = joined_terms(words)
    terms = [OPERATOR.search(word) is not None for word in words]
    terms = [
        is_term or (words[at] in ("not", "-") and terms[at + 1 : at + 2] == [True]) for at, is_term in enumerate(terms)
    ]
    if not words:
        raise CommandError("say which rollouts: by their ids, or by a filter such as group:q1 status:failed", 2)
    if all(terms):
        return [], filter
    if any(terms):
        id, term = words[terms.index(False)], words[terms.index(True)]
        raise CommandError(
            f"give ids or a filter, not both: {id!r} is an id, {term!r} a term; rollout:{id} is a term too", 2
        )
    wrong = next((word for word in words if not re.fullmatch(ID_PATTERN, word)), None)
    if wrong is not None:
        raise CommandError(f"{wrong!r} is neither the id of a rollout nor a term of a filter such as group:q1", 2)
    return list(dict.fromkeys(words)), ""


def target_of(text: str) -> tuple[str, str | None, int | None]:
    """(rollout, attempt, sequence) of a target: RID, RID/ATTEMPT or RID/ATTEMPT#SEQUENCE; None for absent parts."""
    match = TARGET.fullmatch(utf8(text))
    if match is None:
        raise CommandError(f"{text!r} is not RID, RID/ATTEMPT or RID/ATTEMPT#SEQUENCE", 2)
    sequence = match["sequence"]
    return match["rollout"], match["attempt"], None if sequence is None else int(sequence)


def seconds(option: str, text: str) -> float:
    """The seconds of a length of time such as 90s, 10m or 1.5h."""
    from penstock.gateway.model import times

    try:
        return times.seconds(option, text)
    except ValueError as e:
        raise CommandError(str(e), 2) from None


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """The values that were given as NAME=VALUE, by name."""
    found = [word.partition("=") for word in words]
    wrong = next((word for word, (name, sign, _) in zip(words, found, strict=True) if not name or not sign), None)
    if wrong is not None:
        raise CommandError(f"{option}: {wrong!r} is not NAME=VALUE", 2)
    return {name: value for name, _, value in found}


def validated_model(model: type[M], *arguments: str, **fields: Any) -> M:
    """A model made of values from the command line. `arguments`: fields that are positional arguments and not
    options."""
    from pydantic import ValidationError

    from penstock.gateway.model.toml import sentence

    try:
        return model(**fields)
    except ValidationError as e:
        first: Mapping[str, Any] = e.errors(include_url=False)[0]
        named = "".join(f"{option}: " for option in _option(first["loc"], arguments))
        raise CommandError(named + sentence(first), 2) from None


def _option(place: Sequence[int | str], arguments: Sequence[str]) -> Iterator[str]:
    """The option that a field of a model comes from, and the part of its value that is meant."""
    for name in place[:1]:
        key = "".join(f" {part}" for part in place[1:] if isinstance(part, str))
        option = str(name).upper() if name in arguments else f"--{str(name).replace('_', '-')}"
        yield OPTIONS.get(str(name), option) + key


async def only_attempt(client: Client, rid: str, example: str = "#1") -> str:
    """The id of a rollout's only attempt, when none was named; raises `CommandError` if there are several. `example`:
    what follows the attempt in a correct target."""
    attempts = await client.attempts(rid)
    if len(attempts) != 1:
        names = ", ".join(attempt.id for attempt in attempts[:20])
        raise CommandError(
            f"rollout {rid!r} has {len(attempts)} attempts ({names}): say which, as {rid}/ATTEMPT{example}", 2
        )
    return attempts[0].id


def with_client(url: str, ask: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Runs `ask` with a client of the gateway; a `ClientError` becomes a `CommandError`. Says which gateway was
    changed where nothing names it, or lacks what was asked for."""
    import asyncio

    from penstock.gateway.client.client import Client, ClientError

    async def talk() -> None:
        async with Client(url) as client:
            await ask(client)
            if client.changed and url == LOCAL and (asked := asked_gateway(url)):
                note(f"Changed at {asked}.")

    token = _GATEWAY.set(url)
    try:
        asyncio.run(talk())
    except ClientError as e:
        raise CommandError(_explained(e)) from None
    finally:
        _GATEWAY.reset(token)


def _explained(error: ClientError) -> str:
    """The error's message, with what only this side knows of it."""
    from penstock.gateway.client.connection import Unreachable
    from penstock.gateway.model.settings import ADMIN_KEY, READ_KEY

    empty = [name for name in (ADMIN_KEY, READ_KEY) if os.environ.get(name) == ""]
    if error.status == NO_KEY and empty:
        return f"{error}; {empty[0]} is set, and empty"
    elsewhere = error.status == NOT_FOUND or isinstance(error, Unreachable)
    return with_asked(str(error)) if elsewhere else str(error)


def with_asked(text: str, url: str | None = None) -> str:
    """A message that something is not there, with the gateway that was asked (that of the running command if not
    given), unless it was named."""
    asked = asked_gateway(url or _GATEWAY.get())
    return f"{text} (asked: {asked})" if asked else text


def note(text: str) -> None:
    """Prints a remark to stderr, beside the result; on a terminal its lines end between words."""
    safe = terminal_safe(text)
    if sys.stderr.isatty():
        from textwrap import wrap

        width = os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_WIDTH
        lines = (wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in safe.split("\n"))
        safe = "\n".join(part for some in lines for part in some)
    print(safe, file=sys.stderr)


async def limited_rows(limit: int, rows: Callable[[int], AsyncIterator[T]]) -> list[T]:
    """Up to `limit` rows; prints a note when there are more. `rows` yields up to so many rows."""
    found = [row async for row in rows(limit + 1)]
    if len(found) > limit:
        note(f"There are more than {limit:,}: --limit {limit * 10} shows more of them.")
    return found[:limit]


def unreadable(file: str | Path, error: OSError) -> str:
    """Says why a file cannot be read, and names the one beside it that may be meant."""
    from difflib import get_close_matches

    near: list[str] = []
    if isinstance(error, FileNotFoundError):
        with suppress(OSError):
            near = get_close_matches(Path(file).name, os.listdir(Path(file).parent), n=1)
    meant = f"; did you mean {Path(file).with_name(near[0])}?" if near else ""
    return f"{file}: {error.strerror}{meant}"


# Output files that appear only when they are complete.


@contextmanager
def whole_file(path: Path | None) -> Generator[IO[bytes]]:
    """A file that appears under its name when all is written, and not at all if that fails; None is stdout. A pipe or a
    device is written to directly, and a link is followed. Raises `CommandError` when it cannot be written."""
    if path is None:
        yield sys.stdout.buffer
        return
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        end = path.resolve()
        part = end.with_name(f".{end.name}.{os.getpid()}.part")
        try:
            with part.open("xb") as file:
                yield file
            part.replace(end)
        finally:
            with suppress(OSError):
                part.unlink()
    except OSError as e:
        raise CommandError(f"{path}: {e.strerror}") from None


def check_format(format: Format, output: Path | None) -> None:
    """Raises `CommandError` where Parquet cannot be written, and where rows would fill a terminal."""
    if format == "parquet" and output is None:
        raise CommandError("Parquet goes to a file: say which, as --output FILE", 2)
    if output is None and sys.stdout.isatty():
        raise CommandError("rows would fill this terminal: write them with --output FILE, or see them with | less", 2)
    if format == "parquet" and find_spec("pyarrow") is None:
        raise CommandError(f"Parquet needs pyarrow: {install_hint('parquet')}")
