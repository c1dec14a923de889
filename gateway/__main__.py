"""The `penstock` command. Commands import what they need when they run: `--help` loads no server and no database.

All but `serve` and `check` speak to a running gateway through `gateway.client`. Results go to stdout, everything else
to stderr; an error is one line. Exit codes: 0 done, 1 failed, 2 wrongly called, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console, RenderableType

    from gateway.client import Client
    from gateway.model import RolloutSummary
    from gateway.views import SpanDetail

HELP = "A transparent gateway that records every model call of unmodified agents on a durable tape."
DEFAULT_CONFIG = Path("penstock.toml")
PIPED_WIDTH = 200
PARALLEL = 8
"""Calls that `show` asks for at a time."""
TARGET = re.compile(r"(?P<rollout>[^/#]+)(/(?P<attempt>[^/#]+))?(#(?P<sequence>[1-9][0-9]{0,8}))?")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Filter = Annotated[
    str, Parameter(allow_leading_hyphen=True, help="Terms such as status:failed model:qwen* latency>2s.")
]
Url = Annotated[str, Parameter(name="--gateway", env_var="PENSTOCK_GATEWAY", help="URL of the gateway.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON, one object a line.")]
LOCAL = "http://127.0.0.1:4747"

app = App(name="penstock", help=HELP, result_action="return_value", print_error=False, exit_on_error=False)


class Failure(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@app.command
def serve(
    *, config: Path | None = None, data: Path | None = None, host: str | None = None, port: int | None = None
) -> None:
    """Run the gateway.

    Parameters
    ----------
    config
        Configuration file; ./penstock.toml if there is one.
    data
        Directory of the tape; penstock-data if not configured.
    host
        Address to listen on; 127.0.0.1 if not configured.
    port
        Port to listen on; 4747 if not configured.
    """
    from gateway.app import serve as run

    run(_config(config), data, host, port)


@app.command
def rollouts(*filter: Filter, limit: int = 100, json: Json = False, gateway: Url = LOCAL) -> None:
    """List rollouts, newest first.

    Terms about the rollout are rollout, status, mode, origin, started and metadata.KEY; one of its calls must
    satisfy all the others together.

    Parameters
    ----------
    limit
        How many at most.
    """
    import time

    from gateway import render

    async def ask(client: Client) -> None:
        rows = [row async for row in client.rollouts(_terms(filter), limit)]
        _show(rows, json, lambda: render.rollouts(rows, time.time_ns()))

    _with_client(gateway, ask)


@app.command
def spans(rollout: str, /, *filter: Filter, limit: int = 1000, json: Json = False, gateway: Url = LOCAL) -> None:
    """List the calls of a rollout, in order.

    Parameters
    ----------
    rollout
        RID or RID/ATTEMPT.
    limit
        How many at most.
    """
    from gateway import render

    async def ask(client: Client) -> None:
        rid, attempt, _ = _target(rollout)
        rows = [row async for row in client.spans(rid, attempt, _terms(filter), limit)]
        _show(rows, json, lambda: render.spans(rows))

    _with_client(gateway, ask)


@app.command
def show(
    target: str,
    /,
    *,
    raw: Literal["request", "response"] | None = None,
    calls: int = 50,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Show a rollout as a tree: attempts, calls, and what each call added to the conversation.

    Parameters
    ----------
    target
        RID, RID/ATTEMPT, or RID/ATTEMPT#SEQUENCE for one call with its whole text.
    raw
        Print the exact bytes of one call's body instead.
    calls
        How many calls at most.
    """
    from gateway import conversation

    async def ask(client: Client) -> None:
        rid, attempt, sequence = _target(target)
        if sequence is not None:
            attempt = attempt or await _only_attempt(client, rid)
            await _show_call(client, rid, attempt, sequence, raw, json)
        elif raw is not None:
            raise Failure(f"--raw shows one call: say which, such as {rid}/{attempt or 'ATTEMPT'}#1", 2)
        else:
            rollout, details = await _rollout_details(client, rid, attempt, calls)
            _show([rollout, *details], json, lambda: conversation.rollout_tree(rollout, details))

    _with_client(gateway, ask)


@app.command
def token(rollout: str, /, *, expires: str | None = None, gateway: Url = LOCAL) -> None:
    """Make an agent token: the API key of an agent that may speak for one rollout and nothing else.

    Parameters
    ----------
    rollout
        The only rollout that it opens.
    expires
        How long it is valid, such as 30m, 1h or 7d; for ever if not given.
    """

    async def ask(client: Client) -> None:
        made = await client.token(rollout, None if expires is None else _seconds(expires))
        print(made.token)

    _with_client(gateway, ask)


@app.command
def stats(*, spans: int = 10_000, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show figures: calls, tokens and latencies by model, and the tape.

    Parameters
    ----------
    spans
        How many of the newest spans to sum over.
    """
    from gateway import render

    async def ask(client: Client) -> None:
        figures = await client.stats(spans)
        _show([figures], json, lambda: render.stats(figures))

    _with_client(gateway, ask)


@app.command
def changes(*, since: int | None = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Follow what happens, until interrupted.

    Parameters
    ----------
    since
        Cursor to begin after; 0 is the beginning of the tape, and what is new if not given.
    """
    from gateway import render

    async def ask(client: Client) -> None:
        # Also tells at once when there is no gateway: the feed itself would wait for one.
        now = (await client.stats(spans=0)).cursor
        console = _console()
        async for entry in client.changes(now if since is None else since):
            line = entry.model_dump_json(exclude_none=True) if json else render.change(entry)
            console.print(line, soft_wrap=True)

    _with_client(gateway, ask)


@app.command
def check(*, data: Path | None = None) -> None:
    """Read every record of a tape and report what is not as it should be.

    Parameters
    ----------
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    from gateway.config import ConfigError, load
    from gateway.store import TapeError
    from gateway.store import check as examine

    try:
        path = load(_config(None), data=data).data
        figures, problems = examine(path)
    except (ConfigError, TapeError, OSError) as e:
        raise Failure(str(e)) from None
    print(f"{path}: " + ", ".join(f"{name} {count:,}" for name, count in figures.items()))
    for problem in problems:
        print(problem)
    if problems:
        raise Failure(f"{path} is not clean: {len(problems):,} problems")
    print("clean")


def _config(given: Path | None) -> Path | None:
    """The configuration file: one that was named must exist, the default need not."""
    return given or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)


def _terms(words: tuple[str, ...]) -> str:
    for word in words:
        if word.startswith("--"):
            raise Failure(f"unknown option {word!r}", 2)
    return " ".join(words)


def _target(text: str) -> tuple[str, str | None, int | None]:
    match = TARGET.fullmatch(text)
    if match is None:
        raise Failure(f"{text!r} is not RID, RID/ATTEMPT or RID/ATTEMPT#SEQUENCE", 2)
    sequence = match["sequence"]
    return match["rollout"], match["attempt"], None if sequence is None else int(sequence)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if match is None:
        raise Failure(f"{text!r} is not a time: a whole number and s, m, h or d, such as 90m", 2)
    return int(match[1]) * UNITS[match[2]]


async def _only_attempt(client: Client, rid: str) -> str:
    attempts = await client.attempts(rid)
    if len(attempts) != 1:
        names = ", ".join(attempt.id for attempt in attempts[:20])
        raise Failure(f"rollout {rid!r} has {len(attempts)} attempts ({names}): say which, as {rid}/ATTEMPT#1", 2)
    return attempts[0].id


async def _show_call(client: Client, rid: str, attempt: str, sequence: int, raw: str | None, json: bool) -> None:
    from gateway import conversation

    if raw is not None:
        ask = client.request_body if raw == "request" else client.response_body
        sys.stdout.buffer.write(await ask(rid, attempt, sequence))
        sys.stdout.buffer.flush()
    else:
        detail = await client.span(rid, attempt, sequence)
        _show([detail], json, lambda: conversation.call_tree(detail))


async def _rollout_details(
    client: Client, rid: str, attempt: str | None, calls: int
) -> tuple[RolloutSummary, list[SpanDetail]]:
    import asyncio

    rollout = await client.rollout(rid)
    heads = [head async for head in client.spans(rid, attempt, limit=calls)]
    details: list[SpanDetail] = []
    for at in range(0, len(heads), PARALLEL):
        some = (client.span(rid, head.attempt, head.sequence) for head in heads[at : at + PARALLEL])
        details += await asyncio.gather(*some)
    return rollout, details


def _with_client(url: str, ask: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
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


def _show(models: list[Any], json: bool, render: Callable[[], RenderableType]) -> None:
    """Models as JSON lines, or as their picture."""
    if not json:
        _console().print(render())
        return
    given: list[BaseModel] = models
    for model in given:
        print(model.model_dump_json(exclude_none=True))


def _console() -> Console:
    """Tables that are piped somewhere are not squeezed into 80 columns."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED_WIDTH if wide else None, highlight=False, emoji=False, markup=False)


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    try:
        app(arguments)
        sys.stdout.flush()
    except Failure as e:
        _end(str(e), e.code)
    except CycloptsError as e:
        _end(f"{' '.join(str(e).split())} See penstock --help.", 2)
    except BrokenPipeError:
        # The reader has seen enough; stdout must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)


def _end(message: str, code: int) -> None:
    print(f"penstock: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
