"""Commands that need no running gateway: `serve`, which runs one, those that read or copy a tape directly, and those
that help with its configuration.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.gateway.client.console import CONFIG_FILE, PORT_OR_ANY, CommandError, note, seconds, unreadable
from penstock.gateway.model.codes import install_hint

if TYPE_CHECKING:
    from penstock.gateway.followers.lake.lake import ChunkResult, Lake
    from penstock.gateway.model.known_secrets import Secrets

Bodies = Annotated[bool, Parameter(negative="")]
_NEEDS = ("deltalake", "pyarrow")
_Config = Annotated[Path, Parameter(help="TOML with `[[masking]]` rules: penstock.toml, or a file of its own.")]
_Type = Annotated[str, Parameter(name="--type", help="Its content type, such as text/event-stream; may be left out.")]
Say = Callable[[str], None]


def serve(
    *,
    config: Path | None = None,
    data: Path | None = None,
    host: str | None = None,
    port: Annotated[int | None, Parameter(validator=PORT_OR_ANY)] = None,
    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=64))] = 1,
    take_over: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run the gateway.

    On a terminal it prints what to paste for an agent, then a line for each call.
    SIGTERM stops it when running calls have ended. SIGHUP has it read its configuration anew.

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
    workers
        Processes that serve the port together: one for each core that calls may use.
    take_over
        Go on in the place of the gateway that writes this tape, if one does: no connection is refused meanwhile.
    quiet
        Print only the address on a terminal: neither the lines to paste nor a line a call.
    """
    from penstock.gateway.process import parent

    parent.remember_hangup()
    from penstock.gateway.process.main import ServeOptions, run

    file = config_file(config)
    asked = ServeOptions(file and str(file), data and str(data), host, port, workers, quiet)
    run(asked, take_over=take_over)


def check(*, data: Path | None = None) -> None:
    """Read every record of a tape and report what is not as it should be.

    Parameters
    ----------
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    with _failures():
        path = _data(data)
        found = _examined(path, path)
    if found:
        raise CommandError(f"{path} is not clean: {found:,} problems")
    print("clean")


def backup(to: Path, /, *, data: Path | None = None) -> None:
    """Copy a tape into a new directory while a gateway writes it, and check the copy.

    The copy is the tape as of one moment: rollouts, calls, versions of prompts, releases, runs. It is a directory that
    `penstock serve --data` takes. Files that are no part of the tape are not in it: the configuration, adapters.

    Parameters
    ----------
    to
        Directory of the copy, which must not hold a tape yet.
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    from penstock.gateway.tape.store.backup import copy_tape

    with _failures():
        path = _data(data)
        with copy_tape(path, to, "name another directory") as copy:
            found = _examined(copy, to)
    if found:
        raise CommandError(f"{to} is a whole copy of {path}, and neither is clean: {found:,} problems")
    print("clean")


def restore(backup: Path, /, *, data: Path | None = None) -> None:
    """Put a backup where a gateway finds its tape, after it was checked.

    A tape that is there already stays. Calls that ran when the backup was made end as interrupted when the gateway
    starts.

    Parameters
    ----------
    backup
        Directory that `penstock backup` has made.
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    from penstock.gateway.tape.store.backup import copy_tape

    with _failures():
        path = _data(data)
        with copy_tape(backup, path, "choose another --data") as copy:
            if found := _examined(copy, backup):
                raise CommandError(f"{backup} is not clean: {found:,} problems; nothing was restored")
    print(f"clean; {path} has it now")


def _data(given: Path | None) -> Path:
    """The directory of the tape: the given one, else the configured one."""
    from penstock.gateway.config import load

    return load(config_file(None), data=given).data


def _examined(path: Path, name: Path) -> int:
    """Prints figures and problems of a tape under this name; returns the number of problems."""
    from penstock.console.commands.check import examine
    from penstock.console.views.table import size
    from penstock.gateway.model.toml import pluralized

    figures, problems = examine(path)
    counts = [pluralized(figures[f"{noun}s"], noun) for noun in ("rollout", "attempt", "change")]
    print(f"{name}: {', '.join(counts)}, {pluralized(figures['open'], 'open call')}, {size(figures['used_bytes'])}")
    for problem in problems:
        print(problem)
    return len(problems)


@contextmanager
def _failures() -> Generator[None]:
    """Turns errors of a tape or its directory into a `CommandError`."""
    from penstock.gateway.config import ConfigError
    from penstock.gateway.tape.store.directory import TapeError

    try:
        yield
    except (ConfigError, TapeError, OSError) as e:
        raise CommandError(str(e)) from None


def config_file(given: Path | None) -> Path | None:
    """The configuration file: a named one must exist, the default need not; None without one."""
    # Not Path.exists, which raises if this directory may not be read.
    return given or (CONFIG_FILE if os.path.exists(CONFIG_FILE) else None)


# -- `penstock lake` ----


def lake(*, to: str, every: str | None = None, bodies: Bodies = False, data: Path | None = None) -> None:
    """Append what is new on a tape to tables of Parquet (Delta Lake), in a directory or in S3.

    It reads the tape directly, whether a gateway runs or not. Without --every it ends when everything is written.

    Parameters
    ----------
    to
        A directory, or s3://BUCKET/PREFIX with credentials in the variables of AWS.
    every
        Go on until interrupted, and look for what is new so often: 5m, 1h; 1s at least.
    bodies
        Write the bytes of requests and answers, too. A lake that has them goes on having them.
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    pause = None if every is None else seconds("--every", every)
    if pause is not None and pause < 1:
        raise CommandError(f"--every: {every!r} is less than 1s, which is the least", 2)
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise CommandError(f"a lake needs {', '.join(missing)}: {install_hint('lake')}")
    _run(to, pause, bodies, data)


def _run(to: str, pause: float | None, bodies: bool, data: Path | None) -> None:
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.followers.lake.lake import Lake
    from penstock.gateway.followers.lake.location import LakeLocation, LakeUnreachableError, LakeUnusableError
    from penstock.gateway.model.prices import Prices
    from penstock.gateway.tape.store import Store
    from penstock.gateway.tape.store.directory import TapeError

    def say(line: str) -> None:
        print(line, flush=True)

    stop = Event()

    def end(number: int, frame: object) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        config = load(config_file(None), data=data)
        with Store(config.data, readonly=True) as store:
            lake = Lake(store, LakeLocation(to), Prices(config.prices), bodies=bodies)
            if pause is None:
                write_lake(lake, say, stop)
            else:
                follow_lake(lake, pause, say, note, stop)
    except (ConfigError, TapeError, LakeUnusableError, LakeUnreachableError) as error:
        raise CommandError(str(error)) from None


def write_lake(lake: Lake, say: Say, stop: Event) -> None:
    """Writes all new rows. Raises `LakeUnusableError`, `LakeUnreachableError`, `TapeError`."""
    found = None
    while not stop.is_set() and (found := lake.step()) is not None:
        say(_lake_line(found))
        if not found.behind:
            return
    if found is None and not stop.is_set():
        say(f"nothing new since change {lake.cursor:,}" if lake.cursor else "nothing to write: the tape is empty")


def follow_lake(lake: Lake, every: float, say: Say, warn: Say, stop: Event) -> None:
    """Writes new rows every `every` seconds until it is stopped. A store that cannot be reached, or a tape that cannot
    be read, is reported once and tried again in the next round. Raises `LakeUnusableError`."""
    from penstock.gateway.followers.lake.location import LakeUnreachableError
    from penstock.gateway.tape.store.directory import TapeError

    said = ""
    while not stop.is_set():
        try:
            write_lake(lake, say, stop)
            said = ""
        except (LakeUnreachableError, TapeError) as error:
            if str(error) != said:
                said = str(error)
                warn(f"{said}; tried again every {every:g} s")
        stop.wait(every)


def _lake_line(found: ChunkResult) -> str:
    """The result of a round in one line."""
    from penstock.console.views.table import size

    parts = [f"{name} +{one.rows:,} ({size(one.bytes)})" for name, one in found.written.items() if one.rows]
    erased = sum(one.erased for one in found.written.values())
    if found.forgotten:
        parts.append(f"{erased:,} rows erased of {found.forgotten:,} forgotten rollouts")
    behind = f"{found.behind:,} changes behind" if found.behind else "up to date"
    return f"{', '.join(parts) or 'no rows'}; at change {found.cursor:,}, {behind}"


# -- the configuration: masking rules and keys ----


def try_masking(file: str, /, *, config: _Config = CONFIG_FILE, content_type: _Type = "") -> None:
    """Show a body as masking rules would keep it.

    The body goes to stdout; what each rule has found to stderr. The exit code is 1 if a rule cannot be applied to the
    body, so that it would not be kept.

    Parameters
    ----------
    file
        The body: a request, an answer or a recorded stream. `-` reads stdin.
    """
    from penstock.gateway.model.facts import MASKED, MASKING_FAILED
    from penstock.gateway.model.known_secrets import BodyContext

    masker, body = _masker(config).for_call(), _read(file)
    kept = masker.body(body, BodyContext(content_type, answer=True))
    if masker.masked:
        kept = masker.without_tokens(kept, BodyContext(content_type))
    noted = masker.span_attributes
    _ = sys.stdout.buffer.write(kept)
    sys.stdout.buffer.flush()
    for rule, count in noted.get(MASKED, {}).items():
        note(f"{rule}: {count}")
    if (failed := noted.get(MASKING_FAILED)) is not None:
        raise CommandError(f"it would not be kept: {str(failed).removeprefix('failed: ')}")
    if not noted:
        note("No rule finds anything.")


def _masker(config: Path) -> Secrets:
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.model.known_secrets import NO_SECRETS
    from penstock.gateway.wire.masking.masker import MaskingCounts, masker

    try:
        rules = load(config).masking
        if not rules:
            raise CommandError(f"{config} has no [[masking]]: add a rule with a name and a pattern or paths", 2)
        return masker(rules, NO_SECRETS, MaskingCounts(quiet=True))
    except ConfigError as error:
        raise CommandError(str(error), 2) from None


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise CommandError(unreadable(file, error), 2) from None


def make_key(name: str, /, *, role: Literal["call", "read", "operate", "release"] = "read") -> None:
    """Make a named key for the control API or for calls: the key, and what penstock.toml keeps of it.

    It is printed this once and stored nowhere. Commands take it from PENSTOCK_ADMIN_KEY, agents as their API key.

    Parameters
    ----------
    name
        Whose it is: what the audit log and budgets call it.
    role
        What it opens: call (model calls, and nothing else); or of the control API read; operate (the queue, upstreams,
        tools, tokens) as well; or release (versions, releases) too.
    """
    from penstock.gateway.client.console import validated_model
    from penstock.gateway.config import KeySettings
    from penstock.gateway.traffic.calls.admission import key_hash, make_key

    key = make_key()
    kept = validated_model(KeySettings, "name", name=name, role=role, sha256=key_hash(key))
    print(key)
    print(f'\n[[key]]\nname = "{kept.name}"\nrole = "{kept.role}"\nsha256 = "{kept.sha256}"')
