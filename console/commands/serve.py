"""Commands that need no running gateway: `serve`, which runs one, and those that read or copy a tape directly."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.gateway.client.console import PORT_OR_ANY, CommandError

DEFAULT_CONFIG = Path("penstock.toml")


def serve(
    *,
    config: Path | None = None,
    data: Path | None = None,
    host: str | None = None,
    port: Annotated[int | None, Parameter(validator=PORT_OR_ANY)] = None,
    workers: Annotated[int, Parameter(validator=Number(gte=1, lte=64))] = 1,
    take_over: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run the gateway.

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
    """
    from penstock.gateway.process import parent

    parent.remember_hangup()
    from penstock.gateway.process.main import ServeOptions, run

    file = config_file(config)
    asked = ServeOptions(file and str(file), data and str(data), host, port, workers)
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
    return given or (DEFAULT_CONFIG if os.path.exists(DEFAULT_CONFIG) else None)
